import ipaddress
import sys

import pytest

from shoal.core.processes import is_own, network_of, own_addresses

linux = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are named on Linux only")


@linux
def test_the_loopback_has_its_address():
    assert "127.0.0.1" in own_addresses()["lo"]


def test_all_of_them_are_this_machines_own():
    assert all(is_own(address) for found in own_addresses().values() for address in found)
    assert not is_own("192.0.2.77")


@linux
def test_each_address_is_in_the_network_of_its_interface():
    assert network_of("127.0.0.1") == "127.0.0.0/8"
    for address in (address for found in own_addresses().values() for address in found):
        assert ipaddress.ip_address(address) in ipaddress.ip_network(network_of(address))


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77", "::ffff:127.0.0.1", "localhost", ""])
def test_an_address_that_is_not_of_this_machine_has_no_network(address):
    assert network_of(address) == ""
