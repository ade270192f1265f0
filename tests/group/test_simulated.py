"""The contract of groups, and what is special about one in virtual time."""

import pytest
import torch

from contracts import group_checks, strategy_checks, window_checks
from contracts.strategies import ABORTED, CASES, COUNTED, EVERY
from shoal.core import Deadline, DeadlineExceeded, PeerLost, ShoalError, UsageError
from shoal.group import Mutex
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.topology import Weights
from shoal.transport import FaultScript, Profile
from simulate.simulated import NEAR, in_simulation

GROUP = {
    "reductions": {"num_dtypes": 4},
    "copies": None,
    "exchanges": None,
    "twins": {"graph": "directed"},
    "one_sided": None,
    "unasked": None,
    "in_flight": None,
}
WINDOWS = {
    "writes": None,
    "masses": {"num_turns": 10},
    "letters": {"num_letters": 20},
    "pending": None,
    "exclusion": {"num_turns": 5},
    "changes": {"num_elements": 1003, "num_versions": 10},
    "departures": None,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", GROUP)
def test_operations(name, size):
    in_simulation(getattr(group_checks, name), size, GROUP[name])


def test_machines():
    in_simulation(group_checks.machines, 4, None, workers_per_machine=2)


def test_workers_that_differ_are_told_who_called_what():
    for text in in_simulation(group_checks.mismatch, 2, None):
        for word in ("rank 0", "all_reduce", "rank 1", "broadcast"):
            assert word in text


def test_leaving():
    assert in_simulation(group_checks.leaving, 3, None) == [2, 2, 1]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    in_simulation(getattr(window_checks, name), 3, WINDOWS[name])


IN_GROUP = [name for name in EVERY if CASES[name].strategy != "ddp"]


@pytest.mark.parametrize("check", [pytest.param("rounds", marks=pytest.mark.slow), "limits"])
def test_strategies_run_in_it_unchanged(check):
    in_simulation(getattr(strategy_checks, check), 3, IN_GROUP)


@pytest.mark.slow
def test_bytes_of_strategies_are_those_of_the_formula():
    in_simulation(strategy_checks.metered, 3, [name for name in COUNTED if name in IN_GROUP])


def test_an_aborted_round_changes_nothing():
    in_simulation(strategy_checks.aborted, 2, [name for name in ABORTED if name in IN_GROUP])


# --- time ---

SLOW = Profile.parse("[ways.default]\ndelay_ms = 100\nmbit_s = 8")  # a megabyte a second
MEGABYTE = 250_000  # elements


def timed_values(outcomes):
    """What each worker has returned; the first error that ended one is raised."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def timed(work, size, **world):
    """When each worker's clock stands where at its end."""

    def run(worker):
        work(worker)
        return worker.clock.now_s()

    return timed_values(run_exact(World(num_workers=size, **{"profile": SLOW, **world}), run))


def test_an_exchange_takes_as_long_as_its_bytes():
    def exchange(worker):
        worker.compute(worker.rank)
        other = 1 - worker.rank
        worker.group.exchange(torch.ones(MEGABYTE), Weights(0.5, {other: 0.5})).wait()

    # rank 0 waits for what rank 1 has sent a second later; rank 1 until its own has left
    assert timed(exchange, 2) == pytest.approx([2.1, 2.0])


def test_an_all_reduce_goes_round_a_ring():
    def reduce(worker):
        worker.group.all_reduce(torch.ones(4 * MEGABYTE)).wait()

    assert timed(reduce, 4) == pytest.approx([6 * 1.1] * 4)


def test_rings_pass_each_other_and_other_messages():
    far = Profile.parse("[ways.default]\ndelay_ms = 100")

    def reduce_twice(worker):
        handles = [worker.group.all_reduce(torch.ones(8)) for _ in range(2)]
        after, before = (worker.rank + 1) % 4, (worker.rank - 1) % 4
        worker.group.exchange(torch.ones(8), Weights(0.5, {before: 0.5}, {after: 1.0})).wait()
        assert worker.clock.now_s() == pytest.approx(0.1)
        for handle in handles:
            handle.wait()

    assert timed(reduce_twice, 4, profile=far) == pytest.approx([0.6] * 4)


def test_who_is_late_holds_up_only_the_hops_that_come_through_it():
    far = Profile.parse("[ways.default]\ndelay_ms = 100")

    def reduce(worker):
        worker.compute(1.0 if worker.rank == 0 else 0.0)
        worker.group.all_reduce(torch.ones(8)).wait()

    # the others have sent what they could before: of the six hops of rank 3 only the third waits for it
    assert timed(reduce, 4, profile=far) == pytest.approx([1.4, 1.5, 1.6, 1.3])


def test_what_is_computed_meanwhile_costs_no_time():
    def overlap(worker):
        handle = worker.group.all_reduce(torch.ones(2 * MEGABYTE))
        worker.compute(2.0)
        assert not handle.is_done()
        worker.compute(0.5)
        assert handle.is_done()
        handle.wait()

    assert timed(overlap, 2) == pytest.approx([2.5, 2.5])


def test_a_write_is_there_when_it_has_come():
    def write(worker):
        window = worker.group.window("w", MEGABYTE)
        worker.group.barrier().wait()
        began_s = worker.clock.now_s()
        if worker.rank == 0:
            handle = window.put(1, torch.full((MEGABYTE,), 3.0))
            assert not handle.is_done()
            handle.wait()
            assert worker.clock.now_s() - began_s == pytest.approx(1.1)
        else:
            worker.compute(1.0)
            assert not window.filled()
            assert window.wait(Deadline.after(0.05)) == []
            assert window.wait() == [0]
            assert worker.clock.now_s() - began_s == pytest.approx(1.1)
            with window.slot(0) as slot:
                assert slot.tensor[-1] == 3

    timed(write, 2)


def test_inside_a_machine_nothing_takes_time():
    def meet(worker):
        other = worker.rank ^ 1
        worker.group.exchange(torch.ones(MEGABYTE), Weights(0.5, {other: 0.5})).wait()

    ends_s = timed(meet, 4, workers_per_machine=2, between="machines")
    assert ends_s == [0.0] * 4


def test_who_was_waited_for():
    def meet(worker):
        worker.compute(5.0 if worker.rank == 2 else 1.0)
        worker.group.barrier().wait()
        return list(worker.group.stats.waited_s)

    outcomes = run_exact(World(num_workers=3, profile=NEAR), meet)
    assert [outcome.value for outcome in outcomes] == [[0, 0, 4], [0, 0, 4], [0, 0, 0]]


def test_a_deadline_is_one_of_virtual_time():
    def wait(worker):
        if worker.rank == 0:
            with pytest.raises(DeadlineExceeded):
                worker.group.barrier().wait(Deadline.after(3600))
            assert worker.clock.now_s() == 3600
        else:
            worker.compute(7200)
            worker.group.barrier()

    timed(wait, 2)


def test_a_deadline_holds_when_the_end_becomes_known_meanwhile():
    far = Profile.parse("[ways.default]\ndelay_ms = 5000")

    def wait(worker):
        worker.compute(0.5 * worker.rank)
        handle = worker.group.barrier()
        with pytest.raises(DeadlineExceeded):
            handle.wait(Deadline.after(0.6))

    assert timed(wait, 2, profile=far) == pytest.approx([0.6, 1.1])


def test_who_polls_goes_on_when_it_is_over():
    def poll(worker):
        worker.compute(worker.rank)
        handle = worker.group.barrier()
        while not handle.is_done():
            worker.group.progress()
        window = worker.group.window("w", 1)
        if worker.rank == 0:
            worker.compute(1.0)
            window.put(1, torch.ones(1)).wait()
        else:
            while not window.filled():
                pass

    # rank 0 hears of rank 1 at 1.1, works for a second, and its write takes 0.1
    assert timed(poll, 2) == pytest.approx([2.2, 2.2], abs=1e-3)


def test_who_polls_for_what_never_comes_is_named():
    def poll(worker):
        if worker.rank == 1:
            worker.group.window("y", 1, sources=()).read(0, torch.zeros(1), version=1).wait()
        handle = worker.group.barrier()
        while not handle.is_done():
            worker.group.progress()

    with pytest.raises(ShoalError, match=r"rank 0 for (barrier|progress); rank 1 for read 'y' of rank 0"):
        run_exact(World(num_workers=2), poll)


def test_workers_that_wait_for_each_other_are_named():
    def stuck(worker):
        if worker.rank == 0:
            worker.group.barrier().wait()
        else:
            window = worker.group.window("y", 1, sources=())
            window.fetch(0).wait()
            window.read(0, torch.zeros(1), version=1).wait()

    with pytest.raises(ShoalError, match="rank 0 for barrier; rank 1 for read 'y' of rank 0"):
        run_exact(World(num_workers=2), stuck)


@pytest.mark.parametrize(("end", "at_s"), [("leave", 3.0), ("fail", 3.02), ("close", 3.0)])
def test_a_letter_to_one_that_ends_is_over(end, at_s):
    def work(worker):
        window = worker.group.window("w", 4)
        if worker.rank == 0:
            window.send(1, torch.ones(4)).wait()
            window.send(1, torch.ones(4)).wait()
            return worker.clock.now_s()
        worker.compute(3.0)
        if end == "fail":
            raise ShoalError("enough")
        if end == "close":
            worker.group.progress()
            window.close()
            worker.compute(2.0)
        return None

    assert run_exact(World(num_workers=2), work)[0].value == pytest.approx(at_s)


def test_who_fails_is_missed_after_its_own_time():
    def work(worker):
        if worker.rank == 1:
            worker.compute(5.0)
            raise ShoalError("enough")
        with pytest.raises(PeerLost):
            worker.group.barrier().wait()
        return worker.clock.now_s()

    assert run_exact(World(num_workers=2), work)[0].value == pytest.approx(5.02)


def test_what_went_wrong_once_is_not_told_again():
    def work(worker):
        tensor = torch.full((4,), float(worker.rank))
        if worker.rank == 2:
            raise ShoalError("enough")
        handle = worker.group.all_reduce(tensor)
        for _ in range(2):
            with pytest.raises(PeerLost):
                handle.wait()
        worker.group.should_survive = True
        return worker.group.all_reduce(tensor).wait().tolist()

    outcomes = run_exact(World(num_workers=3, profile=NEAR), work)
    assert [outcome.value for outcome in outcomes] == [[0.5] * 4, [0.5] * 4, None]


def test_those_left_of_a_ring_begin_again():
    def work(worker):
        worker.group.should_survive = True
        if worker.rank == 1:
            worker.compute(1.0)
            raise ShoalError("enough")
        tensor = torch.full((1,), float(worker.rank))
        worker.group.all_reduce(tensor).wait()
        return tensor.item(), worker.clock.now_s()

    outcomes = run_exact(World(num_workers=3, profile=SLOW), work)
    assert outcomes[0].value == outcomes[2].value == pytest.approx((1.0, 1.02 + 2 * 0.1), abs=1e-4)


def test_a_bug_in_a_worker_is_raised():
    def fail(worker):
        if worker.rank == 1:
            raise ZeroDivisionError
        worker.group.barrier().wait()

    with pytest.raises(ZeroDivisionError):
        run_exact(World(num_workers=2), fail)


@pytest.mark.parametrize("profile", [Profile(), SLOW])
def test_one_member_at_a_time_holds_a_mutex(profile):
    held = []

    def work(worker):
        mutex = Mutex(worker.group, "m")
        began_s = worker.clock.now_s()
        for _ in range(3):
            with mutex:
                held.append(worker.rank)
                assert held == [worker.rank]
                worker.compute(1.0)
                worker.group.progress()  # lets the others come first
                held.remove(worker.rank)
        worker.group.barrier().wait()
        mutex.close()
        return worker.clock.now_s() - began_s

    ends_s = timed_values(run_exact(World(num_workers=3, profile=profile), work))
    assert min(ends_s) >= 9.0
    assert profile != Profile() or max(ends_s) == pytest.approx(9.0)


def test_who_is_lost_or_leaves_holds_no_mutex():
    def work(worker):
        mutex = Mutex(worker.group, "m")
        worker.compute(worker.rank)
        mutex.__enter__()  # and never gives it back
        entered_s = worker.clock.now_s()
        worker.compute(5.0)
        if worker.rank == 0:
            raise ShoalError("enough")
        worker.group.leave()
        return entered_s

    outcomes = run_exact(World(num_workers=3), work)
    assert [outcome.value for outcome in outcomes] == [None, pytest.approx(5.02), pytest.approx(10.02)]


def test_a_window_that_only_publishes_takes_no_time_and_sends_nothing():
    def work(worker):
        worker.compute(worker.rank)
        window = worker.group.window("x", 2, sources=())
        assert worker.clock.now_s() == worker.rank
        window.publish(torch.full((2,), float(worker.rank)), 0)
        assert (worker.group.stats.sent_bytes, worker.group.stats.received_bytes) == (0, 0)
        worker.compute(5.0)
        peer = (worker.rank + 1) % 3
        assert window.fetch(peer).wait().tensor.tolist() == [peer] * 2
        assert worker.group.stats.received_bytes == 8
        worker.group.barrier().wait()
        window.close()
        worker.group.barrier().wait()
        again = worker.group.window("x", 3, sources=())
        assert again.fetch(peer).wait() is None

    timed(work, 3)


def test_who_fails_of_a_loss_has_the_lost_one_blamed():
    def work(worker):
        if worker.rank == 2:
            raise ShoalError("enough")
        if worker.rank == 1:
            worker.group.barrier().wait()
        worker.compute(5.0)
        worker.group.should_survive = True
        worker.group.barrier().wait()
        return [loss.root.rank for loss in worker.group.lost.values()]

    assert run_exact(World(num_workers=3), work)[0].value == [2, 2]


# --- faults ---


def test_a_killed_worker_is_lost_to_the_others():
    script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 2.5\npeer = "rank:1"')
    tensor = torch.ones(1)

    def work(worker):
        num = 0
        for _ in range(5):
            worker.compute(1.0)
            worker.group.all_reduce(tensor.clone()).wait()
            num += 1
        return num

    outcomes = run_exact(World(num_workers=3, faults=script), work)
    assert [type(outcome.error) for outcome in outcomes] == [PeerLost] * 3
    assert "rank 1 is lost" in str(outcomes[0].error)
    assert "killed by the fault script" in str(outcomes[1].error)


def test_an_exchange_outlives_a_killed_worker():
    script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 2.5\npeer = "rank:1"')

    def work(worker):
        x = torch.full((1,), float(worker.rank))
        others = [rank for rank in range(3) if rank != worker.rank]
        for _ in range(5):
            worker.compute(1.0)
            worker.group.exchange(x, Weights(0.5, dict.fromkeys(others, 0.25))).wait()
        return x.item(), tuple(worker.group.lost)

    outcomes = run_exact(World(num_workers=3, faults=script), work)
    assert outcomes[1].value is None
    (x, lost), (z, _) = outcomes[0].value, outcomes[2].value
    assert lost == (1,)
    assert x == pytest.approx(z, abs=0.05)


def test_a_slow_worker_takes_longer():
    script = FaultScript.parse('[[fault]]\nkind = "slow"\nfactor = 3\npeer = "rank:1"')

    def work(worker):
        for _ in range(4):
            worker.compute(1.0)
            worker.group.barrier().wait()

    assert timed(work, 2, faults=script, profile=Profile()) == pytest.approx([12.0, 12.0])


def test_a_slow_worker_is_slow_whatever_it_waits_for():
    script = FaultScript.parse('[[fault]]\nkind = "slow"\nfactor = 3\nat_s = 2\nfor_s = 3\npeer = "rank:1"')

    def work(worker):
        for _ in range(4):
            handle = worker.group.barrier()
            worker.compute(1.0)
            handle.wait()
        worker.compute(1.0)

    # at 0 and 1 a second each, at 2 three, and one again at 5 and 6
    assert timed(work, 2, faults=script, profile=Profile()) == pytest.approx([6.0, 7.0])


def test_a_window_is_not_waited_for_when_nobody_can_be_heard():
    script = FaultScript.parse('[[fault]]\nkind = "partition"\nat_s = 2\nfor_s = 3\npeer = "rank:1"')

    def work(worker):
        other = 1 - worker.rank
        window = worker.group.window("w", 1, sources=[other])
        if worker.rank == 1:
            worker.compute(3.0)
            window.send(0, torch.ones(1)).wait()
            worker.compute(3.0)
            window.send(0, torch.ones(1)).wait()
            return []
        heard = [(window.wait(), worker.clock.now_s()) for _ in range(2)]
        worker.compute(3.5)
        return [*heard, (window.wait(), worker.clock.now_s())]

    outcomes = run_exact(World(num_workers=2, faults=script), work)
    (first, first_s), (second, second_s), (last, last_s) = outcomes[0].value
    assert (first, second, last) == ([], [], [1])
    assert (first_s, second_s, last_s) == pytest.approx((2.0, 2.0, 6.0), abs=1e-3)


def test_a_script_that_a_group_cannot_follow_is_refused():
    script = FaultScript.parse('[[fault]]\nkind = "skew"\noffset_s = 3')
    outcomes = run_exact(World(num_workers=1, faults=script), lambda worker: None)
    assert isinstance(outcomes[0].error, UsageError)


def test_a_killed_worker_is_lost_to_servers_too():
    script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 0.5\npeer = "rank:1"')

    def work(worker):
        everybody = worker.group.everybody
        tensor = torch.ones(1)
        for _ in range(5):
            worker.compute(0.2)
            everybody.exchange(
                tensor, Weights.uniform([rank for rank in range(3) if rank != everybody.rank])
            ).wait()
        return tuple(everybody.lost)

    outcomes = run_exact(World(num_workers=2, num_servers=1, faults=script), work)
    assert [outcome.value for outcome in outcomes] == [(2,), None, (2,)]
    assert "killed" in str(outcomes[1].error)
