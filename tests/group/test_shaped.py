"""Delays by the clock: what each operation takes over links of 10 ms and a megabyte a second."""

import pytest

from group.pretender import ManualSleeper, Pending, Pretender, ones
from shoal.core import Deadline, DeadlineExceeded, PeerLost
from shoal.group.wrappers import Shaped
from shoal.topology import Weights
from shoal.transport import Profile

SLOW = "[ways.default]\ndelay_ms = 10\nmbit_s = 8"
NEIGHBOURS = Weights.uniform([1, 2])


@pytest.fixture
def sleeper():
    return ManualSleeper()


@pytest.fixture
def shape(sleeper):
    def shape(profile=SLOW, inner=None, **options):
        return Shaped(inner or Pretender(), Profile.parse(profile), sleeper=sleeper, **options)

    return shape


def milliseconds(sleeper, issue):
    """How long an operation takes."""
    began_s = sleeper.clock.now_s()
    handle = issue()
    assert sleeper.clock.now_s() == began_s, "issuing takes no time"
    handle.wait()
    assert handle.is_done()
    return round((sleeper.clock.now_s() - began_s) * 1e3, 3)


def test_each_operation_takes_what_its_links_need(shape, sleeper):
    group = shape()
    window = group.window("w", 1000)
    window.publish(ones(), 0)
    for wanted_ms, issue in [
        (14, lambda: group.exchange(ones(), NEIGHBOURS)),  # links of their own: both at once
        (0, lambda: group.exchange(ones(), Weights(1.0))),
        (4 * (10 + 1.333), lambda: group.all_reduce(ones())),  # four steps of a third
        (4, lambda: group.broadcast(ones(), 0)),  # the root is done when it has sent
        (14, lambda: group.broadcast(ones(), 1)),
        (14, lambda: group.all_gather(ones())),
        (10, group.barrier),
        (24, lambda: window.fetch(1)),  # there and back
        (0, lambda: window.fetch(0)),
        (24, lambda: window.read(1, ones())),
        (14, lambda: window.put(1, ones())),  # done when it is there
        (14, lambda: window.add(1, ones())),
    ]:
        assert milliseconds(sleeper, issue) == pytest.approx(wanted_ms, abs=1e-2)


def test_a_line_is_shared_by_all_links(shape, sleeper):
    group = shape("[places.home]\nup_mbit_s = 4\ndown_mbit_s = 16\n[ways.default]\ndelay_ms = 10")
    # two times 4 KB at half a megabyte a second leave this worker, whose senders take 8 ms for one
    assert milliseconds(sleeper, lambda: group.exchange(ones(), NEIGHBOURS)) == 18
    assert milliseconds(sleeper, lambda: group.exchange(ones(), Weights(0.2, {1: 0.8}, {}))) == 18


def test_operations_that_overlap_wait_for_each_other_on_their_link(shape, sleeper):
    group = shape()
    handles = [group.exchange(ones(), NEIGHBOURS) for _ in range(3)]
    for number, handle in enumerate(handles, 1):
        handle.wait()
        assert sleeper.clock.now_s() == pytest.approx(0.010 + number * 0.004)


def test_a_profile_names_workers_or_machines(shape, sleeper):
    named = SLOW + '\n[[ways.between]]\nfrom = "rank:1"\nto = "rank:0"\none_way = true\ndelay_ms = 100'
    assert milliseconds(sleeper, lambda: shape(named).exchange(ones(), NEIGHBOURS)) == 104
    by_machine = shape(inner=Pretender(4, per_machine=2), between="machines")
    assert milliseconds(sleeper, lambda: by_machine.exchange(ones(), Weights.uniform([1]))) == 0
    assert milliseconds(sleeper, lambda: by_machine.exchange(ones(), Weights.uniform([2]))) == 14


def test_a_deadline_ends_the_wait_and_the_operation_goes_on(shape, sleeper):
    handle = shape().exchange(ones(), NEIGHBOURS)
    with pytest.raises(DeadlineExceeded, match="exchange over a shaped link"):
        handle.wait(Deadline.after(0.005, sleeper.clock))
    assert sleeper.clock.now_s() == pytest.approx(0.005)
    assert not handle.is_done()
    handle.wait(Deadline.after(1, sleeper.clock))
    assert sleeper.clock.now_s() == pytest.approx(0.014)


def test_what_fails_fails_at_once(shape, sleeper):
    group = shape()
    for issue in (group.barrier, lambda: group.all_gather(ones())):
        pending = group.inner.pending = Pending()
        handle = issue()
        assert not handle.is_done()
        pending.is_over, pending.error = True, PeerLost("rank 1 is lost.", peer=1)
        with pytest.raises(PeerLost):
            handle.wait()
    assert handle.is_done()
    assert sleeper.slept_s == 0


def test_other_operations_go_on_during_a_wait(shape):
    group = shape()
    group.exchange(ones(), NEIGHBOURS).wait()
    assert group.inner.num_progressed >= 14


def test_a_seed_decides_the_delays(shape, sleeper):
    def delays(seed):
        group = Shaped(Pretender(), "wan", seed=seed, sleeper=sleeper)
        return [milliseconds(sleeper, lambda: group.exchange(ones(), NEIGHBOURS)) for _ in range(5)]

    first = delays(1)
    assert delays(1) == pytest.approx(first, abs=2e-3)
    assert delays(2) != pytest.approx(first, abs=2e-3)
    assert min(first) > 20
