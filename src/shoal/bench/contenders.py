"""What the benchmarks that train share: strategies, devices, the model that is trained, and printed figures.

Importing this does not import torch.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.doctor import machine
from shoal.report.tables import emit
from shoal.report.units import counted
from shoal.strategies.options import WAITS_FOR_ALL, read_options
from shoal.strategies.registry import canonical, find

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from shoal.bench.ranks import HostFlags
    from shoal.group.base import Group
    from shoal.models import ModelEntry
    from shoal.strategies import Strategy

    Batch = tuple[torch.Tensor, torch.Tensor]
    """Inputs and labels."""

NONE = "none"
"""Nothing is attached, and nothing shared: the ceiling."""
DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
_NUM_BATCHES = 4
_QUICK_SIDE = 32
"""Larger images than this take a CPU many times as long."""
_DRIVER_ANSWER_S = 30.0
_DEVIATIONS = 1.96
"""Of a normal distribution 95 % lie within so many on both sides."""

Device = Annotated[DeviceChoice, flag("Where workers compute; auto: on a GPU, if there is one.")]
NoCuda = Annotated[bool, flag("The same as --device cpu.")]
SequenceLength = Annotated[
    int | None, flag("Tokens of an example, for a model of text.", ge=1, shown="the model's own")
]
StrategyOption = Annotated[
    dict[str, str], flag("Of the strategies that have it; may be given often.", metavar="NAME=VALUE")
]
WorkersPerMachine = Annotated[int | None, flag("Split this machine into several, for 'hierarchical'.", ge=1)]
NumServers = Annotated[
    int | None,
    flag("Processes beside the workers, for 'parameter-server' and 'staleness-aware'.", ge=1, shown="1"),
]


def check_profile(profile: str | None) -> None:
    """Complain of a profile that is none before anything is started."""
    if profile is not None:
        from shoal.transport import Profile

        Profile.load(profile)


def check_data_dir(data_dir: Path | None, task: str) -> None:
    """UsageError for a folder of files where the task needs none."""
    if data_dir is not None and task != "mnist":
        raise UsageError(
            f"--data-dir has the files of MNIST, and {task} needs none.",
            next_step="leave it out, or say --task mnist.",
        )


# --- strategies ---


def beside_none(named: Iterable[str]) -> tuple[str, ...]:
    """What is measured beside 'none': each that was named once. UsageError where that is nothing."""
    chosen = tuple(name for name in dict.fromkeys(named) if name != NONE)
    if not chosen:
        raise UsageError(
            "There is no strategy to measure beside 'none'.",
            next_step="name one, for example --strategies all-reduce.",
        )
    for name in chosen:
        find(name)
    return chosen


def is_ddp(strategy: str) -> bool:
    """Whether it is torch's own wrapper."""
    return strategy != NONE and canonical(strategy) == "ddp"


def needs_servers(strategy: str) -> bool:
    """Whether there are processes beside the workers."""
    return strategy != NONE and find(strategy)[0].needs_servers


def sends_by_itself(strategy: str) -> bool:
    """Whether what it sends passes its group by, which so can neither count nor slow it."""
    return strategy != NONE and find(strategy)[0].has_own_channel


def is_swarm(strategy: str) -> bool:
    """Whether workers train in a swarm, without a group."""
    return strategy != NONE and find(strategy)[0].is_swarm


def is_free_running(strategy: str, options: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether no worker waits for another, so that each has its own pace; `options` are by strategy.

    A report may name a strategy from outside that is not here: that counts as one whose workers wait.
    """
    if strategy == NONE:
        return True
    own = options.get(strategy, {})
    has_rounds = any(own.get(name) for name in (*WAITS_FOR_ALL, "force_barrier"))
    try:
        is_asynchronous = find(strategy)[0].is_asynchronous
    except UsageError:
        return False
    return is_asynchronous and not has_rounds and own.get("mode", "async") == "async"


def has_option(strategy: str, option: str) -> bool:
    """Whether the strategy can be told so."""
    return option in find(strategy)[0].options.__struct_fields__


def all_options(strategy: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those given, what the strategy's name implies, and its defaults. UsageError for one it hasn't."""
    info, implied = find(strategy)
    read = read_options(info.options, {**implied, **given}, strategy)
    options: dict[str, Any] = msgspec.to_builtins(read)
    return options


def without_defaults(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leave out the options that have their default value: another version of Shoal may not know them."""
    return {
        strategy: {name: value for name, value in own.items() if value != defaults.get(name)}
        for strategy, own in options.items()
        for defaults in [all_options(strategy, {})]
    }


def shares_of(strategies: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give each strategy those options that it has; UsageError for an option that none of them has."""
    shares = {
        strategy: {option: value for option, value in given.items() if has_option(strategy, option)}
        for strategy in strategies
    }
    for option in given:
        if not any(option in share for share in shares.values()):
            raise UsageError(
                f"None of {', '.join(shares)} has an option {option!r}.",
                next_step="`shoal run --help` names those of each strategy.",
            )
    return shares


def options_of(strategies: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Collect each strategy's options, with those given that it has; UsageError for one that none has."""
    return {strategy: all_options(strategy, own) for strategy, own in shares_of(strategies, given).items()}


def servers_of(asked: int | None, strategies: Iterable[str]) -> int:
    """Return as many servers as was asked for, or one; UsageError where no strategy has any."""
    if asked is not None and not any(map(needs_servers, strategies)):
        raise UsageError(
            "--num-servers is of parameter-server and staleness-aware, which are not measured here.",
            next_step="leave it out, or name one of them among --strategies.",
        )
    return asked or 1


class Contender(msgspec.Struct, frozen=True):
    """One way of training."""

    name: str
    strategy: str
    options: dict[str, Any] = {}
    base: str = ""
    """The contender that it differs from by a trick alone."""
    trick: str = ""


def strategy_contenders(texts: Sequence[str], common: Mapping[str, Any]) -> tuple[Contender, ...]:
    """Strategies, each a name and perhaps options of its own: 'neighbor topology=ring'.

    `common` options go to all that know them, and yield to a strategy's own; UsageError for one that nobody
    knows.
    """
    labels = {" ".join(text.split()): text.split() for text in texts}
    if not labels:
        raise UsageError(
            "There is no strategy to train with.", next_step="name one: --strategies all-reduce."
        )
    shares = shares_of([name for name, *_ in labels.values()], common)
    return tuple(
        contender_of(label, name, shares[name] | _own_options(label, words))
        for label, (name, *words) in labels.items()
    )


def _own_options(label: str, words: Sequence[str]) -> dict[str, str]:
    own = {}
    for word in words:
        option, is_there, value = word.partition("=")
        if not is_there or not option:
            raise UsageError(
                f"{word!r} in {label!r} sets nothing.", next_step="say --strategies 'neighbor topology=ring'."
            )
        own[option.replace("-", "_")] = value
    return own


def contender_of(
    name: str, strategy: str, options: Mapping[str, Any], base: str = "", trick: str = ""
) -> Contender:
    """Make a contender with all options that its strategy has, checked."""
    return Contender(name, strategy, all_options(strategy, options), base, trick)


# --- devices ---


def device_of(asked: DeviceChoice, *, no_cuda: bool = False, is_here: bool = True) -> DeviceKind:
    """Return the device that was asked for; `auto` takes GPUs where this machine has any.

    UsageError for GPUs that this machine does not have, where workers run on it.
    """
    if no_cuda and asked == "cuda":
        raise UsageError("--no-cuda and --device cuda contradict.", next_step="leave one of them out.")
    if no_cuda or asked == "cpu":
        return "cpu"
    has_gpu = machine.default_device() == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    if asked == "cuda" and is_here and not has_gpu:
        raise UsageError(
            "There is no GPU for --device cuda.",
            cause="torch has no CUDA, the driver tells of no GPU, or CUDA_VISIBLE_DEVICES hides them all.",
            next_step="use --device cpu, or see what `shoal doctor` says.",
        )
    return "cuda" if has_gpu or asked == "cuda" else "cpu"


def workers_device(
    asked: DeviceChoice, hosts: HostFlags, num_workers: int, *, no_cuda: bool = False
) -> DeviceKind:
    """Say where the workers of a command compute, by its flags for devices and hosts.

    That they share GPUs, or cores, is told. UsageError as `device_of`.
    """
    device = device_of(asked, no_cuda=no_cuda, is_here=not hosts.are_named)
    tell_sharing(device, hosts, num_workers)
    return device


def num_gpus() -> int:
    """Count the GPUs that this process and its children may use on this machine."""
    num_found = len(machine.gpus(_DRIVER_ANSWER_S).found)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        num_found if visible is None else min(num_found, len([part for part in visible.split(",") if part]))
    )


def has_shared_gpus(hosts: HostFlags, num_workers: int) -> bool:
    """Tell whether there are more workers than GPUs on this machine; other machines' are not known."""
    return not hosts.are_named and hosts.workers_here(num_workers) > num_gpus()


def tell_sharing(device: DeviceKind, hosts: HostFlags, num_workers: int) -> None:
    """Say that workers share the GPUs, or the cores, of this machine; the user of a launcher knows."""
    if hosts.are_named or hosts.launched_size is not None:
        return
    num_here, kind = (num_gpus(), "GPU") if device == "cuda" else (num_cores(), "core")
    if num_workers > num_here:
        emit(f"{num_workers} workers share {counted(num_here, kind)}.", sys.stderr)


def tell_inputs(entry: ModelEntry, device: DeviceKind) -> None:
    """Say what nobody has said of the inputs: that their shape was guessed, or images take a CPU long."""
    if entry.is_guessed:
        shape = "×".join(map(str, entry.input_shape)) + " tokens" * (entry.num_tokens is not None)
        emit(
            f"{entry.name} is given inputs of {shape}, as guessed from its first layer; its factory can say "
            "otherwise: return model, {'input_shape': (3, 32, 32)}.",
            sys.stderr,
        )
    if entry.image_side is not None:
        tell_slow_images(entry.image_side, device, max(_QUICK_SIDE, entry.smallest_side))


def tell_slow_images(side: int, device: DeviceKind, quick_side: int = _QUICK_SIDE) -> None:
    """Say that large images take a CPU long: their size is changed by a flag alone."""
    if device == "cpu" and side > quick_side:
        emit(f"Images of {side}×{side} take a CPU long; --image-size {quick_side} is quicker.", sys.stderr)


# --- what a worker trains ---


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this process has told it to; a CPU always has."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


class Trainee:
    """`step` is the user's own loop; `model` may get something wrapped around it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, batches: Iterator[Batch], device: torch.device
    ) -> None:
        from shoal.models import loss_of

        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._batches = batches
        self._loss_of = loss_of

    def step(self) -> None:
        """Trains one iteration, from fresh gradients."""
        self.optimizer.zero_grad()
        self.learn()

    def learn(self) -> None:
        """Forward, loss, backward and the optimizer's step; gradients are added to what is there."""
        x, y = next(self._batches)
        self._loss_of(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told to."""
        synchronize(self.device)

    def seconds_of(self, action: Callable[[], None], count: int = 1) -> float:
        """How long so many calls take, with all that the device has to do for them."""
        self.synchronize()
        began_s = time.perf_counter()
        for _ in range(count):
            action()
        self.synchronize()
        return time.perf_counter() - began_s


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained on synthetic batches, and by which SGD."""

    entry: Any
    """A `ModelEntry`."""
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    seed: int = 0

    def trainee(self, rank: int, device: torch.device) -> Trainee:
        """Make what one rank trains: models are equal on all ranks, and a rank's few batches are its own."""
        from torch.optim import SGD

        model = new_model(self.entry, self.seed, device)
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)
        seeds = range(rank * _NUM_BATCHES, (rank + 1) * _NUM_BATCHES)
        batches = [self.entry.random_batch(self.seed + seed, self.batch_size) for seed in seeds]
        on_device = [(x.to(device), y.to(device)) for x, y in batches]
        return Trainee(model, optimizer, itertools.cycle(on_device), device)


def new_model(entry: ModelEntry, seed: int, device: torch.device) -> nn.Module:
    """Make one that has learned nothing; equal for equal seeds."""
    import torch

    torch.manual_seed(seed)
    return entry.build().to(device)


def make_contender(group: Group, strategy: str, options: Mapping[str, Any]) -> Strategy:
    """The strategy; UsageError for one that stands on a package which is not there.

    A lone worker's strategy does not ask for it, and would be plain training, measured under that name.
    """
    from shoal.strategies import make_strategy

    if canonical(strategy) == "horovod" and group.size == 1:
        from shoal.strategies.horovod import load_horovod

        load_horovod()
    return make_strategy(group, strategy, **options)


class Laps:
    """The times of one iteration after another; the device is waited for before the first and after the last.

    Between them a GPU is told of new work while it does the old: the end of an iteration is an event in its
    stream. What it still does elsewhere after the last event counts as part of the last iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[Any] = []
        synchronize(device)
        self._began_s = time.perf_counter()
        self._begin = self._now()

    def __len__(self) -> int:
        return len(self._ends)

    def end(self) -> None:
        """An iteration ends here, and the next begins."""
        self._ends.append(self._now())

    def seconds(self) -> list[float]:
        """How long each iteration took, once the device has done them all."""
        synchronize(self._device)
        in_all_s = time.perf_counter() - self._began_s
        pairs = itertools.pairwise([self._begin, *self._ends])
        if self._device.type != "cuda":
            return [end_s - begin_s for begin_s, end_s in pairs]
        times_s = [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        if times_s:
            times_s[-1] += max(0.0, in_all_s - sum(times_s))
        return times_s

    def _now(self) -> Any:
        """An event of the GPU's current stream, or on a CPU the time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


# --- figures as the documents print them ---


class Spread(msgspec.Struct, frozen=True):
    """The mean of one figure, and how far most samples are from it."""

    mean: float
    error: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Compute it with the population's deviation, as BlueFog, Horovod and KungFu do."""
        return cls(statistics.fmean(samples), _DEVIATIONS * statistics.pstdev(samples))

    def __str__(self) -> str:
        return f"{self.mean:.1f} +-{self.error:.1f}"


def iteration_text(number: int, speed: float, what: str = "img") -> str:
    """BlueFog's and Horovod's line of one iteration; on a CPU too a worker is a GPU there."""
    return f"Iter #{number}: {speed:.1f} {what}/sec per GPU"


def tokens_of(config: Mapping[str, Any]) -> int | None:
    """How many tokens an example of a benchmark has; None where it is none of text."""
    num_tokens = config.get("sequence_length")
    return int(num_tokens) if num_tokens else None


def inputs_text(config: Mapping[str, Any]) -> str:
    """What a model is given, as ' of 32×32 images'; empty where that is neither images nor tokens."""
    side, num_tokens = config.get("image_size"), tokens_of(config)
    if num_tokens:
        return f" of {counted(num_tokens, 'token')} a sequence"
    return f" of {side}×{side} images" if side else ""
