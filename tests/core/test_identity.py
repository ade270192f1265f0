import os
import stat
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.core import IdentityError, PeerId, UsageError
from shoal.core.identity import (
    Identity,
    default_identity_path,
    new_secret,
    state_folder,
    write_private_file,
)

posix_only = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def pem_of(key, encryption=None):
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        encryption or serialization.NoEncryption(),
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys" / "identity.pem"


@posix_only
def test_it_is_made_on_first_use_for_this_user_alone():
    made = Identity.load_or_create()
    path = default_identity_path()
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    assert Identity.load_or_create() == made == Identity.load(path)
    assert list(path.parent.iterdir()) == [path]  # no draft is left


def test_an_identity_signs_and_its_id_is_its_public_keys():
    identity = Identity.generate()
    identity.public_key.verify(identity.sign(b"hello"), b"hello")
    assert identity.peer_id == PeerId.of_public_key(identity.public_key.public_bytes_raw())
    assert identity != Identity.generate()


def test_a_seed_always_makes_the_same_identity():
    first, again = Identity.from_seed(b"7" * 32), Identity.from_seed(b"7" * 32)
    assert first == again
    assert first.sign(b"hello") == again.sign(b"hello")
    assert first != Identity.from_seed(b"8" * 32)
    # RFC 8032, section 7.1, the first test
    known = Identity.from_seed(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    assert known.public_key.public_bytes_raw().hex().startswith("d75a980182b10ab7d54bfed3c964073a")
    for seed in (b"", b"7" * 31, b"7" * 33):
        with pytest.raises(UsageError, match=f"has 32 bytes, not {len(seed)}"):
            Identity.from_seed(seed)


@posix_only
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_mode_does_not_depend_on_the_umask(path, umask):
    before = os.umask(umask)
    try:
        Identity.generate().save(path)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o600


def test_threads_that_start_at_once_get_the_same(path):
    barrier, found = threading.Barrier(16), []

    def look():
        barrier.wait()
        found.append(Identity.load_or_create(path).peer_id)

    threads = [threading.Thread(target=look) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_processes_that_start_at_once_get_the_same():
    code = "from shoal.core.identity import Identity; input(); print(Identity.load_or_create().peer_id)"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = []
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        answers.append(child.communicate(timeout=30)[0].strip())
        assert child.returncode == 0
    assert len(set(answers)) == 1
    assert answers[0] == str(Identity.load_or_create().peer_id)


@posix_only
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_file_open_to_others_is_refused(path, mode):
    Identity.generate().save(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="can be read by other users") as caught:
        Identity.load(path)
    assert f"its mode is {mode:o}, not 600" in str(caught.value)
    assert f"chmod 600 {path}" in str(caught.value)
    assert "shoal keys new" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\xff\x00" * 50,
        b"-----BEGIN PRIVATE KEY-----\nbm8=\n-----END PRIVATE KEY-----\n",
        pem_of(Ed25519PrivateKey.generate())[:60],
        pem_of(Ed25519PrivateKey.generate(), serialization.BestAvailableEncryption(b"word")),
        # a well-formed key of an algorithm that nobody knows
        b"-----BEGIN PRIVATE KEY-----\nMBECAQAwBgYDKmMHBQAEBAQCAAA=\n-----END PRIVATE KEY-----\n",
    ],
)
def test_a_damaged_file_is_an_error_of_ours(path, content):
    write_private_file(path, content)
    with pytest.raises(IdentityError, match="holds no usable key") as caught:
        Identity.load(path)
    assert f"shoal keys new --file {path} --replace" in str(caught.value)


@pytest.mark.parametrize(
    "make", [ed448.Ed448PrivateKey.generate, lambda: ec.generate_private_key(ec.SECP256R1())]
)
def test_a_key_of_another_kind_is_refused(path, make):
    write_private_file(path, pem_of(make()))
    with pytest.raises(IdentityError, match="key of another kind"):
        Identity.load(path)


def test_a_file_that_is_not_there_or_no_file_says_how_to_make_one(path, tmp_path):
    for wrong in (path, tmp_path):
        with pytest.raises(IdentityError, match="cannot be read") as caught:
            Identity.load(wrong)
        assert f"shoal keys new --file {wrong}" in str(caught.value)


def test_the_private_key_is_in_no_repr_and_no_message(path):
    identity = Identity.generate()
    raw = identity.private_key.private_bytes_raw()
    pem = pem_of(identity.private_key)
    shown = [repr(identity), str(identity), f"{identity}"]
    # the file's last line is cut: everything else of the key is there
    write_private_file(path, pem.replace(b"-----END", b"?----END"))
    for attempt in (lambda: Identity.load(path), lambda: identity.save(path / "below")):
        try:
            attempt()
        except IdentityError:
            shown.append(traceback.format_exc())
    assert len(shown) == 5
    body = pem.decode().splitlines()[1]
    for text in shown:
        assert body not in text
        assert body[-20:] not in text
        assert raw.hex() not in text
        assert repr(raw)[2:-1] not in text


def test_a_key_is_not_replaced_unless_asked(path):
    first, second = Identity.generate(), Identity.generate()
    first.save(path)
    with pytest.raises(FileExistsError):
        second.save(path)
    assert Identity.load(path) == first
    second.save(path, replace=True)
    assert Identity.load(path) == second
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_not_taken_for_a_key_that_exists(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match=r"cannot be written.*is a file, not a folder"):
        Identity.generate().save(tmp_path / "file" / "identity.pem")


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(IdentityError, match="cannot be written: Permission denied") as caught:
        Identity.load_or_create(path)
    assert "SHOAL_STATE" in str(caught.value)


def test_a_link_to_nowhere_is_not_followed(path, tmp_path):
    path.parent.mkdir()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(IdentityError, match="cannot be read"):
        Identity.load_or_create(path)
    assert not (tmp_path / "nowhere").exists()


def test_the_state_folder_is_what_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path / "mine"))
    assert state_folder() == tmp_path / "mine"
    assert default_identity_path() == tmp_path / "mine" / "identity.pem"


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"HOME": "/home/me"}, "/home/me/.local/state/shoal"),
        ("linux", {"HOME": "/home/me", "XDG_STATE_HOME": "/state"}, "/state/shoal"),
        ("darwin", {"HOME": "/Users/me"}, "/Users/me/Library/Application Support/shoal"),
        ("win32", {"HOME": "/me", "LOCALAPPDATA": "/me/local"}, "/me/local/shoal"),
        ("win32", {"HOME": "/me"}, "/me/AppData/Local/shoal"),
    ],
)
@posix_only
def test_without_it_the_platforms_folder_is_used(monkeypatch, platform, environ, expected):
    for name in ("SHOAL_STATE", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert state_folder() == Path(expected)


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("SHOAL_STATE", "XDG_STATE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(IdentityError, match="set SHOAL_STATE"):
        state_folder()


def test_secrets_are_long_and_new_each_time():
    assert new_secret() != new_secret()
    assert len(new_secret()) == 43  # 32 bytes, six bits a character
