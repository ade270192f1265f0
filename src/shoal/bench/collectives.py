"""`shoal bench collectives`: what the operations of a group take, beside torch.distributed's over gloo.

Both run in the same worker processes and take turns; the workers meet in the group's barrier before each
sample, whosever it is, and a sample is the time of the slowest of them. On a CPU it is that of one call. On a
GPU it is that of many calls which are issued back to back, divided by their number: nobody waits for the GPU
in between. The workers are `collective_worker`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from shoal.bench.crew import Crew, CrewSettings, one_line
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
NO_TENSOR = "none"
_ROUNDS = 6
_REPEATS = {
    "cpu": ((64 * KIB, 180), (MIB, 90), (25 * MIB, 18), (1 << 62, 12)),
    "cuda": ((MIB, 12), (1 << 62, 6)),
}
"""Samples by device, for sizes up to so many bytes."""
CALLS_PER_SAMPLE = {"cpu": 1, "cuda": 20}


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

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in OPS:
                raise UsageError(
                    f"There is no collective {op!r}.", next_step=f"choose from {', '.join(OPS)}."
                )
        if not self.workers or min(self.workers) < 2:
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


SHORT = CollectivesConfig(sizes=(4 * KIB, MIB, 25 * MIB), repeats=6)


class CollectivesScenario:
    """One start: a crew for each number of workers."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), CollectivesConfig)

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Every operation with every size; one that fails is a row, and the rest go on."""
        device = self._config.device
        for num_workers in self._config.workers:
            settings = CrewSettings("shoal.bench.collective_worker:work", num_workers, {"device": device})
            with Crew(settings) as crew:
                for op in self._config.ops or OPS:
                    for size_bytes in self._config.sizes if op != "barrier" else (0,):
                        of = f" of {size_text(size_bytes)}" if size_bytes else ""
                        tell(f"{num_workers} workers on {device}: {op}{of}")
                        key: RowKey = {"device": device, "workers": num_workers, "size_bytes": size_bytes}
                        yield from self._measure(crew, op, key)

    def _measure(self, crew: Crew, op: str, key: RowKey) -> Iterator[Measured]:
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
            yield _row(op, {**key, "via": GROUP}, error=one_line(error))
            return
        for via in answers[0]:
            outcomes = [answer[via] for answer in answers]
            wrong = [text for text in outcomes if isinstance(text, str)]
            if wrong:
                yield _row(op, {**key, "via": via}, error=wrong[0])
            else:
                yield _row(
                    op, {**key, "via": via}, samples=[max(times) for times in zip(*outcomes, strict=True)]
                )


def usual_repeats(size_bytes: int, device: str) -> int:
    """As many as a steady median takes: small calls scatter most, large ones take longest."""
    return next(repeats for limit, repeats in _REPEATS[device] if size_bytes <= limit)


def _row(op: str, key: RowKey, **outcome: Any) -> Measured:
    return Measured(key=key, metric=op, unit="s", direction="lower", **outcome)


def summarize_collectives(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts."""
    rows = []
    for (op, device, workers, size_bytes), by_via in _cases(report.rows).items():
        gloo_ms = _median_ms(by_via.get(GLOO))
        for via in (GROUP, FOREIGN):
            if via not in by_via:
                continue
            shoal_ms = _median_ms(by_via[via])
            ratio = shoal_ms / gloo_ms if shoal_ms and gloo_ms else None
            rows.append(
                {
                    "op": op,
                    "device": device,
                    "workers": workers,
                    "size_bytes": size_bytes,
                    "tensor": via if size_bytes else NO_TENSOR,
                    "shoal_ms": _rounded(shoal_ms),
                    "gloo_ms": _rounded(gloo_ms),
                    "ratio": _rounded(ratio),
                }
            )
    failed = len(report.failed)
    return {"rows": rows, **({"failed": failed} if failed else {})}


def collectives_items(report: Report) -> Items:
    """A table for each number of workers: Shoal's time with either memory, gloo's, and the ratios."""
    items: Items = [(f"collectives  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    cases = _cases(report.rows)
    for place in dict.fromkeys(key[1:3] for key in cases):
        device, workers = place
        columns = ("own memory", "foreign", "gloo", "own/gloo", "foreign/gloo")
        count = report.config.get("calls_per_sample") or CALLS_PER_SAMPLE.get(device, 1)
        calls = "a call" if count == 1 else f"a call, {count} back to back"
        table = Table(
            f"{workers} workers on {device}: ms {calls} (median of the slowest worker's; lower is better)",
            (Column("operation", "left"), Column("size"), *map(Column, columns)),
        )
        previous = ""
        for (op, *_, size_bytes), by_via in ((key, row) for key, row in cases.items() if key[1:3] == place):
            errors = [row.error for row in by_via.values() if row.error is not None]
            if errors:
                table.notes[len(table.rows)] = (f"failed: {errors[0]}", "red")
            own, foreign, gloo = (_median_ms(by_via.get(via)) for via in (GROUP, FOREIGN, GLOO))
            ratios = (own / gloo if own and gloo else None, foreign / gloo if foreign and gloo else None)
            cells = ["-" if value is None else digits(value) for value in (own, foreign, gloo, *ratios)]
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


Case = tuple[str, str, int, int]
"""Operation, device, number of workers and bytes."""


def _cases(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """The row of each contender by case; one that failed in some start is failed."""
    cases: dict[Case, dict[str, Row]] = {}
    for row in rows:
        if "via" in row.key:
            device = str(row.key.get("device", "cpu"))  # reports of old do not say
            key = row.metric, device, int(row.key["workers"]), int(row.key["size_bytes"])
            case = cases.setdefault(key, {})
            via = str(row.key["via"])
            if via not in case or row.error is not None:
                case[via] = row
    return cases


def _median_ms(row: Row | None) -> float | None:
    return None if row is None or row.error is not None else statistics.median(row.samples) * 1e3


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
