"""Pictures of what a benchmark is about, before all tables: targets, calls of the DHT, an expert server.

Each is told from metrics, so that any report that has them gets it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shoal.report.curves import Histogram
from shoal.report.figures import Chart, IntervalBar, bar_of, bars_figure, histogram_figure, percentiles_figure
from shoal.report.plots import (
    Colours,
    Contest,
    PageFigures,
    Section,
    Shown,
    beside_one_another,
    dotted,
    line_over,
    steps_apart,
    titled,
)
from shoal.report.schema import Row, is_number
from shoal.report.statistics import percentile, start_medians, usual_deviation
from shoal.report.units import counted
from shoal.report.views import group_of
from shoal.report.words import metric_words, sentence_case

Found = list[tuple[Shown, Row]]


def pictures(shown: Sequence[Shown], figures: PageFigures, colours: Colours) -> list[Section]:
    """The pictures of the reports of one benchmark; those that have nothing to show are left out."""
    sections = [
        target_bars(shown, figures, colours),
        Section("Did stores and reads succeed?", SUCCESS_HOW, _success_bars(shown, figures)),
        Section("Hops of a look-up", HOPS_HOW, _hops(shown, figures)),
        Section("Throughput", THROUGHPUT_HOW, _throughput(shown, figures)),
        Section("Throughput by number of clients", CLIENTS_HOW, _by_clients(shown, figures, colours)),
        Section("Time of a call", CALLS_HOW, _call_times(shown, figures)),
        Section("Traffic for one record", TRAFFIC_HOW, _traffic(shown, figures)),
    ]
    return [section for section in sections if section.content]


def _rows(shown: Sequence[Shown], *metrics: str) -> Found:
    return [
        (item, row)
        for metric in metrics
        for item in shown
        for row in item.report.rows
        if row.metric == metric and row.starts
    ]


def _labelled(found: Found, words: Mapping[str, str]) -> list[tuple[str, int, Row]]:
    """Each row with its label, and the place of its metric among `words`.

    A label is what the row is of, then what tells it from the others: its report, its setting.
    """
    contest, places = Contest([row.key for _, row in found]), list(words)
    return [
        (
            dotted(words[row.metric], item.label, contest.contender(row.key), contest.setting(row.key)),
            places.index(row.metric),
            row,
        )
        for item, row in found
    ]


# --- until the target ---

TARGETS = ("seconds_to_target", "bytes_to_target", "steps_to_target")
_ENDS = ("final_accuracy", "final_distance", "final_val_loss")


def target_bars(shown: Sequence[Shown], figures: PageFigures, colours: Colours) -> Section:
    """A bar for each contender: what it took to reach the target."""
    ran = _rows(shown, *_ENDS)
    contest = Contest([row.key for _, row in ran])
    settings = list(dict.fromkeys(contest.setting(row.key) for _, row in ran))
    parts = []
    for metric in TARGETS:
        reached = {(item.number, row.identity[1]): row for item, row in _rows(shown, metric)}
        for setting in settings if reached else ():
            runs = [(item, row) for item, row in ran if contest.setting(row.key) == setting]
            found = [(item, end, reached.get((item.number, end.identity[1]))) for item, end in runs]
            least = usual_deviation(
                start_medians(row)
                for _, end, row in found
                if row is not None and len(row.starts) == len(end.starts)
            )
            bars = []
            for item, end, row in found:
                contender = contest.contender(end.key)
                colour = colours.setdefault(contender, len(colours))
                label = dotted(item.label, contender) or "all"
                if row is not None and len(row.starts) == len(end.starts):
                    bars.append(bar_of(row, label, colour, least))
                else:
                    bars.append(IntervalBar(label, None, note=_why_not(row, len(end.starts)), metric=metric))
            if any(end is not None and len(end.starts) > 1 for _, end, _ in found):
                # a single run of each is no ranking, and must not look like one
                bars.sort(key=lambda bar: math.inf if bar.value is None else bar.value)
            if any(bar.value is not None for bar in bars):
                title = sentence_case(metric_words(metric)) + _target_of(shown, runs)
                title += f" · {setting}" if setting else ""
                parts.append(titled(f"{title} (lower is better)", figures.place(bars_figure(bars))))
    how = TARGET_HOW if any(len(row.starts) > 1 for _, row in ran) else SINGLE_TARGET_HOW
    return Section("What it took to reach the target", how + _coarseness(shown), beside_one_another(*parts))


def _target_of(shown: Sequence[Shown], runs: Found) -> str:
    """' 90 %': the target that the reports name, where they agree."""
    targets: dict[float, bool] = {}
    for item in shown:
        target: Any = item.report.config.get("target", item.report.config.get("target_accuracy"))
        if is_number(target):
            targets[target] = True
    if len(targets) != 1:
        return ""
    (target,) = targets
    is_share = any(row.metric == "final_accuracy" for _, row in runs)
    return f" ({100 * target:g} %)" if is_share else f" ({target:g})"


def _coarseness(shown: Sequence[Shown]) -> str:
    """How finely the figures can be read: nobody looks whether the target is reached at every step."""
    steps = steps_apart(shown) or 1
    if steps < 2:
        return ""
    return (
        f" Whether the target is reached is looked at every {steps} steps, so that each run ends at a "
        f"multiple of {steps}; a mean need not."
    )


def _why_not(row: Row | None, num_runs: int) -> str:
    """Why somebody has no bar: it did not reach the target in every run."""
    if row is None:
        return f"not reached in {counted(num_runs, 'run')}"
    return f"reached in {len(row.starts)} of {counted(num_runs, 'run')} only"


TARGET_HOW = (
    "A bar is the mean over the runs, which differ in their seed; ± and the thin line are the 95 % interval "
    "of that mean. Runs that agree by chance would have a line that is too short: none is shorter than the "
    "typical one here (the median, as a share of the mean). Where two lines overlap, these runs do not tell "
    "one from the other. Only who reached the target in every run has a bar."
)
SINGLE_TARGET_HOW = (
    "One run of each, so that the bars are in no order: another run may turn it round. Only who reached the "
    "target has a bar."
)

# --- calls of the DHT ---

_TRIED = {"store_success": "store_replicas", "get_success": "get_hops"}
"""The metric that has a sample for each call whose success was counted."""
_CALLS = {"store_success": "stores", "get_success": "reads"}


def _success_bars(shown: Sequence[Shown], figures: PageFigures) -> str:
    """The share of calls that succeeded, all starts together, with Wilson's interval."""
    parts = []
    for item in shown:
        bars = []
        tries = {row.identity: row for _, row in _rows([item], *_TRIED.values())}
        for label, colour, row in _labelled(_rows([item], *_CALLS), _CALLS):
            calls = tries.get((_TRIED[row.metric], row.identity[1]))
            if calls is None or len(calls.starts) != len(row.starts):
                continue
            total = sum(map(len, calls.starts))
            done = sum(
                min(1.0, max(0.0, share[0])) * len(start)
                for share, start in zip(row.starts, calls.starts, strict=True)
            )
            low, high = wilson(done, total)
            note = f"{done:,.0f} of {total:,}"
            bars.append(IntervalBar(label, done / total, (low, high), note, colour, row.metric))
        if bars:
            alive = [percentile(start_medians(row), 50) for _, row in _rows([item], "survival")]
            dead = f"{100 * (1 - min(alive)):.3g} % of the peers were dead" if alive else ""
            dead = "no peer was dead" if alive and min(alive) == 1 else dead
            title = sentence_case(dotted(item.label, dead))
            parts.append(titled(title, figures.place(bars_figure(bars, "Share that succeeded"))))
    return beside_one_another(*parts)


def wilson(done: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score, which also holds near 0 and 1."""
    z, share = 1.96, done / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


SUCCESS_HOW = (
    "The share of records that were stored (some peer took them) and of reads that found their record. One "
    "call may carry many of them. The line is the 95 % interval of so many. Anything below 100 % is data "
    "that was not found."
)


def _hops(shown: Sequence[Shown], figures: PageFigures) -> str:
    parts = []
    words = {"get_hops": "Reads", "store_hops": "Stores"}
    found = _rows(shown, *words)
    for (item, row), (title, _, _) in zip(found, _labelled(found, words), strict=True):
        if not all(0 <= hops <= MAX_HOPS for hops in row.samples):
            continue
        counts: dict[int, float] = {}
        for hops in row.samples:
            counts[int(hops)] = counts.get(int(hops), 0.0) + 1
        whole = Histogram({number: counts.get(number, 0.0) for number in range(max(counts) + 1)})
        picture = histogram_figure(whole, item.number, "Peers asked one after another", " peers asked")
        parts.append(titled(title, figures.place(picture)))
    return beside_one_another(*parts)


MAX_HOPS = 256
"""A lookup that asks more peers than an id has bits is none."""
HOPS_HOW = (
    "How many peers were asked one after another before the answer was there. 0 is an answer that the asking "
    "peer had itself. Fewer is better: each costs the time of a round trip."
)


def _traffic(shown: Sequence[Shown], figures: PageFigures) -> str:
    parts = []
    for what, metrics in (
        ("Messages", ("store_messages", "get_messages")),
        ("Datagrams", ("store_datagrams", "get_datagrams")),
        ("Bytes", ("store_bytes", "get_bytes")),
    ):
        words = {metric: metric_words(metric) for metric in metrics}
        bars = [bar_of(row, label, colour) for label, colour, row in _labelled(_rows(shown, *words), words)]
        if bars:
            parts.append(titled(what, figures.place(bars_figure(bars, f"{what} for one record"))))
    return beside_one_another(*parts)


TRAFFIC_HOW = (
    "What the network carried for one record that was stored and for one that was read, on average; less is "
    "better. A message may be several datagrams, and one message may carry many records: a record may take "
    "fewer messages than there are peers that keep it."
)

# --- an expert server ---

_SPEEDS = {
    "samples_per_s": "the expert server",
    "local_samples_per_s": "the module alone, without a network",
    "raw_samples_per_s": "blocking sockets without a protocol",
    "echo_samples_per_s": "the echo, without computing",
}


def _throughput(shown: Sequence[Shown], figures: PageFigures) -> str:
    found = _rows(shown, *_SPEEDS)
    if not _rows(shown, "samples_per_s") or len({row.metric for _, row in found}) < 2:
        return ""
    parts = []
    for item in shown:
        own = _labelled(_rows([item], *_SPEEDS), _SPEEDS)
        bars = [bar_of(row, label, colour) for label, colour, row in own]
        if bars:
            # the echo is many times as fast as all computing: on one axis the others would be slivers
            near = [bar for bar in bars if (bar.value or 0.0) <= MAX_TIMES * (bars[0].value or 0.0)]
            far = [bar for bar in bars if bar not in near]
            plot = figures.place(bars_figure(near, "Samples in a second"))
            said = "; ".join(f"{bar.label}: {bar.value:,.0f} /s" for bar in far if bar.value is not None)
            plot += f'<p class="how">Too fast for this axis: {escape(said)}.</p>' if said else ""
            parts.append(titled(item.label, plot))
    return beside_one_another(*parts)


THROUGHPUT_HOW = (
    "Samples in a second; more is better. Below the server stand its bounds, measured in the same run: the "
    "same computing without a network, and the same traffic without computing (the echo). In truth a server "
    "cannot be faster than either, and is good where it comes near the lower of them. Each is measured at "
    "another moment: above 100 % of a bound is an error of measurement."
)
MAX_TIMES = 10
"""A bar that is so many times as long as the server's is told in words."""


def _by_clients(shown: Sequence[Shown], figures: PageFigures, colours: Colours) -> str:
    found = [
        (item, row) for item, row in _rows(shown, "samples_per_s") if is_number(row.key.get("num_clients"))
    ]
    if len({row.key["num_clients"] for _, row in found}) < 2:
        return ""
    contest = Contest([row.key for _, row in found], aside=("num_clients", "scenario"))
    lines: dict[str, list[Row]] = {}
    for _, row in found:
        name = dotted(contest.contender(row.key), contest.setting(row.key)) or "the expert server"
        lines.setdefault(name, []).append(row)
    chart = Chart(group_of(found[0][1]), ["num_clients"])
    entries = [(name, colours.setdefault(name, len(colours))) for name in lines]
    for series, rows in enumerate(lines.values()):
        chart.add(0, line_over("num_clients", rows), series=series, style="points")
    number = figures.open_set(entries)
    return figures.legend(number) + figures.place(*chart.figures(entries), number=number)


CLIENTS_HOW = (
    "Samples in a second by how many clients asked at once. It grows until the server has no time left; from "
    "there on, more clients only wait longer."
)


_CALL_TIMES = (("forward_latency", "backward_latency"), ("store_latency", "get_latency"))


def _call_times(shown: Sequence[Shown], figures: PageFigures) -> str:
    """Percentiles of each kind of call, as far as there are calls enough for them."""
    parts = []
    for item in shown:
        for metrics in _CALL_TIMES:
            own = _rows([item], *metrics)
            if not own:
                continue
            named = [(label, number, row) for number, (label, _, row) in enumerate(_labelled(own, _KINDS))]
            number = figures.open_set((name, colour) for name, colour, _ in named)
            picture = percentiles_figure(("latency", own[0][1].unit, "lower"), named)
            for series, trace in enumerate(picture["data"]):
                trace["meta"] = {"series": series}
            num_calls = min(len(row.samples) for _, _, row in named)
            few = f"{counted(num_calls, 'call')} of a kind: too few for p95" if num_calls < 20 else ""
            few = dotted(_batch_of(item), few)
            plot = figures.legend(number) + figures.place(picture, number=number)
            parts.append(titled(dotted(item.label, few), plot))
    return beside_one_another(*parts)


def _batch_of(item: Shown) -> str:
    """'a call of 64 records': what one call carries, where the report says it; '' for a single thing."""
    config = item.report.config
    plan = config.get("plan")
    size = plan.get("expert_batch_size") if isinstance(plan, dict) else config.get("batch_size")
    if not isinstance(size, int) or size < 2:
        return ""
    return f"a call carries {counted(size, 'expert' if isinstance(plan, dict) else 'sample')}"


_KINDS = {
    "forward_latency": "forward",
    "backward_latency": "backward",
    "store_latency": "store",
    "get_latency": "read",
}
CALLS_HOW = (
    "How long a caller waited for one call, which may carry a whole batch of samples or records; less is "
    "better. p50 is the median, p95 what nineteen of twenty calls stayed below. A percentile is drawn where "
    "there are calls enough for it: four for p75, ten for p90, twenty for p95."
)
