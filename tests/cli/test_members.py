import sys
from pathlib import Path

import pytest

from shoal.cli.members import check_ways, claimed_identity, member_of, passing_identity, where_to_listen
from shoal.core.errors import IdentityError, UsageError
from shoal.core.identity import Identity, new_secret, write_private_file
from shoal.core.ids import Address

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")


@needs_locks
def test_two_peers_of_one_machine_are_two_peers():
    own = Identity.load_or_create().peer_id
    with claimed_identity(None) as first:
        assert first.peer_id == own
        with claimed_identity(None) as second:
            assert second.peer_id != own
        assert passing_identity(None).peer_id not in (own, second.peer_id)
    assert passing_identity(None).peer_id == own
    with claimed_identity(None) as later:
        assert later.peer_id == own


@needs_locks
def test_a_named_identity_is_had_by_one_peer(tmp_path):
    path = tmp_path / "other.pem"
    named = Identity.generate()
    named.save(path)
    with claimed_identity(path) as first:
        assert first.peer_id == passing_identity(path).peer_id == named.peer_id
        with pytest.raises(UsageError, match="in use by another peer on this machine"):
            with claimed_identity(path):
                pass


@pytest.mark.parametrize("has_home", [True, False])
def test_a_passer_by_needs_no_file(tmp_path, monkeypatch, has_home):
    if has_home:
        monkeypatch.setenv("SHOAL_STATE", "/proc/nowhere")
    else:
        monkeypatch.delenv("SHOAL_STATE")
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", _no_home)
    assert passing_identity(None).peer_id != passing_identity(None).peer_id
    with pytest.raises(IdentityError), claimed_identity(None):
        pass


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_named_identity_must_exist(tmp_path):
    with pytest.raises(IdentityError, match="cannot be read"):
        with claimed_identity(tmp_path / "none.pem"):
            pass
    with pytest.raises(IdentityError, match="cannot be read"):
        passing_identity(tmp_path / "none.pem")


def test_members_have_the_secret_of_the_file_or_of_the_environment(tmp_path, monkeypatch):
    identity = Identity.generate()
    assert member_of(identity, None).membership is None
    path = tmp_path / "swarm.secret"
    write_private_file(path, new_secret().encode())
    by_file = member_of(identity, path).membership
    monkeypatch.setenv("SHOAL_SECRET", path.read_text())
    assert member_of(identity, None).membership.secret == by_file.secret
    monkeypatch.setenv("SHOAL_SECRET", new_secret())
    assert member_of(identity, path).membership.secret == by_file.secret


def test_lists_need_a_secret(tmp_path):
    with pytest.raises(UsageError, match="Lists of peers need a swarm secret"):
        member_of(Identity.generate(), None, (None, tmp_path / "denied"))


def test_it_listens_where_those_it_joins_can_call_it():
    def where(*starts, is_open):
        return str(where_to_listen([Address.parse(start) for start in starts], is_open=is_open))

    assert where(is_open=False) == "127.0.0.1:0"
    assert where("[::1]:9", is_open=False) == "[::1]:0"
    assert where("10.0.0.7:9", is_open=True) == "0.0.0.0:0"
    assert where("[2001:db8::7]:9", "10.0.0.7:9", is_open=True) == "[::]:0"


def test_who_joins_others_must_be_called_by_them():
    here, there = Address("127.0.0.1", 0), Address("10.0.0.7", 31337)
    check_ways(here, [Address("127.0.0.1", 9), Address("localhost", 9)])
    check_ways(Address("0.0.0.0", 0), [there])
    with pytest.raises(UsageError, match=r"where 10\.0\.0\.7:31337 cannot call it"):
        check_ways(here, [there])
