"""`shoal bench ddp`: what sharing costs as workers are added, in the sweep of PyTorch's DDP benchmark.

Without a wrapper on rank 0, then 1, 2, 4, ... workers of a machine, then whole machines. What a worker does
is `ddp_worker`'s, what the samples say `ddp_summary`'s, and PyTorch's file `report.pytorch`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import all_options, has_option, is_ddp, needs_servers
from shoal.bench.frame import Measured, Metrics, Tell, measured
from shoal.bench.workers import Crew, CrewSettings, OpenCrew, Workers, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.report.pytorch import ALONE, SECONDS

SKEW, ALIKE = "slowest_over_fastest", "like_machine_0"
METRICS: Metrics = {
    SECONDS: ("s", "lower"),
    SKEW: ("", "lower"),
    ALIKE: ("", "higher"),
}
"""Iterations of all ranks, one rank after another; in each iteration the slowest rank's time by the fastest
one's; whether a machine is built as the first one, 1 or 0."""
_measured = partial(measured, METRICS)
DOCUMENT_MODELS = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
DOCUMENT_BUCKET_SIZE = 25
NUM_CLASSES = 1000
COMPARED = ("processor", "cores", "device", "topology", "versions")
"""What is looked at to tell whether two machines are alike."""
OF_THE_WRAPPER = (
    "bucket_mib",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "should_broadcast_buffers",
)
"""Options of the strategy `ddp` that torch's wrapper itself has; the others are the strategy's."""
_ANSWER_S = 1800.0  # 15 iterations of a large model on one core

Backend = Literal["gloo", "nccl", "shoal"]
"""What carries gradients: torch.distributed's, or the group's own shared memory and streams."""


class DdpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom, and how often."""

    models: tuple[str, ...] = ("resnet18",)
    batch_size: int = 32
    """Of each worker."""
    image_size: int = 32
    """The side of the images."""
    num_warmup: int = 5
    num_iters: int = 10
    bucket_size: int | None = 25
    """Of gradients, in MiB; None for a strategy that has none."""
    distributed_backend: Backend = "gloo"
    strategy: str = "ddp"
    options: dict[str, Any] = {}
    num_workers: int = 2
    workers_per_machine: int | None = None
    """Counts one machine as several; None takes machines as they are."""
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_size, self.num_iters, self.num_workers) < 1 or not self.models:
            raise UsageError(
                "Without a model, workers, examples or iterations nothing is measured.",
                next_step="give 1 or more.",
            )
        if self.workers_per_machine is not None and self.num_workers % self.workers_per_machine:
            raise UsageError(
                f"{self.num_workers} workers do not fill machines of {self.workers_per_machine}.",
                next_step="let --np be a multiple of --workers-per-machine.",
            )
        if needs_servers(self.strategy):
            raise UsageError(
                f"{self.strategy} needs servers beside the workers, and this sweep has none.",
                next_step=f"shoal bench training --strategies {self.strategy}.",
            )
        if self.device == "cpu" and self.distributed_backend == "nccl":
            raise UsageError(
                "NCCL works between GPUs alone.",
                next_step="say --distributed-backend gloo, or --device cuda.",
            )

    @property
    def is_ddp(self) -> bool:
        """Whether torch's own wrapper is measured, and no strategy of Shoal's in its place."""
        return is_ddp(self.strategy)


class Stage(msgspec.Struct, frozen=True):
    """One configuration of the sweep: the first ranks, under the document's label."""

    label: str
    num_ranks: int

    @property
    def is_alone(self) -> bool:
        """Whether nothing is wrapped around the model."""
        return self.label == ALONE


def bucket_size_of(strategy: str, asked: int | None) -> int | None:
    """The size that was asked for, or the document's; UsageError for a strategy that has no buckets."""
    if has_buckets(strategy):
        return asked or DOCUMENT_BUCKET_SIZE
    if asked is not None:
        raise UsageError(
            f"{strategy} shares no gradients in buckets, so that --bucket-size means nothing to it.",
            next_step="leave it out, or take a strategy that has them, as all-reduce.",
        )
    return None


def options_of(strategy: str, given: Mapping[str, str], bucket_size: int | None) -> dict[str, Any]:
    """All options of a strategy, its buckets of this size. UsageError for one that it doesn't have."""
    if "bucket_mib" in given:
        raise UsageError(
            "--option bucket_mib is the size of buckets, which has a flag of its own here.",
            next_step=f"say --bucket-size {given['bucket_mib']}.",
        )
    foreign = [option for option in given if is_ddp(strategy) and option not in OF_THE_WRAPPER]
    if foreign:
        raise UsageError(
            f"Torch's wrapper, which is measured as it is, has no option {foreign[0]!r}.",
            next_step=f"one of {', '.join(OF_THE_WRAPPER)}; or take another strategy, as all-reduce.",
        )
    sized = {} if bucket_size is None else {"bucket_mib": bucket_size}
    return all_options(strategy, {**sized, **given})


def has_buckets(strategy: str) -> bool:
    """Whether a strategy shares gradients in buckets."""
    return has_option(strategy, "bucket_mib")


def sweep(machines: Sequence[int]) -> list[Stage]:
    """The stages for ranks on these machines, in the order of ranks: a machine is a number, used once.

    BenchmarkError where the ranks of a machine do not follow each other.
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    if len(sizes) != len({*machines}):
        raise BenchmarkError(
            "The ranks of a machine do not follow each other, so there is no sweep from machine to machine.",
            cause="the launcher deals ranks out to machines in turns.",
            next_step="let it fill one machine after another, as mpirun --map-by slot does.",
        )
    powers = itertools.takewhile(lambda count: count < sizes[0], (1 << bit for bit in itertools.count()))
    stages = [Stage(ALONE, 1), *(Stage(f"1M/{count}G", count) for count in powers)]
    for number in range(1, len(sizes) + 1):
        used = sizes[:number]
        each = str(used[0]) if min(used) == max(used) else f"{min(used)}-{max(used)}"
        stages.append(Stage(f"{number}M/{each}G", sum(used)))
    return stages


class DdpScenario:
    """One start: every stage of every model, each in a group of its own."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), DdpConfig), seed=seed)
        self._num_groups = 0
        self._warm_model: str | None = None
        self.open_crew: OpenCrew = Crew

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Model by model; a stage that fails is a row, and the rest go on."""
        config = self._config
        settings = CrewSettings(
            "shoal.bench.ddp_worker:work", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        with self.open_crew(settings) as crew:
            places = crew.ask("place")
            yield from self._compare_machines(crew, [place["host_id"] for place in places], tell)
            stages = sweep(numbered([place["machine"] for place in places]))
            for model, stage in itertools.product(config.models, stages):
                yield from self._measure(crew, model, stage, tell)

    def _compare_machines(self, crew: Workers, hosts: list[str], tell: Tell) -> Iterator[Measured]:
        if len({*hosts}) == 1:
            return
        machines = [machine for machine in crew.ask("machine") if machine is not None]
        for number, machine in enumerate(machines[1:], start=1):
            different = [name for name in COMPARED if machine[name] != machines[0][name]]
            key = {"machine": number, "host": machine["machine"], "differs_in": ", ".join(different)}
            yield _measured(ALIKE, key, [float(not different)])
            if "topology" in different:
                tell(f"{machine['machine']} is built otherwise:\n{machine['topology']}")

    def _warm_up(self, crew: Workers, model: str, tell: Tell) -> None:
        """Everybody alone; what is slow about a first time is over then."""
        if self._warm_model != model or not crew.is_running:
            tell(f"{model}: warming up")
            crew.ask("warm_up", model=model)
            self._warm_model = model

    def _measure(self, crew: Workers, model: str, stage: Stage, tell: Tell) -> Iterator[Measured]:
        config = self._config
        key = {
            "model": model,
            "batch_size": config.batch_size,
            "image_size": config.image_size,
            "label": stage.label,
            "num_ranks": stage.num_ranks,
        }
        self._num_groups += 1
        group_name = None if stage.is_alone else f"ddp-{self._num_groups}"
        try:
            self._warm_up(crew, model, tell)
            tell(f"{model}: {stage.label}")
            times_s = crew.ask(
                "measure",
                among=stage.num_ranks,
                model=model,
                num_ranks=stage.num_ranks,
                group_name=group_name,
            )
        except BenchmarkError as error:
            tell(f"{model}, {stage.label} failed: {one_line(error)}")
            yield _measured(SECONDS, key, error=one_line(error))
            return
        yield _measured(SECONDS, key, list(itertools.chain.from_iterable(times_s)))
        if stage.num_ranks > 1:
            yield _measured(SKEW, key, skew(times_s))


def skew(times_s: Sequence[Sequence[float]]) -> list[float]:
    """Of each iteration: the time of the slowest rank, divided by that of the fastest."""
    return [max(times) / min(times) for times in zip(*times_s, strict=True)]


def numbered(names: Sequence[Any]) -> list[int]:
    """Numbers in the place of names, in the order of their first appearance."""
    seen: dict[str, int] = {}
    return [seen.setdefault(str(name), len(seen)) for name in names]
