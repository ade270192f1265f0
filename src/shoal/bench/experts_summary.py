"""What `shoal bench experts` prints: what the document's benchmark tells, for each start, and RESULT."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.bench.experts_config import ExpertsConfig
from shoal.report import Report
from shoal.report.statistics import percentiles
from shoal.report.views import Items

MIB, GB = 1 << 20, 1e9
_PERCENTILES = (50, 95)
Start = dict[str, list[float]]
"""Samples of one process start, by metric."""


def summarize_experts(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts.

    `p50_ms` and `p95_ms` are of single forward calls, those with `backward_` of single backward calls.
    """
    config = msgspec.convert(report.config, ExpertsConfig)
    starts = _starts(report)
    result: dict[str, Any] = {"status": _status(report), **msgspec.to_builtins(config)}
    if starts:
        each = [_figures(start) for start in starts]
        names = dict.fromkeys(name for figures in each for name in figures)
        for name in names:
            values = [figures[name] for figures in each if name in figures]
            result[name] = _rounded(statistics.median(values))
        if failures := _failures(report):
            result["failures"] = failures
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def experts_items(report: Report) -> Items:
    """The lines of each start, and what failed in any of them."""
    items: Items = [(f"experts  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    config = msgspec.convert(report.config, ExpertsConfig)
    items += [f"Status: {_status(report)}", *_parameter_lines(config)]
    starts = _starts(report)
    for number, start in enumerate(starts, 1):
        if len(starts) > 1:
            items += ["", f"Start {number} of {len(starts)}"]
        items += list(_lines(start, config, str(report.environment.get("device", ""))))
    items.append("")
    items += [(f"failed: {_first_words(row.error or '')}", "red") for row in report.failed]
    if report.failed and starts:
        items.append(("Warning: calls failed; times and rates end with the calls that did not.", "red"))
    return items


def _starts(report: Report) -> list[Start]:
    """Rows that only some starts have (calls that all failed have no latency) are left out."""
    rows = {row.metric: row.starts for row in report.rows if row.starts and "reason" not in row.key}
    num_starts = len(rows.get("samples_per_s", ()))
    return [
        {metric: starts[number] for metric, starts in rows.items() if len(starts) == num_starts}
        for number in range(num_starts)
    ]


def _status(report: Report) -> str:
    return "Failure" if report.failed else "Success"


def _first_words(error: str) -> str:
    """Without the traceback that may follow: it was shown when it happened, and the report has it."""
    return " ".join(error.partition("Traceback (most recent call last)")[0].split()).removesuffix(
        " Likely cause:"
    )


def _failures(report: Report) -> dict[str, int]:
    """Calls that failed, by the name of the error."""
    return {str(row.key["reason"]): int(sum(row.samples)) for row in report.rows if row.metric == "failures"}


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
    for kind, prefix in (("forward", ""), ("backward", "backward_")):
        latencies_s = start.get(f"{kind}_latency", [])
        if latencies_s:
            for q, value_s in zip(_PERCENTILES, percentiles(latencies_s, _PERCENTILES), strict=True):
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
    yield (
        f"Beside it: a bare echo of the same frames {figures['echo_samples_per_s']:,.0f} samples/s, the "
        f"module alone {figures['local_samples_per_s']:,.0f} samples/s"
    )
    for kind, prefix in (("forward", ""), ("backward", "backward_")):
        if f"{prefix}p50_ms" in figures:
            some = ", ".join(f"p{q} {figures[f'{prefix}p{q}_ms']:.4g}" for q in _PERCENTILES)
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


def _rounded(value: float) -> float | int:
    return int(value) if value == int(value) else float(f"{value:.4g}")
