"""`shoal bench collectives`: what the operations of a group take, beside torch.distributed's over gloo.

Both run in the same worker processes and take turns; the workers meet in the group's barrier before each
sample, whosever it is, and a sample is the time of the slowest of them. On a CPU it is that of one call. On a
GPU it is that of many calls which are issued back to back, divided by their number: nobody waits for the GPU
in between. With `machines` the workers are those of several machines, which talk over streams: once in the
clear, once encrypted, and gloo takes turns with both. The workers are `collective_worker`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from shoal.bench.frame import Measured, RowKey, Tell
from shoal.bench.workers import Crew, CrewSettings, OpenCrew, Workers, one_line
from shoal.core import BenchmarkError, UsageError
from shoal.report import Report, Row
from shoal.report.tables import Column, Table
from shoal.report.units import digits
from shoal.report.views import Items

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


class CollectivesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured."""

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
                    f"There is no collective {op!r}.", next_step=f"choose from {', '.join(OPS)}."
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
    def num_back_to_back(self) -> int:
        """Calls of one sample."""
        return self.calls_per_sample or CALLS_PER_SAMPLE[self.device]

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


class CollectivesScenario:
    """One start: a crew for each number of workers, or for each number of machines."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), CollectivesConfig)
        self._seed = seed
        self.open_crew: OpenCrew = Crew

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Every operation with every size; one that fails is a row, and the rest go on."""
        device = self._config.device
        for settings, key in self._crews_between_machines() if self._config.machines else self._crews():
            where = _place_text(int(key.get("machines", 0)), int(key["workers"]))
            with self.open_crew(settings) as crew:
                for op in self._config.ops or OPS:
                    for size_bytes in self._config.sizes if op != "barrier" else (0,):
                        of = f" of {size_text(size_bytes)}" if size_bytes else ""
                        tell(f"{where} on {device}: {op}{of}")
                        yield from self._measure(
                            crew, op, {"device": device, **key, "size_bytes": size_bytes}
                        )

    def _crews(self) -> Iterator[tuple[CrewSettings, RowKey]]:
        for num_workers in self._config.workers:
            arguments = {"device": self._config.device}
            settings = CrewSettings("shoal.bench.collective_worker:work", num_workers, arguments)
            yield settings, {"workers": num_workers}

    def _crews_between_machines(self) -> Iterator[tuple[CrewSettings, RowKey]]:
        config = self._config
        function = "shoal.bench.collective_worker:work_between_machines"
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
                CrewSettings(function, machines * workers, arguments, _ANSWER_S),
                key if config.profile is None else {**key, "profile": config.profile},
            )

    def _measure(self, crew: Workers, op: str, key: RowKey) -> Iterator[Measured]:
        size_bytes = int(key["size_bytes"])
        repeats = self._config.repeats or usual_repeats(size_bytes, self._config.device)
        num_rounds = min(_ROUNDS, repeats)
        details = {
            "num_rounds": num_rounds,
            "samples_per_round": -(-repeats // num_rounds),
            "calls_per_sample": self._config.num_back_to_back,
        }
        try:
            answers = crew.ask("measure", op=op, size_bytes=size_bytes, **details)
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
                yield _row(
                    op, _key_of(key, via), samples=[max(times) for times in zip(*outcomes, strict=True)]
                )


def _key_of(key: RowKey, via: str) -> RowKey:
    """The row of one contender; between machines it says whether that encrypts."""
    if "machines" not in key:
        return {**key, "via": via}
    return {**key, "encrypted": via == TLS, "via": GROUP if via in (PLAIN, TLS) else via}


def usual_repeats(size_bytes: int, device: str) -> int:
    """As many as a steady median takes: small calls scatter most, large ones take longest."""
    return next(repeats for limit, repeats in _REPEATS[device] if size_bytes <= limit)


def _row(op: str, key: RowKey, **outcome: Any) -> Measured:
    return Measured(key=key, metric=op, unit="s", direction="lower", **outcome)


def summarize_collectives(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts."""
    rows = [
        _result(case, via, by_via)
        for case, by_via in _cases(report.rows).items()
        for via in (GROUP, FOREIGN, PLAIN, TLS)
        if via in by_via
    ]
    failed = len(report.failed)
    return {"rows": rows, **({"failed": failed} if failed else {})}


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
    items: Items = [(f"collectives  {report.created}  code {report.code}".rstrip(), "bold"), ""]
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
    workers = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    return f"{num_machines} machines of {workers}" if num_machines else workers


def size_text(size_bytes: int) -> str:
    """As people write sizes: '25 MB'."""
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
    """On each machine."""
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
