from types import SimpleNamespace

import pytest
import torch

from shoal.bench.contenders import Laps, Recipe
from shoal.bench.workers import BenchPlace
from shoal.core import UsageError
from shoal.models import model_named

RECIPE = Recipe(entry=model_named("small-mlp"), batch_size=4, learning_rate=0.1, seed=3)

CPU = torch.device("cpu")


def parameters_of(trainee):
    return torch.cat([parameter.detach().flatten() for parameter in trainee.model.parameters()])


def test_ranks_begin_alike_and_learn_from_batches_of_their_own():
    first, second = RECIPE.trainee(0, CPU), RECIPE.trainee(1, CPU)
    assert torch.equal(parameters_of(first), parameters_of(second))
    first.step()
    second.step()
    assert not torch.equal(parameters_of(first), parameters_of(second))


def test_a_step_forgets_the_gradients_of_the_last_and_learning_adds_to_them():
    plain, adding = RECIPE.trainee(0, CPU), RECIPE.trainee(0, CPU)
    for trainee, action in ((plain, plain.step), (adding, adding.learn)):
        assert trainee.seconds_of(action, 2) > 0
    assert not torch.equal(parameters_of(plain), parameters_of(adding))


class FakeGpu:
    """A GPU that does what it is told later: an event happens when the stream has come to it."""

    def __init__(self):
        self.now_ms = 0.0
        self.queue = []
        self.num_waits = 0

    def compute(self, duration_ms):
        self.queue.append(("work", duration_ms))

    def synchronize(self, device):
        self.num_waits += 1
        for kind, what in self.queue:
            if kind == "work":
                self.now_ms += what
            else:
                what.at_ms = self.now_ms
        self.queue.clear()

    def event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at_ms=None)
        event.record = lambda stream: self.queue.append(("event", event))
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        return event


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    # the host's clock stands still, so that nothing is left over after the last event
    monkeypatch.setattr("shoal.bench.contenders.time.perf_counter", lambda: 0.0)
    return fake


def test_a_gpu_is_waited_for_before_the_first_iteration_and_after_the_last(gpu):
    gpu.compute(1000.0)  # of somebody else, before
    laps = Laps(torch.device("cuda", 0))
    for duration_ms in (30.0, 10.0, 20.0):
        gpu.compute(duration_ms)
        laps.end()
    assert (len(laps), gpu.num_waits) == (3, 1)
    assert laps.seconds() == pytest.approx([0.03, 0.01, 0.02])
    assert gpu.num_waits == 2


def test_what_a_gpu_does_after_the_last_event_is_of_the_last_iteration(gpu, monkeypatch):
    laps = Laps(torch.device("cuda", 0))
    gpu.compute(30.0)
    laps.end()
    gpu.compute(10.0)
    laps.end()
    monkeypatch.setattr("shoal.bench.contenders.time.perf_counter", lambda: 0.045)
    assert laps.seconds() == pytest.approx([0.03, 0.015])


def test_times_on_a_cpu_are_those_of_the_clock(monkeypatch):
    clock = iter([5.0, 5.0, 5.5, 7.0, 9.0])
    monkeypatch.setattr("shoal.bench.contenders.time.perf_counter", lambda: next(clock))
    laps = Laps(CPU)
    laps.end()
    laps.end()
    assert laps.seconds() == [0.5, 1.5]


def test_workers_take_the_gpus_of_their_machine_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    places = [BenchPlace(rank, 5, "key", str(tmp_path)) for rank in range(5)]
    assert [place.device("cuda").index for place in places] == [0, 1, 0, 1, 0]
    assert [device.index for device in taken] == [0, 1, 0, 1, 0]
    assert places[1].device("cpu") == CPU


def test_a_worker_without_a_gpu_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds none"):
        BenchPlace(1, 2, "key", str(tmp_path)).device("cuda")
