"""`shoal bench experts`: one server process, many clients in others, loopback TCP between them.

In one run the same clients send the same bytes to a bare echo, to blocking sockets where they are few, and to
experts, and the server tells how fast its experts are alone. All but the experts are measured before they are
asked and again after: a machine that changes its speed meets all of them. The processes themselves are
`processes.experts`, which imports torch.
"""

from __future__ import annotations

import contextlib
import selectors
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import msgspec

from shoal.bench.frame import (
    BenchmarkPlan,
    RowKey,
    Tell,
    WholeRunFlags,
    announce,
    measured,
    same_fields,
)
from shoal.bench.workers import Child, child, client_processes, resident_bytes
from shoal.core import BenchmarkError, UsageError
from shoal.core.errors import did_you_mean
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.doctor.machine import default_device, ensure_open_files, torch_build
from shoal.report import Report, Row
from shoal.report.schema import Start, by_reason, by_start, with_failed
from shoal.report.statistics import known_percentiles
from shoal.report.units import counted, ranged, ratio, rounded
from shoal.report.views import Items, title_line

# --- presets and flags ---

HOST = "127.0.0.1"
ECHO = "bench.echo"
"""The method that sends back what it is sent."""
MAX_RAW_BYTES = 32 << 10
"""Of a client's batch that is also sent over bare sockets: larger ones measure the kernel."""
MAX_LOOPS = 8
"""Network loop threads that a preset asks for at most: beyond it they take the cores from each other."""
PROCESSES_A_CORE = 4
_BATCHES_AT_ONCE = 4  # that the server computes together, where neither preset nor flag says how many samples
_FILES_A_CLIENT = 6  # two connections and a bare one, and the loop of a thread
_FILES_OF_A_CLIENT = 5  # the same at the server; what it sends through is a second descriptor
_PRESETS = "the preset's"
_OTHER_FILES = 256  # CUDA's own are about a hundred


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the document's table."""

    num_experts: int = 16
    num_clients: int = 128
    batch_size: int = 2048
    max_batch_size: int | None = None
    """None stands for four batches."""
    num_handlers: int | None = None
    """None stands for half as many as there are clients."""
    backward: bool = True
    expert_class: str = "ffn"
    should_raise_file_limit: bool = False
    published_samples_per_s: float | None = None
    """What hivemind's document tells of it, where it does."""


PUBLISHED_ON = "GeForce GTX 1080 Ti"
"""The device of the document's figures."""
_LONG_S = 60.0  # of computing alone: such a run is announced

_SMALL = Preset(num_experts=1, num_clients=512, batch_size=1, max_batch_size=8192)
PRESETS: dict[str, Preset] = {
    "default": Preset(published_samples_per_s=28_581.213),
    "ffn_forward_backward": Preset(published_samples_per_s=28_581.213),
    "ffn_forward": Preset(backward=False, published_samples_per_s=97_604.282),
    "ffn_small_batch": Preset(num_experts=4, batch_size=32, max_batch_size=8192, backward=False),
    "ffn_small_batch_512clients": _SMALL,
    "ffn_small_batch_512clients_32handlers": msgspec.structs.replace(_SMALL, num_handlers=32),
    "ffn_massive": Preset(
        num_clients=512, batch_size=512, max_batch_size=8192, backward=False, should_raise_file_limit=True
    ),
    "minimalistic": Preset(num_experts=1, num_clients=1, num_handlers=1),
    "nop": Preset(backward=False, expert_class="nop"),
}


class ExpertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server, its clients, and what they ask for."""

    preset: str = "default"
    num_experts: int
    num_clients: int
    client_processes: int
    """That the clients are spread over, each with a connection and a thread of its own."""
    num_batches_per_client: int = 16
    batch_size: int
    max_batch_size: int
    """Samples that the server computes at once."""
    num_handlers: int
    """Network loop threads of the server."""
    hidden_dim: int = 1024
    expert_class: str
    backward: bool
    """Whether each batch that went forward goes backward too, and teaches its expert."""
    device: str
    precision: str = "fp32"

    @property
    def num_samples(self) -> int:
        """That all clients send."""
        return self.num_clients * self.num_batches_per_client * self.batch_size

    @property
    def num_calls(self) -> int:
        """That all clients make, forward and backward apart."""
        return self.num_clients * self.num_batches_per_client * (2 if self.backward else 1)

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        clients_a_process = -(-self.num_clients // self.client_processes)
        return max(_FILES_OF_A_CLIENT * self.num_clients, _FILES_A_CLIENT * clients_a_process) + _OTHER_FILES

    def __post_init__(self) -> None:
        check_batches(self.batch_size, self.max_batch_size)
        check_clients(self.num_clients, self.client_processes, "one client")


class ExpertsFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench experts`; what is not given is the preset's."""

    preset: Annotated[
        str,
        flag(
            "default (also ffn_forward_backward), ffn_forward, ffn_small_batch, ffn_small_batch_512clients, "
            "ffn_small_batch_512clients_32handlers, ffn_massive, minimalistic or nop.",
            metavar="NAME",
        ),
    ] = "default"
    num_experts: Annotated[int | None, flag("That the server serves.", ge=1, shown=_PRESETS)] = None
    num_clients: Annotated[
        int | None, flag("Each with a connection and a thread of its own.", ge=1, shown=_PRESETS)
    ] = None
    client_processes: Annotated[
        int | None, flag("That clients are spread over.", ge=1, shown="4 for each core, or the clients")
    ] = None
    num_batches_per_client: Annotated[int | None, flag("One after another.", ge=1, shown="16")] = None
    batch_size: Annotated[int | None, flag("Samples of a client's call.", ge=1, shown=_PRESETS)] = None
    max_batch_size: Annotated[
        int | None,
        flag("Samples that the server computes at once.", ge=1, shown=f"{_PRESETS}; 4 times --batch-size"),
    ] = None
    hidden_dim: Annotated[int | None, flag("Of a sample.", ge=1, shown="1024")] = None
    expert_class: Annotated[
        str | None,
        flag("ffn, transformer, nop, …, or package.module:factory.", metavar="NAME", shown=_PRESETS),
    ] = None
    backward: Annotated[
        bool | None, flag("Train, or only ask.", "--backward/--no-backward", shown=_PRESETS)
    ] = None
    num_handlers: Annotated[
        int | None,
        flag("Network loop threads of the server.", ge=1, shown=f"{_PRESETS}, at most 8 and half the cores"),
    ] = None
    device: Annotated[
        str | None, flag("Of the server: cpu, cuda, cuda:1.", shown="cuda where there is one")
    ] = None
    precision: Annotated[
        Literal["fp32", "tf32", "bf16"] | None, flag("That the server computes in.", shown="fp32")
    ] = None
    increase_file_limit: Annotated[
        bool, flag("Allow as many open sockets as clients need; ffn_massive does so anyway.")
    ] = False


def check_batches(batch_size: int, max_batch_size: int) -> None:
    """UsageError for those that no server takes."""
    if max_batch_size < batch_size:
        raise UsageError(
            f"No server that computes {max_batch_size} samples at once takes a batch of {batch_size}.",
            next_step=f"give --max-batch-size {batch_size} or more.",
        )


def check_clients(num_clients: int, num_processes: int, one: str) -> None:
    """UsageError for processes that have none; `one` says how a client is asked for."""
    if not 1 <= num_processes <= num_clients:
        raise UsageError(
            f"{num_clients} clients cannot be spread over {num_processes} processes.",
            next_step=f"give at least {one} for each of --client-processes.",
        )


def preset_named(name: str) -> Preset:
    """UsageError, with the nearest name, where there is no such preset; hyphens are underscores."""
    preset = PRESETS.get(name.replace("-", "_"))
    if preset is None:
        raise UsageError(
            f"There is no preset '{name}'.{did_you_mean(name, PRESETS)}",
            next_step=f"give --preset one of {', '.join(PRESETS)}.",
        )
    return preset


def long_run(config: ExpertsConfig, local_samples_per_s: float) -> str | None:
    """What to say beforehand of a run that takes minutes, by what the module alone does; None of others."""
    least_s = ratio(config.num_samples, local_samples_per_s)
    if least_s < _LONG_S:
        return None
    return (
        f"computing {config.num_samples:,} samples takes {least_s / 60:,.0f} minutes or more on "
        f"{config.device}; --num-batches-per-client makes it shorter"
    )


def published_samples_per_s(config: ExpertsConfig) -> float | None:
    """What the document tells of such a run; None of others, whose flags change what is asked, too."""
    preset = preset_named(config.preset)
    asked = ("num_experts", "num_clients", "batch_size", "backward", "expert_class")
    is_changed = any(getattr(config, name) != getattr(preset, name) for name in asked)
    is_changed = is_changed or (config.hidden_dim, config.num_batches_per_client) != (1024, 16)
    return None if is_changed else preset.published_samples_per_s


def experts_command(flags: ExpertsFlags, run: WholeRunFlags) -> BenchmarkPlan:
    """Clients that send batches to the experts of one server, beside a bare echo and the module alone."""
    should_raise = flags.increase_file_limit or preset_named(flags.preset).should_raise_file_limit
    config = config_of(flags.preset, msgspec.structs.asdict(flags))
    announce(ensure_files(config.num_files, should_raise=should_raise))
    return BenchmarkPlan(config, run, summarize_experts, experts_items)


def config_of(name: str, given: Mapping[str, Any]) -> ExpertsConfig:
    """A preset with the flags that were given on a command line, by name, in place of its own numbers.

    `--num-handlers` counts as it is given; a preset's number is a bound beside the cores.
    """
    preset = preset_named(name)
    fields = [field for field in ExpertsConfig.__struct_fields__ if field != "preset"]
    told = {field: given[field] for field in fields if given.get(field) is not None}
    num_clients = told.get("num_clients", preset.num_clients)
    batch_size = told.get("batch_size", preset.batch_size)
    num_handlers = preset.num_handlers or max(1, num_clients // 2)
    defaults = {
        **same_fields(preset, ExpertsConfig),
        "client_processes": min(num_clients, PROCESSES_A_CORE * num_cores()),
        "max_batch_size": max(batch_size, preset.max_batch_size or _BATCHES_AT_ONCE * batch_size),
        "num_handlers": min(num_handlers, MAX_LOOPS, max(1, num_cores() // 2)),
    }
    told["device"] = check_device(told["device"]) if "device" in told else default_device()
    return ExpertsConfig(preset=name.replace("-", "_"), **{**defaults, **told})


def check_device(device: str) -> str:
    """The device itself; UsageError for one that cannot be here, before processes are started."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Experts cannot be served on {device!r}.", next_step="use cpu, cuda, or cuda:1.")
    if kind == "cuda" and not torch_build().startswith("CUDA"):
        raise UsageError(
            f"There is no GPU for --device {device}.",
            cause="torch is a build without CUDA.",
            next_step="use --device cpu, or see what `shoal doctor` says.",
        )
    return device


def ensure_files(
    num_files: int,
    *,
    should_raise: bool,
    cause: str = "every client has a connection of its own, and the server holds them all.",
    clients: str = "--num-clients",
) -> str | None:
    """See that all processes may open what they need; what was changed, in words. UsageError otherwise."""
    try:
        return ensure_open_files(num_files, should_raise=should_raise)
    except UsageError as error:
        step = f"use fewer {clients}" if should_raise else "add --increase-file-limit"
        raise UsageError(
            error.what, cause=cause, next_step=f"{step}, or run `ulimit -n {num_files}` first."
        ) from error


# --- what clients count ---

_MAX_TEXT = 300


class Tally(msgspec.Struct):
    """What clients have done in a phase; moments are on the clock that all processes of a machine share."""

    num_samples: int = 0
    """Of batches that went all the way."""
    forward_us: list[int] = []
    """How long each call took that was answered."""
    backward_us: list[int] = []
    failures: dict[str, int] = {}
    """Calls that failed, by the name of the error."""
    first_failure: str = ""
    """What the first of these errors said."""
    ended_s: float = 0.0

    @property
    def num_failed(self) -> int:
        """How many calls failed, whatever the error."""
        return sum(self.failures.values())

    def add(self, other: Tally) -> None:
        """What others have done in the same phase."""
        self.num_samples += other.num_samples
        self.forward_us += other.forward_us
        self.backward_us += other.backward_us
        for name, count in other.failures.items():
            self.fail(name, count, other.first_failure)
        self.ended_s = max(self.ended_s, other.ended_s)

    def fail(self, name: str, count: int = 1, text: str = "") -> None:
        """Some calls have failed."""
        self.failures[name] = self.failures.get(name, 0) + count
        self.first_failure = self.first_failure or text

    def note(self, error: Exception) -> None:
        """A call has failed, whatever the error is: it counts under its name."""
        self.fail(type(error).__name__, text=" ".join(f"{type(error).__name__}: {error}".split())[:_MAX_TEXT])


# --- one start ---


@dataclass
class ExpertsOutcome:
    """What one run found out."""

    launch_s: float
    """From nothing to a server that answers, imports and all."""
    experts_s: float
    networking_s: float
    echo: Tally = field(default_factory=Tally)
    echo_samples_per_s: list[float] = field(default_factory=list)
    raw_samples_per_s: list[float] = field(default_factory=list)
    """Of blocking sockets, a thread for each at both ends; empty where batches are large."""
    asked: Tally = field(default_factory=Tally)
    asked_s: float = 0.0
    local_samples_per_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    """Of the server, from before the experts are asked to after; empty where the system does not tell."""
    server: dict[str, int] = field(default_factory=dict)
    num_lost: int = 0
    complaint: str = ""

    def rows(self, config: ExpertsConfig, total_s: float) -> Iterator[Row]:
        """Tell the report what was measured, and an error where calls failed."""
        key: RowKey = {
            "scenario": config.preset,
            "expert_class": config.expert_class,
            "num_clients": config.num_clients,
            "batch_size": config.batch_size,
            "backward": config.backward,
        }
        asked, echo = self.asked, self.echo
        figures: dict[str, Sequence[float]] = {
            "samples_per_s": [ratio(asked.num_samples, self.asked_s)],
            "echo_samples_per_s": self.echo_samples_per_s,
            "raw_samples_per_s": self.raw_samples_per_s,
            "local_samples_per_s": self.local_samples_per_s,
            "num_samples": [asked.num_samples],
            "asked": [self.asked_s],
            "forward_latency": [us / 1e6 for us in asked.forward_us],
            "backward_latency": [us / 1e6 for us in asked.backward_us],
            "failed_calls": [asked.num_failed],
            "failed_echoes": [echo.num_failed],
            "lost_clients": [self.num_lost],
            "launch": [self.launch_s],
            "startup_experts": [self.experts_s],
            "startup_networking": [self.networking_s],
            "server_processes": [self.server["num_processes"]],
            "server_rss": self.rss_bytes,
            "total": [total_s],
        }
        for name in ("allocated", "reserved"):
            if f"{name}_bytes" in self.server:
                figures[f"gpu_{name}"] = [self.server[f"{name}_bytes"]]
        for metric, samples in figures.items():
            if samples:
                yield measured(metric, key, samples)
        for name, count in asked.failures.items():
            yield measured("failures", {**key, "reason": name}, [count])
        if text := self._failure_text(config):
            yield measured("completed", key, error=text)

    def _failure_text(self, config: ExpertsConfig) -> str:
        parts = []
        num_echoes = config.num_calls * len(self.echo_samples_per_s)
        for what, num, tally in (("calls", config.num_calls, self.asked), ("echoes", num_echoes, self.echo)):
            if tally.failures:
                reasons = ", ".join(f"{name} × {count}" for name, count in tally.failures.items())
                parts.append(f"{tally.num_failed} of {num} {what} failed: {reasons}.")
        if self.num_lost:
            parts.append(f"{self.num_lost} of {config.num_clients} clients were lost: {self.complaint}")
        if first := self.asked.first_failure or self.echo.first_failure:
            parts.append(f"The first: {first}")
        return " ".join(parts)


class ExpertsScenario:
    """One start: a server, then its clients, then the end of both."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), ExpertsConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Row]:
        """Serve and ask, and tell what it took."""
        began_s = time.perf_counter()
        config = self._config
        tell(f"starting a server of {counted(config.num_experts, 'expert')}")
        arguments = {"config": msgspec.to_builtins(config), "seed": self._seed}
        with child("shoal.bench.processes.experts:host", arguments, name="The server") as server:
            ready = server.expect()
            launch_s = time.perf_counter() - began_s
            outcome = ExpertsOutcome(launch_s, ready["experts_s"], ready["networking_s"])
            self._measure(server, ready, outcome, tell)
        yield from outcome.rows(config, time.perf_counter() - began_s)

    def _measure(self, server: Child, ready: Mapping[str, Any], outcome: ExpertsOutcome, tell: Tell) -> None:
        config = self._config

        def look() -> None:
            if size_bytes := resident_bytes(ready["pid"]):
                outcome.rss_bytes.append(size_bytes)

        tell("experts without a network")
        outcome.local_samples_per_s.append(server.ask("local"))
        if (long := long_run(config, outcome.local_samples_per_s[0])) is not None:
            tell(long)
        clients = counted(config.num_clients, "client")
        processes = counted(config.client_processes, "process", "processes")
        tell(f"connecting {clients} in {processes}")
        with ClientFleet(config, self._seed, ready) as fleet:
            fleet.connect()
            self._echo(fleet, outcome, tell)
            tell(f"experts, {clients}")
            look()
            outcome.asked, outcome.asked_s = fleet.phase("experts", look)
            look()
            outcome.server = server.ask("memory")
            self._echo(fleet, outcome, tell)
            tell("experts without a network, once more")
            outcome.local_samples_per_s.append(server.ask("local"))
            outcome.num_lost, outcome.complaint = fleet.num_lost, fleet.complaint

    def _echo(self, fleet: ClientFleet, outcome: ExpertsOutcome, tell: Tell) -> None:
        tell(f"bare echoes, {counted(self._config.num_clients, 'client')}")
        tally, seconds = fleet.phase("echo")
        outcome.echo_samples_per_s.append(ratio(tally.num_samples, seconds))
        outcome.echo.add(tally)
        tally, seconds = fleet.phase("raw")
        if tally.num_samples:
            outcome.raw_samples_per_s.append(ratio(tally.num_samples, seconds))


# --- client processes ---

_TICK_S = 0.1
_ANSWER_S = 600.0
_CALL_S = 2.0  # more of patience for each batch: calls have deadlines, so that only a bug takes longer
_ATTEND = "shoal.bench.processes.experts:attend"
LOST = "LostClient"
"""What calls count as whose client died before it could tell of them."""


class ClientFleet:
    """All clients, spread over processes that are started at once; a context manager."""

    def __init__(self, config: ExpertsConfig, seed: int, server: Mapping[str, Any]) -> None:
        self._config = config
        self._arguments = {
            "config": msgspec.to_builtins(config),
            "seed": seed,
            "port": server["port"],
            "raw_port": server.get("raw_port", 0),
            "uids": server["uids"],
        }
        self._sizes: dict[Child, int] = {}
        """Clients of each process that has not been lost."""
        self._stack = contextlib.ExitStack()
        self.num_lost = 0
        """Clients whose process died or hung."""
        self.complaint = ""
        """Why the last of them was lost."""

    def __enter__(self) -> Self:
        num_clients, num_processes = self._config.num_clients, self._config.client_processes
        started = client_processes(_ATTEND, self._arguments, num_clients, num_processes)
        for rank, process in enumerate(self._stack.enter_context(started)):
            self._sizes[process] = len(range(rank, num_clients, num_processes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def connect(self) -> None:
        """Wait until every client has its connection."""
        self._ask("connect")

    def phase(self, order: str, on_tick: Callable[[], None] | None = None) -> tuple[Tally, float]:
        """Have all clients do something at once; what came of it, and seconds until the last was done."""
        began_s = time.monotonic()
        answers = self._ask(order, on_tick)
        total = Tally()
        for answer in answers:
            total.add(msgspec.convert(answer, Tally))
        if self.num_lost:
            num_calls = self._config.num_calls // self._config.num_clients
            total.fail(LOST, self.num_lost * num_calls)
        return total, total.ended_s - began_s

    def _ask(self, order: str, on_tick: Callable[[], None] | None = None) -> list[Any]:
        for process in self._sizes:
            process.order(order=order, details={})
        answers = []
        patience_s = _ANSWER_S + _CALL_S * self._config.num_batches_per_client
        until_s = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            for process in self._sizes:
                selector.register(process, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    selector.unregister(key.fileobj)
                    try:
                        answers.append(key.data.expect()["answer"])
                    except BenchmarkError as error:
                        self._lose(key.data, error)
                if on_tick is not None:
                    on_tick()
                if time.monotonic() > until_s:
                    for key in list(selector.get_map().values()):
                        selector.unregister(key.fileobj)
                        self._lose(key.data, _stuck(order, patience_s))
        return answers

    def _lose(self, process: Child, error: BenchmarkError) -> None:
        """Go on without these clients; BenchmarkError when nobody is left."""
        process.kill()
        self.num_lost += self._sizes.pop(process)
        self.complaint = " ".join(error.what.split())
        if not self._sizes:
            raise error


def _stuck(order: str, patience_s: float) -> BenchmarkError:
    return BenchmarkError(
        f"A client process did not answer '{order}' within {patience_s:g} s.",
        cause="the machine is overloaded, or out of memory.",
        next_step="run it with fewer clients, or smaller batches.",
    )


# --- what it prints ---

MIB, GB = 1 << 20, 1e9
_PERCENTILES = (50, 95)


def summarize_experts(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts.

    `p50_ms` and `p95_ms` are of single forward calls, those with `backward_` of single backward calls.
    """
    config = msgspec.convert(report.config, ExpertsConfig)
    starts = by_start(report, "samples_per_s")
    result: dict[str, Any] = {"status": _status(report), **msgspec.to_builtins(config)}
    if starts:
        result["conditions"] = _conditions(config, len(starts))
        each = [_figures(start) for start in starts]
        result["headline"] = _headline(each, config)
        if (published := published_samples_per_s(config)) is not None:
            result["published_samples_per_s"] = published
        names = dict.fromkeys(name for figures in each for name in figures)
        for name in names:
            values = [figures[name] for figures in each if name in figures]
            result[name] = rounded(statistics.median(values))
        if failures := by_reason(report, "failures"):
            result["failures"] = failures
    return with_failed(report, result)


def experts_items(report: Report) -> Items:
    """The lines of each start, and what failed in any of them."""
    items: Items = [title_line(report), ""]
    config = msgspec.convert(report.config, ExpertsConfig)
    items += [f"Status: {_status(report)}", *_parameter_lines(config)]
    starts = by_start(report, "samples_per_s")
    for number, start in enumerate(starts, 1):
        if len(starts) > 1:
            items += ["", f"Start {number} of {len(starts)}"]
        items += list(_lines(start, config, str(report.environment.get("device", ""))))
    items.append("")
    for row in report.failed:
        # without the traceback that may follow: it was shown when it happened, and the report has it
        words = (row.error or "").partition("Traceback (most recent call last)")[0].split()
        items.append((f"failed: {' '.join(words).removesuffix(' Likely cause:')}", "red"))
    if report.failed and starts:
        items.append(("Warning: calls failed; times and rates end with the calls that did not.", "red"))
    return items


def _status(report: Report) -> str:
    return "Failure" if report.failed else "Success"


# --- figures ---


def _figures(start: Start) -> dict[str, float]:
    """Of one start."""
    figures = {
        "samples_per_s": start["samples_per_s"][0],
        "echo_samples_per_s": statistics.fmean(start["echo_samples_per_s"]),
        "local_samples_per_s": statistics.fmean(start["local_samples_per_s"]),
        "startup_s": start["startup_experts"][0] + start["startup_networking"][0],
        "startup_experts_s": start["startup_experts"][0],
        "startup_networking_s": start["startup_networking"][0],
        "launch_s": start["launch"][0],
        "num_samples": start["num_samples"][0],
        "seconds": start["asked"][0],
        "failed_calls": start["failed_calls"][0],
        "failed_echoes": start["failed_echoes"][0],
        "lost_clients": start["lost_clients"][0],
    }
    if raw := start.get("raw_samples_per_s"):
        figures["raw_samples_per_s"] = statistics.fmean(raw)
        figures["fraction_of_raw"] = ratio(figures["samples_per_s"], figures["raw_samples_per_s"])
    for kind, prefix in (("forward", ""), ("backward", "backward_")):
        latencies_s = start.get(f"{kind}_latency", [])
        if latencies_s:
            for q, value_s in known_percentiles(latencies_s, _PERCENTILES).items():
                figures[f"{prefix}p{q}_ms"] = 1e3 * value_s
    figures["server_processes"] = start["server_processes"][0]
    if rss_bytes := start.get("server_rss"):
        figures["server_rss_before_mib"] = rss_bytes[0] / MIB
        figures["server_rss_half_mib"] = rss_bytes[len(rss_bytes) // 2] / MIB
        figures["server_rss_mib"] = rss_bytes[-1] / MIB
    for name in ("allocated", "reserved"):
        if f"gpu_{name}" in start:
            figures[f"gpu_{name}_mib"] = start[f"gpu_{name}"][0] / MIB
    figures["total_s"] = start["total"][0]
    return figures


def _headline(each: Sequence[Mapping[str, float]], config: ExpertsConfig) -> list[str]:
    """How fast the server was, and how near to its bounds; medians of the starts, and how far they reach."""
    speed = ranged([figures["samples_per_s"] for figures in each], "samples/s")
    bounds = [
        figures["samples_per_s"] / min(figures["echo_samples_per_s"], figures["local_samples_per_s"])
        for figures in each
        if min(figures["echo_samples_per_s"], figures["local_samples_per_s"]) > 0
    ]
    clients = f"{counted(config.num_clients, 'client')} at once"
    sentences = [f"The server handled {speed} from {clients}."]
    if bounds:
        share = ranged([100 * bound for bound in bounds], "%")
        error = "; above 100 % is an error of measurement" if statistics.median(bounds) > 1 else ""
        sentences.append(
            f"That is {share} of the lower of its bounds: the module without a network, and an echo of "
            f"the same bytes{error}."
        )
    failed = sum(figures["failed_calls"] for figures in each)
    if failed:
        sentences.append(f"{failed:,.0f} of {len(each) * config.num_calls:,} calls failed.")
    return sentences


def _conditions(config: ExpertsConfig, num_starts: int) -> list[str]:
    """What was served, and what was asked for."""
    passes = "forward and backward" if config.backward else "forward"
    batches = counted(config.num_batches_per_client, "batch", "batches")
    batches += f" of {counted(config.batch_size, 'sample')}"
    processes = counted(config.client_processes, "process", "processes")
    clients = f"{counted(config.num_clients, 'client')} in {processes} on the same machine"
    experts = (
        f"{counted(config.num_experts, 'expert')} ({config.expert_class}, hidden size {config.hidden_dim:,})"
    )
    return [
        f"One server with {experts} on {config.device}, {config.precision}.",
        f"{clients}, each with {batches}, {passes}.",
        f"{counted(num_starts, 'run')}.",
    ]


# --- lines ---


def _parameter_lines(config: ExpertsConfig) -> Iterator[str]:
    server = (
        "num_experts",
        "expert_class",
        "hidden_dim",
        "max_batch_size",
        "num_handlers",
        "device",
        "precision",
    )
    clients = ("num_clients", "client_processes", "num_batches_per_client", "batch_size", "backward")
    for title, names in (("Server", server), ("Clients", clients)):
        yield f"{title}: " + ", ".join(f"{name}={getattr(config, name)}" for name in names)


def _lines(start: Start, config: ExpertsConfig, device: str) -> Iterator[str]:
    figures = _figures(start)
    yield (
        f"Server start-up: {figures['startup_s']:.3f} s ({figures['startup_experts_s']:.3f} s experts + "
        f"{figures['startup_networking_s']:.3f} s networking)"
    )
    yield f"Processed {figures['num_samples']:,.0f} examples in {figures['seconds']:.3f} s"
    passes = "forward + backward" if config.backward else "forward"
    yield f"Throughput, {passes}: {figures['samples_per_s']:,.0f} samples/s"
    if (published := published_samples_per_s(config)) is not None:
        yield f"hivemind's document, on a {PUBLISHED_ON}: {published:,.0f} samples/s"
    yield (
        f"Beside it: a bare echo of the same frames {figures['echo_samples_per_s']:,.0f} samples/s, the "
        f"module alone {figures['local_samples_per_s']:,.0f} samples/s"
    )
    if "raw_samples_per_s" in figures:
        yield (
            f"Blocking sockets with the same bytes: {figures['raw_samples_per_s']:,.0f} samples/s, of which "
            f"the experts reach {figures['fraction_of_raw']:.2f}"
        )
    for kind, prefix in (("forward", ""), ("backward", "backward_")):
        if f"{prefix}p50_ms" in figures:
            known = [q for q in _PERCENTILES if f"{prefix}p{q}_ms" in figures]
            some = ", ".join(f"p{q} {figures[f'{prefix}p{q}_ms']:.4g}" for q in known)
            yield f"Latency of a {kind} call (ms): {some}"
    yield f"Failed calls: {figures['failed_calls']:,.0f} of {config.num_calls:,}"
    yield f"Total time: {figures['total_s']:.3f} s"
    yield _device_line(figures, config, device)
    if "server_rss_mib" in figures:
        before, half, after = (figures[f"server_rss_{when}mib"] for when in ("before_", "half_", ""))
        yield f"Server memory (RSS, MiB): {before:.1f} before, {half:.1f} half-way, {after:.1f} after"


def _device_line(figures: dict[str, float], config: ExpertsConfig, device: str) -> str:
    line = f"Device: {config.device}" + (f" ({device})" if device not in ("", config.device) else "")
    if "gpu_allocated_mib" in figures:
        allocated, reserved = (figures[f"gpu_{name}_mib"] * MIB / GB for name in ("allocated", "reserved"))
        line += f", {allocated:.3f} GB allocated, {reserved:.3f} GB reserved"
    return line
