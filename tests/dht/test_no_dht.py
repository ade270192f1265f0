import asyncio

import pytest

from shoal.core import Address, Peer, PeerRefused, PeerUnreachable, ShoalError
from shoal.dht.join import first_ping

AT = Peer(Address("10.0.0.7", 31337))


class Refusing:
    """A protocol whose pings fail."""

    def __init__(self, error):
        self.error = error

    async def call_ping(self, peer):
        raise self.error


def test_only_a_method_that_is_missing_means_that_there_is_no_dht():
    missing = PeerRefused("dht.ping at 10.0.0.7:31337: this peer has no method 'dht.ping'.")
    with pytest.raises(PeerRefused, match=r"10\.0\.0\.7:31337 is a Shoal peer without a DHT"):
        asyncio.run(first_ping(Refusing(missing), AT))
    for other in (PeerRefused("it was denied."), PeerUnreachable("nobody has no method")):
        with pytest.raises(ShoalError) as caught:
            asyncio.run(first_ping(Refusing(other), AT))
        assert caught.value is other
