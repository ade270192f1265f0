import sys

import pytest

from shoal.core.processes import is_own, own_addresses


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are named on Linux only")
def test_the_loopback_has_its_address():
    assert "127.0.0.1" in own_addresses()["lo"]


def test_all_of_them_are_this_machines_own():
    assert all(is_own(address) for found in own_addresses().values() for address in found)
    assert not is_own("192.0.2.77")
