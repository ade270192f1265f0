"""What each fault does to one worker of a group, and to a group of processes."""

import os
import signal

import pytest
import torch

from group.pretender import ManualSleeper, Pretender, ones
from shoal.core import PeerLost, UsageError
from shoal.group import exchange_machines, pair_gossip
from shoal.group.wrappers import Faulty, damage
from shoal.topology import Weights
from shoal.transport import FaultScript
from shoal.transport.network.distributions import Draws

NEIGHBOURS = Weights(0.5, {1: 0.3, 2: 0.2})
CUT = "[[fault]]\nkind = 'partition'\nat_step = 1\nfor_steps = 1\nbetween = [['rank:0'], ['rank:2']]"


@pytest.fixture
def sleeper():
    return ManualSleeper()


@pytest.fixture
def hurt(sleeper):
    def hurt(script, **options):
        return Faulty(Pretender(), FaultScript.parse(script), sleeper=sleeper, **options)

    return hurt


@pytest.fixture
def signals(monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid == os.getpid(), number)))
    return sent


def weights_used(group):
    return [call for call in group.inner.calls if isinstance(call, Weights)]


# --- the worker itself ---


def test_a_worker_is_killed_before_its_step(hurt, signals):
    group = hurt("[peers]\nanna = 'rank:0'\n[[fault]]\nkind = 'kill'\nat_step = 2\npeer = 'anna'")
    for _ in range(2):
        group.barrier().wait()
    assert signals == []
    group.barrier()
    assert signals == [(True, signal.SIGKILL)]


def test_others_are_killed_by_themselves(hurt, signals):
    hurt("[[fault]]\nkind = 'kill'\npeers = ['rank:1', 'rank:2']").progress()
    assert signals == []
    hurt("[[fault]]\nkind = 'kill'\npeers = ['rank:1', 'machine:0']").progress()
    assert signals == [(True, signal.SIGKILL)]


def assert_killed_after_2_s(group, signals, sleeper):
    sleeper.clock.advance(1.9)
    group.progress()
    assert signals == []
    sleeper.clock.advance(0.2)
    group.progress()
    assert signals == [(True, signal.SIGKILL)]


def test_time_counts_from_the_construction(hurt, signals, sleeper):
    sleeper.clock.advance(100)
    group = hurt("[[fault]]\nkind = 'kill'\nat_s = 2")
    assert_killed_after_2_s(group, signals, sleeper)


def test_a_script_waits_for_its_beginning(hurt, signals, sleeper):
    group = hurt("[[fault]]\nkind = 'kill'\nat_s = 2.0")
    group.hold()
    sleeper.clock.advance(50)
    group.barrier().wait()
    assert signals == []
    group.restart()
    assert_killed_after_2_s(group, signals, sleeper)


def test_a_pause_of_known_length_sleeps_once(hurt, signals, sleeper):
    group = hurt("[[fault]]\nkind = 'pause'\nat_step = 1\nfor_s = 3")
    group.barrier().wait()
    assert sleeper.slept_s == 0
    for _ in range(3):
        group.barrier().wait()
    assert sleeper.slept_s == pytest.approx(3)
    assert signals == []


def test_a_pause_without_end_stops_the_process_once(hurt, signals):
    group = hurt("[[fault]]\nkind = 'pause'")
    for _ in range(3):
        group.barrier().wait()
    assert signals == [(True, signal.SIGSTOP)]


def test_a_slow_worker_takes_longer_between_operations(hurt, sleeper):
    group = hurt("[[fault]]\nkind = 'slow'\nfactor = 10\nfor_steps = 2")
    for wanted_s in (9, 18, 18):
        sleeper.clock.advance(1)
        group.barrier().wait()
        assert sleeper.slept_s == pytest.approx(wanted_s)


@pytest.mark.parametrize("call", ["wait", "is_done", "progress"])
def test_a_slow_worker_takes_longer_while_an_operation_is_under_way(hurt, sleeper, call):
    group = hurt("[[fault]]\nkind = 'slow'\nfactor = 10")
    handle = group.barrier()
    for _ in range(2):
        sleeper.clock.advance(1)
        getattr(group if call == "progress" else handle, call)()
        assert sleeper.slept_s == pytest.approx(9)
        if call == "wait":
            return
        sleeper.slept_s = 0


def test_whoever_makes_its_time_pass_asks_how_slow_a_worker_is(hurt, sleeper):
    script = (
        "[[fault]]\nkind = 'slow'\nfactor = 10\nat_s = 2\nfor_s = 2\n[[fault]]\nkind = 'slow'\nfactor = 2"
    )
    group = hurt(script, should_stretch=False)
    seen = []
    for _ in range(5):
        seen.append(group.slowness)
        sleeper.clock.advance(1)
        group.barrier().wait()
    assert seen == [2, 2, 20, 20, 2]
    assert sleeper.slept_s == 0


# --- its peers ---


def test_an_exchange_goes_on_without_peers_beyond_a_partition(hurt):
    group = hurt(CUT)
    for _ in range(3):
        group.exchange(ones(), NEIGHBOURS).wait()
    before, during, after = weights_used(group)
    assert before == after == NEIGHBOURS
    assert (during.own, during.sources) == (0.7, {1: 0.3})


def test_who_sends_keeps_its_destinations(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\npeer = 'rank:0'")
    group.exchange(ones(), Weights(0.5, {1: 0.5}, {1: 0.5, 2: 0.5})).wait()
    assert weights_used(group) == [Weights(1.0, {}, {1: 0.5, 2: 0.5})]


def test_what_goes_to_machines_or_pairs_is_an_exchange(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\npeer = 'rank:0'")
    exchange_machines(group, ones(), Weights(1.0)).wait()
    pair_gossip(group, ones(), 2).wait()
    assert [round(weights.own, 6) for weights in weights_used(group)] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "barrier"])
def test_an_operation_that_needs_a_lost_peer_says_so_and_changes_nothing(hurt, name):
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:2', 'rank:0']\none_way = true")
    tensor = ones()
    issue = {
        "all_reduce": lambda: group.all_reduce(tensor),
        "broadcast": lambda: group.broadcast(tensor, 2),
        "all_gather": lambda: group.all_gather(tensor),
        "barrier": group.barrier,
    }[name]
    handle = issue()
    tensor.fill_(5) if name == "all_reduce" else None  # as the inner group would
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 2 is lost: the fault script") as raised:
            handle.wait()
    assert raised.value.peer == 2
    assert tensor.unique().tolist() == [1.0]
    assert group.inner.calls == [name], "it takes place, so that nobody waits for this worker"


def test_a_group_that_should_survive_goes_on_without_a_lost_peer(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:2', 'rank:0']")
    group.should_survive = True
    assert group.inner.should_survive
    assert group.all_reduce(ones()).wait().unique().tolist() == [1.0]
    assert len(group.all_gather(ones()).wait()) == 2
    assert group.barrier().wait() is None


def test_those_who_need_nobody_beyond_go_on(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:0', 'rank:2']\none_way = true")
    assert group.all_reduce(ones()).wait().unique().tolist() == [1.0]
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:0', 'rank:2']")
    group.broadcast(ones(), 0).wait()
    group.broadcast(ones(), 1).wait()


def test_a_fetch_from_beyond_a_partition_brings_nothing(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:0', 'rank:2']")
    window = group.window("model", 1000, sources=())
    window.publish(ones(), 0)
    assert window.fetch(2).wait() is None
    assert window.fetch(1).wait() is not None
    assert window.fetch(0).wait() is not None


def test_one_sided_operations_do_not_pass_a_partition(hurt):
    group = hurt("[[fault]]\nkind = 'partition'\nlink = ['rank:0', 'rank:2']\nat_step = 4")
    window = group.window("w", 1000)
    window.publish(ones(), 3)
    for write in (window.put, window.add):
        for to in (1, 2):
            assert write(to, ones()).wait() is None
    with window.slot(1) as slot:
        assert slot.num_writes == 4
    for write in (window.put, window.add, window.send):
        assert write(2, ones()).wait() is None
    with window.slot(1) as slot:
        assert slot.num_writes == 4
    assert window.read(2, ones()).wait() is None
    assert window.read(1, ones()).wait() == 3


def test_only_a_put_is_lost_by_chance(hurt):
    group = hurt("[[fault]]\nkind = 'drop'\nlink = ['rank:0', 'rank:1']\nprobability = 0.5")
    window = group.window("w", 1000)
    counts = []
    for write in (window.put, window.add):
        for _ in range(40):
            write(1, ones()).wait()
        with window.slot(1) as slot:
            counts.append(slot.num_writes)
            slot.clear()
    assert 10 < counts[0] < 30
    assert counts[1] == 40


def test_corruption_reaches_what_is_written_and_read(hurt):
    group = hurt("[[fault]]\nkind = 'corrupt'\nlink = ['rank:0', 'rank:1']\nprobability = 1.0")
    window, own, into = group.window("w", 1000), ones(), ones()
    window.publish(ones(), 0)
    window.put(1, own).wait()
    window.read(1, into).wait()
    with window.slot(1) as slot:
        assert [int((tensor != 1).sum()) for tensor in (own, into, slot.tensor)] == [0, 1, 1]


def test_drops_come_by_chance_and_by_seed(hurt):
    def dropped(seed):
        group = hurt("[[fault]]\nkind = 'drop'\nprobability = 0.3", seed=seed)
        for _ in range(100):
            group.exchange(ones(), NEIGHBOURS).wait()
        return [tuple(weights.sources) for weights in weights_used(group)]

    first = dropped(1)
    assert dropped(1) == first
    assert dropped(2) != first
    assert 100 < sum(map(len, first)) < 180
    assert len(set(first)) == 4


# --- wrong bits ---


def num_wrong_bits(tensor, wanted):
    wrong = tensor.contiguous().view(torch.uint8) ^ wanted.contiguous().view(torch.uint8)
    return sum(int(byte).bit_count() for byte in wrong.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64])
def test_damage_is_one_bit_wherever_the_tensor_lies(dtype):
    draws = Draws(1)
    for wanted in (torch.ones(7, 5, dtype=dtype).T, torch.tensor(3, dtype=dtype)):
        tensor = wanted.clone()
        damage(tensor, draws)
        assert num_wrong_bits(tensor.reshape(-1), wanted.reshape(-1)) == 1
    damage(torch.empty(0, dtype=dtype), draws)


def test_corruption_reaches_what_peers_send(hurt):
    group = hurt("[[fault]]\nkind = 'corrupt'\nprobability = 1\npeer = 'rank:2'")
    handle = group.exchange(ones(), NEIGHBOURS)
    assert num_wrong_bits(handle.wait(), ones()) == 1
    assert num_wrong_bits(handle.wait(), ones()) == 1  # not again by waiting again
    assert num_wrong_bits(group.all_reduce(ones()).wait(), ones()) == 1
    assert [num_wrong_bits(part, ones()) for part in group.all_gather(ones()).wait()] == [0, 0, 1]
    window, published = group.window("model", 1000, sources=()), ones()
    window.publish(published, 4)
    snapshot = window.fetch(2).wait()
    assert num_wrong_bits(snapshot.tensor, published) == 1
    assert snapshot.version == 4
    assert snapshot.is_intact()
    assert published.unique().tolist() == [1.0]
    assert num_wrong_bits(window.fetch(1).wait().tensor, published) == 0


# --- what a group cannot do ---


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("[[fault]]\nkind = 'skew'\noffset_s = 1", r"fault\[0\]: 'skew' is a matter of networks"),
        ("[[fault]]\nkind = 'reorder'\nprobability = 0.1", "'reorder' is a matter of networks"),
        ("[[fault]]\nkind = 'duplicate'\nprobability = 0.1", "'duplicate' is a matter of networks"),
        ("[[fault]]\nkind = 'slow'\nfactor = 2\nlink = ['rank:0', 'rank:1']", "no links to slow down"),
        ("[[fault]]\nkind = 'slow'\nfactor = 0.5", "no worker becomes faster"),
        ("[[fault]]\nkind = 'pause'\nfor_steps = 3", "takes no steps; give 'for_s'"),
        ("[[fault]]\nkind = 'kill'\npeer = 'rank:3'", r"no worker is called 'rank:3', did you mean 'rank:"),
        ("[[fault]]\nkind = 'kill'\npeer = '10.0.0.1:31337'", "no worker is called"),
        ("[peers]\nanna = 'machine:1'", r"peers.anna: no worker is called 'machine:1'"),
    ],
)
def test_refusals(hurt, script, message):
    with pytest.raises(UsageError, match=message):
        hurt(script)


# --- a group of processes ---


def cut_off(group, arguments):
    """What becomes of one number a worker in three rounds, the second of them cut."""
    group = Faulty(group, FaultScript.parse(arguments["script"]))
    seen = []
    for _ in range(3):
        tensor = group.empty(1).fill_(group.rank)
        try:
            seen.append(group.all_reduce(tensor, "sum").wait().item())
        except PeerLost as error:
            seen.append([error.peer, tensor.item()])
    return seen


def test_a_partition_in_a_group_of_processes(workers):
    # rank 1 sees no cut: it gets its sum, and nobody hangs
    assert workers.run(cut_off, 3, {"script": CUT}) == [
        [3.0, [2, 0.0], 3.0],
        [3.0, 3.0, 3.0],
        [3.0, [0, 2.0], 3.0],
    ]
