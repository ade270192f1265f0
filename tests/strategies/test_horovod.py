"""`horovod`: the calls that Horovod gets, through a stand-in that reduces by the group."""

import sys
import types

import pytest
import torch

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies.horovod import HorovodAllReduce
from strategies.fakes import Mirror
from strategies.quadratics import Point, close, step, targets

RATE = 0.3


class NoneCompressor:
    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, context):
        return tensor


class HalfCompressor:
    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, context):
        return tensor.to(context)


class Stand(types.ModuleType):
    """Horovod's module as far as the strategy calls it; reductions are those of a group."""

    Average = "average"
    Compression = types.SimpleNamespace(none=NoneCompressor, fp16=HalfCompressor)

    def __init__(self, group):
        super().__init__("horovod.torch")
        self.group = group
        self.calls = []

    def init(self):
        self.calls.append("init")

    def rank(self):
        return self.group.rank

    def size(self):
        return self.group.size

    def allreduce_async_(self, tensor, name=None, op=None):
        assert op == self.Average
        self.calls.append(f"{name} {tensor.dtype}".replace("torch.", ""))
        return self.group.all_reduce(tensor)

    def synchronize(self, handle):
        return handle.wait()

    def join(self):
        self.calls.append("join")


@pytest.fixture
def stand(monkeypatch):
    def put(group):
        stand = Stand(group)
        monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
        monkeypatch.setitem(sys.modules, "horovod.torch", stand)
        return stand

    return put


def formula(group, _):
    """Means of gradients, accumulated ones included; means of parameters with local steps."""
    stand = Stand(group)
    sys.modules["horovod"] = types.ModuleType("horovod")
    sys.modules["horovod.torch"] = stand
    try:
        for num_local in (1, 2):
            goals = targets(group.size, 8)
            model = Point()
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            strategy = HorovodAllReduce(group, local_steps=num_local)
            values = torch.zeros_like(goals[0])
            with strategy.attach(model, optimizer, stays=True):
                for number in range(4):
                    optimizer.zero_grad()
                    with strategy.accumulate():
                        model(goals[2 * number, group.rank]).backward()
                    model(goals[2 * number + 1, group.rank]).backward()
                    optimizer.step()
                    gradients = 2 * values - goals[2 * number] - goals[2 * number + 1]
                    if num_local == 1:
                        values = values - RATE * gradients.mean(0)
                    else:
                        values = values - RATE * gradients
                        values = values.mean(0).expand_as(values) if number % 2 else values
                    close(model.x, values[group.rank])
    finally:
        del sys.modules["horovod.torch"], sys.modules["horovod"]
    return stand.calls


def test_formula(workers):
    first, second = workers.run(formula, 2)
    assert first == second == ["init", *["shoal.x float64"] * 4, "init", *["shoal.x float64"] * 2]


def test_compression_unused_parameters_and_the_end(stand):
    group = Mirror()
    horovod = stand(group)
    model = torch.nn.ModuleDict({"one": Point(), "two": Point()})
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with HorovodAllReduce(group, compression="fp16").attach(model, optimizer):
        step(model["one"], optimizer, torch.ones(4))
        assert model["two"].x.grad is not None
        assert not model["two"].x.grad.any()
    torch.testing.assert_close(model["one"].x.detach(), torch.full((4,), RATE, dtype=torch.float64))
    assert horovod.calls == ["init", "shoal.one.x float16", "shoal.two.x float16", "join"]


def test_other_ranks_are_refused(stand):
    stand(SoloGroup())
    model = Point()
    strategy = HorovodAllReduce(Mirror())
    with pytest.raises(UsageError, match=r"rank 0 of 2 is rank 0 of 1 in Horovod(.|\n)*horovodrun"):
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=RATE))


def test_without_horovod_it_says_how(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(UsageError, match=r"Horovod is not there(.|\n)*pip install(.|\n)*all-reduce"):
        HorovodAllReduce(Mirror())
    assert HorovodAllReduce(SoloGroup()).name == "horovod"
