"""`shoal bench ddp`: what sharing costs as workers are added, in the sweep of PyTorch's DDP benchmark.

Without a wrapper on rank 0, then 1, 2, 4, ... workers of a machine, then whole machines. PyTorch's file is
`report.pytorch`'s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import (
    Device,
    DeviceKind,
    SequenceLength,
    Trainee,
    all_options,
    device_of,
    has_option,
    has_shared_gpus,
    is_ddp,
    make_contender,
    needs_servers,
    new_model,
    num_gpus,
    tell_inputs,
    tell_sharing,
)
from shoal.bench.frame import BenchmarkPlan, RunFlags, Tell, WholeRunFlags, defaults_of, measured, same_fields
from shoal.bench.ranks import HostFlags
from shoal.bench.workers import Backend as TorchBackend
from shoal.bench.workers import BenchPlace, LocalWorkers, OpenWorkers, Workers, WorkerSettings, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.core.run_options import flag
from shoal.doctor.machine import describe_machine
from shoal.report import Report, Row
from shoal.report.pytorch import ALONE, SECONDS, to_document
from shoal.report.schema import rows_of, with_failed
from shoal.report.statistics import PERCENTILES, known_percentiles, percentiles
from shoal.report.units import counted, digits
from shoal.report.views import Items

if TYPE_CHECKING:
    from shoal.group.base import Group
    from shoal.models import ModelEntry

SKEW, ALIKE = "slowest_over_fastest", "like_machine_0"
"""Iterations of all ranks, one rank after another; in each iteration the slowest rank's time by the fastest
one's; whether a machine is built as the first one, 1 or 0."""
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
_WARM_ITERATIONS = 2
_TITLE = "Shoal distributed data parallel benchmark"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NOTABLE_SKEW = 1.05
"""In the median iteration; below it the slowest rank is a different one each time."""
_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
"""What a launcher would have set, by the flag that says it."""


class DdpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, by whom, and how often."""

    models: tuple[str, ...] = ("resnet18",)
    batch_size: int = 32
    image_size: int | None = 32
    """The side of the images; None where no model takes any."""
    sequence_length: int | None = None
    """Tokens of an example; None where each model of text has its own."""
    num_warmup: int = 5
    num_iters: int = 10
    bucket_size: int | None = DOCUMENT_BUCKET_SIZE
    """Of gradients, in MiB; None for a strategy that has none."""
    distributed_backend: Backend = "gloo"
    strategy: str = "ddp"
    options: dict[str, Any] = {}
    num_workers: int = 2
    workers_per_machine: int | None = None
    """Counts one machine as several; None takes machines as they are."""
    device: DeviceKind = "cpu"
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


_USUAL = defaults_of(DdpConfig)


class DdpFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench ddp`, which are those of PyTorch's DDP benchmark and ours."""

    model: Annotated[
        tuple[str, ...] | None,
        flag(
            "What is trained; your own is file.py:factory.",
            metavar="NAME,...",
            shown="the document's four on GPUs, resnet18 else",
        ),
    ] = None
    strategy: Annotated[
        str, flag("In the place of torch's DDP: any of `shoal run --help`.", metavar="NAME")
    ] = _USUAL.strategy
    option: Annotated[dict[str, str], flag("Of the strategy; may be given often.", metavar="NAME=VALUE")] = {}
    num_workers: Annotated[
        int | None, flag("Workers at most.", "--np", "-np", ge=1, shown="the GPUs, or 2 on the CPU")
    ] = None
    workers_per_machine: Annotated[
        int | None, flag("Count one machine as several of so many workers.", ge=1)
    ] = None
    batch_size: Annotated[int, flag("Of each worker.", ge=1)] = _USUAL.batch_size
    image_size: Annotated[int | None, flag("The side of the images.", ge=1, shown="the models' own")] = None
    sequence_length: SequenceLength = None
    num_warmup: Annotated[int, flag("Iterations before those that count.", ge=0)] = _USUAL.num_warmup
    num_iters: Annotated[int, flag("Measured iterations of each rank.", ge=1)] = _USUAL.num_iters
    bucket_size: Annotated[int | None, flag("Of gradients, in MB.", ge=1, shown=str(_USUAL.bucket_size))] = (
        None
    )
    distributed_backend: Annotated[
        TorchBackend | None,
        flag("Of the measured groups.", shown="for ddp: nccl with a GPU for each worker, else gloo"),
    ] = None
    device: Device = "auto"
    world_size: Annotated[
        int | None, flag("Processes, of which this is one: started by hand, one a rank.", ge=1)
    ] = None
    rank: Annotated[int | None, flag("Of this process.", ge=0, shown="RANK")] = None
    master_addr: Annotated[str | None, flag("Where rank 0 runs.", metavar="HOST")] = None
    master_port: Annotated[int | None, flag("Where they meet there.", ge=1, le=65535, metavar="PORT")] = None


class DdpRunFlags(WholeRunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark; --json has PyTorch's layout here."""

    json_file: Annotated[
        Path | None, flag("Write PyTorch's own JSON of the run; - is stdout.", "--json", metavar="FILE")
    ] = None


def ddp_command(flags: DdpFlags, hosts: HostFlags, run: DdpRunFlags) -> BenchmarkPlan:
    """The sweep of PyTorch's DDP benchmark: no wrapper, then 1, 2, 4, ... workers, then whole machines."""
    take_part(flags)
    config = ddp_config(flags, hosts, run)
    return BenchmarkPlan(
        config, run, summarize_ddp, ddp_items, where=hosts.starter(config.num_workers), encode=encode_ddp
    )


def ddp_config(flags: DdpFlags, hosts: HostFlags, run: RunFlags) -> DdpConfig:
    """Make of the flags, and of the document's defaults on this device, what is measured."""
    device = device_of(flags.device, is_here=not hosts.are_named)
    is_gpu = device == "cuda"
    num_here = num_gpus() if is_gpu else 0
    size = hosts.num_workers(flags.num_workers, flags.world_size or num_here or _USUAL.num_workers)
    is_shared = is_gpu and has_shared_gpus(hosts, size)
    tell_sharing(device, hosts, size)
    if is_shared and flags.distributed_backend == "nccl":
        raise UsageError(
            "NCCL refuses workers that share a GPU.",
            next_step=f"take --np {num_here} or fewer, or --distributed-backend gloo.",
        )
    models = flags.model or (DOCUMENT_MODELS if is_gpu else _USUAL.models)
    entries = entries_of(models, flags)
    if flags.image_size is None:
        for entry in entries:
            tell_inputs(entry, device)
    strategy = "ddp" if is_ddp(flags.strategy) else flags.strategy
    bucket_size = bucket_size_of(strategy, flags.bucket_size)
    usual: Backend = "shoal"
    if strategy == "ddp":
        usual = "nccl" if is_gpu and not is_shared else "gloo"
    resolved = {
        "image_size": next((entry.image_side for entry in entries if entry.image_side is not None), None),
        "bucket_size": bucket_size,
        "distributed_backend": flags.distributed_backend or usual,
        "strategy": strategy,
        "num_workers": size,
        "device": device,
    }
    return DdpConfig(
        **{**same_fields(flags, DdpConfig), **resolved},
        models=tuple(dict.fromkeys(entry.name for entry in entries)),
        options=options_of(strategy, flags.option, bucket_size),
        seed=run.seed,
    )


def entries_of(models: Sequence[str], flags: DdpFlags) -> list[ModelEntry]:
    """The models as they are measured: all that take images with the same size, by default the largest.

    UsageError for a size of images where no model takes any, and for a length where none reads text.
    """
    from shoal.models import model_named

    named = [model_named(name) for name in models]
    sides = [entry.image_side for entry in named if entry.image_side is not None]
    if flags.image_size is not None and not sides:
        named[0].at(flags.image_size)  # says why not
    if flags.sequence_length is not None and all(entry.num_tokens is None for entry in named):
        named[0].at(num_tokens=flags.sequence_length)
    side = flags.image_size or max(sides, default=None)
    return [entry_of(name, side, flags.sequence_length) for name in models]


def entry_of(model: str, image_size: int | None, sequence_length: int | None) -> ModelEntry:
    """One model with the sizes that are of its kind of inputs."""
    from shoal.models import model_named

    entry = model_named(model)
    return entry.at(
        None if entry.image_side is None else image_size,
        None if entry.has_fixed_classes else NUM_CLASSES,
        None if entry.num_tokens is None else sequence_length,
    )


def take_part(flags: DdpFlags) -> None:
    """BenchPlace this process as the flags say, in the variables that a launcher would have set."""
    given = {name: getattr(flags, name) for name in _VARIABLES if getattr(flags, name) is not None}
    if flags.world_size is None:
        if given:
            raise UsageError(
                f"--{next(iter(given)).replace('_', '-')} says nothing without --world-size.",
                next_step="give both, or neither: workers are started by themselves then.",
            )
        return
    told = {_VARIABLES[name]: str(value) for name, value in given.items()}
    missing = [name for name, variable in _VARIABLES.items() if variable not in {**told, **os.environ}]
    if missing and flags.world_size > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UsageError(
            f"One process of {flags.world_size} cannot find the others without {names}.",
            next_step="start one for each rank: shoal bench ddp --world-size 2 --rank 0 --master-addr HOST "
            "--master-port 29500.",
        )
    os.environ.update({"RANK": "0", **told} if flags.world_size == 1 else told)


def bucket_size_of(strategy: str, asked: int | None) -> int | None:
    """The size that was asked for, or the document's; UsageError for a strategy that has no buckets."""
    if has_option(strategy, "bucket_mib"):
        return asked or DOCUMENT_BUCKET_SIZE
    if asked is not None:
        raise UsageError(
            f"{strategy} shares no gradients in buckets, so that --bucket-size means nothing to it.",
            next_step="leave it out, or take a strategy that has them, as all-reduce.",
        )
    return None


def options_of(strategy: str, given: Mapping[str, str], bucket_size: int | None) -> dict[str, Any]:
    """Collect a strategy's options, with buckets of this size. UsageError for one that it doesn't have."""
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


# --- the scenario ---


class SweepStage(msgspec.Struct, frozen=True):
    """One configuration of the sweep: the first ranks, under the document's label."""

    label: str
    num_ranks: int

    @property
    def is_alone(self) -> bool:
        """Whether nothing is wrapped around the model."""
        return self.label == ALONE


def sweep(machines: Sequence[int]) -> list[SweepStage]:
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
    stages = [SweepStage(ALONE, 1), *(SweepStage(f"1M/{count}G", count) for count in powers)]
    for number in range(1, len(sizes) + 1):
        used = sizes[:number]
        each = str(used[0]) if min(used) == max(used) else f"{min(used)}-{max(used)}"
        stages.append(SweepStage(f"{number}M/{each}G", sum(used)))
    return stages


class DdpScenario:
    """One start: every stage of every model, each in a group of its own."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.structs.replace(msgspec.convert(dict(config), DdpConfig), seed=seed)
        self._num_groups = 0
        self._warm_model: str | None = None
        self.open_workers: OpenWorkers = LocalWorkers

    def run(self, tell: Tell) -> Iterator[Row]:
        """Model by model; a stage that fails is a row, and the rest go on."""
        config = self._config
        settings = WorkerSettings(
            "shoal.bench.ddp:DdpWorker", config.num_workers, msgspec.to_builtins(config), _ANSWER_S
        )
        with self.open_workers(settings) as workers:
            places = workers.ask("place")
            yield from self._compare_machines(workers, [place["host_id"] for place in places], tell)
            stages = sweep(numbered([place["machine"] for place in places]))
            for model, stage in itertools.product(config.models, stages):
                yield from self._measure(workers, model, stage, tell)

    def _compare_machines(self, workers: Workers, hosts: list[str], tell: Tell) -> Iterator[Row]:
        if len({*hosts}) == 1:
            return
        machines = [machine for machine in workers.ask("machine") if machine is not None]
        for number, machine in enumerate(machines[1:], start=1):
            different = [name for name in COMPARED if machine[name] != machines[0][name]]
            key = {"machine": number, "host": machine["machine"], "differs_in": ", ".join(different)}
            yield measured(ALIKE, key, [float(not different)])
            if "topology" in different:
                tell(f"{machine['machine']} is built otherwise:\n{machine['topology']}")

    def _warm_up(self, workers: Workers, model: str, tell: Tell) -> None:
        """Everybody alone; what is slow about a first time is over then."""
        if self._warm_model != model or not workers.is_running:
            tell(f"{model}: warming up")
            workers.ask("warm_up", model=model)
            self._warm_model = model

    def _measure(self, workers: Workers, model: str, stage: SweepStage, tell: Tell) -> Iterator[Row]:
        config = self._config
        entry = entry_of(model, config.image_size, config.sequence_length)
        inputs = {"num_tokens": entry.num_tokens, "image_size": entry.image_side}
        key = {
            "model": model,
            "batch_size": config.batch_size,
            **{name: number for name, number in inputs.items() if number is not None},
            "label": stage.label,
            "num_ranks": stage.num_ranks,
        }
        self._num_groups += 1
        group_name = None if stage.is_alone else f"ddp-{self._num_groups}"
        try:
            self._warm_up(workers, model, tell)
            tell(f"{model}: {stage.label}")
            times_s = workers.ask(
                "measure",
                among=stage.num_ranks,
                model=model,
                num_ranks=stage.num_ranks,
                group_name=group_name,
            )
        except BenchmarkError as error:
            tell(f"{model}, {stage.label} failed: {one_line(error)}")
            yield measured(SECONDS, key, error=one_line(error))
            return
        yield measured(SECONDS, key, list(itertools.chain.from_iterable(times_s)))
        if stage.num_ranks > 1:
            yield measured(SKEW, key, skew(times_s))


def skew(times_s: Sequence[Sequence[float]]) -> list[float]:
    """Divide the time of the slowest rank by that of the fastest, in each iteration."""
    return [max(times) / min(times) for times in zip(*times_s, strict=True)]


def numbered(names: Sequence[Any]) -> list[int]:
    """Numbers in the place of names, in the order of their first appearance."""
    seen: dict[str, int] = {}
    return [seen.setdefault(str(name), len(seen)) for name in names]


# --- a worker ---


class DdpWorker:
    """What one worker does; its methods are the orders."""

    def __init__(self, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> None:
        place.set_up_process()
        self._place = place
        self._config = msgspec.convert(arguments, DdpConfig)

    def place(self) -> dict[str, Any]:
        """The machine that this worker counts as being on, and the one that it is on."""
        from shoal.group.cluster.rendezvous import host_id

        machines, per_machine = self._place.machines, self._config.workers_per_machine
        machine = machines[self._place.rank] if machines else 0
        part = self._place.local_rank // per_machine if per_machine else 0
        return {"machine": [machine, part], "host_id": host_id()}

    def machine(self) -> dict[str, Any] | None:
        """Describe the machine, by the first worker of each."""
        return describe_machine() if self._place.local_rank == 0 else None

    def warm_up(self, model: str) -> None:
        """Iterate alone, for nobody to see."""
        trainee = self._trainee(model)
        for _ in range(_WARM_ITERATIONS):
            iteration_s(trainee)

    def measure(self, model: str, num_ranks: int, group_name: str | None) -> list[float]:
        """The seconds of each iteration, in a group of so many ranks, or with nothing around the model."""
        from shoal.group.solo import SoloGroup

        config = self._config
        with contextlib.ExitStack() as stack:
            group: Group = SoloGroup()
            if group_name is not None:
                group = stack.enter_context(self._open_group(group_name, num_ranks))
            trainee = self._trainee(model)
            if group_name is not None:
                self._share(group, trainee, stack)
            for _ in range(config.num_warmup):
                iteration_s(trainee)
            group.barrier().wait()
            times_s = [iteration_s(trainee) for _ in range(config.num_iters)]
            group.barrier().wait()  # nobody takes apart what another still needs
            return times_s

    def _trainee(self, model: str) -> Trainee:
        import torch
        from torch.optim import SGD

        config = self._config
        entry = entry_of(model, config.image_size, config.sequence_length)
        device = self._place.device(config.device)
        seed = config.seed + self._place.rank
        network = new_model(entry, seed, device)
        # the document's settings, and its labels
        optimizer = SGD(network.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
        x, y = (tensor.to(device) for tensor in entry.random_batch(seed, config.batch_size))
        labels = torch.ones_like(y).clamp(max=entry.num_classes - 1)
        return Trainee(network, optimizer, itertools.repeat((x, labels)), device)

    def _open_group(self, name: str, num_ranks: int) -> Group:
        config = self._config
        backend: TorchBackend | None = None
        # torch's wrapper opens gloo on the CPU, and NCCL where each worker has a GPU, by itself
        if config.distributed_backend != "shoal" and not (config.is_ddp and self._is_usual):
            backend = config.distributed_backend
        return self._place.open_group(
            name, among=num_ranks, workers_per_machine=config.workers_per_machine, backend=backend
        )

    @property
    def _is_usual(self) -> bool:
        """Whether the backend is the device's own."""
        return self._config.distributed_backend == ("gloo" if self._config.device == "cpu" else "nccl")

    def _check_backend(self, opened: str) -> None:
        """UsageError where torch's wrapper talks by another backend than the report would say."""
        if opened != self._config.distributed_backend:
            raise UsageError(
                f"Workers were to talk by {self._config.distributed_backend}, and {opened} was opened.",
                cause="NCCL refuses workers that share a GPU.",
                next_step=f"give --distributed-backend {opened}.",
            )

    def _share(self, group: Group, trainee: Trainee, stack: contextlib.ExitStack) -> None:
        """Torch's wrapper is taken as it is, for a lone worker too: as a strategy it has hooks of ours."""
        config = self._config
        if config.is_ddp:
            from torch import distributed

            from shoal.group.cluster.torch_world import open_process_group
            from shoal.strategies.ddp import wrap
            from shoal.strategies.options import DDPOptions

            open_process_group(group, trainee.device, stack)
            self._check_backend(distributed.get_backend())
            options = msgspec.convert(config.options, DDPOptions)
            trainee.model = wrap(trainee.model, options, should_start_equal=True)
        else:
            strategy = make_contender(group, config.strategy, config.options)
            stack.enter_context(strategy.attach(trainee.model, trainee.optimizer, stays=True))


def iteration_s(trainee: Trainee) -> float:
    """The seconds of one iteration: forward, loss, backward and the optimizer's step, all done."""
    trainee.optimizer.zero_grad()
    return trainee.seconds_of(trainee.learn)


# --- results ---


def encode_ddp(report: Report) -> bytes:
    """PyTorch's own JSON of this run."""
    return msgspec.json.encode(to_document(report)) + b"\n"


def summarize_ddp(report: Report) -> dict[str, Any]:
    """The RESULT line: percentiles of each stage by model, and the headline."""
    models: dict[str, Any] = {}
    for row in rows_of(report, SECONDS):
        batch_size = int(row.key["batch_size"])
        figures = {f"p{q}": value for q, value in known_percentiles(row.samples).items()}
        models.setdefault(str(row.key["model"]), {})[str(row.key["label"])] = {
            "num_ranks": row.key["num_ranks"],
            "sec_per_iter": {name: round(value, 6) for name, value in figures.items()},
            "examples_per_s_per_worker": round(batch_size / figures["p50"], 1),
        }
        if num_tokens := row.key.get("num_tokens"):
            speed = batch_size * int(num_tokens) / figures["p50"]
            models[str(row.key["model"])][str(row.key["label"])]["tokens_per_s_per_worker"] = round(speed, 1)
    result: dict[str, Any] = {
        "headline": [_headline(model, stages, report) for model, stages in models.items()],
        "conditions": [_condition(report)],
        "device": report.config.get("device", "cpu"),
        "image_size": report.config.get("image_size"),
        "models": models,
    }
    skews = {
        f"{row.key['model']} {row.key['label']}": round(statistics.median(row.samples), 4)
        for row in rows_of(report, SKEW)
    }
    if skews:
        result["slowest_over_fastest"] = skews
    return with_failed(report, result)


def _condition(report: Report) -> str:
    """What holds for all stages alike."""
    config = report.config
    iterations = f"{config['num_iters']} iterations after {config['num_warmup']} to warm up"
    starts = counted(len(report.seeds), "run")
    return f"Strategy {config['strategy']} on {config.get('device', 'cpu')}, {iterations}; {starts}."


def _headline(model: str, stages: dict[str, Any], report: Report) -> str:
    label, last = list(stages.items())[-1]
    seconds = last["sec_per_iter"]["p50"]
    workers = counted(last["num_ranks"], "worker")
    text = f"{model} takes {seconds:.3f} s an iteration on {workers} ({label})"
    if speed := last.get("tokens_per_s_per_worker"):
        text += f", {digits(speed * last['num_ranks'])} tokens/s in all"
    if ALONE in stages and label != ALONE:
        share = 100 * stages[ALONE]["sec_per_iter"]["p50"] / seconds
        text += f": each worker at {share:.0f} % of the speed of one without {report.config['strategy']}"
    return f"{text}."


def ddp_items(report: Report) -> Items:
    """The header, then a table for each model, with what is wrong with it under it."""
    items: Items = [*header_lines(report), ""]
    for row in rows_of(report, ALIKE):
        if min(row.samples) < 1:
            text = f"Warning: {row.key['host']} differs from the first machine: {row.key['differs_in']}."
            items += [(text, "yellow"), ""]
    tables: dict[tuple[Any, Any], list[Row]] = {}
    for row in report.rows:
        if row.metric == SECONDS:
            tables.setdefault((row.key["model"], row.key["batch_size"]), []).append(row)
    for (model, batch_size), rows in tables.items():
        items += [(f"Benchmark: {model} with batch size {batch_size}", "bold"), ""]
        items += list(table_lines([row for row in rows if row.starts]))
        items.append("")
        for row in rows:
            if row.error is not None:
                items.append((f"{row.key['label']} failed: {row.error}", "red"))
        items += _skew_lines(report, model)
    for row in report.failed:
        if row.metric != SECONDS:
            items.append((f"failed: {' '.join(str(row.error).split())}", "red"))
    return items


def header_lines(report: Report) -> Iterator[str]:
    """Versions, what was measured with, and how the machines are built."""
    config, environment = report.config, report.environment
    versions = environment.get("versions", {})
    num_others = len(rows_of(report, ALIKE))
    yield from ("-" * len(_TITLE), _TITLE, "-" * len(_TITLE), "")
    yield f"* Shoal version: {report.code}"
    yield f"* PyTorch version: {versions.get('torch', 'unknown')}"
    yield f"* CUDA version: {versions.get('cuda')}"
    yield f"* Distributed backend: {config['distributed_backend']}"
    if config["bucket_size"] is not None:
        yield f"* Maximum bucket size: {config['bucket_size']}MB"
    yield f"* Strategy: {config['strategy']}"
    if config["image_size"] is not None:
        yield f"* Image size: {config['image_size']}x{config['image_size']}"
    num_tokens = {int(row.key["num_tokens"]) for row in report.rows if "num_tokens" in row.key}
    if num_tokens:
        yield f"* Tokens of an example: {', '.join(map(str, sorted(num_tokens)))}"
    counts = f"{config['num_warmup']} to warm up, {config['num_iters']} measured"
    num_starts = len(report.seeds)
    yield f"* Iterations: {counts}" + (f", in each of {num_starts} starts" if num_starts > 1 else "")
    yield f"* Device: {environment.get('processor' if config['device'] == 'cpu' else 'device')}"
    yield f"* Machine: {environment.get('machine')}" + (f", and {num_others} more" if num_others else "")
    topology = _ESCAPES.sub("", str(environment.get("topology", "")))
    if topology:
        name = "nvidia-smi topo -m" if "GPU0" in topology else "lscpu"
        yield from ("", f"--- {name} ---", "")
        yield from (line.expandtabs().rstrip() for line in topology.splitlines())
        yield from ("", "-" * (len(name) + 8))
    if config["device"] == "cpu":
        yield from ("", "On the CPU: what the table counts as a GPU is a worker of one thread.")
        cores, num_workers = environment.get("cores"), config["num_workers"]
        if not num_others and isinstance(cores, int) and num_workers > cores:
            yield f"{num_workers} workers share {cores} cores, and their figures say so."


def table_lines(rows: list[Row]) -> Iterator[str]:
    """The document's table, of rows of one model; ex/sec is that of one worker."""
    num_tokens = int(rows[0].key.get("num_tokens", 0)) if rows else 0
    head = "tok/sec" if num_tokens else "ex/sec"
    yield f"{'':22}" + f"{'sec/iter':>14}{head:>10}" * len(PERCENTILES)
    for row in rows:
        count = int(row.key["batch_size"]) * (num_tokens or 1)
        line = f"{row.key['num_ranks']:>4} GPUs -- {row.key['label']:>8}:"
        for q, seconds in zip(PERCENTILES, percentiles(row.samples), strict=True):
            line += f"  p{q:02d}:  {seconds:1.3f}s  {int(count / seconds):6d}/s"
        yield line


def _skew_lines(report: Report, model: object) -> Items:
    """One for each stage in which ranks were not equally fast."""
    items: Items = []
    num_iters = int(report.config["num_iters"])
    seconds = {row.key["label"]: row for row in rows_of(report, SECONDS) if row.key["model"] == model}
    for row in rows_of(report, SKEW):
        if row.key["model"] == model and (factor := statistics.median(row.samples)) >= NOTABLE_SKEW:
            label = row.key["label"]
            slowest = slowest_rank(seconds[label], num_iters)
            items.append(
                f"{label}: in the median iteration the slowest rank takes {factor:.2f} times as long as the "
                f"fastest; rank {slowest} is the slowest on the whole."
            )
    return [*items, ""] if items else []


def slowest_rank(row: Row, num_iters: int) -> int:
    """Find it by the median of its iterations; a start holds those of one rank after another."""
    times_s: dict[int, list[float]] = {}
    for start in row.starts:
        for index, time_s in enumerate(start):
            times_s.setdefault(index // num_iters, []).append(time_s)
    return max(times_s, key=lambda rank: statistics.median(times_s[rank]))
