"""The JSON of PyTorch's DDP benchmark: read as a report, written, and two of them compared in its own layout.

Runs pair by model, batch size and number of ranks, so that a model missing from one file misaligns nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core.errors import ReportError
from shoal.report.schema import Report, Row, Scalar
from shoal.report.statistics import percentile

if TYPE_CHECKING:
    from shoal.report.diff import Diff

BENCHMARK = "pytorch-ddp"
RESULTS = "benchmark_results"
SHOWN = (75, 95)
SECONDS = "sec_per_iter"
ALONE = "no ddp"
"""Its label of the run without DDP, which is the first of each model."""


class _Run(msgspec.Struct):
    ranks: list[int]
    measurements: list[float]


class _Result(msgspec.Struct):
    model: str
    batch_size: int
    result: list[_Run]


def is_pytorch(document: object) -> bool:
    """Whether a decoded JSON document is that benchmark's."""
    return isinstance(document, dict) and RESULTS in document and "schema" not in document


def from_document(document: dict[str, Any], source: str) -> Report:
    """A report whose config is the document's other entries; `has_ddp` is false for the baseline without DDP.

    `source` names the file in errors. Such a file does not say when it was made: `created` is empty.
    """
    try:
        results = msgspec.convert(document[RESULTS], list[_Result])
    except msgspec.ValidationError as error:
        raise ReportError(
            f"{source} looks like PyTorch's DDP-benchmark JSON but is not: {error}",
            cause="it was edited, or another version of that benchmark wrote it",
            next_step="write it again with that benchmark's --json",
        ) from error
    rows: list[Row] = []
    seen: dict[object, int] = {}
    for result in results:
        for index, run in enumerate(result.result):
            key: dict[str, Scalar] = {
                "model": result.model,
                "batch_size": result.batch_size,
                "num_ranks": len(run.ranks),
                "has_ddp": index > 0,
            }
            occurrence = seen[tuple(key.values())] = seen.get(tuple(key.values()), 0) + 1
            if occurrence > 1:
                key["occurrence"] = occurrence
            rows.append(_row(key, run))
    config = {name: value for name, value in document.items() if name != RESULTS}
    return Report(benchmark=BENCHMARK, created="", config=config, rows=rows)


def _row(key: dict[str, Scalar], run: _Run) -> Row:
    starts = [run.measurements] if run.measurements else []
    error = None if starts else "no measurements"
    return Row(key=key, metric=SECONDS, unit="s", direction="lower", starts=starts, error=error)


def to_document(report: Report) -> dict[str, Any]:
    """What that benchmark would have written of a run of `shoal bench ddp`: samples of all starts pooled.

    A stage that failed is left out; the run without DDP stays, without measurements. A strategy in DDP's
    place is one entry more, which is compared as configuration.
    """
    config, versions = report.config, report.environment.get("versions", {})
    results: dict[tuple[Scalar, Scalar], list[_Run]] = {}
    for row in report.rows:
        if row.metric != SECONDS:
            continue
        runs = results.setdefault((row.key["model"], row.key["batch_size"]), [_Run([0], [])])
        if row.key["label"] == ALONE:
            runs[0].measurements += row.samples
        elif row.error is None:
            runs.append(_Run(list(range(int(row.key["num_ranks"]))), row.samples))
    document = {
        "pytorch_version": versions.get("torch", ""),
        "cuda_version": versions.get("cuda"),
        "distributed_backend": config["distributed_backend"],
        "bucket_size": config["bucket_size"],
        RESULTS: [
            msgspec.to_builtins(_Result(str(model), int(batch_size), runs))
            for (model, batch_size), runs in results.items()
        ],
    }
    is_ddp = config["strategy"] == "ddp"
    return document if is_ddp else {**document, "strategy": config["strategy"]}


def diff_lines(diff: Diff) -> list[str]:
    """The comparison in PyTorch's own layout: the test's figures at p75 and p95; negative is slower."""
    lines = [f"{'':20} {'baseline':>20}      {'test':>20}", f"{'':20} {'-' * 20:>20}      {'-' * 20:>20}"]
    old, new = diff.baseline.config, diff.test.config
    lines += [
        f"{name + ':':20} {old.get(name, '-')!s:>20}  vs  {new.get(name, '-')!s:>20}"
        for name in sorted({**old, **new})
    ]
    lines.append("")
    tables: dict[tuple[Scalar, Scalar], list[str]] = {}
    for pair in diff.rows:
        key = pair.test.key
        if key["has_ddp"] and pair.baseline.error is None and pair.test.error is None:
            table = tables.setdefault((key["model"], key["batch_size"]), [])
            table.append(f"{key['num_ranks']:>4} GPUs:" + "".join(_columns(pair.baseline, pair.test)))
    for (model, batch_size), table in tables.items():
        header = f"{'sec/iter':>16}{'ex/sec':>10}{'diff':>10}" * len(SHOWN)
        lines += [f"Benchmark: {model} with batch size {batch_size}", "", f"{'':10}{header}", *table, ""]
    return lines


def _columns(baseline: Row, test: Row) -> list[str]:
    columns = []
    for q in SHOWN:
        old, new = percentile(baseline.samples, q), percentile(test.samples, q)
        rate = int(int(test.key["batch_size"]) / new) if new > 0 else 0
        change = -100 * ((new - old) / old) if old else 0.0
        columns.append(f"  p{q:02d}: {new:8.3f}s {rate:7d}/s {change:+8.1f}%")
    return columns
