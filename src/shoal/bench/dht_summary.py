"""What `shoal bench dht` prints: the lines of the document's benchmark, for each start, and the RESULT."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.bench.dht_config import EXPERTS, DhtConfig
from shoal.report import Report
from shoal.report.statistics import percentiles
from shoal.report.views import Items

MIB = 1 << 20
MEMORY_KIND = "pss" if sys.platform == "linux" else "peak rss"
_PERCENTILES = (50, 90, 95, 99)
Start = dict[str, list[float]]
"""Samples of one process start, by metric."""


def summarize_dht(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts, and hops of all of them together.

    Latencies of gets are a batch's in experts mode and a key's in keys mode; messages are datagrams, answers
    among them, that all peers sent meanwhile. Times of a virtual world are simulated, but for `wall_s`.
    """
    starts = _starts(report)
    config = msgspec.convert(report.config, DhtConfig)
    result: dict[str, Any] = {
        "mode": config.mode,
        "num_peers": config.num_peers,
        "num_processes": config.num_processes,
    }
    if config.profile is not None:
        result["profile"] = config.profile
    if starts:
        each = [_figures(start, config) for start in starts]
        for name in each[0]:
            result[name] = _rounded(statistics.median(figures[name] for figures in each))
        result["memory_kind"] = MEMORY_KIND
        result["hops"] = _distribution(hops for start in starts for hops in start["get_hops"])
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def dht_items(report: Report) -> Items:
    """The lines of each start."""
    items: Items = [(f"dht  {report.created}  code {report.code}".rstrip(), "bold"), ""]
    config = msgspec.convert(report.config, DhtConfig)
    starts = _starts(report)
    for number, start in enumerate(starts, 1):
        if len(starts) > 1:
            items.append(f"Start {number} of {len(starts)}")
        items += [*_lines(start, config), ""]
    items += [(f"failed: {' '.join((row.error or '').split())}", "red") for row in report.failed]
    return items


def _starts(report: Report) -> list[Start]:
    rows = {row.metric: row.starts for row in report.rows if row.starts}
    return [
        {metric: samples[number] for metric, samples in rows.items()}
        for number in range(len(rows.get("create", ())))
    ]


# --- figures ---


def _figures(start: Start, config: DhtConfig) -> dict[str, float]:
    """Of one start; the same names for every start of a run."""
    get_ms = [1e3 * latency_s for latency_s in start["get_latency"]]
    figures = {"create_s": start["create"][0]}
    if config.mode == EXPERTS:
        figures["unique_experts"] = start["unique_experts"][0]
        figures["store_ms_per_key"] = 1e3 * start["store_total"][0] / start["store_tried"][0]
        figures["get_ms_per_expert"] = 1e3 * start["get_total"][0] / start["get_tried"][0]
    else:
        figures["store_ms_per_key"] = 1e3 * statistics.fmean(start["store_latency"])
        figures["get_ms_per_key"] = statistics.fmean(get_ms)
        for what in ("store", "get"):
            figures[f"{what}s_per_s"] = _ratio(start[f"{what}_tried"][0], start[f"{what}_total"][0])
    for what in ("store", "get"):
        figures[f"{what}_success"] = start[f"{what}_right"][0] / start[f"{what}_tried"][0]
    figures["survival"] = start["alive"][0] / config.num_peers
    figures["rss_mib"] = start["memory"][0] / MIB
    for what in ("store", "get"):
        num_tried = start[f"{what}_tried"][0]
        figures[f"messages_per_{what}"] = start[f"{what}_packets"][0] / num_tried
        figures[f"requests_per_{what}"] = start[f"{what}_requests"][0] / num_tried
        figures[f"bytes_per_{what}"] = start[f"{what}_traffic"][0] / num_tried
    for q, value in zip(_PERCENTILES, percentiles(get_ms, _PERCENTILES), strict=True):
        figures[f"get_p{q}_ms"] = value
    figures["slowest_get_s"] = max(get_ms) / 1e3
    if config.num_victims:
        figures["gets_meeting_dead"] = start["get_met_dead"][0]
        figures["slowest_get_meeting_dead_s"] = start["get_slowest_met_dead"][0]
    figures["median_hops"] = statistics.median(start["get_hops"])
    if config.profile is not None:
        figures["median_get_s"] = statistics.median(start["get_latency"])
        round_trip_s = statistics.median(start.get("round_trip", [0.0]))
        figures["median_round_trips"] = _ratio(figures["median_get_s"], round_trip_s)
        figures["simulated_s"] = start["simulated"][0]
    figures["wall_s"] = start["wall"][0]
    figures["bucket_size"], figures["num_replicas"] = start["bucket_size"][0], start["num_replicas"][0]
    return figures


def _distribution(hops: Iterator[float]) -> dict[str, int]:
    counts: dict[int, int] = {}
    for each in hops:
        counts[int(each)] = counts.get(int(each), 0) + 1
    return {str(number): counts[number] for number in sorted(counts)}


# --- lines ---


def _lines(start: Start, config: DhtConfig) -> Iterator[str]:
    create_s, num_peers = start["create"][0], config.num_peers
    seconds = "s" if config.profile is None else "simulated s"
    yield f"Created {num_peers} peers in {create_s:.4g} {seconds} ({_ratio(num_peers, create_s):.4g} peers/s)"
    yield from (_expert_lines if config.mode == EXPERTS else _key_lines)(start)
    yield f"Node survival rate: {100 * start['alive'][0] / num_peers:.3f}%"
    if config.num_victims:
        yield (
            f"Gets that met dead peers: {start['get_met_dead'][0]:.0f}, "
            f"the slowest in {start['get_slowest_met_dead'][0]:.4g} s"
        )
    hops = _distribution(iter(start["get_hops"]))
    yield "Hops of a look-up: " + ", ".join(f"{hops_} × {count}" for hops_, count in hops.items())
    if config.profile is not None:
        figures = _figures(start, config)
        yield (
            f"Median get: {figures['median_hops']:.4g} hops, {figures['median_get_s']:.4g} simulated s, "
            f"{figures['median_round_trips']:.4g} round trips"
        )
    yield f"Memory of all processes ({MEMORY_KIND}): {start['memory'][0] / MIB:.1f} MiB"


def _expert_lines(start: Start) -> Iterator[str]:
    yield f"Unique ids after deduplication: {start['unique_experts'][0]:.0f}"
    yield f"Store success rate: {_success(start, 'store', '%')}"
    yield f"Mean store time: {_mean(start, 'store'):.4g}, Total: {start['store_total'][0]:.4g}"
    if start["expired_before_reads"][0]:
        yield "Warning: all records expired before they were read; raise --expiration."
    elif start["expired_during_reads"][0]:
        yield "Warning: records expired while they were read; raise --expiration."
    yield f"Get success rate: {_success(start, 'get', '')}"
    yield f"Mean get time: {_mean(start, 'get'):.4g}, Total: {start['get_total'][0]:.4g}"


def _key_lines(start: Start) -> Iterator[str]:
    for what in ("store", "get"):
        rounds_s, name = start[f"{what}_round"], what.capitalize()
        spread_s = statistics.stdev(rounds_s) if len(rounds_s) > 1 else 0.0
        yield (
            f"{name} wall time of a round: mean {statistics.fmean(rounds_s):.4g}, std {spread_s:.4g}, "
            f"max {max(rounds_s):.4g}"
        )
        yield f"Average {what} time per worker: {statistics.fmean(start[f'{what}_latency']):.4g}"
        yield f"{name} total time: {start[f'{what}_total'][0]:.4g}"
        yield f"{name} success rate: {_success(start, what, '%')}"


def _success(start: Start, what: str, sign: str) -> str:
    num_right, num_tried = start[f"{what}_right"][0], start[f"{what}_tried"][0]
    return f"{100 * num_right / num_tried:.1f}{sign} ({num_right:.0f} / {num_tried:.0f})"


def _mean(start: Start, what: str) -> float:
    return start[f"{what}_total"][0] / start[f"{what}_tried"][0]


def _ratio(above: float, below: float) -> float:
    """0 where there is nothing to divide by: virtual time may stand still."""
    return above / below if below else 0.0


def _rounded(value: float) -> float | int:
    short = float(f"{value:.4g}")
    return int(value) if value == int(value) else short
