"""What the samples of `shoal bench ddp` say, in the layout of PyTorch's DDP benchmark."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.bench.contenders import workers_text
from shoal.bench.ddp import ALIKE, SKEW
from shoal.report import Report, Row
from shoal.report.pytorch import ALONE, SECONDS, to_document
from shoal.report.statistics import PERCENTILES, percentiles
from shoal.report.views import Items

_TITLE = "Shoal distributed data parallel benchmark"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NOTABLE_SKEW = 1.05
"""In the median iteration; below it the slowest rank is a different one each time."""


def encode_ddp(report: Report) -> bytes:
    """PyTorch's own JSON of this run."""
    return msgspec.json.encode(to_document(report)) + b"\n"


def summarize_ddp(report: Report) -> dict[str, Any]:
    """The RESULT line: percentiles of each stage by model, and the headline."""
    models: dict[str, Any] = {}
    for row in _rows(report, SECONDS):
        batch_size = int(row.key["batch_size"])
        figures = dict(zip((f"p{q}" for q in PERCENTILES), percentiles(row.samples), strict=True))
        models.setdefault(str(row.key["model"]), {})[str(row.key["label"])] = {
            "num_ranks": row.key["num_ranks"],
            "sec_per_iter": {name: round(value, 6) for name, value in figures.items()},
            "examples_per_s_per_worker": round(batch_size / figures["p50"], 1),
        }
    result: dict[str, Any] = {
        "headline": [_headline(model, stages, report) for model, stages in models.items()],
        "device": report.config.get("device", "cpu"),
        "image_size": report.config.get("image_size"),
        "models": models,
    }
    skews = {
        f"{row.key['model']} {row.key['label']}": round(statistics.median(row.samples), 4)
        for row in _rows(report, SKEW)
    }
    if skews:
        result["slowest_over_fastest"] = skews
    return {**result, "failed": len(report.failed)} if report.failed else result


def _headline(model: str, stages: dict[str, Any], report: Report) -> str:
    label, last = list(stages.items())[-1]
    seconds = last["sec_per_iter"]["p50"]
    workers = workers_text(last["num_ranks"])
    text = f"{model} takes {seconds:.3f} s an iteration on {workers} ({label})"
    if ALONE in stages and label != ALONE:
        share = 100 * stages[ALONE]["sec_per_iter"]["p50"] / seconds
        text += f": each worker at {share:.0f} % of the speed of one without {report.config['strategy']}"
    return f"{text}."


def ddp_items(report: Report) -> Items:
    """The header, then a table for each model, with what is wrong with it under it."""
    items: Items = [*header_lines(report), ""]
    for row in _rows(report, ALIKE):
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
    num_others = len(_rows(report, ALIKE))
    yield from ("-" * len(_TITLE), _TITLE, "-" * len(_TITLE), "")
    yield f"* Shoal version: {report.code}"
    yield f"* PyTorch version: {versions.get('torch', 'unknown')}"
    yield f"* CUDA version: {versions.get('cuda')}"
    yield f"* Distributed backend: {config['distributed_backend']}"
    if config["bucket_size"] is not None:
        yield f"* Maximum bucket size: {config['bucket_size']}MB"
    yield f"* Strategy: {config['strategy']}"
    yield f"* Image size: {config['image_size']}x{config['image_size']}"
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
    yield f"{'':22}" + f"{'sec/iter':>14}{'ex/sec':>10}" * len(PERCENTILES)
    for row in rows:
        line = f"{row.key['num_ranks']:>4} GPUs -- {row.key['label']:>8}:"
        for q, seconds in zip(PERCENTILES, percentiles(row.samples), strict=True):
            line += f"  p{q:02d}:  {seconds:1.3f}s  {int(int(row.key['batch_size']) / seconds):6d}/s"
        yield line


def _skew_lines(report: Report, model: object) -> Items:
    """One for each stage in which ranks were not equally fast."""
    items: Items = []
    num_iters = int(report.config["num_iters"])
    seconds = {row.key["label"]: row for row in _rows(report, SECONDS) if row.key["model"] == model}
    for row in _rows(report, SKEW):
        if row.key["model"] == model and (factor := statistics.median(row.samples)) >= NOTABLE_SKEW:
            label = row.key["label"]
            slowest = slowest_rank(seconds[label], num_iters)
            items.append(
                f"{label}: in the median iteration the slowest rank takes {factor:.2f} times as long as the "
                f"fastest; rank {slowest} is the slowest on the whole."
            )
    return [*items, ""] if items else []


def slowest_rank(row: Row, num_iters: int) -> int:
    """By the median of its iterations; a start holds those of one rank after another."""
    times_s: dict[int, list[float]] = {}
    for start in row.starts:
        for index, time_s in enumerate(start):
            times_s.setdefault(index // num_iters, []).append(time_s)
    return max(times_s, key=lambda rank: statistics.median(times_s[rank]))


def _rows(report: Report, metric: str) -> list[Row]:
    return [row for row in report.rows if row.metric == metric and row.starts]
