"""`shoal bench latency`: what a model's throughput becomes when the network between its blocks is slow.

After Learning@home's throughput scripts (Ryabinin & Gusev 2020, section 4.1). Three methods compute the same
blocks: 'fast' and 'slow' are model parallelism in this process, 'ours' is expert servers and clients in
others. What measures them is `processes.latency`, which imports torch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.bench.experts import (
    HOST,
    MAX_LOOPS,
    ExpertsConfig,
    check_batches,
    check_clients,
    check_device,
    ensure_files,
)
from shoal.bench.frame import (
    BenchmarkPlan,
    RowKey,
    Tell,
    WholeRunFlags,
    announce,
    curve,
    measured,
    same_fields,
)
from shoal.bench.workers import Child, ask_all, child, client_processes
from shoal.core import Address, BenchmarkError, UsageError
from shoal.core.errors import did_you_mean
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.doctor.machine import default_device, gpus, memory
from shoal.report import Curve, Report, Row
from shoal.report.schema import rows_of, with_failed
from shoal.report.statistics import MIN_SEEDS, MIN_TIMED_STARTS, lead_of, start_medians
from shoal.report.units import counted, digits, scale_for
from shoal.report.views import Items, contest_line, headline, title_line
from shoal.report.words import METRICS

# --- what it is told ---

Method = Literal["fast", "slow", "ours"]
Passes = Literal["forward", "forward+backward"]
METHODS: tuple[Method, ...] = ("fast", "slow", "ours")
DEFAULT_STAGES = 2
"""Devices of a machine without GPUs: processes and stages that share its cores."""
BACKWARD_COST, RECOMPUTED_COST = 2.0, 3.0
"""Of a backward in virtual time, in forwards: by itself, and where the server computes forward again."""
_INNER_DIM = 2048  # of a transformer's feed-forward
_FLOAT_BYTES = 4
_TRAINED = 4  # parameters, gradients and Adam's two moments
_FILES_A_CLIENT = 2
_OTHER_FILES = 256
_DRIVER_ANSWER_S = 10.0
_CORES_A_CLIENT_PROCESS = 4
_LONG_S = 600.0


class LatencyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is measured as it is asked for: each of these is a flag, and stands in the config as it is."""

    block_type: Annotated[Literal["ffn", "transformer"], flag("What each layer of the model is.")] = "ffn"
    hid_dim: Annotated[int, flag("Width of a layer.", ge=1)] = 1024
    layers_per_gpu: Annotated[int, flag("Layers of each device, or host.", ge=1)] = 56
    batch_size: Annotated[int, flag("Samples of a batch.", ge=1)] = 4
    batches_for_latency: Annotated[int, flag("After one that does not count.", ge=1)] = 5
    batches_for_throughput: Annotated[int, flag("In a run, of each client.", ge=1)] = 10
    """One after another where one batch is under way at a time; in `fast` on a CPU, of each batch that is
    under way."""
    throughput_runs: Annotated[int, flag("Measured after another.", ge=1)] = 5
    linspace_points: Annotated[int, flag("Pings from 0 to --max-ping.", ge=1)] = 10
    jobs: Annotated[int, flag("Clients of ours at once.", "--jobs", "-j", ge=1)] = 64
    compute_ms: Annotated[float, flag("--virtual: of one batch in one layer, forward.", ge=0.001)] = 10.0


class LatencyFlags(LatencyOptions, frozen=True, kw_only=True):
    """The flags of `shoal bench latency`, by the names of the document's scripts."""

    gpus: Annotated[
        list[str] | None,
        flag(
            "Devices, with --layers-per-gpu each; one GPU may be named twice. On a CPU: stages that share "
            "its cores.",
            metavar="N ...",
            shown="all GPUs; 0 1 on a CPU",
        ),
    ] = None
    max_ping: Annotated[float, flag("The longest mean delay of a layer, seconds.", ge=0)] = 0.2
    client_processes: Annotated[
        int | None, flag("That clients are spread over.", ge=1, shown="one for 4 cores")
    ] = None
    hosts: Annotated[
        list[str] | None,
        flag(
            "Servers of ours, by `shoal serve`; without any, one for each device is started.",
            metavar="HOST:PORT ...",
        ),
    ] = None
    secret_file: Annotated[
        Path | None, flag("The swarm's secret; SHOAL_SECRET where it is not given.", metavar="FILE")
    ] = None
    max_batch_size: Annotated[
        int | None,
        flag(
            "Samples that a server computes at once.", ge=1, shown="half of a device's share of all clients"
        ),
    ] = None
    passes: Annotated[
        Literal["forward", "both"], flag("Forward as the document, or also forward and backward together.")
    ] = "forward"
    methods: Annotated[tuple[str, ...], flag("What is measured, some of these.", metavar="NAME,...")] = (
        METHODS
    )
    device: Annotated[
        Literal["cpu", "cuda"] | None, flag("Where layers are computed.", shown="cuda where there is one")
    ] = None
    virtual: Annotated[bool, flag("Simulate it: delays take no time, and computing what is said.")] = False
    increase_file_limit: Annotated[bool, flag("Allow as many open sockets as clients need.")] = False


class LatencyConfig(LatencyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of blocks in a row, who computes them, and what is measured at which pings."""

    device: str = "cpu"
    gpus: tuple[int, ...] = (0, 1)
    """One device each, with `layers_per_gpu` blocks; one GPU may be several of them. On a CPU: stages."""
    max_ping_s: float = 0.2
    client_processes: int = 1
    hosts: tuple[str, ...] = ()
    """Servers that run already; none: the benchmark starts one for each device."""
    secret_file: str | None = None
    max_batch_size: int = 2048
    """Samples that a server computes at once."""
    passes: tuple[Passes, ...] = ("forward",)
    methods: tuple[Method, ...] = METHODS
    is_virtual: bool = False

    def __post_init__(self) -> None:
        if self.hosts and not self.is_virtual and len(self.hosts) != len(self.gpus):
            raise UsageError(
                f"{len(self.hosts)} hosts serve another number of layers than {len(self.gpus)} devices hold.",
                cause="all methods compute the same model: --layers-per-gpu for each device, and each host.",
                next_step="give as many --gpus as --hosts, or leave --gpus out.",
            )
        check_batches(self.batch_size, self.max_batch_size)
        check_clients(self.jobs, self.client_processes, "one of --jobs")

    @property
    def num_layers(self) -> int:
        """Blocks of the whole model."""
        return self.layers_per_gpu * len(self.gpus)

    @property
    def pings_s(self) -> list[float]:
        """Mean delays, from none to the longest, each once."""
        last = max(1, self.linspace_points - 1)
        return list(dict.fromkeys(self.max_ping_s * index / last for index in range(self.linspace_points)))

    @property
    def expert_class(self) -> str:
        """What a block is called among experts."""
        return f"lah-{self.block_type}"

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the whole model's parameters, norms and biases left out."""
        dim = self.hid_dim
        weights = 24 * dim * dim if self.block_type == "ffn" else 4 * dim * dim + 2 * _INNER_DIM * dim
        return _FLOAT_BYTES * weights * self.num_layers

    @property
    def needed_bytes(self) -> int:
        """What the model takes, with all that trains it where that is measured."""
        return self.parameter_bytes * (_TRAINED if "forward+backward" in self.passes else 1)

    @property
    def waiting_s(self) -> float:
        """What the delays of `slow`, or of `ours`, add up to, one batch after another."""
        num_batches = self.batches_for_latency + 1 + self.throughput_runs * self.batches_for_throughput + 1
        num_calls = sum(1 if passes == "forward" else 2 for passes in self.passes)
        return sum(self.pings_s) * num_batches * num_calls * self.num_layers

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        return _FILES_A_CLIENT * self.jobs * len(self.gpus) + _OTHER_FILES

    def calls(self, passes: Passes) -> int:
        """Waits of one batch."""
        return self.num_layers * (1 if passes == "forward" else 2)


def latency_command(flags: LatencyFlags, run: WholeRunFlags, more: Sequence[str] | None) -> BenchmarkPlan:
    """Throughput under latency: model parallelism without delays, with them, and expert servers.

    A model is a row of layers. 'fast' holds neighbouring layers on one device and waits for nothing; 'slow'
    waits after every layer, ping × Exp(1); 'ours' are expert servers, which many clients ask at once, each
    waiting as long after every layer. After Learning@home's throughput scripts; forward only, as they are.
    """
    config = latency_config(flags, more or ())
    if not flags.virtual:
        announce(check_machine(config, should_raise_limit=flags.increase_file_limit))
        announce(waiting_text(config))
    return BenchmarkPlan(config, run, summarize_latency, latency_items)


def latency_config(flags: LatencyFlags, more: Sequence[str] = ()) -> LatencyConfig:
    """Make of the flags what is measured; `more` are values that follow the first of --gpus or --hosts."""
    gpus, hosts = _listed_values(flags, more)
    return config_of(
        {
            **same_fields(flags, LatencyConfig),
            "gpus": gpus,
            "max_ping_s": flags.max_ping,
            "hosts": hosts,
            "secret_file": None if flags.secret_file is None else str(flags.secret_file.absolute()),
            "passes": ("forward",) if flags.passes == "forward" else ("forward", "forward+backward"),
            "methods": parsed_methods(flags.methods),
            "is_virtual": flags.virtual,
        }
    )


def _listed_values(flags: LatencyFlags, more: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Devices and hosts: after one flag, after several, or between commas; `more` follows the first value."""
    numbers, addresses = (
        [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
        for texts in (flags.gpus, flags.hosts)
    )
    for text in more:
        if flags.gpus and text.isdecimal():
            numbers.append(text)
        elif flags.hosts and ":" in text:
            addresses.append(text)
        else:
            raise UsageError(
                f"{text!r} belongs to no flag.",
                next_step="say --gpus 0 1 2 3, and --hosts HOST:PORT HOST:PORT.",
            )
    wrong = [number for number in numbers if not number.isdecimal()]
    if wrong:
        raise UsageError(f"--gpus {wrong[0]} is no device.", next_step="give numbers: --gpus 0 1 2 3.")
    return tuple(map(int, numbers)), tuple(addresses)


def waiting_text(config: LatencyConfig) -> str:
    """What the delays alone take, in words; who would wait for hours is told how not to. '' for nothing."""
    methods, waiting_s = [name for name in config.methods if name != "fast"], config.waiting_s
    if not methods or not waiting_s:
        return ""
    is_long = waiting_s >= _LONG_S
    took = f"{waiting_s / 60:,.0f} minutes" if is_long else scale_for("s", waiting_s).format(waiting_s)
    line = f"The delays of {' and of '.join(methods)} take about {took}{' each' * (len(methods) > 1)}."
    advice = " --virtual takes none of it; fewer --linspace-points or --throughput-runs take less."
    return line + advice * is_long


def config_of(given: dict[str, Any]) -> LatencyConfig:
    """The configuration of the flags that were given; UsageError for what cannot be on this machine."""
    told = {name: value for name, value in given.items() if value is not None}
    is_virtual = told.get("is_virtual", False)
    told["hosts"] = tuple(str(Address.parse(host)) for host in told.get("hosts", ()))
    told.setdefault("device", "cpu" if is_virtual else default_device())
    check_device(told["device"])
    if not told.get("gpus"):
        count = len(told["hosts"]) or None
        if told["device"] == "cpu":
            told["gpus"] = tuple(range(count or DEFAULT_STAGES))
        else:
            num_gpus = max(1, len(gpus(_DRIVER_ANSWER_S).found))
            told["gpus"] = tuple(number % num_gpus for number in range(count or num_gpus))
    jobs = told.get("jobs", LatencyConfig().jobs)
    told.setdefault("client_processes", max(1, min(jobs, num_cores() // _CORES_A_CLIENT_PROCESS)))
    # half of what comes to one device: were all clients computed together, they would stay together, and all
    # devices but one would wait
    batch_size = told.get("batch_size", LatencyConfig().batch_size)
    told.setdefault("max_batch_size", int(batch_size * max(1, jobs // (2 * len(told["gpus"])))))
    return LatencyConfig(**told)


def check_machine(config: LatencyConfig, *, should_raise_limit: bool) -> str | None:
    """UsageError for a model that does not fit, or too few open files; what was changed, in words."""
    available_bytes = memory().available_bytes
    if config.device == "cpu" and available_bytes is not None and config.needed_bytes > available_bytes:
        raise UsageError(
            f"{config.num_layers} blocks need {config.needed_bytes / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB are free.",
            next_step="lower --layers-per-gpu or --hid-dim, or simulate it: --virtual.",
        )
    cause = "every client has a connection to every server."
    return ensure_files(config.num_files, should_raise=should_raise_limit, cause=cause, clients="--jobs")


def parsed_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """Put methods into the order in which they are measured; UsageError for one that there is not."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise UsageError(
            f"There is no method {unknown[0]!r}.{did_you_mean(unknown[0], METHODS)}"
            if unknown
            else "No method is measured.",
            next_step=f"give some of {','.join(METHODS)}.",
        )
    return tuple(method for method in METHODS if method in names)


# --- one start ---

AXIS = "ping_s"


class LatencyPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method at one ping."""

    method: Method
    passes: Passes
    ping_s: float
    latency_s: list[float] = []
    samples_per_s: list[float] = []
    error: str | None = None

    def rows(self) -> Iterator[Row]:
        """The rows of this point in a report."""
        key: RowKey = {"method": self.method, "passes": self.passes, "ping_ms": round(1e3 * self.ping_s, 6)}
        yield measured("throughput", key, self.samples_per_s, self.error)
        if self.error is None:
            yield measured("latency", key, self.latency_s)


class LatencyScenario:
    """One start: every method at every ping."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), LatencyConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Row | Curve]:
        """Measure, or simulate, and tell row after row, then all of them as curves."""
        all_found = []
        for found in self._simulated(tell) if self._config.is_virtual else self._measured(tell):
            all_found.append(found)
            yield from found.rows()
        yield from curves(all_found, self._config.pings_s)

    def _measured(self, tell: Tell) -> Iterator[LatencyPoint]:
        if self._config.methods != ("ours",):
            yield from self._baselines(tell)
        if "ours" in self._config.methods:
            yield from self._ours(tell)

    def _baselines(self, tell: Tell) -> Iterator[LatencyPoint]:
        from shoal.bench.processes.latency import Baseline, Pings

        config = self._config
        tell(f"making {config.num_layers} blocks")
        baseline = Baseline(config, self._seed)
        for method, pings_s in (("fast", [0.0]), ("slow", config.pings_s)):
            if method not in config.methods:
                continue
            baseline.place(in_turn=method == "slow")
            for index, ping_s in enumerate(pings_s):
                for passes in config.passes:
                    tell(_point_text(method, passes, index, len(pings_s)))
                    alone, flow = (
                        Pings(ping_s, self._seed, f"{phase} {passes} slow") if method == "slow" else None
                        for phase in ("latency", "throughput")
                    )
                    yield LatencyPoint(
                        method=method,
                        passes=passes,
                        ping_s=ping_s,
                        latency_s=baseline.latencies(passes, alone),
                        samples_per_s=baseline.rates(passes, flow),
                    )

    def _ours(self, tell: Tell) -> Iterator[LatencyPoint]:
        """Servers that do not answer at all fail every point; other methods keep theirs."""
        config = self._config
        points = [(ping_s, passes) for ping_s in config.pings_s for passes in config.passes]
        with contextlib.ExitStack() as stack:
            try:
                fleet = stack.enter_context(opened_fleet(config, self._seed, tell))
            except BenchmarkError as error:
                text = " ".join(str(error).split())
                for ping_s, passes in points:
                    yield LatencyPoint(method="ours", passes=passes, ping_s=ping_s, error=text)
                return
            for ping_s, passes in points:
                tell(_point_text("ours", passes, config.pings_s.index(ping_s), len(config.pings_s)))
                try:
                    latency_s, rates = fleet.latencies(ping_s, passes), fleet.rates(ping_s, passes)
                    told: dict[str, Any] = {"latency_s": latency_s, "samples_per_s": rates}
                except BenchmarkError as error:
                    told = {"error": error.what}
                yield LatencyPoint(method="ours", passes=passes, ping_s=ping_s, **told)

    def _simulated(self, tell: Tell) -> Iterator[LatencyPoint]:
        from shoal.bench.workers import run_tasks

        config = self._config
        tasks = [
            {"method": method, "passes": passes, "ping_s": ping_s}
            for method in config.methods
            for ping_s in (config.pings_s if method != "fast" else [0.0])
            for passes in config.passes
        ]
        shared = {"config": msgspec.to_builtins(config), "seed": self._seed}
        num_processes = max(1, min(num_cores(), len(tasks)))
        results = run_tasks(
            "shoal.bench.processes.latency:run_point",
            [{**shared, **task} for task in tasks],
            num_processes=num_processes,
            tell=tell,
        )
        for number, (task, result) in enumerate(zip(tasks, results, strict=True), 1):
            tell(f"methods at pings, in virtual time: {number} of {len(tasks)}")
            told = {"error": result.what} if isinstance(result, BenchmarkError) else result
            yield msgspec.convert({**task, **told}, LatencyPoint)


def curves(all_found: Sequence[LatencyPoint], pings_s: Sequence[float]) -> Iterator[Curve]:
    """A line over the pings for each method: one for each run, and each measured batch, so that they differ.

    What has no delay is as fast at every ping.
    """
    lines: dict[tuple[Method, Passes], list[LatencyPoint]] = {}
    for found in all_found:
        if found.error is None:
            lines.setdefault((found.method, found.passes), []).append(found)
    for metric in ("throughput", "latency"):
        for (method, passes), points in lines.items():
            at = points * len(pings_s) if method == "fast" else points
            axis = list(pings_s) if method == "fast" else [point.ping_s for point in points]
            values = [point.samples_per_s if metric == "throughput" else point.latency_s for point in at]
            for repeat in zip(*values, strict=True):
                yield curve(metric, {"method": method, "passes": passes}, {"value": list(repeat), AXIS: axis})


def _point_text(method: str, passes: str, index: int, num_points: int) -> str:
    return f"{method}, {passes}, ping: {index + 1} of {num_points}"


# --- servers and client processes ---

_HOST_EXPERTS = "shoal.bench.processes.experts:host"
_ATTEND = "shoal.bench.processes.latency:attend"


class Fleet:
    """Clients that are connected; each order is for one ping and one kind of passes."""

    def __init__(self, clients: list[Child]) -> None:
        self._clients = clients

    def connect(self) -> None:
        """BenchmarkError when a server does not answer, or does not serve what it should."""
        for answer in ask_all(self._clients, "connect"):
            _values(answer)

    def latencies(self, ping_s: float, passes: Passes) -> list[float]:
        """Seconds of each batch of one client, while the others are silent."""
        return _values(self._clients[0].ask("latency", ping_s=ping_s, passes=passes))

    def rates(self, ping_s: float, passes: Passes) -> list[float]:
        """Samples a second of all clients, in each run."""
        answers = ask_all(self._clients, "throughput", ping_s=ping_s, passes=passes)
        return [sum(parts) for parts in zip(*map(_values, answers), strict=True)]


@contextlib.contextmanager
def opened_fleet(config: LatencyConfig, seed: int, tell: Tell) -> Iterator[Fleet]:
    """Clients, and the servers that they ask where those do not run already."""
    with contextlib.ExitStack() as stack:
        servers = list(config.hosts)
        if not servers:
            tell(f"starting {len(config.gpus)} servers of {config.layers_per_gpu} blocks each")
            ready = [stack.enter_context(_server(config, seed, number)) for number in range(len(config.gpus))]
            servers = [f"{HOST}:{server.expect()['port']}" for server in ready]
        num_processes = config.client_processes
        tell(f"connecting {config.jobs} clients in {num_processes} processes")
        arguments = {"config": msgspec.to_builtins(config), "seed": seed, "servers": servers}
        started = client_processes(_ATTEND, arguments, config.jobs, num_processes)
        fleet = Fleet(stack.enter_context(started))
        try:
            fleet.connect()
        except BenchmarkError as error:
            if not config.hosts:
                raise
            raise BenchmarkError(
                error.what,
                cause="a host serves nothing, other experts, or asks for a swarm's secret (--secret-file).",
                next_step=f"on each host: shoal serve --expert-class {config.expert_class} --hidden-dim "
                f"{config.hid_dim} --num-experts {config.layers_per_gpu} --listen HOST:PORT",
            ) from error
        yield fleet


def _server(config: LatencyConfig, seed: int, number: int) -> contextlib.AbstractContextManager[Child]:
    """One for each device; those that share the cores of a CPU divide them."""
    cores = num_cores()
    gpu = config.gpus[number]
    experts = ExpertsConfig(
        preset="latency",
        num_experts=config.layers_per_gpu,
        num_clients=config.jobs,
        client_processes=1,
        batch_size=config.batch_size,
        max_batch_size=config.max_batch_size,
        num_handlers=max(1, min(MAX_LOOPS, cores // (2 * len(config.gpus)))),
        hidden_dim=config.hid_dim,
        expert_class=config.expert_class,
        backward="forward+backward" in config.passes,
        device="cpu" if config.device == "cpu" else f"cuda:{gpu}",
    )
    threads = {"OMP_NUM_THREADS": str(max(1, cores // len(config.gpus)))} if config.device == "cpu" else {}
    return child(
        _HOST_EXPERTS,
        {"config": msgspec.to_builtins(experts), "seed": seed + number * config.layers_per_gpu},
        name=f"Server {number + 1} of {len(config.gpus)}",
        variables=threads,
    )


def _values(answer: dict[str, Any]) -> list[float]:
    if "error" in answer:
        raise BenchmarkError(answer["error"])
    values: list[float] = answer["values"]
    return values


# --- what it prints ---

_FORWARD: Passes = "forward"
_NAMES: dict[Method, str] = {"ours": "expert servers", "slow": "model parallelism"}
_KEPT = 0.8  # of the throughput: less has a reason worth telling
_NO_SPREAD = 1e-9


def summarize_latency(report: Report) -> dict[str, Any]:
    """The RESULT line: what is left of each method's throughput at the longest ping, forward."""
    config = msgspec.convert(report.config, LatencyConfig)
    result: dict[str, Any] = {
        "block_type": config.block_type,
        "num_layers": config.num_layers,
        "hid_dim": config.hid_dim,
        "batch_size": config.batch_size,
        "jobs": config.jobs,
        "max_ping_s": config.pings_s[-1],
        "is_virtual": config.is_virtual,
    }
    result |= {name: float(f"{value:.4g}") for name, value in _figures(report, config).items()}
    result["headline"] = _sentences(result, config, report)
    where = "in virtual time" if config.is_virtual else "in real processes"
    layers = f"{config.num_layers} layers of {config.block_type}, hidden size {config.hid_dim:,}"
    who = f"{counted(config.jobs, 'client')} with batches of {config.batch_size}, {where}"
    result["conditions"] = [f"{layers}; {who}; {counted(len(report.seeds), 'run')}."]
    return with_failed(report, result)


def _figures(report: Report, config: LatencyConfig) -> dict[str, float]:
    last_s = config.pings_s[-1]
    at = {
        (method, ping_s): rate
        for method in config.methods
        for ping_s in (0.0, last_s)
        if (rate := _mean(report, method, ping_s)) is not None
    }
    figures = {f"{method}_throughput": at[method, 0.0] for method in config.methods if (method, 0.0) in at}
    for method in config.methods:
        if last_s and method != "fast" and {(method, 0.0), (method, last_s)} <= at.keys():
            figures[f"{method}_throughput_max_ping"] = at[method, last_s]
            figures[f"{method}_kept"] = at[method, last_s] / at[method, 0.0]
    if {("ours", last_s), ("slow", last_s)} <= at.keys():
        figures["ours_over_slow"] = at["ours", last_s] / at["slow", last_s]
    if {("ours", last_s), ("fast", 0.0)} <= at.keys():
        figures["ours_over_fast"] = at["ours", last_s] / at["fast", 0.0]
    return figures


def _mean(report: Report, method: Method, ping_s: float) -> float | None:
    row = _row(report, "throughput", method, _FORWARD, ping_s)
    return statistics.fmean(row.samples) if row is not None else None


def _row(report: Report, metric: str, method: Method, passes: Passes, ping_s: float) -> Row | None:
    key = {"method": method, "passes": passes, "ping_ms": round(1e3 * ping_s, 6)}
    return next((row for row in rows_of(report, metric) if row.key == key), None)


def _sentences(result: dict[str, Any], config: LatencyConfig, report: Report) -> list[str]:
    last_s = config.pings_s[-1]
    needed = MIN_SEEDS if config.is_virtual else MIN_TIMED_STARTS
    rows = {name: _row(report, "throughput", method, _FORWARD, last_s) for method, name in _NAMES.items()}
    starts = {name: start_medians(row) for name, row in rows.items() if row is not None}
    num_starts = min(map(len, starts.values()), default=0)
    begin = "With" if num_starts >= needed else f"In {counted(num_starts, 'run')}, with"
    ping = f"{begin} a mean delay of {digits(1e3 * last_s)} ms at every layer"
    sentences = []
    if "ours_kept" in result:
        who = f"{counted(config.jobs, 'client')} of expert servers {'keeps' if config.jobs == 1 else 'keep'}"
        sentences.append(f"{ping}, {who} {100 * result['ours_kept']:.0f} % of the throughput without delay.")
        if result["ours_kept"] < _KEPT and result["ours_throughput_max_ping"] > _limit(config) / 2:
            sentences.append(
                f"A batch waits {digits(_waits_s(config))} s on its way, so that "
                f"{counted(config.jobs, 'client')} cannot do more than {digits(_limit(config))} samples/s "
                "there; more of them (-j) can."
            )
    if "slow_kept" in result:
        kept = digits(100 * result["slow_kept"], 2)
        sentences.append(f"{ping}, model parallelism keeps {kept} % of its throughput.")
    if "ours_over_slow" in result:
        lead = lead_of(starts, "higher", needed)
        where, times = "There" if last_s else "Without delay", result["ours_over_slow"]
        if not lead.is_told_apart:
            sentences.append(contest_line(f"{where}, in samples a second", lead, digits))
        elif times > 1:
            sentences.append(f"{where}, expert servers do {digits(times)} times as many samples a second.")
        else:
            times = digits(1 / times)
            sentences.append(f"{where}, model parallelism does {times} times as many samples a second.")
    if config.is_virtual and sentences:
        sentences.append(
            f"Simulated: {digits(config.compute_ms)} ms for a batch in a block, forward; bytes take no time."
        )
    return sentences


def _waits_s(config: LatencyConfig) -> float:
    """Of a batch on its way, forward, at the longest ping."""
    return config.num_layers * config.pings_s[-1]


def _limit(config: LatencyConfig) -> float:
    """Samples a second that clients with one batch each cannot pass, whatever the servers can do."""
    waits_s = _waits_s(config)
    return config.jobs * config.batch_size / waits_s if waits_s else math.inf


def latency_items(report: Report) -> Items:
    """The lines of each method, and what failed."""
    config = msgspec.convert(report.config, LatencyConfig)
    items: Items = [title_line(report), *headline(report), ""]
    where = "in virtual time" if config.is_virtual else f"on {config.device}"
    items.append(
        f"{config.num_layers} {config.block_type} blocks of width {config.hid_dim}, batches of "
        f"{config.batch_size}, {counted(config.jobs, 'client')}, {where}"
    )
    for passes in config.passes:
        items += ["", (passes, "bold")]
        for method in config.methods:
            for ping_s in config.pings_s if method != "fast" else [0.0]:
                items.append(_line(report, method, passes, ping_s))
    items.append("")
    reasons = dict.fromkeys(" ".join((row.error or "").split()) for row in report.failed)
    return items + [(f"failed: {reason}", "red") for reason in reasons]


def _line(report: Report, method: Method, passes: Passes, ping_s: float) -> str:
    parts = [f"{method:4}  ping {ping_s:.4f} s"]
    for metric in ("latency", "throughput"):
        row = _row(report, metric, method, passes, ping_s)
        unit = METRICS[metric].unit
        parts.append(f"{metric} {_spread(row)} {unit}" if row is not None else f"{metric} failed")
    return "  ".join(parts)


def _spread(row: Row) -> str:
    """Mean and sample deviation; of one sample no deviation is known."""
    mean = statistics.fmean(row.samples)
    deviation = "n/a"
    if len(row.samples) > 1:
        spread = statistics.stdev(row.samples)
        deviation = digits(spread if spread > _NO_SPREAD * abs(mean) else 0.0)
    return f"{digits(mean, 4):>9} ± {deviation:>8}"
