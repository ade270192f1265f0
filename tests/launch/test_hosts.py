import socket

import pytest

from shoal.core import UsageError
from shoal.launch.hosts import Host, Hosts, SshSettings, is_here, open_hosts, parse_hosts, read_hostfile

SSH = SshSettings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("a", [Host("a", 1)]),
        ("a:1, b:2,a:3", [Host("a", 4), Host("b", 2)]),
        ("me@10.0.0.1:4,[fe80::1]:2", [Host("me@10.0.0.1", 4), Host("[fe80::1]", 2)]),
    ],
)
def test_hosts_and_their_slots(text, expected):
    assert parse_hosts(text) == expected


@pytest.mark.parametrize("text", ["", "a:2,", "a:x", "a:0", "a:b:c", "a b"])
def test_what_is_no_host_is_refused(text):
    with pytest.raises(UsageError) as refused:
        parse_hosts(text)
    assert refused.value.next_step


def test_a_host_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# all\n\na slots=2 # big\nb:3\nc\nme@d   slots = 4 max-slots=8\n")
    assert read_hostfile(path) == [Host("a", 2), Host("b", 3), Host("c", 1), Host("me@d", 4)]


@pytest.mark.parametrize(
    ("text", "told"), [("a slot=2", "Line 1"), ("# none", "names no host"), (None, "cannot be read")]
)
def test_a_host_file_that_cannot_be_read_is_named(tmp_path, text, told):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_hostfile(path)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", socket.gethostname()])
def test_this_machine_is_known_by_its_names(name):
    assert is_here(name) or name == "[::1]"


@pytest.mark.parametrize("name", ["192.0.2.1", "nobody.invalid", "me@nobody.invalid"])
def test_others_are_not_this_machine(name):
    assert not is_here(name)


def test_several_names_of_this_machine_are_one_host():
    hosts = Hosts(parse_hosts("localhost:2,192.0.2.1:1,127.0.0.1:3"), SSH)
    assert hosts.num_slots == 6
    assert hosts.slots_of_first == 5
    assert hosts.is_elsewhere
    assert not Hosts(parse_hosts("localhost:2,127.0.0.1:3"), SSH).is_elsewhere


def test_too_few_slots_are_named():
    hosts = open_hosts("a:2,b:3", None, SSH)
    hosts.check(4, 1)
    with pytest.raises(
        UsageError, match="5 workers and 1 server need more than the 5 slots of a:2, b:3"
    ) as few:
        hosts.check(5, 1)
    assert "-np 4" in few.value.next_step


def test_hosts_come_from_one_place(tmp_path):
    assert open_hosts(None, None, SSH) is None
    with pytest.raises(UsageError, match="both given"):
        open_hosts("a", tmp_path / "hosts", SSH)
