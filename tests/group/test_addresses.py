import sys

import pytest

from shoal.core.processes import interface_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux says what an interface's address is")


@linux
def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"


def test_an_address_of_another_machine_has_no_interface_here():
    assert interface_of("198.51.100.7") is None
