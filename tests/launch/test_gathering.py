import signal
import sys

import pytest

from launch.stations import FakeChannel
from shoal._version import __version__
from shoal.core import PeerRefused, PeerUnreachable, UsageError
from shoal.launch.head import AgentHandle, Gathering, meeting_of, place
from shoal.launch.polling import SignalInbox
from shoal.launch.protocol import AGENT, AgentHello, PipeChannel


def present(name, address, *, reached_at="", head="", count=1, machine=None):
    interfaces = {"lo": ["127.0.0.1"], "eth0": [address]}
    hello = AgentHello(__version__, name, interfaces, free_port=7, reached_at=reached_at, head_address=head)
    return AgentHandle(FakeChannel(name), 2, machine or name, hello=hello, num_processes=count)


@pytest.mark.parametrize(
    ("chosen", "interface", "expected"),
    [
        ([present("a", "10.0.0.1")], None, "127.0.0.1"),
        ([present("a", "10.0.0.1"), present("a2", "10.0.0.1", machine="a")], None, "127.0.0.1"),
        ([present("a", "10.0.0.1"), present("b", "10.0.0.2")], None, "10.0.0.1"),
        ([present("a", "10.0.0.1", reached_at="10.0.0.1"), present("b", "10.0.0.2")], None, "10.0.0.1"),
        # a machine behind an address of another one is met by its own
        ([present("a", "10.0.0.1", reached_at="203.0.113.1"), present("b", "10.0.0.2")], None, "10.0.0.1"),
        # this machine: by the address that the others see
        ([present("a", "10.0.0.1"), present("b", "10.0.0.2", head="10.0.0.1")], None, "10.0.0.1"),
        ([present("a", "10.0.0.1", reached_at="9.9.9.9"), present("b", "10.0.0.2")], "eth0", "10.0.0.1"),
        ([present("a", "10.0.0.1"), present("b", "10.0.0.2")], "10.0.0.1", "10.0.0.1"),
    ],
)
def test_they_meet_where_all_can_come(chosen, interface, expected):
    assert (meeting_of(chosen, interface).address, meeting_of(chosen, interface).port) == (expected, 7)


def test_an_interface_that_a_host_has_not_is_named():
    with pytest.raises(UsageError, match=r"a has no network interface ib0 .* it has lo, eth0"):
        meeting_of([present("a", "10.0.0.1")], "ib0")


def test_ranks_are_given_in_order_and_counted_on_each_machine():
    chosen = [
        present("x", "10.0.0.1", count=2),
        present("y", "10.0.0.2", machine="m"),
        present("z", "10.0.0.2", machine="m", count=2),
    ]
    posts = place(chosen)
    assert [[post.rank for post in own] for own in posts] == [[0, 1], [2], [3, 4]]
    flat = [post.variables for own in posts for post in own]
    assert [one["SHOAL_LOCAL_RANK"] for one in flat] == list("01012")
    assert [one["SHOAL_LOCAL_WORLD_SIZE"] for one in flat] == list("22333")
    assert [one["SHOAL_MACHINE"] for one in flat] == list("00111")


def test_hosts_that_answer_are_told_from_those_that_do_not():
    agents = [
        AgentHandle(PipeChannel("good", [sys.executable, *AGENT]), 2, "good"),
        AgentHandle(PipeChannel("noisy", ["sh", "-c", "echo hi; echo no room >&2; exit 3"]), 2, "noisy"),
        AgentHandle(FakeChannel("old", [AgentHello("0.0.1", "old")]), 2, "old"),
    ]
    with SignalInbox() as inbox, Gathering(agents) as gathering:
        assert gathering.wait(inbox, 20.0) is None
        assert [one.host for one in gathering.present] == ["good"]
        errors = {agent.host: error for agent, error in gathering.absent}
        assert "exit code 3: no room" in errors["noisy"].what
        assert "Shoal 0.0.1" in errors["old"].what
        assert isinstance(errors["old"], PeerRefused)
        assert isinstance(gathering.complaint(), PeerUnreachable)
        assert "2 of 3 hosts" in gathering.complaint().what
        assert [one.num_processes for one in gathering.choose(1)] == [1]
    assert not agents[0].channel.is_open


def test_one_that_says_nothing_is_not_waited_for():
    with SignalInbox() as inbox, Gathering([AgentHandle(FakeChannel("b"), 2, "b")]) as gathering:
        assert gathering.wait(inbox, 0.1) is None
        assert "b has not answered within 0.1 s" in gathering.complaint().what


def test_a_signal_ends_the_waiting():
    with SignalInbox() as inbox, Gathering([AgentHandle(FakeChannel("b"), 2, "b")]) as gathering:
        signal.raise_signal(signal.SIGTERM)
        assert gathering.wait(inbox, 20.0) == signal.SIGTERM


def test_an_agent_may_say_itself_which_machine_it_is_on():
    agents = [
        AgentHandle(FakeChannel("the cluster", [AgentHello(__version__, name, machine="node 7")]), 2, name)
        for name in ("x", "y")
    ]
    with SignalInbox() as inbox, Gathering(agents) as gathering:
        assert gathering.wait(inbox, 20.0) is None
    assert [agent.machine for agent in agents] == ["node 7"] * 2
    assert [agent.host for agent in agents] == ["x (node 7)", "y (node 7)"]
