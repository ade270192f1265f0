"""`shoal bench collectives`: what the operations of a group take, beside torch.distributed's over gloo.

Both run in the same worker processes and take turns; the workers meet in the group's barrier before each
sample, whosever it is, and a sample is the time of the slowest of them. On a CPU it is that of one call. On a
GPU it is that of many calls which are issued back to back, divided by their number: nobody waits for the GPU
in between. With `machines` the workers are those of several machines, which talk over streams: once in the
clear, once encrypted, and gloo takes turns with both.
What is called, and how results are checked, is `processes.collectives`'.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from shoal.bench.contenders import DeviceKind, check_profile, device_of, synchronize, tell_sharing
from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell
from shoal.bench.ranks import HostFlags
from shoal.bench.workers import BenchPlace, LocalWorkers, OpenWorkers, Workers, WorkerSettings, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.core.clock import ManualClock
from shoal.core.errors import did_you_mean
from shoal.core.run_options import flag
from shoal.report import Report, Row
from shoal.report.schema import with_failed
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits
from shoal.report.views import Items, title_line

if TYPE_CHECKING:
    import torch

    from shoal.bench.processes.collectives import Call
    from shoal.group import Group

T = TypeVar("T")
OPS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "exchange",
    "pair_gossip",
    "publish_fetch",
    "publish_mix",
    "barrier",
)
KIB, MIB = 1 << 10, 1 << 20
GROUP, FOREIGN, GLOO = "group", "foreign", "gloo"
"""Who makes a call: Shoal with the group's own memory, Shoal with any other, and gloo."""
PLAIN, TLS, LINK = "plain", "tls", "link"
"""Between machines: Shoal in the clear, Shoal encrypted, and what the links of a profile take alone."""
NO_TENSOR = "none"
_ROUNDS = 6
_REPEATS = {
    "cpu": ((64 * KIB, 180), (MIB, 90), (25 * MIB, 18), (1 << 62, 12)),
    "cuda": ((MIB, 12), (1 << 62, 6)),
}
"""Samples by device, for sizes up to so many bytes."""
CALLS_PER_SAMPLE = {"cpu": 1, "cuda": 20}
_ANSWER_S = 900.0
"""For all samples of a case between machines, whose links may be slow."""
_ELEMENT_BYTES = 4
_MAX_WARMED_BYTES = MIB
"""Up to this a call finds in the caches what the one before has left there."""
_ENCRYPTED = {"both": (False, True), "no": (False,), "yes": (True,)}


class CollectivesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says which operations are measured, by whom, and how often."""

    workers: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB)
    """Bytes of each worker's tensor of float32."""
    ops: tuple[str, ...] = ()
    """None stands for all that this version knows."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where tensors are; workers share GPUs where there are fewer."""
    repeats: int | None = None
    """Samples of each kind in a start; by default more for smaller sizes."""
    calls_per_sample: int | None = None
    """Issued back to back; by default 1 on a CPU and 20 on a GPU."""
    machines: tuple[tuple[int, int], ...] = ()
    """Pairs of machines and workers on each, measured instead of `workers`."""
    encrypted: tuple[bool, ...] = ()
    """What is measured between machines, without and with encryption; none stands for both."""
    profile: str | None = None
    """The links between machines: a preset's name or a TOML file. Nothing slows gloo down, so it is left
    out."""

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in OPS:
                raise UsageError(
                    f"There is no collective {op!r}.{did_you_mean(op, OPS)}",
                    next_step=f"choose from {', '.join(OPS)}.",
                )
        if any(machines < 2 or workers < 1 for machines, workers in self.machines):
            raise _no_machines("Between machines there are 2 of them or more, with a worker each.")
        if not self.machines and (self.encrypted or self.profile):
            raise UsageError(
                "Encryption and a profile are of links between machines.",
                next_step="say, for example, --machines 2x1.",
            )
        if not self.machines and (not self.workers or min(self.workers) < 2):
            raise UsageError(
                "A collective needs 2 workers or more.", next_step="say, for example, --workers 2,4."
            )
        if not self.sizes or any(size < 4 or size % 4 for size in self.sizes):
            raise UsageError(
                "A size is a whole number of float32, 4 bytes each.",
                next_step="say, for example, --sizes 4KB,1MB.",
            )

    @property
    def encryptions(self) -> tuple[str, ...]:
        """The contenders that are Shoal between machines."""
        return tuple(TLS if is_encrypted else PLAIN for is_encrypted in self.encrypted or (False, True))


SHORT = CollectivesConfig(sizes=(4 * KIB, MIB, 25 * MIB), repeats=6)
BETWEEN_MACHINES = CollectivesConfig(
    workers=(),
    sizes=(4 * KIB, MIB, 25 * MIB, 100 * MIB),
    ops=("all_reduce",),
    machines=((2, 1), (4, 1), (2, 2)),
)


class CollectivesFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench collectives`."""

    workers: Annotated[
        tuple[int, ...] | None,
        flag("Numbers of workers.", "--workers", "--np", "-np", metavar="N,...", shown="2,4"),
    ] = None
    machines: Annotated[
        str | None,
        flag(
            "Between M machines of N workers each, into which this one is split: try 2x1,4x1,2x2.",
            metavar="MxN,...",
        ),
    ] = None
    encrypted: Annotated[
        Literal["both", "yes", "no"] | None,
        flag("Between machines: with encryption, without, or both in turn.", shown="both"),
    ] = None
    profile: Annotated[
        str | None, flag("Between machines: links as slow as these, a preset's name or a TOML file.")
    ] = None
    device: Annotated[DeviceKind, flag("Where tensors are; workers may share a GPU.")] = "cpu"
    sizes: Annotated[
        tuple[str, ...] | None,
        flag(
            "Of each worker's tensor.",
            metavar="SIZE,...",
            shown="4KB,64KB,1MB,25MB,100MB; between machines without 64KB",
        ),
    ] = None
    ops: Annotated[
        tuple[str, ...] | None,
        flag("Operations.", metavar="OP,...", shown="all of them; between machines all_reduce"),
    ] = None
    repeats: Annotated[
        int | None,
        flag(
            "Samples of each kind in a start: of one call on a CPU, of 20 back to back on a GPU.",
            ge=1,
            shown="12 to 180, by size; 6 to 12 on a GPU",
        ),
    ] = None


def collectives_config(flags: CollectivesFlags, hosts: HostFlags, *, is_short: bool) -> CollectivesConfig:
    """Make of the flags what is measured, on one machine or between several."""
    check_profile(flags.profile)
    config = SHORT if is_short else CollectivesConfig()
    machines = _machines(flags, hosts)
    if machines is not None:
        sizes = SHORT.sizes if is_short else BETWEEN_MACHINES.sizes
        config = msgspec.structs.replace(BETWEEN_MACHINES, sizes=sizes, repeats=config.repeats)
    given = {
        "workers": flags.workers,
        "machines": machines,
        "encrypted": None if flags.encrypted is None else _ENCRYPTED[flags.encrypted],
        "profile": flags.profile,
        "device": device_of(flags.device),
        "sizes": None if flags.sizes is None else tuple(map(parse_size, flags.sizes)),
        "ops": None if flags.ops is None else tuple(op.replace("-", "_") for op in flags.ops),
        "repeats": flags.repeats,
    }
    config = msgspec.structs.replace(
        config, **{name: value for name, value in given.items() if value is not None}
    )
    between = tuple(num_machines * num_workers for num_machines, num_workers in config.machines)
    tell_sharing(config.device, hosts, max(between or config.workers))
    return config


def collectives_command(flags: CollectivesFlags, hosts: HostFlags, run: RunFlags) -> BenchmarkPlan:
    """Operations of a group in memory that workers share, or between machines, beside gloo's."""
    config = collectives_config(flags, hosts, is_short=run.short)
    where = None
    if hosts.are_named:
        ((num_machines, num_workers),) = config.machines
        where = hosts.starter(num_machines * num_workers)
    return BenchmarkPlan(config, run, summarize_collectives, collectives_items, where=where)


def _machines(flags: CollectivesFlags, hosts: HostFlags) -> tuple[tuple[int, int], ...] | None:
    """Read pairs of machines and workers on each, as asked for or as hosts have slots; None on one."""
    machines = None if flags.machines is None else parse_machines(flags.machines)
    if hosts.are_named:
        named = _on_hosts(hosts)
        if machines not in (None, named):
            raise UsageError(
                f"--machines {flags.machines} is not what the hosts are.", next_step="leave --machines out."
            )
        machines = named
    if machines is not None and flags.workers is not None:
        raise UsageError(
            "--workers is of one machine, and several are to be measured.",
            next_step="leave it out: --machines 2x4 is 2 machines of 4 workers.",
        )
    return machines


def _on_hosts(hosts: HostFlags) -> tuple[tuple[int, int], ...]:
    """Take the machines that were named; workers see whether all have as many of them as the first."""
    num_slots, mates = hosts.num_workers(None, 0), hosts.workers_per_machine
    if mates is None:
        raise UsageError(
            "The hosts are this machine alone.", next_step="split it: --machines 2x1, without hosts."
        )
    if num_slots % mates or num_slots == mates:
        raise UsageError(
            f"The first host has {mates} workers, and all have {num_slots}: those are no equal machines.",
            next_step="name 2 or more with as many workers each: -H host1:2,host2:2.",
        )
    return ((num_slots // mates, mates),)


# --- the scenario ---


class CollectivesScenario:
    """One start: workers for each number of workers, or for each number of machines."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), CollectivesConfig)
        self._seed = seed
        self.open_workers: OpenWorkers = LocalWorkers

    def run(self, tell: Tell) -> Iterator[Row]:
        """Every operation with every size; one that fails is a row, and the rest go on."""
        device = self._config.device
        for settings, key in self._settings():
            where = _place_text(int(key.get("machines", 0)), int(key["workers"]))
            with self.open_workers(settings) as workers:
                for op in self._config.ops or OPS:
                    for size_bytes in self._config.sizes if op != "barrier" else (0,):
                        of = f" of {size_text(size_bytes)}" if size_bytes else ""
                        tell(f"{where} on {device}: {op}{of}")
                        yield from self._measure(
                            workers, op, {"device": device, **key, "size_bytes": size_bytes}
                        )

    def _settings(self) -> Iterator[tuple[WorkerSettings, RowKey]]:
        """The workers that are started, and the key of their rows: on one machine, or on several."""
        config = self._config
        for num_workers in () if config.machines else config.workers:
            settings = WorkerSettings("shoal.bench.collectives:work", num_workers, {"device": config.device})
            yield settings, {"workers": num_workers}
        function = "shoal.bench.collectives:work_between_machines"
        for machines, workers in config.machines:
            key: RowKey = {"machines": machines, "workers": workers}
            arguments = {
                **key,
                "device": config.device,
                "via": config.encryptions,
                "profile": config.profile,
                "seed": self._seed,
            }
            yield (
                WorkerSettings(function, machines * workers, arguments, _ANSWER_S),
                key if config.profile is None else {**key, "profile": config.profile},
            )

    def _measure(self, workers: Workers, op: str, key: RowKey) -> Iterator[Row]:
        size_bytes = int(key["size_bytes"])
        repeats = self._config.repeats or usual_repeats(size_bytes, self._config.device)
        num_rounds = min(_ROUNDS, repeats)
        details = {
            "num_rounds": num_rounds,
            "samples_per_round": -(-repeats // num_rounds),
            "calls_per_sample": self._config.calls_per_sample or CALLS_PER_SAMPLE[self._config.device],
        }
        try:
            answers = workers.ask("measure", op=op, size_bytes=size_bytes, **details)
        except BenchmarkError as error:
            for via in self._config.encryptions if self._config.machines else (GROUP,):
                yield _row(op, _key_of(key, via), error=one_line(error))
            return
        for via in answers[0]:
            outcomes = [answer[via] for answer in answers]
            wrong = [text for text in outcomes if isinstance(text, str)]
            if wrong:
                yield _row(op, _key_of(key, via), error=wrong[0])
            else:
                samples = [max(times) for times in zip(*outcomes, strict=True)]
                yield _row(op, _key_of(key, via), starts=[samples])


def _key_of(key: RowKey, via: str) -> RowKey:
    """The row of one contender; between machines it says whether that encrypts."""
    if "machines" not in key:
        return {**key, "via": via}
    return {**key, "encrypted": via == TLS, "via": GROUP if via in (PLAIN, TLS) else via}


def usual_repeats(size_bytes: int, device: str) -> int:
    """Return as many as a steady median takes: small calls scatter most, large ones take longest."""
    return next(repeats for limit, repeats in _REPEATS[device] if size_bytes <= limit)


def _row(op: str, key: RowKey, **outcome: Any) -> Row:
    return Row(key=key, metric=op, unit="s", direction="lower", **outcome)


# --- a worker ---


def work(place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Stopwatch:
    """Measure what is ordered."""
    place.set_up_process()
    stack.enter_context(place.gloo())
    device = place.device(arguments["device"])
    group = stack.enter_context(place.open_group("collectives"))
    return Stopwatch(group, device)


def work_between_machines(
    place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack
) -> Stopwatch:
    """Measure what is ordered, in groups whose machines have so many `workers` each."""
    from shoal.group import Shaped

    place.set_up_process()
    device = place.device(arguments["device"])
    profile = arguments["profile"]
    opened = {}
    for via in arguments["via"]:
        group = place.open_group(
            f"collectives-{via}",
            workers_per_machine=arguments["workers"],
            encrypt="always" if via == TLS else "never",
        )
        opened[via] = stack.enter_context(group)
    meeting = next(iter(opened.values()))
    sizes = Counter(meeting.machines).values()
    if [*sizes] != [arguments["workers"]] * arguments["machines"]:
        raise UsageError(
            f"The machines have {', '.join(map(str, sizes))} workers, and each is to have "
            f"{arguments['workers']}.",
            next_step="name hosts with as many workers each.",
        )
    contenders = {via: GroupContender(group) for via, group in opened.items()}
    if profile is not None:
        between: dict[str, Any] = {"between": "machines", "seed": arguments["seed"]}
        contenders = {via: GroupContender(Shaped(group, profile, **between)) for via, group in opened.items()}
        alone, now_s = _links_alone(meeting, profile, **between)
        contenders[LINK] = GroupContender(alone, now_s=now_s)
    else:  # no profile slows gloo down
        stack.enter_context(place.gloo())
    return Stopwatch(meeting, device, contenders, has_gloo=profile is None)


def _links_alone(group: Group, profile: str, **between: Any) -> tuple[Group, Callable[[], float]]:
    """Shape a group by a clock of its own, in which time passes at once: what the links alone would take."""
    from shoal.group import Shaped
    from shoal.group.operations import ClockSleeper

    clock = ManualClock()

    class PassingTime(ClockSleeper):
        def sleep(self, seconds: float) -> None:
            clock.advance(seconds)

    return Shaped(group, profile, sleeper=PassingTime(clock), **between), clock.now_s


@dataclass(frozen=True, slots=True)
class GroupContender:
    """One of those that take turns: a group with one kind of memory, and the clock that times its calls."""

    group: Group
    has_own_memory: bool = True
    now_s: Callable[[], float] = time.perf_counter


class Stopwatch:
    """Makes the calls of all contenders in turn; workers meet in `group` before each sample."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        contenders: Mapping[str, GroupContender] | None = None,
        *,
        has_gloo: bool = True,
    ) -> None:
        self._group = group
        self._device = device
        self._contenders = contenders or {GROUP: GroupContender(group), FOREIGN: GroupContender(group, False)}
        self._has_gloo = has_gloo
        self._versions = itertools.count()

    def measure(
        self, op: str, size_bytes: int, num_rounds: int, samples_per_round: int, calls_per_sample: int
    ) -> dict[str, list[float] | str]:
        """Return, by contender, seconds of this worker's calls, or what was wrong with somebody's result."""
        from shoal.group import share

        wrong: dict[str, list[float] | str] = {}
        calls: dict[str, Call] = {}
        with contextlib.ExitStack() as stack:
            for via, call in self._calls(op, size_bytes, stack):
                # told to all: who has the right result must not wait for who has not
                complaints = [text for text in share(self._group, self._complaint(call)) if text]
                if complaints:
                    wrong[via] = f"wrong result: {complaints[0]}"
                else:
                    calls[via] = call
            times: dict[str, list[float] | str] = {via: [] for via in calls}
            num_warm = 1 if size_bytes <= _MAX_WARMED_BYTES else 0
            for via in taking_turns(list(calls), num_rounds):
                now_s = self._contenders[via].now_s if via in self._contenders else time.perf_counter
                timed = self._time(calls[via], num_warm + samples_per_round, calls_per_sample, now_s)
                times[via] = [*times[via], *timed[num_warm:]]
            self._group.barrier().wait()  # somebody may still read what this worker gives back next
        return times | wrong

    def _calls(self, op: str, size_bytes: int, stack: contextlib.ExitStack) -> Iterator[tuple[str, Call]]:
        from shoal.bench.processes.collectives import GLOO_CALLS, SHOAL, Stage

        num_elements = size_bytes // _ELEMENT_BYTES
        for via, each in self._contenders.items():
            if size_bytes or each.has_own_memory:  # without a tensor its memory makes no difference
                stage = Stage(each.group, num_elements, each.has_own_memory, self._device, self._versions)
                stack.callback(stage.free)
                yield via, SHOAL[op](stage)
        if self._has_gloo and op in GLOO_CALLS:
            yield GLOO, GLOO_CALLS[op](Stage(self._group, num_elements, device=self._device))

    def _complaint(self, call: Call) -> str:
        """Say what is wrong with the first result of a call; nothing where it is right."""
        from shoal.bench.processes.collectives import difference

        self._group.barrier().wait()
        complaint = ""
        for number, (result, expected) in enumerate(zip(call.run(), call.expected, strict=True)):
            differs = difference(result.view(-1), expected)
            if differs:
                complaint = f"rank {self._group.rank}, tensor {number}: {differs}"
                break
        self._group.barrier().wait()
        call.reset()
        return complaint

    def _time(
        self,
        call: Call,
        num_samples: int,
        calls_per_sample: int,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> list[float]:
        """The seconds of a call in each sample: a GPU is waited for before its calls and after them alone."""
        times_s = []
        for _ in range(num_samples):
            synchronize(self._device)
            self._group.barrier().wait()
            began_s = now_s()
            for _ in range(calls_per_sample):
                results = call.run()
            synchronize(self._device)
            times_s.append((now_s() - began_s) / calls_per_sample)
            del results  # giving the last memory back is not part of it
        return times_s


def taking_turns(contenders: Sequence[T], num_rounds: int) -> Iterator[T]:
    """Yield everybody once a round, forwards and backwards in turn: A B C, C B A, A B C, ..."""
    for number in range(num_rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)


# --- results ---


def summarize_collectives(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts."""
    rows = [
        _result(case, via, by_via)
        for case, by_via in _cases(report.rows).items()
        for via in (GROUP, FOREIGN, PLAIN, TLS)
        if via in by_via
    ]
    return with_failed(report, {"rows": rows})


def _result(case: CollectiveCase, via: str, by_via: Mapping[str, Row]) -> dict[str, Any]:
    shoal_ms, gloo_ms, link_ms = (_median_ms(by_via.get(who)) for who in (via, GLOO, LINK))
    tensor = via if case.size_bytes else NO_TENSOR
    result = {
        "op": case.op,
        "device": case.device,
        **({"machines": case.machines} if case.machines else {}),
        "workers": case.workers,
        "size_bytes": case.size_bytes,
        **({"encrypted": via == TLS} if case.machines else {"tensor": tensor}),
        "shoal_ms": _rounded(shoal_ms),
        "gloo_ms": _rounded(gloo_ms),
        "ratio": _rounded(_ratio(shoal_ms, gloo_ms)),
    }
    if LINK in by_via:
        result |= {"link_ms": _rounded(link_ms), "ratio_to_link": _rounded(_ratio(shoal_ms, link_ms))}
    return result


def collectives_items(report: Report) -> Items:
    """A table for each number of workers or machines: two times of Shoal's, gloo's, and the ratios."""
    items: Items = [title_line(report), ""]
    cases = _cases(report.rows)
    for place in dict.fromkeys(case.place for case in cases):
        items.append(_table(report, {case: row for case, row in cases.items() if case.place == place}))
    if any(not case.machines for case in cases):
        items.append("own memory: tensors made by group.empty(); foreign: any others, as a program has them.")
    if any(case.machines for case in cases):
        items.append("plain, TLS: Shoal in the clear and encrypted, with tensors made by group.empty().")
    if not {case.op for case in cases}.isdisjoint(("exchange", "pair_gossip")):
        items.append(
            "exchange: with the neighbours in an exponential graph, 2 among 4; pair_gossip: with one."
        )
    return [*items, ""] if cases else items


def _table(report: Report, cases: Mapping[CollectiveCase, Mapping[str, Row]]) -> Table:
    """The cases of one place, beside gloo or, where a profile slows Shoal down, beside its links."""
    first = next(iter(cases))
    profile = report.config.get("profile")
    vias, names = (
        ((PLAIN, TLS), ("plain", "TLS")) if first.machines else ((GROUP, FOREIGN), ("own", "foreign"))
    )
    beside, other = (GLOO, "gloo") if profile is None else (LINK, "links")
    count = report.config.get("calls_per_sample") or CALLS_PER_SAMPLE.get(first.device, 1)
    calls = "a call" if count == 1 else f"a call, {count} back to back"
    links = "" if profile is None else f", links as '{profile}'"
    columns = (
        *("own memory" if name == "own" else name for name in names),
        "gloo" if profile is None else "links alone",
        *(f"{name}/{other}" for name in names),
    )
    table = Table(
        f"{_place_text(first.machines, first.workers)} on {first.device}{links}: ms {calls} "
        "(median of the slowest worker's; lower is better)",
        (Column("operation", "left"), Column("size"), *map(Column, columns)),
    )
    previous = ""
    for case, by_via in cases.items():
        errors = [row.error for row in by_via.values() if row.error is not None]
        if errors:
            table.notes[len(table.rows)] = (f"failed: {errors[0]}", "red")
        one, two, base = (_median_ms(by_via.get(via)) for via in (*vias, beside))
        values = (one, two, base, _ratio(one, base), _ratio(two, base))
        table.rows.append(
            (
                case.op if case.op != previous else "",
                size_text(case.size_bytes) if case.size_bytes else "-",
                *("-" if value is None else digits(value) for value in values),
            )
        )
        previous = case.op
    return table


def _place_text(num_machines: int, num_workers: int) -> str:
    """'2 workers', or '2 machines of 1 worker'."""
    workers = counted(num_workers, "worker")
    return f"{num_machines} machines of {workers}" if num_machines else workers


def size_text(size_bytes: int) -> str:
    """Write a size as people do: '25 MB'."""
    for unit, name in ((MIB, "MB"), (KIB, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


def parse_size(text: str) -> int:
    """Bytes from '4KB', '25 MB' or '4096'; a KB is 1024 bytes."""
    number, factor = text.strip().upper(), 1
    for unit, name in ((MIB, "MB"), (KIB, "KB"), (1, "B")):
        if number.endswith(name):
            number, factor = number.removesuffix(name), unit
            break
    try:
        return int(float(number) * factor)
    except ValueError:
        raise UsageError(f"{text!r} is no size.", next_step="write it as 4KB, 25MB or 4096.") from None


def parse_machines(text: str) -> tuple[tuple[int, int], ...]:
    """Machines and workers on each, from '2x1,4x1'."""
    pairs = [part.strip().lower().partition("x") for part in text.split(",") if part.strip()]
    if not pairs or not all(first.isdecimal() and second.isdecimal() for first, _, second in pairs):
        raise _no_machines(f"--machines {text} does not say how many machines and workers there are.")
    return tuple((int(machines), int(workers)) for machines, _, workers in pairs)


def _no_machines(what: str) -> UsageError:
    return UsageError(what, next_step="say, for example, --machines 2x1,4x1,2x2: machines x workers on each.")


class CollectiveCase(NamedTuple):
    """What all contenders of one line of a table did."""

    op: str
    device: str
    machines: int
    """0 where all workers are on one."""
    workers: int
    """How many there are on each machine."""
    size_bytes: int

    @property
    def place(self) -> tuple[str, int, int]:
        """What stands in one table."""
        return self.device, self.machines, self.workers


def _cases(rows: Sequence[Row]) -> dict[CollectiveCase, dict[str, Row]]:
    """The row of each contender by case; one that failed in some start is failed."""
    cases: dict[CollectiveCase, dict[str, Row]] = {}
    for row in rows:
        if "via" in row.key:
            via, machines = str(row.key["via"]), int(row.key.get("machines", 0))
            if machines and via == GROUP:
                via = TLS if row.key["encrypted"] else PLAIN
            device = str(row.key.get("device", "cpu"))  # reports of old do not say
            key = CollectiveCase(
                row.metric, device, machines, int(row.key["workers"]), int(row.key["size_bytes"])
            )
            case = cases.setdefault(key, {})
            if via not in case or row.error is not None:
                case[via] = row
    return cases


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value and to else None


def _median_ms(row: Row | None) -> float | None:
    return None if row is None or row.error is not None else statistics.median(row.samples) * 1e3


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
