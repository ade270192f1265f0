"""Every strategy, what it promises beyond the common contract, and the models that it is tried with.

A new strategy adds a line to CASES and passes `test_strategy.py`. One of another package takes the place of
ours with SHOAL_TEST_CASES, which tells the fields of its `Case` that are not the default:

    export SHOAL_TEST_CASES='{"my_package.rules:Mine": {"keeps_mean": false}}'
    pytest tests/contracts/test_strategy.py
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from shoal.strategies import make_strategy


@dataclass(frozen=True)
class Case:
    """A strategy with options, and which of the promises it makes."""

    strategy: str
    options: dict = field(default_factory=dict)
    are_replicas_equal: bool = False
    """After each step, up to rounding."""
    keeps_mean: bool = True
    """Of the parameters, when nothing is learned."""
    is_step_undone: bool = True
    """An aborted round comes before the step, and leaves that undone too."""
    shares_through_group: bool = True
    """What it sends can be counted in the group."""
    sends_in_place: bool = True
    """What it sends are parameters or gradients, where they lie."""
    can_be_aborted: bool = True
    """Its rounds are operations of the group that can be made to fail."""
    waits: bool = True
    """For others, in each round."""
    momentum: float = 0.0
    """That the optimizer must have."""
    is_plain_alone: bool = True
    """In a group of one."""
    needs_more: bool = False
    """Than a group: servers, or a package that need not be there. Its own tests give it that."""


OUTSIDE = "my_strategy:NoLoCo"
EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
AWC = {"order": "adapt-while-combine"}
CASES = {
    "all-reduce": Case("all-reduce", are_replicas_equal=True),
    "ddp": Case("ddp", are_replicas_equal=True, shares_through_group=False),
    "neighbor": Case("neighbor", is_step_undone=False),
    "neighbor, one peer": Case("neighbor", {"topology": "one-peer-exponential"}, is_step_undone=False),
    "neighbor, while": Case("neighbor", {"topology": "ring", **AWC}),
    "hierarchical": Case("hierarchical", are_replicas_equal=True, is_step_undone=False),
    "hierarchical, while": Case("hierarchical", AWC),
    "pair": Case("pair", keeps_mean=False, waits=False),
    "sma": Case("sma", {"alpha": 0.4}),
    "local-sgd": Case("local-sgd", {"local_steps": 1}, are_replicas_equal=True, is_step_undone=False),
    "diloco": Case(
        "diloco",
        {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        are_replicas_equal=True,
        is_step_undone=False,
        sends_in_place=False,
        is_plain_alone=False,
    ),
    "noloco": Case(
        "noloco",
        {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        is_step_undone=False,
        sends_in_place=False,
    ),
    "sparse-loco": Case(
        "sparse-loco",
        {"local_steps": 1},
        are_replicas_equal=True,
        keeps_mean=False,
        is_step_undone=False,
        sends_in_place=False,
    ),
    "push-sum": Case("push-sum", keeps_mean=False, can_be_aborted=False, waits=False),
    "window": Case("window", keeps_mean=False, can_be_aborted=False, waits=False),
    "window, barrier": Case("window", {"force_barrier": True}, can_be_aborted=False),
    "gradient-tracking": Case("gradient-tracking"),
    "exact-diffusion": Case("exact-diffusion", is_step_undone=False),
    "extra": Case("extra"),
    "d2": Case("d2", is_step_undone=False),
    "momentum": Case("momentum", is_step_undone=False, momentum=0.3),
    "choco": Case(
        "choco",
        {"codec": "int8", "gamma": 0.8},
        can_be_aborted=False,
        sends_in_place=False,
    ),
    "sgp": Case("sgp", is_step_undone=False),
    "relay": Case("relay", keeps_mean=False, is_step_undone=False, sends_in_place=False),
    "outside": Case(
        OUTSIDE,
        {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        is_step_undone=False,
        sends_in_place=False,
    ),
    "parameter-server": Case("parameter-server", needs_more=True),
    "staleness-aware": Case("staleness-aware", needs_more=True),
    "horovod": Case("horovod", needs_more=True),
    "swarm": Case("swarm", is_plain_alone=False, needs_more=True),  # but with a target: its own tests
}
GIVEN = json.loads(os.environ.get("SHOAL_TEST_CASES", "{}"))
CASES = {name: Case(name, **told) for name, told in GIVEN.items()} or CASES
DEVICE = os.environ.get("SHOAL_TEST_DEVICE", "cpu")
"""Where models are: `make test-gpu` asks for cuda."""
EVERY = {name: case for name, case in CASES.items() if not case.needs_more}
COUNTED = {name: case for name, case in EVERY.items() if case.shares_through_group}
ABORTED = {name: case for name, case in COUNTED.items() if case.can_be_aborted}


class ManySmall(nn.Module):
    """200 tensors of odd sizes."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(1 + number % 7, 3) for number in range(200))

    def forward(self, x):
        return (torch.cat(list(self.weights)) * x).sum()


class OneLarge(nn.Module):
    """One tensor of an odd size."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100_003))

    def forward(self, x):
        return (self.weight * x.sum()).sum()


class Point(nn.Module):
    """A quadratic: the loss of each worker is least at its own target."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(5))

    def forward(self, target):
        return (self.x - target).square().sum() / 2


class Mixed(nn.Module):
    """Two dtypes, a frozen, an unused and a shared parameter, BatchNorm, channels_last."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(9))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        x = self.two(self.one(x).tanh()) + self.frozen.sum()
        return self.head(x) * self.scale.float()


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.ReLU(), nn.Linear(11, 3))


MODELS = {"many small": ManySmall, "one large": OneLarge}


def make(group, case, **options):
    return make_strategy(group, case.strategy, **{**case.options, **options})


def flat(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def bits(model, optimizer):
    """Copies of all that training changes."""
    state = optimizer.state_dict()["state"]
    tensors = [*model.parameters(), *model.buffers()]
    for entry in state.values():
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def are_equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def group_mean(group, vector):
    """By way of the group alone, whatever the strategy is; on the CPU."""
    parts = group.all_gather(vector.cpu()).wait()
    return torch.stack(parts).mean(0)


def unequal(group, model):
    """What each worker adds to its parameters, so that there is something to average."""
    generator = torch.Generator().manual_seed(100 + group.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device))


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()
