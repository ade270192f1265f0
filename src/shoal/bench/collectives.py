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
from typing import Any, Literal

import msgspec

from shoal.bench.crew import Crew, CrewSettings, OpenCrew, Workers, one_line
from shoal.bench.frame import Measured, RowKey, Tell
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
            with self.open_crew(settings) as crew:
                for op in self._config.ops or OPS:
                    for size_bytes in self._config.sizes if op != "barrier" else (0,):
                        of = f" of {size_text(size_bytes)}" if size_bytes else ""
                        tell(f"{_place_text(key)} on {device}: {op}{of}")
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


def _place_text(key: Mapping[str, Any]) -> str:
    """'2 workers', or '2 machines of 1 worker'."""
    workers = f"{key['workers']} worker{'' if key['workers'] == 1 else 's'}"
    return f"{key['machines']} machines of {workers}" if "machines" in key else workers


def usual_repeats(size_bytes: int, device: str) -> int:
    """As many as a steady median takes: small calls scatter most, large ones take longest."""
    return next(repeats for limit, repeats in _REPEATS[device] if size_bytes <= limit)


def _row(op: str, key: RowKey, **outcome: Any) -> Measured:
    return Measured(key=key, metric=op, unit="s", direction="lower", **outcome)


def summarize_collectives(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts."""
    rows = _machine_results(report.rows)
    for (op, device, workers, size_bytes), by_via in _cases(report.rows).items():
        gloo_ms = _median_ms(by_via.get(GLOO))
        for via in (GROUP, FOREIGN):
            if via not in by_via:
                continue
            shoal_ms = _median_ms(by_via[via])
            rows.append(
                {
                    "op": op,
                    "device": device,
                    "workers": workers,
                    "size_bytes": size_bytes,
                    "tensor": via if size_bytes else NO_TENSOR,
                    "shoal_ms": _rounded(shoal_ms),
                    "gloo_ms": _rounded(gloo_ms),
                    "ratio": _rounded(_ratio(shoal_ms, gloo_ms)),
                }
            )
    failed = len(report.failed)
    return {"rows": rows, **({"failed": failed} if failed else {})}


def _machine_results(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of the RESULT line that are of several machines."""
    results = []
    for (op, device, machines, workers, size_bytes), by_via in _machine_cases(rows).items():
        gloo_ms, link_ms = _median_ms(by_via.get(GLOO)), _median_ms(by_via.get(LINK))
        for via in (PLAIN, TLS):
            if via not in by_via:
                continue
            shoal_ms = _median_ms(by_via[via])
            result = {
                "op": op,
                "device": device,
                "machines": machines,
                "workers": workers,
                "size_bytes": size_bytes,
                "encrypted": via == TLS,
                "shoal_ms": _rounded(shoal_ms),
                "gloo_ms": _rounded(gloo_ms),
                "ratio": _rounded(_ratio(shoal_ms, gloo_ms)),
            }
            if LINK in by_via:
                result["link_ms"] = _rounded(link_ms)
                result["ratio_to_link"] = _rounded(_ratio(shoal_ms, link_ms))
            results.append(result)
    return results


def collectives_items(report: Report) -> Items:
    """A table for each number of workers: Shoal's time with either memory, gloo's, and the ratios.

    For each number of machines: in the clear, encrypted, gloo's, and the ratios.
    """
    items: Items = [(f"collectives  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    items += _machine_tables(report)
    cases = _cases(report.rows)
    for place in dict.fromkeys(key[1:3] for key in cases):
        device, workers = place
        columns = ("own memory", "foreign", "gloo", "own/gloo", "foreign/gloo")
        table = Table(
            f"{workers} workers on {device}: ms {_calls_text(report, device)}",
            (Column("operation", "left"), Column("size"), *map(Column, columns)),
        )
        previous = ""
        for (op, *_, size_bytes), by_via in ((key, row) for key, row in cases.items() if key[1:3] == place):
            errors = [row.error for row in by_via.values() if row.error is not None]
            if errors:
                table.notes[len(table.rows)] = (f"failed: {errors[0]}", "red")
            own, foreign, gloo = (_median_ms(by_via.get(via)) for via in (GROUP, FOREIGN, GLOO))
            cells = map(_cell, (own, foreign, gloo, _ratio(own, gloo), _ratio(foreign, gloo)))
            table.rows.append(
                (op if op != previous else "", size_text(size_bytes) if size_bytes else "-", *cells)
            )
            previous = op
        items.append(table)
    if cases:
        items += [
            "own memory: tensors made by group.empty(); foreign: any others, as a program has them.",
            "exchange: with the neighbours in an exponential graph, 2 among 4; pair_gossip: with one.",
            "",
        ]
    return items


def _machine_tables(report: Report) -> Items:
    items: Items = []
    cases = _machine_cases(report.rows)
    profile = report.config.get("profile")
    beside, name = (GLOO, GLOO) if profile is None else (LINK, "links alone")
    for place in dict.fromkeys(key[1:4] for key in cases):
        device, machines, workers = place
        where = _place_text({"machines": machines, "workers": workers})
        links = "" if profile is None else f", links as '{profile}'"
        short = name.partition(" ")[0]
        columns = ("size", "plain", "TLS", name, f"plain/{short}", f"TLS/{short}")
        table = Table(
            f"{where} on {device}{links}: ms {_calls_text(report, device)}",
            (Column("operation", "left"), *map(Column, columns)),
        )
        previous = ""
        for (op, *_, size_bytes), by_via in ((key, row) for key, row in cases.items() if key[1:4] == place):
            errors = [row.error for row in by_via.values() if row.error is not None]
            if errors:
                table.notes[len(table.rows)] = (f"failed: {errors[0]}", "red")
            plain, tls, other = (_median_ms(by_via.get(via)) for via in (PLAIN, TLS, beside))
            cells = map(_cell, (plain, tls, other, _ratio(plain, other), _ratio(tls, other)))
            size = size_text(size_bytes) if size_bytes else "-"
            table.rows.append((op if op != previous else "", size, *cells))
            previous = op
        items.append(table)
    if cases:
        items += ["plain, TLS: Shoal in the clear and encrypted, with tensors made by group.empty().", ""]
    return items


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


Case = tuple[str, str, int, int]
"""Operation, device, number of workers and bytes."""


def _cases(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """The row of each contender by case; one that failed in some start is failed."""
    cases: dict[Case, dict[str, Row]] = {}
    for row in rows:
        if "via" in row.key and "machines" not in row.key:
            device = str(row.key.get("device", "cpu"))  # reports of old do not say
            key = row.metric, device, int(row.key["workers"]), int(row.key["size_bytes"])
            case = cases.setdefault(key, {})
            via = str(row.key["via"])
            if via not in case or row.error is not None:
                case[via] = row
    return cases


def _machine_cases(rows: Sequence[Row]) -> dict[tuple[str, str, int, int, int], dict[str, Row]]:
    """As `_cases`, of several machines: operation, device, machines, workers on each, and bytes."""
    cases: dict[tuple[str, str, int, int, int], dict[str, Row]] = {}
    for row in rows:
        if "via" in row.key and "machines" in row.key:
            counts = (int(row.key[name]) for name in ("machines", "workers", "size_bytes"))
            machines, workers, size_bytes = counts
            case = cases.setdefault((row.metric, str(row.key["device"]), machines, workers, size_bytes), {})
            via = str(row.key["via"])
            if via == GROUP:
                via = TLS if row.key["encrypted"] else PLAIN
            if via not in case or row.error is not None:
                case[via] = row
    return cases


def _calls_text(report: Report, device: str) -> str:
    count = report.config.get("calls_per_sample") or CALLS_PER_SAMPLE.get(device, 1)
    calls = "a call" if count == 1 else f"a call, {count} back to back"
    return f"{calls} (median of the slowest worker's; lower is better)"


def _cell(value: float | None) -> str:
    return "-" if value is None else digits(value)


def _ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value and to else None


def _median_ms(row: Row | None) -> float | None:
    return None if row is None or row.error is not None else statistics.median(row.samples) * 1e3


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
