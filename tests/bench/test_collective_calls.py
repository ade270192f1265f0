from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from shoal.bench.collectives import Stopwatch
from shoal.bench.processes import collectives as collective_calls
from shoal.bench.processes.collectives import Call, Expected, Stage, difference, pattern
from shoal.topology.weights import Weights


def stage(size):
    return Stage(SimpleNamespace(rank=0, size=size), 8)


@pytest.mark.parametrize(
    ("size", "heard"), [(2, [1]), (3, [2, 1]), (4, [3, 2]), (5, [4, 3, 1]), (8, [7, 6, 4])]
)
def test_neighbours_are_those_of_the_exponential_graph(size, heard):
    neighbours = stage(size).neighbours()
    assert neighbours[0] == heard
    assert neighbours[1] == [(rank + 1) % size for rank in heard]


def test_partners_are_two_and_two():
    assert stage(4).partners() == [1, 0, 3, 2]
    assert stage(5).partners() == [1, 0, 3, 2, 3]


def test_an_average_is_expected_by_its_weights():
    given = [pattern(2000) + rank for rank in range(3)]
    weights = Weights(0.5, {0: 0.3, 2: 0.2})
    average = 0.5 * given[1] + 0.3 * given[0] + 0.2 * given[2]
    assert difference(average, Expected.average(weights, 1)) == ""


def test_a_wrong_element_is_named():
    result = 2 * pattern(3000) + 1
    assert difference(result, Expected(2, 1)) == ""
    result[1500] += 3
    assert difference(result, Expected(2, 1)) == "element 1500 is 962 and should be 959"
    result[7] = torch.nan
    assert "nan" in difference(result, Expected(2, 1))


def test_tensors_are_on_the_device_in_either_memory():
    asked = []

    def empty(num_elements, *, device):
        asked.append((num_elements, device))
        return torch.empty(num_elements, device=device)

    group = SimpleNamespace(rank=3, size=4, empty=empty)
    device = torch.device("meta")
    assert Stage(group, 8, True, device).tensor().device == device
    assert asked == [(8, device)]
    assert Stage(group, 8, False, device).tensor().device == device
    assert len(asked) == 1


class Gpu:
    """Counts how often somebody waits for it; what it is told to happens at once."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append("wait"))


def test_a_gpu_is_waited_for_before_a_batch_of_calls_and_after_it_alone(monkeypatch):
    gpu = Gpu(monkeypatch)
    meet = SimpleNamespace(wait=lambda: gpu.log.append("meet"))
    group = SimpleNamespace(barrier=lambda: meet)
    stopwatch = Stopwatch(group, torch.device("cuda", 0))
    times_s = stopwatch._time(Call(lambda: gpu.log.append("call") or []), num_samples=2, calls_per_sample=3)
    assert gpu.log == ["wait", "meet", "call", "call", "call", "wait"] * 2
    assert len(times_s) == 2


def test_gloos_messages_of_a_gpu_go_through_memory_of_the_cpu(monkeypatch):
    staged = []

    def pinned(tensor):
        staged.append(torch.full_like(tensor, torch.nan))
        return staged[-1]

    def deliver(messages):
        sent, received = (message[1] for message in messages)
        assert sent is staged[0]
        received.copy_(pattern(8) + 1)  # what rank 1 gives
        return [SimpleNamespace(wait=lambda: None)] * 2

    monkeypatch.setattr(collective_calls, "_for_messages", pinned)
    monkeypatch.setattr(distributed, "P2POp", lambda *message: message)
    monkeypatch.setattr(distributed, "batch_isend_irecv", deliver)
    call = collective_calls.GLOO_CALLS["pair_gossip"](stage(2))
    (result,) = call.run()
    assert difference(result, call.expected[0]) == ""
    assert torch.equal(staged[0], pattern(8))
