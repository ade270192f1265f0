"""What `shoal bench latency` prints: a line for each method and ping, as the document does, and RESULT."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec

from shoal.bench.latency_config import LatencyConfig, Method, Passes
from shoal.report import Report, Row
from shoal.report.units import digits
from shoal.report.views import Items, headline

_FORWARD: Passes = "forward"
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
    result["headline"] = _sentences(result, config)
    return {**result, "failed": len(report.failed)} if report.failed else result


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
    for row in report.rows:
        if row.metric == metric and row.key == key and row.samples:
            return row
    return None


def _sentences(result: dict[str, Any], config: LatencyConfig) -> list[str]:
    last_s = config.pings_s[-1]
    ping = f"a mean delay of {digits(1e3 * last_s)} ms at every layer"
    sentences = []
    if "ours_kept" in result:
        sentences.append(
            f"With {ping}, {_clients(config)} of expert servers {'keeps' if config.jobs == 1 else 'keep'} "
            f"{100 * result['ours_kept']:.0f} % of the throughput without delay."
        )
        if result["ours_kept"] < _KEPT and result["ours_throughput_max_ping"] > _limit(config) / 2:
            sentences.append(_limit_sentence(config))
    if "slow_kept" in result:
        kept = digits(100 * result["slow_kept"], 2)
        sentences.append(f"With {ping}, model parallelism keeps {kept} % of its throughput.")
    if "ours_over_slow" in result:
        where, times = "There" if last_s else "Without delay", digits(result["ours_over_slow"])
        sentences.append(f"{where}, expert servers do {times} times as many samples a second.")
    if config.is_virtual and sentences:
        sentences.append(
            f"Simulated: {digits(config.compute_ms)} ms for a batch in a block, forward; bytes take no time."
        )
    return sentences


def _clients(config: LatencyConfig) -> str:
    return f"{config.jobs} client{'s' * (config.jobs != 1)}"


def _waits_s(config: LatencyConfig) -> float:
    """Of a batch on its way, forward, at the longest ping."""
    return config.num_layers * config.pings_s[-1]


def _limit(config: LatencyConfig) -> float:
    """Samples a second that clients with one batch each cannot pass, whatever the servers can do."""
    waits_s = _waits_s(config)
    return config.jobs * config.batch_size / waits_s if waits_s else math.inf


def _limit_sentence(config: LatencyConfig) -> str:
    return (
        f"A batch waits {digits(_waits_s(config))} s on its way, so that {_clients(config)} cannot do "
        f"more than {digits(_limit(config))} samples/s there; more of them (-j) can."
    )


def latency_items(report: Report) -> Items:
    """The lines of each method, and what failed."""
    config = msgspec.convert(report.config, LatencyConfig)
    items: Items = [
        (f"latency  {report.created}  code {report.code}".rstrip(), "bold"),
        *headline(report),
        "",
    ]
    where = "in virtual time" if config.is_virtual else f"on {config.device}"
    items.append(
        f"{config.num_layers} {config.block_type} blocks of width {config.hid_dim}, batches of "
        f"{config.batch_size}, {_clients(config)}, {where}"
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
    for metric, unit in (("latency", "s"), ("throughput", "samples/s")):
        row = _row(report, metric, method, passes, ping_s)
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
