import datetime

import pytest

from shoal.core import Address, ManualClock, UsageError
from shoal.transport.trust.membership import check_may_listen
from transport.members import Swarm, assert_tells_nothing

DAY_S = 24 * 3600.0


def test_it_is_who_its_identity_is():
    membership = Swarm().member()
    assert membership.peer_id == membership.identity.peer_id
    assert membership.access.is_allowed(membership.peer_id)


def test_it_shows_no_secret():
    swarm = Swarm()
    membership = swarm.member()
    membership.server_tls()
    assert_tells_nothing(f"{membership} {membership!r}", swarm)


def test_contexts_are_kept_until_their_certificate_has_grown_old():
    clock = ManualClock(wall_s=datetime.datetime.now(datetime.UTC).timestamp())
    membership = Swarm().member(clock=clock)
    server, client = membership.server_tls(), membership.client_tls()
    assert server is not client
    clock.advance(14 * DAY_S)
    assert membership.server_tls() is server
    assert membership.client_tls() is client
    clock.advance(2 * DAY_S)
    assert membership.server_tls() is not server
    assert membership.client_tls() is not client
    assert membership.server_tls() is membership.server_tls()


def test_a_clock_that_is_set_back_makes_new_certificates():
    clock = ManualClock(wall_s=datetime.datetime.now(datetime.UTC).timestamp())
    membership = Swarm().member(clock=clock)
    server = membership.server_tls()
    clock._wall_s -= 2 * DAY_S
    assert membership.server_tls() is not server


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_anybody_may_listen_on_loopback(host):
    check_may_listen(Address(host, 0), None, is_insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "fe80::1%eth0"])
def test_who_listens_to_others_needs_a_secret(host):
    address = Address(host, 0)
    with pytest.raises(UsageError, match=r"(?s)this machine only.*--secret-file.*--insecure"):
        check_may_listen(address, None, is_insecure=False)
    check_may_listen(address, None, is_insecure=True)
    check_may_listen(address, Swarm().member(), is_insecure=False)
