"""Groups over several machines: who speaks, what travels, and what a loss means."""

import threading

import pytest
import torch

from group.cables import Cables
from group.clusters import open_cluster
from group.hosts import together
from shoal.core import Deadline, DeadlineExceeded, PeerLost, ShoalError, TensorError, UsageError
from shoal.group.cluster.machine_exchange import MachineExchange, MachineReduction
from shoal.group.functions import Mutex, exchange_machines, share
from shoal.topology import Weights

TWO_BY_TWO = [[0, 1], [2, 3]]
GAVE_UP = ConnectionAbortedError()
"""The error of a worker that ends without having left."""


def waiting_for(handle):
    """What a wait ends in."""
    try:
        return handle.wait(Deadline.after(20))
    except PeerLost as error:
        return error


def loss_of(group):
    """Those that are lost, once somebody is."""
    deadline = Deadline.after(10)
    while not group.lost:
        deadline.check("somebody to be lost")
        group.progress()
    return list(group.lost)


def sent_bytes(groups):
    return sum(sum(group.mesh.sent_bytes.values()) for group in groups)


def counted(groups, at_least):
    """Bytes sent, once they are so many: they are counted by other threads."""
    deadline = Deadline.after(10)
    while (found := sent_bytes(groups)) < at_least:
        deadline.check("bytes to be counted")
    return found


def test_machines_and_places():
    with open_cluster([[0, 2], [1]]) as groups:
        assert [group.machine for group in groups] == [0, 1, 0]
        assert groups[0].num_machines == 2
        assert list(groups[1].machines) == [0, 1, 0]
        assert list(groups[0].members) == [0, 1, 2]
        assert together(groups, lambda group: share(group, group.rank)) == [[0, 1, 2]] * 3


def test_a_hierarchical_exchange_sends_one_tensor_a_machine():
    count = 100_000

    def neighbor(group):
        other = (group.rank + 2) % 4
        tensor = torch.full((count,), float(group.rank))
        return group.exchange(tensor, Weights(0.5, {other: 0.5}, {other: 1.0})).wait()[0].item()

    def hierarchical(group):
        tensor = torch.full((count,), float(group.rank))
        return exchange_machines(group, tensor, Weights(0.5, {1 - group.machine: 0.5})).wait()[0].item()

    with open_cluster(TWO_BY_TWO) as groups:
        before = sent_bytes(groups)
        assert together(groups, neighbor) == [1.0, 2.0, 1.0, 2.0]
        flat_bytes = counted(groups, before + 4 * 4 * count) - before
        assert together(groups, hierarchical) == [1.5] * 4
        machine_bytes = counted(groups, before + flat_bytes + 2 * 4 * count) - before - flat_bytes
    assert 4 * 4 * count < flat_bytes < 4 * 4 * count + 2000
    assert machine_bytes < flat_bytes / 2 + 100, "heads are a little longer"


def test_an_all_reduce_sends_two_shares_a_machine():
    with open_cluster(TWO_BY_TWO) as groups:
        before = sent_bytes(groups)
        together(groups, lambda group: group.all_reduce(torch.ones(100_000)).wait())
        assert counted(groups, before + 2 * 400_000) - before < 2 * 400_000 + 2000


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_peer_ends_a_collective_on_all_others_by_name(lost):
    """Whether it speaks for its machine or not."""
    with open_cluster(TWO_BY_TWO) as groups:
        handles = [group.all_reduce(torch.ones(10)) for group in groups if group.rank != lost]
        groups[lost].close(GAVE_UP)
        with_errors = [waiting_for(handle) for handle in handles]
        assert [error.peer for error in with_errors] == [lost] * 3
        assert all(f"rank {lost} is lost" in str(error) for error in with_errors)


def until_lost(group, ranks):
    """Wait until streams have ended with these, while the group itself does nothing."""
    deadline = Deadline.after(10)
    while not group.mesh.monitor.lost.keys() >= ranks:
        deadline.check("ranks to be lost")


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("should_survive", [False, True])
def test_a_machine_whose_workers_are_all_lost_has_not_left(is_begun, should_survive):
    """Whether they are lost before an operation or while nobody looks at it."""
    with open_cluster([[0], [1, 2]]) as groups:
        groups[0].should_survive = should_survive
        handle = groups[0].barrier() if is_begun else None
        for group in groups[1:]:
            group.close(GAVE_UP)
        until_lost(groups[0], {1, 2})
        ended = waiting_for(handle or groups[0].barrier())
        assert ended is None if should_survive else ended.peer in (1, 2)


def test_a_loss_counts_whenever_it_is_noticed(monkeypatch):
    """Also after the look at who is lost, when only one more machine is waited for."""
    find_leader = MachineExchange._find_leader

    with open_cluster([[0], [1], [2]]) as groups:
        groups[1].barrier()

        def lose_and_look(between, machine):
            if machine == 2 and machine in between._leaders:  # it was greeted, and is waited for
                groups[2].close(GAVE_UP)
                until_lost(groups[0], {2})
            return find_leader(between, machine)

        monkeypatch.setattr(MachineExchange, "_find_leader", lose_and_look)
        assert waiting_for(groups[0].barrier()).peer == 2


def test_one_that_has_left_is_no_member_after_an_operation_without_it(monkeypatch):
    """Also where what it says itself comes late."""
    with open_cluster(TWO_BY_TWO) as groups:
        monkeypatch.setattr(groups[3].mesh.monitor, "tell", lambda ending: None)
        groups[3].leave()
        together(groups[:3], lambda group: group.barrier().wait(Deadline.after(20)))
        assert [list(group.members) for group in groups[:3]] == [[0, 1, 2]] * 3
        monkeypatch.undo()


def test_an_exchange_outlives_a_lost_peer():
    def mix(group):
        others = [rank for rank in range(4) if rank != group.rank]
        tensor = torch.full((1000,), float(group.rank))
        return group.exchange(tensor, Weights.uniform(others, others)).wait()[0].item()

    with open_cluster(TWO_BY_TWO) as groups:
        assert together(groups, mix) == [1.5] * 4
        for group in groups:
            group.should_survive = True
        groups[0].close(GAVE_UP)
        assert together(groups[1:], mix) == [(1 + 2 + 3 + rank) / 4 for rank in (1, 2, 3)]
        assert [list(group.members) for group in groups[1:]] == [[1, 2, 3]] * 3
        assert together(groups[1:], loss_of) == [[0]] * 3
        # another speaks for its machine now
        reduced = together(
            groups[1:], lambda g: g.all_reduce(torch.full((5,), float(g.rank))).wait()[0].item()
        )
        assert reduced == [2.0] * 3


def test_an_exchange_leaves_a_peer_out_of_everything_that_is_lost_between_two_of_its_pieces():
    count = 3 << 20  # three pieces
    with open_cluster([[0], [1]]) as groups:
        live, spare = (together(groups, lambda group: group.empty(count).fill_(group.rank)) for _ in range(2))
        send = groups[1].mesh.send

        def send_two_pieces(to, key, tensor, **options):
            """Sends the last piece where nobody looks for it: a real loss may not fall between two."""
            topic = "lost" if key[1] == "x 2" else key[1]
            return send(to, (key[0], topic, key[2]), tensor, **options)

        groups[1].mesh.send = send_two_pieces
        handles = [
            group.exchange(mine, Weights(0.5, {1 - group.rank: 0.5}, {1 - group.rank: 1.0}), out=out)
            for group, mine, out in zip(groups, live, spare, strict=True)
        ]
        groups[0].should_survive = True
        deadline = Deadline.after(10)
        while spare[0][0] == 0:  # its first pieces have come, and were mixed
            deadline.check("two pieces to come")
            for group in groups:
                group.progress()
        groups[1].close(GAVE_UP)
        mixed = handles[0].wait(Deadline.after(20))
        assert torch.equal(mixed, torch.zeros(count))


def test_what_is_on_its_way_is_not_written_over():
    count = 500_000

    def work(group):
        other = 1 - group.rank
        live, spare = group.empty(count), group.empty(count)
        live.fill_(float(group.rank))
        for _ in range(5):
            group.exchange(live, Weights(0.0, {other: 1.0}, {other: 1.0}), out=spare).wait()
            group.settle(live)
            live.fill_(-1.0)  # the other one has it
            live, spare = spare, live
        return live.unique().tolist()

    with open_cluster([[0], [1]]) as groups:
        assert together(groups, work) == [[1.0], [0.0]]


def test_a_mutex_excludes_other_machines():
    inside = []

    def work(group):
        mutex = Mutex(group, "m")
        for _ in range(10):
            with mutex:
                inside.append(group.rank)
                assert inside == [group.rank]
                inside.remove(group.rank)
        group.barrier().wait()

    with open_cluster([[0, 1], [2]]) as groups:
        together(groups, work)


def test_a_mutex_of_a_lost_holder_is_free_again():
    with open_cluster([[0], [1, 2]]) as groups:
        for group in groups:
            group.should_survive = True
        mutexes = together(groups, lambda group: Mutex(group, "m"))
        mutexes[0].__enter__()
        groups[0].close(GAVE_UP)
        for mutex in mutexes[1:]:
            with mutex:
                pass


def test_a_read_waits_for_its_version_and_is_of_one_piece():
    count, rounds = 50_000, 30

    def work(group):
        memory = group.empty(count)
        window = group.window("w", count, sources=())
        if group.rank == 0:
            window.publish(memory, 0)
        group.barrier().wait()
        if group.rank == 0:
            for version in range(1, rounds + 1):
                with window.changing(version):
                    memory.fill_(float(version))
        else:
            mine = torch.empty(count)
            version = 0
            while version < rounds:
                version = window.read(0, mine, version=version + 1).wait()
                assert mine.unique().tolist() == [float(version)]
        group.barrier().wait()

    with open_cluster([[0, 1], [2]]) as groups:
        together(groups, work)


def test_windows_over_machines_lose_and_double_nothing():
    def work(group):
        window = group.window("w", 100)
        others = [rank for rank in range(group.size) if rank != group.rank]
        mass, total = 0.0, torch.zeros(100)
        for _ in range(20):
            for other in others:
                window.add(other, torch.ones(100), weight=0.5, mass=0.5).wait()
            for source in window.filled():
                with window.slot(source) as slot:
                    assert slot.source == source
                    mass += slot.mass
                    total += slot.tensor
                    slot.clear()
        group.barrier().wait()
        for source in window.filled():
            with window.slot(source) as slot:
                mass += slot.mass
                total += slot.tensor
        window.close()
        assert total.unique().tolist() == [mass]
        return mass

    with open_cluster([[0, 1], [2]]) as groups:
        assert together(groups, work) == [20.0] * 3


def test_sends_come_one_after_the_other():
    def work(group):
        window = group.window("w", 8, torch.int64)
        heard = {}
        if group.rank == 0:
            while sum(map(len, heard.values())) < 20:
                for source in window.wait(Deadline.after(10)):
                    with window.slot(source) as slot:
                        heard.setdefault(source, []).append(int(slot.tensor[0]))
                        assert slot.note == bytes([heard[source][-1]])
                        slot.clear()
        else:
            for number in range(10):
                window.send(0, torch.full((8,), number), note=bytes([number])).wait()
        window.close()
        return heard

    with open_cluster([[0, 1], [2]]) as groups:
        assert together(groups, work)[0] == {1: list(range(10)), 2: list(range(10))}


def test_what_is_written_must_fit():
    def work(group):
        window = group.window("w", 4)
        with pytest.raises(TensorError, match="do not fit"):
            window.put(1 - group.rank, torch.ones(5))
        with pytest.raises(UsageError, match="is open"):
            group.window("w", 4)

    with open_cluster([[0], [1]]) as groups:
        together(groups, work)


# --- what cannot be finished ends everywhere ---


def test_one_that_fails_because_of_a_loss_is_not_blamed_for_it():
    """Also by those that hear of its failure first, or alone."""
    with Cables() as cables, open_cluster([[0], [1], [2]], cables) as groups:
        cables.cut([0], [1])
        groups[0].close(GAVE_UP)
        error = waiting_for(groups[2].barrier())
        assert error.peer == 0
        groups[2].close(GAVE_UP)
        error = waiting_for(groups[1].barrier())
        assert error.peer == 0
        assert "rank 0 is lost: it failed" in str(error)


def outcome(work):
    """What some work brings, errors as values."""
    try:
        return work()
    except ShoalError as error:
        return error


def failing_at(monkeypatch, moment, rank):
    """Let a rank end, as if killed, when it should go on in a conversation: a signal would come anywhere."""
    holder, method = moment
    whole = getattr(holder, method)

    def broken(part, *arguments, **named):
        if getattr(part, "_between", part)._mesh.rank == rank:
            raise KilledError
        return whole(part, *arguments, **named)

    monkeypatch.setattr(holder, method, broken)


BEFORE_GREETING = MachineExchange, "announce"
AFTER_GREETING = MachineExchange, "hear_greetings"
BEFORE_SENDING = MachineReduction, "start"
BEFORE_AGREEING = MachineExchange, "agree"


class KilledError(Exception):
    """In place of a signal."""


def reduce_or_die(group):
    try:
        # so large that nothing of it is sent before all machines have greeted
        return outcome(lambda: group.all_reduce(torch.ones(2_000_000), "sum").wait(Deadline.after(20)))
    except KilledError:
        group.close(GAVE_UP)
        return None


@pytest.mark.parametrize(
    ("moment", "victim"), [(BEFORE_GREETING, 1), (AFTER_GREETING, 1), (BEFORE_SENDING, 3)]
)
def test_who_speaks_is_lost_in_the_middle(monkeypatch, moment, victim):
    """Those it led, the other leaders and those these lead all learn who it was, and are out of step."""
    with open_cluster([[0], [1, 2], [3]]) as groups:
        failing_at(monkeypatch, moment, victim)
        for rank, error in enumerate(together(groups, reduce_or_die)):
            assert rank == victim or (isinstance(error, PeerLost) and error.peer == victim), (rank, error)
        monkeypatch.undo()
        others = [group for group in groups if group.rank != victim]
        for error in together(others, reduce_or_die):
            assert "out of step" in str(error)


@pytest.mark.parametrize("victim", [0, 1, 3, 5])
@pytest.mark.parametrize("moment", [BEFORE_GREETING, AFTER_GREETING, BEFORE_SENDING, BEFORE_AGREEING])
def test_who_speaks_is_lost_and_the_others_go_on(monkeypatch, moment, victim):
    """Another worker of its machine speaks for it; without one, the others go on without the machine."""
    machines = [[0], [1, 2], [3, 4], [5]]

    def reduce(group, size):
        given = torch.full((size,), float(group.rank + 1))
        try:
            return group.all_reduce(given, "sum").wait(Deadline.after(20)).clone()
        except KilledError:
            group.close(GAVE_UP)
            return None

    for size in (10, 100_000, 2_000_000):
        with open_cluster(machines) as groups, monkeypatch.context() as patched:
            for group in groups:
                group.should_survive = True
            if size == 10 and moment == BEFORE_SENDING:
                continue
            failing_at(patched, moment, victim)
            results = together(groups, lambda group, size=size: reduce(group, size))
            survivors = [result for result in results if result is not None]
            assert results[victim] is None
            assert len(survivors) == 5
            assert all(torch.equal(result, survivors[0]) for result in survivors)
            # what the lost one gave inside of its machine counts, as does all that it gave before it ended
            totals = {21.0} if victim in (1, 3) else {21.0, 21.0 - (victim + 1)}
            assert set(survivors[0].unique().tolist()) <= totals
            patched.undo()
            after = together([group for group in groups if group.rank != victim], lambda g: reduce(g, 8))
            assert all(torch.equal(result, torch.full((8,), 20.0 - victim)) for result in after)


def test_who_gives_up_in_the_middle_does_not_leave_in_order():
    has_given_up = threading.Event()

    def work(group):
        if group.rank != 0:
            has_given_up.wait(20)
            return waiting_for(group.all_reduce(torch.ones(2_000_000)))
        with pytest.raises(DeadlineExceeded):
            group.all_reduce(torch.ones(2_000_000)).wait(Deadline.after(0))
        group.close(GAVE_UP)
        has_given_up.set()
        return None

    with open_cluster([[0], [1], [2]]) as groups:
        assert [error.peer for error in together(groups, work)[1:]] == [0, 0]


def test_a_broadcast_of_one_who_has_left():
    def work(group):
        return outcome(lambda: group.broadcast(torch.ones(3), 0).wait(Deadline.after(20)))

    with open_cluster([[0, 1], [2], [3]]) as groups:
        groups[0].leave()
        for error in together(groups[1:], work):
            assert "rank 0, which should broadcast, has left" in str(error)


def test_a_window_without_living_sources_is_not_waited_for():
    def work(group):
        window = group.window("w", 4, sources=[2] if group.rank < 2 else [])
        if group.rank == 2:
            group.leave()
            return None
        return list(window.wait(Deadline.after(20)))

    with open_cluster([[0, 1], [2]]) as groups:
        assert together(groups, work) == [[], [], None]


def test_what_is_asked_of_one_who_leaves_is_answered():
    with open_cluster([[0], [1]]) as groups:
        windows = [group.window("x", 4, sources=()) for group in groups]
        windows[0].publish(groups[0].empty(4), 0)
        handle = windows[1].read(0, torch.zeros(4), version=5)
        groups[0].leave()
        assert handle.wait(Deadline.after(20)) is None
        assert windows[1].fetch(0).wait(Deadline.after(20)) is None


def test_a_source_that_does_not_send_is_named():
    def work(group):
        weights = Weights(0.5, {1: 0.5}, {}) if group.rank == 0 else Weights(1.0, {}, {})
        return outcome(lambda: group.exchange(torch.ones(4), weights).wait(Deadline.after(20)))

    with open_cluster([[0], [1]]) as groups:
        assert "rank 1, which does not send to it" in str(together(groups, work)[0])


def test_an_exchange_that_meets_an_all_reduce_is_an_error_and_nobody_hangs():
    def work(group):
        tensor = torch.ones(8)
        if group.rank == 0:
            return outcome(lambda: group.all_reduce(tensor).wait(Deadline.after(20)))
        error = outcome(lambda: group.exchange(tensor, Weights.uniform([0], [0])).wait(Deadline.after(20)))
        group.close(GAVE_UP)
        return error

    with open_cluster([[0], [1]]) as groups:
        reducing, exchanging = together(groups, work)
        assert "rank 1 called exchange where rank 0 called all_reduce" in str(exchanging)
        assert isinstance(reducing, PeerLost)
        assert reducing.peer == 1
        assert "it failed: rank 1 called exchange where rank 0 called all_reduce" in str(reducing)


def test_nothing_is_expected_of_those_who_are_gone():
    with open_cluster([[0], [1], [2]]) as groups:
        groups[2].leave()
        together(groups[:2], lambda group: [group.barrier().wait() for _ in range(20)])
        assert groups[0].mesh._mailbox.is_empty


def test_who_is_waited_for_is_counted():
    is_waiting = threading.Event()

    def work(group):
        if group.rank == 1:
            is_waiting.wait(20)
        handle = group.barrier()
        is_waiting.set()
        handle.wait()
        return [seconds > 0 for seconds in group.stats.waited_s]

    with open_cluster([[0], [1]]) as groups:
        is_late = together(groups, work)[0]
        assert is_late == [False, True]
