from shoal.core import Address, PeerRefused, PeerUnreachable
from shoal.dht.join import explained

AT = Address("10.0.0.7", 31337)


def test_only_a_method_that_is_missing_means_that_there_is_no_dht():
    missing = PeerRefused("dht.ping at 10.0.0.7:31337: this peer has no method 'dht.ping'.")
    told = explained(missing, AT)
    assert "10.0.0.7:31337 is a Shoal peer without a DHT" in str(told)
    for other in (PeerRefused("it was denied."), PeerUnreachable("nobody has no method")):
        assert explained(other, AT) is other
