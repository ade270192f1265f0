import copy
import pickle

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.core import IdentityError
from shoal.core.identity import new_secret, write_private_file
from shoal.transport.trust.secret import SwarmSecret

TEXT = "0123456789abcdefghijABCDEFGHIJ-_secret-text"


def test_what_keys_writes_can_be_read(tmp_path):
    path = tmp_path / "secret"
    text = new_secret()
    write_private_file(path, text.encode() + b"\n")
    assert SwarmSecret.load(path) == SwarmSecret.parse(text) == SwarmSecret.parse(f"  {text}\r\n")
    assert SwarmSecret.load(path) != SwarmSecret.parse(new_secret())
    assert SwarmSecret.parse(text) != text


def test_the_environment(monkeypatch):
    monkeypatch.delenv("SHOAL_SECRET", raising=False)
    assert SwarmSecret.from_environment() is None
    monkeypatch.setenv("SHOAL_SECRET", TEXT)
    assert SwarmSecret.from_environment() == SwarmSecret.parse(TEXT)
    monkeypatch.setenv("SHOAL_SECRET", "short")
    with pytest.raises(IdentityError, match="variable SHOAL_SECRET"):
        SwarmSecret.from_environment()


def test_a_file_that_others_may_read(tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match=r"(?s)other users.*is 640.*chmod 600.*keys secret") as caught:
        SwarmSecret.load(path)
    assert TEXT not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "none"
    with pytest.raises(IdentityError, match=f"shoal keys secret --file {path}"):
        SwarmSecret.load(path)
    with pytest.raises(IdentityError, match="cannot be read"):
        SwarmSecret.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [(b"", "empty"), (b" \n\n", "empty"), (b"hunter2", "7 characters"), (b"\xff" * 50, "not text")],
)
def test_content_that_is_no_secret(tmp_path, content, cause):
    path = tmp_path / "secret"
    write_private_file(path, content)
    with pytest.raises(IdentityError, match=f"(?s){cause}.*shoal keys secret") as caught:
        SwarmSecret.load(path)
    assert "hunter2" not in str(caught.value)


def test_derived_keys_are_those_of_hkdf():
    info = b"\x07\0\0\0purpose\x02\0\0\0id\x00\0\0\0"
    expected = HKDF(hashes.SHA256(), 40, b"shoal swarm secret", info).derive(TEXT.encode())
    assert SwarmSecret.parse(TEXT).derive("purpose", b"id", b"", size_bytes=40) == expected


def test_derived_keys_differ_where_anything_does():
    secret = SwarmSecret.parse(TEXT)
    keys = [
        secret.derive("purpose"),
        secret.derive("purposf"),
        secret.derive("purpose", b""),
        secret.derive("purpose", b"ab"),
        secret.derive("purpose", b"a", b"b"),
        secret.derive("purpose", b"", b"ab"),
        SwarmSecret.parse(TEXT + "x").derive("purpose"),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_it_is_shown_nowhere():
    secret = SwarmSecret.parse(TEXT)
    for text in (repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", repr([secret])):
        assert "hidden" in text
        assert TEXT not in text
        assert repr(secret._key) not in text
    for look in (vars, pickle.dumps, copy.copy, copy.deepcopy, hash):
        with pytest.raises(TypeError) as caught:
            look(secret)
        assert TEXT not in str(caught.value)
