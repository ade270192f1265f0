import statistics

import pytest

from doctor.networks import BadNetwork, serving
from shoal.core import Address, UsageError
from shoal.core.virtual import run_virtual
from shoal.doctor.joining import Member
from shoal.doctor.recording import Effort, LinkMeasurement, _speed, record, to_profile
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import Profile, Way, Ways
from transport.members import Swarm

QUICK = Effort(num_calls=30, calls_s=1.0, bulk_s=0.3, bulk_bytes=4 << 20, patience_s=0.5)
HERE, THERE = Address("10.0.0.1", 5), Address("10.0.0.7", 31337)
LINK = LinkMeasurement(
    THERE, seen_as="10.0.0.1", delays_ms=(5.0, 6.0, 7.0), loss=0.01, up_mbit_s=20.0, down_mbit_s=90.0
)


def test_a_link_of_loopback(run):
    swarm = Swarm()
    told = []

    async def main():
        async with serving(swarm.member()) as address:
            member = Member(membership=swarm.member())
            return await record([address], member, tell=told.append, effort=QUICK)

    (link,) = run(main())
    assert not link.error
    assert (link.ip_protocol, link.seen_as) == ("udp", "127.0.0.1")
    assert len(link.delays_ms) == QUICK.num_calls
    assert all(0 < delay_ms < 500 for delay_ms in link.delays_ms)
    assert link.loss == pytest.approx(0.0, abs=0.2)
    assert link.up_mbit_s > 50
    assert link.down_mbit_s > 50
    assert told == [f"{link.peer}: small calls", f"{link.peer}: bandwidth"]


def test_streams_are_timed_where_datagrams_do_not_get_through(run):
    async def main():
        async with serving() as address:
            return await record([address], Member(), network=BadNetwork(udp="dropped"), effort=QUICK)

    (link,) = run(main())
    assert not link.error
    assert (link.ip_protocol, link.loss) == ("tcp", None)
    assert len(link.delays_ms) == QUICK.num_calls
    assert link.up_mbit_s


def test_a_link_without_streams_has_no_bandwidth(run):
    async def main():
        async with serving() as address:
            return await record([address], Member(), network=BadNetwork(tcp="refused"), effort=QUICK)

    (link,) = run(main())
    assert not link.error
    assert (link.ip_protocol, link.up_mbit_s, link.down_mbit_s) == ("udp", None, None)
    assert Profile.parse(to_profile([link], 0.0).to_toml()).ways.default.mbit_s is None


def test_a_peer_that_cannot_be_measured_is_a_row_and_others_are_measured(run):
    async def main():
        async with serving() as gone:
            pass
        async with serving() as address:
            return await record([gone, address], Member(), effort=QUICK)

    failed, measured = run(main())
    assert "nothing listens there" in failed.error
    assert failed.next_step == f"shoal doctor --join {failed.peer} says what keeps it from answering."
    assert not measured.error
    assert len(to_profile([failed, measured], 0.0).ways.between) == 2
    with pytest.raises(UsageError, match="No link was measured"):
        to_profile([failed], 0.0)


def test_a_profile_of_links_is_read_back(tmp_path):
    other = LinkMeasurement(Address("::1", 9), seen_as="::1", ip_protocol="tcp", delays_ms=(1.0,))
    profile = to_profile([LINK, other], 1_700_000_000.0)
    path = tmp_path / "recorded.toml"
    path.write_text(profile.to_toml())
    read = Profile.load(path)
    assert read == profile
    assert "10.0.0.7:31337" in read.description
    assert "2023-11-14" in read.description
    up, down = read.way_between(HERE, THERE), read.way_between(THERE, HERE)
    assert (up.mbit_s, down.mbit_s) == (20.0, 90.0)
    for way in (up, down):
        assert way.delay_ms.samples == [5.0, 6.0, 7.0]
        assert way.loss == 0.01
    assert read.way_between(Address("::1", 7), other.peer).delay_ms.samples == [1.0]
    # any other two peers have links like all that were recorded
    assert read.ways.default.delay_ms.samples == [5.0, 6.0, 7.0, 1.0]
    assert (read.ways.default.loss, read.ways.default.mbit_s) == (0.01, 55.0)


def test_speed_leaves_out_the_slow_beginning():
    slow = [(0.5, 10), (1.0, 10)]
    steady = [(1.0 + 0.1 * number, 100) for number in range(1, 20)]
    assert _speed(0.0, slow + steady) == pytest.approx(1000)
    assert _speed(0.0, slow) == 20


def record_under(way, effort=None):
    """What is recorded between two hosts with such a way between them, in virtual time."""

    async def main():
        network = MemoryNetwork(Conditions(Profile(ways=Ways(default=way)), seed=3), seed=3)
        async with serving(network=network.host("there"), listen=Address("there", 0)) as address:
            (link,) = await record([address], Member(), network=network.host("here"), effort=effort)
        assert not link.error
        return link

    return run_virtual(main(), limit_s=60)


@pytest.mark.parametrize(
    ("delay_ms", "mbit_s"),
    [(10.0, 20.0), (50.0, 100.0), (100.0, 5.0), (1.0, 500.0), (30.0, 0.1), (60.0, 0.056)],
)
def test_what_is_recorded_is_what_the_network_is_like(delay_ms, mbit_s):
    link = record_under(Way(delay_ms=delay_ms, mbit_s=mbit_s))
    packet_ms = 200 * 8 / mbit_s / 1e3  # small calls are bytes too
    assert statistics.median(link.delays_ms) == pytest.approx(delay_ms, abs=0.1 * delay_ms + packet_ms)
    assert link.up_mbit_s == pytest.approx(mbit_s, rel=0.1)
    assert link.down_mbit_s == pytest.approx(mbit_s, rel=0.1)
    assert link.loss == 0


def test_loss_is_told_from_delay():
    link = record_under(Way(delay_ms=20.0, loss=0.1, mbit_s=100.0), Effort(num_calls=400, calls_s=60.0))
    assert link.loss == pytest.approx(0.1, rel=0.25)
    assert max(link.delays_ms) == pytest.approx(20.0, rel=0.1)
    assert len(link.delays_ms) < 400  # those that were sent again are left out


def test_a_link_that_breaks_is_an_error_in_time():
    async def main():
        script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 0.5\npeer = "there:1024"')
        network = MemoryNetwork(Conditions(Profile(ways=Ways(default=Way(delay_ms=20.0))), script))
        async with serving(network=network.host("there"), listen=Address("there", 0)) as address:
            return await record([address], Member(), network=network.host("here"))

    (link,) = run_virtual(main(), limit_s=30)
    assert "there:1024 stopped answering after 1" in link.error
