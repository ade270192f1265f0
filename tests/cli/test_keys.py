import json
import os
import stat

import pytest
from typer.testing import CliRunner

from shoal.cli.keys import app
from shoal.core import IdentityError, UsageError
from shoal.core.identity import Identity, default_identity_path, write_private_file


@pytest.fixture
def run():
    def run(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def is_private(path):
    return os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600


def key_material(path):
    """Pieces of a PEM file that must never be shown."""
    return [line for line in path.read_text().splitlines() if line]


def test_new_makes_this_users_identity_and_show_tells_of_it(run):
    made = run("new")
    assert made.exit_code == 0
    path = default_identity_path()
    assert is_private(path)
    identity = Identity.load(path)
    assert last_line(made.stdout) == {"peer_id": str(identity.peer_id), "file": str(path), "replaced": None}
    shown = run("show")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[:2] == [f"peer id  {identity.peer_id}", f"file     {path}"]
    assert last_line(shown.stdout) == {"peer_id": str(identity.peer_id), "file": str(path)}
    for line in key_material(path):
        assert line not in made.output + shown.output


def test_another_file_may_be_named(run, tmp_path):
    path = tmp_path / "new folder" / "key.pem"
    made = run("new", "--file", path)
    assert made.exit_code == 0
    assert is_private(path)
    assert not default_identity_path().exists()
    assert last_line(run("show", "--file", path).stdout) == {
        "peer_id": str(Identity.load(path).peer_id),
        "file": str(path),
    }


def test_show_makes_this_users_identity_on_first_use(run):
    path = default_identity_path()
    assert not path.exists()
    first = run("show")
    assert first.exit_code == 0
    assert is_private(path)
    assert last_line(first.stdout) == {"peer_id": str(Identity.load(path).peer_id), "file": str(path)}
    assert run("show").stdout == first.stdout
    for line in key_material(path):
        assert line not in first.output


def test_show_does_not_make_a_file_that_is_named(run, tmp_path):
    path = tmp_path / "key.pem"
    done = run("show", "--file", path)
    assert isinstance(done.exception, IdentityError)
    assert f"shoal keys new --file {path}" in str(done.exception)
    assert not path.exists()
    assert not default_identity_path().exists()


def test_the_help_says_when_an_identity_is_made(run):
    assert "created on first use" in " ".join(run("show", "--help").stdout.split())


def test_new_refuses_to_replace_and_says_what_would_be_lost(run):
    run("new")
    path = default_identity_path()
    before = path.read_bytes()
    done = run("new")
    assert isinstance(done.exception, UsageError)
    message = str(done.exception)
    assert str(Identity.load(path).peer_id) in message
    assert "loses that peer id for good" in message
    assert "--replace" in message
    assert path.read_bytes() == before
    for line in key_material(path):
        assert line not in message + done.output


def test_new_replaces_when_told_to(run):
    first = last_line(run("new").stdout)["peer_id"]
    done = run("new", "--replace")
    assert done.exit_code == 0
    result = last_line(done.stdout)
    assert result["replaced"] == first != result["peer_id"]
    assert f"replaced {first}" in done.stdout
    assert is_private(default_identity_path())
    assert str(Identity.load(default_identity_path()).peer_id) == result["peer_id"]


def test_new_replaces_a_damaged_file_only_when_told_to(run):
    path = default_identity_path()
    write_private_file(path, b"damaged")
    done = run("new")
    assert "a key that cannot be read" in str(done.exception)
    assert run("new", "--replace").exit_code == 0
    assert Identity.load(path)


@pytest.mark.parametrize("verb", ["new", "secret"])
def test_a_folder_is_no_file(run, tmp_path, verb):
    done = run(verb, "--file", tmp_path, "--replace")
    assert isinstance(done.exception, UsageError)
    assert "is a folder" in str(done.exception)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_show_refuses_a_key_that_others_can_read(run):
    run("new")
    path = default_identity_path()
    path.chmod(0o644)
    done = run("show")
    assert isinstance(done.exception, IdentityError)
    for line in key_material(path):
        assert line not in str(done.exception) + done.output


@pytest.mark.parametrize("verb", ["new", "show"])
def test_json_to_a_file_and_to_stdout(run, tmp_path, verb):
    if verb == "show":
        run("new")
    done = run(verb, "--json", tmp_path / "key.json")
    written = json.loads((tmp_path / "key.json").read_text())
    assert written == last_line(done.stdout)
    done = run(verb, "--json", "-", *(["--replace"] if verb == "new" else []))
    assert json.loads(done.stdout)["file"] == str(default_identity_path())
    assert last_line(done.stderr) == json.loads(done.stdout)


def test_a_secret_goes_to_stdout_alone(run):
    done = run("secret")
    assert done.exit_code == 0
    assert len(done.stdout.strip()) == 43
    assert done.stdout.count("\n") == 1
    assert done.stdout.strip() not in done.stderr
    assert run("secret").stdout != done.stdout


def test_a_secret_in_a_file_is_shown_nowhere(run, tmp_path):
    path = tmp_path / "swarm" / "secret"
    done = run("secret", "--file", path)
    assert done.exit_code == 0
    assert is_private(path)
    secret = path.read_text().strip()
    assert len(secret) == 43
    assert secret not in done.output
    assert str(path) in done.stdout
    assert last_line(done.stdout) == {"file": str(path)}


def test_a_secret_is_not_replaced_unless_told_to(run, tmp_path):
    path = tmp_path / "secret"
    run("secret", "--file", path)
    before = path.read_text()
    done = run("secret", "--file", path)
    assert isinstance(done.exception, UsageError)
    assert "shuts out every peer" in str(done.exception)
    assert before.strip() not in str(done.exception) + done.output
    assert path.read_text() == before
    assert run("secret", "--file", path, "--replace").exit_code == 0
    assert path.read_text() != before
    assert is_private(path)
