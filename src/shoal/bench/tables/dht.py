"""What `shoal bench dht` prints: the lines of the document's benchmark, for each start, and the RESULT."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from shoal.bench.dht import EXPERTS, DhtConfig, ExpertsPlan
from shoal.report import Report
from shoal.report.schema import Start, by_reason, by_start, with_failed
from shoal.report.statistics import known_percentiles
from shoal.report.units import counted, ranged, ratio, rounded
from shoal.report.views import Items, title_line

MIB = 1 << 20
MEMORY_KIND = "PSS" if sys.platform == "linux" else "peak RSS"
_PERCENTILES = (50, 90, 95, 99)
_TRAFFIC = ("messages", "datagrams", "bytes")


def summarize_dht(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts, and hops and failures of all of them together.

    Times a key are a phase's divided by its records or keys; latencies are an operation's, which is a batch
    in experts mode. Times of a virtual world are simulated, but for `wall_s`.
    """
    starts = by_start(report, "create")
    config = msgspec.convert(report.config, DhtConfig)
    result: dict[str, Any] = {
        "mode": config.mode,
        "num_peers": config.num_peers,
        "num_processes": config.num_ranks,
        "askers_apart": config.has_askers_apart,
    }
    if config.profile is not None:
        result["profile"] = config.profile
    if starts:
        result["headline"] = _headline(starts, config)
        result["conditions"] = _conditions(config, len(starts))
        each = [_figures(start, config) for start in starts]
        for name in (name for name in each[0] if all(name in figures for figures in each)):
            result[name] = rounded(statistics.median(figures[name] for figures in each))
        result["memory_kind"] = MEMORY_KIND
        result["hops"] = _distribution(hops for start in starts for hops in start["get_hops"])
        if failures := by_reason(report, "store_failures"):
            result["store_failures"] = failures
    result |= {"bucket_size": config.settings.bucket_size, "num_replicas": config.settings.num_replicas}
    return with_failed(report, result)


def dht_items(report: Report) -> Items:
    """The lines of each start, and what failed in any of them."""
    items: Items = [title_line(report), ""]
    config = msgspec.convert(report.config, DhtConfig)
    starts = by_start(report, "create")
    for number, start in enumerate(starts, 1):
        if len(starts) > 1:
            items.append(f"Start {number} of {len(starts)}")
        items += [*_lines(start, config), ""]
    items += [(line, "red") for line in _failure_lines(report, starts)]
    items += [(f"failed: {' '.join((row.error or '').split())}", "red") for row in report.failed]
    return items


def _headline(starts: Sequence[Start], config: DhtConfig) -> list[str]:
    """What was found of what was stored, and how long it took; all starts together."""
    sentences = []
    for what, said in (("store", "records were stored"), ("get", "reads found their record")):
        total = sum(_num_tried(start, what) for start in starts)
        done = sum(round(start[f"{what}_success"][0] * _num_tried(start, what)) for start in starts)
        sentences.append(f"{100 * done / total:.4g} % of the {said}: {done:,} of {total:,}.")
    alive = statistics.median(start["survival"][0] for start in starts)
    if alive < 1:
        sentences.append(f"{100 * (1 - alive):.3g} % of the peers were killed meanwhile.")
    times = {
        what: ranged([start[f"{what}_time_per_key"][0] for start in starts], "s") for what in ("get", "store")
    }
    virtual = " of virtual time" if config.profile is not None else ""
    if isinstance(plan := config.plan, ExpertsPlan):
        together = f", with {plan.expert_batch_size} experts in one call"
        sentences.append(
            f"To read took {times['get']}{virtual} per expert, to store {times['store']} per record"
            f"{together}."
        )
    else:
        sentences.append(f"A read took {times['get']}{virtual}, a store {times['store']}.")
    return sentences


def _conditions(config: DhtConfig, num_starts: int) -> list[str]:
    """Who the peers are, and what they were asked for."""
    plan, processes = config.plan, counted(config.num_processes, "process", "processes")
    if config.profile is not None:
        where = f"simulated under the network profile '{config.profile}', in virtual time"
    else:
        where = f"in {processes} of this machine, over real sockets"
        if config.has_askers_apart:
            where += "; those that store and read have one more"
    if isinstance(plan, ExpertsPlan):
        did = (
            f"One peer declared {counted(plan.num_experts, 'expert')}, {plan.expert_batch_size} in a call: a "
            "record for each expert, and more under the beginnings of its name, by which experts are found. "
            "Another peer looked all experts up."
        )
    else:
        did = f"Peers stored and read single keys; {plan.failure_rate:.0%} of all peers were to be killed."
    settings = config.settings
    return [
        f"{counted(config.num_peers, 'peer')} {where}.",
        did,
        f"A record is kept by {counted(settings.num_replicas, 'peer')}; one message may carry many records.",
        f"A bucket of a routing table has {counted(settings.bucket_size, 'peer')}.",
        f"{counted(num_starts, 'run')}.",
    ]


# --- figures ---


def _figures(start: Start, config: DhtConfig) -> dict[str, float]:
    """Of one start; without the percentiles for which it has too few samples."""
    figures = {"create_s": start["create"][0]}
    if config.mode == EXPERTS:
        figures["unique_experts"] = len(start["get_hops"])
    figures["store_ms_per_key"] = 1e3 * start["store_time_per_key"][0]
    figures["get_ms_per_expert"] = 1e3 * start["get_time_per_key"][0]
    if config.mode != EXPERTS:
        figures["get_ms_per_key"] = figures["get_ms_per_expert"]
        for what in ("store", "get"):
            figures[f"{what}s_per_s"] = ratio(1.0, start[f"{what}_time_per_key"][0])
    for what in ("store", "get"):
        figures[f"{what}_success"] = start[f"{what}_success"][0]
    figures["survival"] = start["survival"][0]
    figures["replicas_per_record"] = statistics.fmean(start["store_replicas"])
    figures["rss_mib"] = start["memory"][0] / MIB
    figures["peak_rss_mib"] = start["peak_rss"][0] / MIB
    for what in ("store", "get"):
        for each in _TRAFFIC:
            figures[f"{each}_per_{what}"] = start[f"{what}_{each}"][0]
        latencies_ms = [1e3 * latency_s for latency_s in start[f"{what}_latency"]]
        figures[f"{what}_latency_ms"] = statistics.fmean(latencies_ms)
        for q, value in known_percentiles(latencies_ms, _PERCENTILES).items():
            figures[f"{what}_p{q}_ms"] = value
    figures["slowest_get_s"] = max(start["get_latency"])
    if config.num_victims:
        figures["gets_meeting_dead_at_most"] = start["get_met_dead_at_most"][0]
        figures["slowest_get_meeting_dead_s"] = start["get_slowest_met_dead"][0]
    figures["median_hops"] = statistics.median(start["get_hops"])
    figures["round_trip_ms"] = 1e3 * statistics.median(start.get("round_trip", [0.0]))
    if config.profile is not None:
        figures["median_get_s"] = statistics.median(start["get_latency"])
        if config.mode != EXPERTS:
            figures["median_round_trips"] = ratio(1e3 * figures["median_get_s"], figures["round_trip_ms"])
        figures["simulated_s"] = start["simulated"][0]
    figures["wall_s"] = start["wall"][0]
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
    yield f"Created {num_peers} peers in {create_s:.4g} {seconds} ({ratio(num_peers, create_s):.4g} peers/s)"
    yield from (_expert_lines if config.mode == EXPERTS else _key_lines)(start)
    yield f"Node survival rate: {100 * start['survival'][0]:.3f}%"
    yield from _more_lines(_figures(start, config), config)
    hops = _distribution(iter(start["get_hops"]))
    yield "Hops of a look-up: " + ", ".join(f"{hops_} × {count}" for hops_, count in hops.items())
    yield (
        f"Memory of the peers and their driver, {MEMORY_KIND}: {start['memory'][0] / MIB:.1f} MiB; "
        f"peak RSS, shared pages in each: {start['peak_rss'][0] / MIB:.1f} MiB"
    )


def _more_lines(figures: Mapping[str, float], config: DhtConfig) -> Iterator[str]:
    """What the document's benchmark does not print."""
    operation = "batch" if config.mode == EXPERTS else "key"
    for what in ("store", "get"):
        known = [q for q in _PERCENTILES if f"{what}_p{q}_ms" in figures]
        some = ", ".join(f"p{q} {figures[f'{what}_p{q}_ms']:.4g}" for q in known)
        yield f"{what.capitalize()} latency of a {operation} (ms): {some}"
        item = "expert" if what == "get" and config.mode == EXPERTS else "record"
        traffic = (f"{figures[f'{each}_per_{what}']:.4g} {each}" for each in _TRAFFIC)
        yield f"{what.capitalize()} traffic of each {item}: {', '.join(traffic)}"
    yield f"Peers that took a record: {figures['replicas_per_record']:.4g} on average"
    if config.num_victims:
        yield (
            f"Gets that met dead peers: at most {figures['gets_meeting_dead_at_most']:.0f}, "
            f"the slowest in {figures['slowest_get_meeting_dead_s']:.4g} s"
        )
    if config.profile is not None:
        ratio = (
            f", {figures['median_round_trips']:.4g} round trips" if "median_round_trips" in figures else ""
        )
        yield (
            f"Median get: {figures['median_hops']:.4g} hops, {figures['median_get_s']:.4g} simulated s{ratio}"
        )


def _failure_lines(report: Report, starts: Sequence[Start]) -> Iterator[str]:
    if failures := by_reason(report, "store_failures"):
        yield "refused: " + ", ".join(f"{reason} × {count}" for reason, count in failures.items())
    expired = sum(sum(row.samples) for row in report.rows if row.metric == "expired_batches")
    if expired:
        is_all = expired == sum(len(start["get_latency"]) for start in starts)
        which = "all records expired before" if is_all else "records expired while"
        yield f"Warning: {which} they were read; raise --expiration."


def _expert_lines(start: Start) -> Iterator[str]:
    yield f"Unique ids after deduplication: {len(start['get_hops'])}"
    for what, sign in (("store", "%"), ("get", "")):
        per_key_s = start[f"{what}_time_per_key"][0]
        yield f"{what.capitalize()} success rate: {_success(start, what, sign)}"
        yield f"Mean {what} time: {per_key_s:.4g}, Total: {per_key_s * _num_tried(start, what):.4g}"


def _key_lines(start: Start) -> Iterator[str]:
    for what in ("store", "get"):
        rounds_s, name = start[f"{what}_round"], what.capitalize()
        spread_s = statistics.stdev(rounds_s) if len(rounds_s) > 1 else 0.0
        yield (
            f"{name} wall time of a round: mean {statistics.fmean(rounds_s):.4g}, std {spread_s:.4g}, "
            f"max {max(rounds_s):.4g}"
        )
        yield f"Average {what} time per worker: {statistics.fmean(start[f'{what}_latency']):.4g}"
        total_s = start[f"{what}_time_per_key"][0] * _num_tried(start, what)
        yield f"{name} total time: {total_s:.4g}"
        yield f"{name} success rate: {_success(start, what, '%')}"


def _success(start: Start, what: str, sign: str) -> str:
    rate, num_tried = start[f"{what}_success"][0], _num_tried(start, what)
    return f"{100 * rate:.1f}{sign} ({round(rate * num_tried)} / {num_tried})"


def _num_tried(start: Start, what: str) -> int:
    """Records that were stored, or keys that were looked up."""
    return len(start["store_replicas" if what == "store" else "get_hops"])
