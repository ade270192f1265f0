"""What is drawn on a page, told from the keys and metrics of its reports; `figures` makes each figure.

Every plot has a place in the markup and an entry in the page's data. A set is what several plots have in
common: the series with their colours, which the reader switches on and off, and a choice (of the axis, of
the row).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal.report.curves import (
    BEHIND,
    WORKERS,
    Histogram,
    Line,
    averaged,
    axes_of,
    class_width,
    histogram_of,
    is_histogram,
)
from shoal.report.html.figures import (
    NUM_COLOURS,
    PALETTE,
    Chart,
    Figure,
    IntervalBar,
    axis_name,
    bar_of,
    bars_figure,
    histogram_figure,
    percentiles_figure,
    waits_figure,
)
from shoal.report.html.markup import Markup, Section, beside_one_another, element, how, joined, titled
from shoal.report.schema import Curve, Report, Row, Scalar, is_number, rows_of, text
from shoal.report.statistics import mean_of, percentile, start_medians, usual_deviation
from shoal.report.units import Scale, counted
from shoal.report.views import Group, group_of
from shoal.report.words import key_label, metric_title, metric_words, scale_of, sentence_case

# --- places and sets ---

MAX_SAMPLES = 1200
"""Of one plot of samples; more are thinned evenly in time, which keeps drift within a start visible."""
SHOWN_SERIES = 12
"""More are there to be switched on."""
CONTENDERS = ("contender", "strategy", "method")
"""Entries of a key that name who competes; the others say under which conditions."""


@dataclass(frozen=True)
class Shown:
    """A report on a page: its name there ('' for a single one), the number of its colour, and its file."""

    report: Report
    label: str = ""
    number: int = 0
    source: str = ""


@dataclass
class PageFigures:
    """All plots of one page."""

    plots: list[dict[str, Any]] = field(default_factory=list)
    sets: list[dict[str, Any]] = field(default_factory=list)
    _samples_left: int = 16_000

    @property
    def data(self) -> dict[str, Any]:
        """What `assets/drawing.js` reads; `palette` has the variable of each colour that is to be exchanged.

        A list that several traces have (the steps of all, the values over seconds and over bytes) stands
        once in `lists`; traces have its number as {"list": number}.
        """
        palette = {colour: f"--{name}" for name, colour in PALETTE.items()}
        numbers: dict[bytes, int] = {}
        lists: list[Any] = []

        def once(value: Any) -> Any:
            if not isinstance(value, list) or len(value) < 4:
                return value
            number = numbers.setdefault(msgspec.json.encode(value), len(lists))
            if number == len(lists):
                lists.append(value)
            return {"list": number}

        def packed(figure: Figure) -> Figure:
            # the names of groups are the legend's of `Report.figure`: a page has its own
            traces = [
                {name: once(value) for name, value in trace.items() if name != "legendgroup"}
                for trace in figure["data"]
            ]
            return {"data": traces, "layout": figure["layout"]}

        plots = [plot | {"figures": [packed(figure) for figure in plot["figures"]]} for plot in self.plots]
        return {"plots": plots, "sets": self.sets, "palette": palette, "lists": lists}

    def share_samples(self, num_plots: int) -> int:
        """How many samples each of some plots may have: a page has so many, and each group at most half."""
        share = max(0, min(MAX_SAMPLES, self._samples_left // (2 * num_plots)))
        self._samples_left -= share * num_plots
        return share

    def place(self, *figures: Figure, number: int | None = None) -> Markup:
        """Keep a figure, or those of a set's choices, and return the element in which it will be drawn."""
        self.plots.append({"figures": list(figures)} | ({} if number is None else {"set": number}))
        return element("div", kind="plot", data_plot=len(self.plots) - 1)

    def open_set(self, series: Iterable[tuple[str, int]]) -> int:
        """A new set of series, each with a label and the number of its colour."""
        entries = [
            {"label": label, "colour": colour % NUM_COLOURS, "isHidden": index >= SHOWN_SERIES}
            for index, (label, colour) in enumerate(series)
        ]
        self.sets.append({"series": entries})
        return len(self.sets) - 1

    def legend(self, number: int) -> Markup:
        """The series of a set as switches; nothing where there is one series."""
        buttons = [
            _switch(
                each["label"],
                number,
                kind=f"line s{each['colour']}",
                data_series=index,
                is_on=not each["isHidden"],
            )
            for index, each in enumerate(self.sets[number]["series"])
        ]
        return element("div", *buttons, kind="legend") if len(buttons) > 1 else Markup()

    def switched(self, series: Iterable[tuple[str, int]], figure: Figure) -> Markup:
        """A figure in a set of its own, under the switches of its series."""
        number = self.open_set(series)
        return self.legend(number) + self.place(figure, number=number)

    def tabs(self, number: int, name: str, choices: Sequence[str]) -> Markup:
        """A few choices of a set, all in sight; nothing where there is no choice."""
        buttons = [
            _switch(choice, number, data_choice=index, is_on=index == 0)
            for index, choice in enumerate(choices)
        ]
        return element("div", element("span", name), *buttons, kind="tabs") if len(buttons) > 1 else Markup()

    def picker(self, number: int, name: str, choices: Sequence[str]) -> Markup:
        """Many choices of a set, in a list."""
        options = [element("option", choice, value=index) for index, choice in enumerate(choices)]
        return element("label", name, " ", element("select", *options, data_set=number))


def _switch(label: str, number: int, *, is_on: bool, kind: str = "", **attributes: str | int) -> Markup:
    state: dict[str, str | int] = {"data_set": number, "aria_pressed": "true" if is_on else "false"}
    return element("button", label, kind=kind, type="button", **state, **attributes)


def dotted(*names: str) -> str:
    """Names in one line with dots between them; those that are empty are left out."""
    return " · ".join(name for name in names if name)


class Contest:
    """Who competes in which setting, told from the keys; one colour for each through a whole chapter.

    `aside` names the entries of a key that are neither: the axis of a plot.
    """

    def __init__(self, keys: Iterable[dict[str, Scalar]], aside: Sequence[str] = ()) -> None:
        found = list(keys)
        first = found[0] if found else {}
        shared = [name for name in first if all(key.get(name) == first[name] for key in found)]
        names = [name for name in CONTENDERS if any(name in key for key in found)]
        self._names = [name for name in names if name not in shared] or names
        self._without = (*aside, *shared)

    def contender(self, key: dict[str, Scalar]) -> str:
        """Name the contender as shortly as the others allow; '' where there is one alone."""
        if self._names:
            return " ".join(text(key[name]) for name in self._names if name in key)
        return self._label(key)

    def setting(self, key: dict[str, Scalar]) -> str:
        """What else distinguishes the key; '' where nothing does."""
        return self._label(key) if self._names else ""

    def _label(self, key: dict[str, Scalar]) -> str:
        without = (*self._without, *self._names)
        return key_label({name: value for name, value in key.items() if name not in without})


Found = list[tuple[Shown, Row]]


@dataclass
class Chapter:
    """The reports of one benchmark, the plots of the page they are on, and the colour of each contender."""

    shown: Sequence[Shown]
    figures: PageFigures = field(default_factory=PageFigures)
    colours: dict[str, int] = field(default_factory=dict)

    def colour_of(self, contender: str) -> int:
        """The number of a contender's colour, through the whole chapter."""
        return self.colours.setdefault(contender, len(self.colours))

    def rows(self, *metrics: str, of: Shown | None = None) -> Found:
        """The rows of some metrics that hold samples, in every report or `of` one."""
        shown = self.shown if of is None else [of]
        return [(item, row) for metric in metrics for item in shown for row in rows_of(item.report, metric)]


def drawn_sections(chapter: Chapter) -> list[Section]:
    """All that is drawn of the reports of a benchmark; a section that has nothing to show has no content."""
    courses = curves(chapter)  # which give out the colours
    return [
        targets(chapter),
        Section("Did stores and reads succeed?", SUCCESS_HOW, _success(chapter)),
        Section("Hops of a look-up", HOPS_HOW, _hops(chapter)),
        Section("Throughput", THROUGHPUT_HOW, _throughput(chapter)),
        Section("Throughput by number of clients", CLIENTS_HOW, _by_clients(chapter)),
        Section("Time of a call", CALLS_HOW, _call_times(chapter)),
        Section("Traffic for one record", TRAFFIC_HOW, _traffic(chapter)),
        courses,
        Section("Speed by number of workers", SCALING_HOW, scaling_plots(chapter)),
        Section("Who waited for whom", WAITS_HOW, wait_plots(chapter)),
        Section("Staleness", STALENESS_HOW, histogram_plots(chapter)),
    ]


def _labelled(found: Found, words: Mapping[str, str]) -> list[tuple[str, int, Row]]:
    """Each row with its label, and the place of its metric among `words`.

    A label is what the row is of, then what tells it from the others: its report, its setting.
    """
    contest, places = Contest(row.key for _, row in found), list(words)
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


def targets(chapter: Chapter) -> Section:
    """A bar for each contender: what it took to reach the target."""
    ran = chapter.rows(*_ENDS)
    contest = Contest(row.key for _, row in ran)
    by_setting: dict[str, Found] = {}
    for item, end in ran:
        by_setting.setdefault(contest.setting(end.key), []).append((item, end))
    parts = []
    for metric in TARGETS:
        reached = {(item.number, each.identity[1]): each for item, each in chapter.rows(metric)}
        for setting, runs in by_setting.items() if reached else ():
            found = [(item, end, reached.get((item.number, end.identity[1]))) for item, end in runs]
            whole = [row for _, end, row in found if row is not None and len(row.starts) == len(end.starts)]
            least = usual_deviation(map(start_medians, whole))
            bars = []
            for item, end, row in found:
                contender = contest.contender(end.key)
                label, colour = dotted(item.label, contender) or "all", chapter.colour_of(contender)
                if row is not None and len(row.starts) == len(end.starts):
                    bars.append(bar_of(row, label, colour, least))
                else:
                    bars.append(IntervalBar(label, None, note=_why_not(row, len(end.starts)), metric=metric))
            if any(len(end.starts) > 1 for _, end in runs):
                # a single run of each is no ranking, and must not look like one
                bars.sort(key=lambda bar: math.inf if bar.value is None else bar.value)
            if whole:
                title = dotted(metric_title(metric) + _target_of(chapter.shown, runs), setting)
                plot = chapter.figures.place(bars_figure(bars))
                parts.append(titled(f"{title} (lower is better)", plot))
    said = TARGET_HOW if any(len(row.starts) > 1 for _, row in ran) else SINGLE_TARGET_HOW
    steps = steps_apart(chapter.shown) or 1
    if steps > 1:
        # nobody looks whether the target is reached at every step
        said += (
            f" Whether the target is reached is looked at every {steps} steps, so that each run ends at a "
            f"multiple of {steps}; a mean need not."
        )
    return Section("What it took to reach the target", said, beside_one_another(parts))


def _target_of(shown: Sequence[Shown], runs: Found) -> str:
    """' (90 %)': the target that the reports name, where they agree."""
    configs = [item.report.config for item in shown]
    found: list[Any] = [config.get("target", config.get("target_accuracy")) for config in configs]
    known = list(dict.fromkeys(target for target in found if is_number(target)))
    if len(known) != 1:
        return ""
    is_share = any(row.metric == "final_accuracy" for _, row in runs)
    return f" ({100 * known[0]:g} %)" if is_share else f" ({known[0]:g})"


def _why_not(row: Row | None, num_runs: int) -> str:
    """Why somebody has no bar: it did not reach the target in every run."""
    if row is None:
        return f"not reached in {counted(num_runs, 'run')}"
    return f"reached in {len(row.starts)} of {counted(num_runs, 'run')} only"


# --- calls of the DHT ---

_TRIED = {"store_success": "store_replicas", "get_success": "get_hops"}
"""The metric that has a sample for each call whose success was counted."""
_CALLS = {"store_success": "stores", "get_success": "reads"}
SUCCESS_HOW = (
    "The share of records that were stored (some peer took them) and of reads that found their record. One "
    "call may carry many of them. The line is the 95 % interval of so many. Anything below 100 % is data "
    "that was not found."
)


def _success(chapter: Chapter) -> Markup:
    """The share of calls that succeeded, all starts together, with Wilson's interval."""
    parts = []
    for item in chapter.shown:
        bars = []
        tries = {row.identity: row for _, row in chapter.rows(*_TRIED.values(), of=item)}
        for label, colour, row in _labelled(chapter.rows(*_CALLS, of=item), _CALLS):
            calls = tries.get((_TRIED[row.metric], row.identity[1]))
            if calls is None or len(calls.starts) != len(row.starts):
                continue
            total = sum(map(len, calls.starts))
            pairs = zip(row.starts, calls.starts, strict=True)
            done = sum(min(1.0, max(0.0, share[0])) * len(start) for share, start in pairs)
            note, ends = f"{done:,.0f} of {total:,}", wilson(done, total)
            bars.append(IntervalBar(label, done / total, ends, note, colour, row.metric))
        if bars:
            alive = [percentile(start_medians(row), 50) for _, row in chapter.rows("survival", of=item)]
            dead = f"{100 * (1 - min(alive)):.3g} % of the peers were dead" if alive else ""
            dead = "no peer was dead" if alive and min(alive) == 1 else dead
            plot = chapter.figures.place(bars_figure(bars, "Share that succeeded"))
            parts.append(titled(sentence_case(dotted(item.label, dead)), plot))
    return beside_one_another(parts)


def wilson(done: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's score, which also holds near 0 and 1."""
    z, share = 1.96, done / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


MAX_HOPS = 256
"""A lookup that asks more peers than an id has bits is none."""
HOPS_HOW = (
    "How many peers were asked one after another before the answer was there. 0 is an answer that the asking "
    "peer had itself. Fewer is better: each costs the time of a round trip."
)


def _hops(chapter: Chapter) -> Markup:
    parts = []
    words = {"get_hops": "Reads", "store_hops": "Stores"}
    found = chapter.rows(*words)
    for (item, row), (title, _, _) in zip(found, _labelled(found, words), strict=True):
        if all(0 <= hops <= MAX_HOPS for hops in row.samples):
            hops = list(map(int, row.samples))
            whole = Histogram({number: float(hops.count(number)) for number in range(max(hops) + 1)})
            figure = histogram_figure(whole, item.number, "Peers asked one after another", " peers asked")
            parts.append(titled(title, chapter.figures.place(figure)))
    return beside_one_another(parts)


TRAFFIC_HOW = (
    "What the network carried for one record that was stored and for one that was read, on average; less is "
    "better. A message may be several datagrams, and one message may carry many records: a record may take "
    "fewer messages than there are peers that keep it."
)


def _traffic(chapter: Chapter) -> Markup:
    parts = []
    for what in ("messages", "datagrams", "bytes"):
        words = {metric: metric_words(metric) for metric in (f"store_{what}", f"get_{what}")}
        bars = [bar_of(row, label, colour) for label, colour, row in _labelled(chapter.rows(*words), words)]
        if bars:
            name = sentence_case(what)
            parts.append(titled(name, chapter.figures.place(bars_figure(bars, f"{name} for one record"))))
    return beside_one_another(parts)


# --- an expert server ---

_SPEEDS = {
    "samples_per_s": "the expert server",
    "local_samples_per_s": "the module alone, without a network",
    "raw_samples_per_s": "blocking sockets without a protocol",
    "echo_samples_per_s": "the echo, without computing",
}
THROUGHPUT_HOW = (
    "Samples in a second; more is better. Below the server stand its bounds, measured in the same run: the "
    "same computing without a network, and the same traffic without computing (the echo). In truth a server "
    "cannot be faster than either, and is good where it comes near the lower of them. Each is measured at "
    "another moment: above 100 % of a bound is an error of measurement."
)
MAX_TIMES = 10
"""A bar that is so many times as long as the server's is told in words."""


def _throughput(chapter: Chapter) -> Markup:
    found = chapter.rows(*_SPEEDS)
    metrics = {row.metric: True for _, row in found}
    if "samples_per_s" not in metrics or len(metrics) < 2:
        return Markup()
    parts = []
    for item in chapter.shown:
        own = _labelled(chapter.rows(*_SPEEDS, of=item), _SPEEDS)
        bars = [(bar_of(row, label, colour), mean_of(start_medians(row))) for label, colour, row in own]
        if bars:
            # the echo is many times as fast as all computing: on one axis the others would be slivers
            near = [bar for bar, speed in bars if speed <= MAX_TIMES * bars[0][1]]
            far = [f"{bar.label}: {speed:,.0f} /s" for bar, speed in bars if bar not in near]
            plot = chapter.figures.place(bars_figure(near, "Samples in a second"))
            plot += how(f"Too fast for this axis: {'; '.join(far)}." if far else "")
            parts.append(titled(item.label, plot))
    return beside_one_another(parts)


CLIENTS_HOW = (
    "Samples in a second by how many clients asked at once. It grows until the server has no time left; from "
    "there on, more clients only wait longer."
)


def _by_clients(chapter: Chapter) -> Markup:
    along = "num_clients"
    rows = [row for _, row in chapter.rows("samples_per_s") if is_number(row.key.get(along))]
    if len({row.key[along]: True for row in rows}) < 2:
        return Markup()
    contest = Contest((row.key for row in rows), aside=(along, "scenario"))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = dotted(contest.contender(row.key), contest.setting(row.key)) or "the expert server"
        lines.setdefault(name, []).append(row)
    chart = Chart(group_of(rows[0]), [along])
    for series, of_one in enumerate(lines.values()):
        chart.add(0, _line_over(along, of_one), series=series, style="points")
    entries = [(name, chapter.colour_of(name)) for name in lines]
    return chapter.figures.switched(entries, chart.figures(entries)[0])


_CALL_TIMES = (("forward_latency", "backward_latency"), ("store_latency", "get_latency"))
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


def _call_times(chapter: Chapter) -> Markup:
    """Percentiles of each kind of call, as far as there are calls enough for them."""
    parts = []
    for item, metrics in ((item, metrics) for item in chapter.shown for metrics in _CALL_TIMES):
        found = _labelled(chapter.rows(*metrics, of=item), _KINDS)
        if not found:
            continue
        named = [(label, number, row) for number, (label, _, row) in enumerate(found)]
        figure = percentiles_figure(("latency", named[0][2].unit, "lower"), named)
        for series, trace in enumerate(figure["data"]):
            trace["meta"] = {"series": series}
        num_calls = min(len(row.samples) for _, _, row in named)
        few = f"{counted(num_calls, 'call')} of a kind: too few for p95" if num_calls < 20 else ""
        plot = chapter.figures.switched(((name, colour) for name, colour, _ in named), figure)
        parts.append(titled(dotted(item.label, _batch_of(item.report), few), plot))
    return beside_one_another(parts)


def _batch_of(report: Report) -> str:
    """'a call carries 64 samples', where the report says it; '' for a single thing."""
    plan, noun = report.config.get("plan"), "sample"
    size = report.config.get("batch_size")
    if isinstance(plan, dict):
        size, noun = plan.get("expert_batch_size"), "expert"
    return f"a call carries {counted(size, noun)}" if isinstance(size, int) and size > 1 else ""


# --- lines: along an axis, over the number of workers ---

_OF_A_COURSE = ("s", "bytes", "step")
"""The axes of a training, in the order in which a reader asks for them."""
DISTANCE_HOW = (
    " How far models are apart is the length of the difference between a worker's parameters and the mean of "
    "all workers', averaged over the workers; of a strategy that averages every few steps it is taken right "
    "after an averaging, while the worst worker is examined wherever it stands."
)
SCALING_HOW = (
    "Speed by the number of workers. Points are medians, their bars reach from the lowest to the highest "
    "run; dashed lines are predictions; the dotted line is the ideal, the fastest with the fewest "
    "workers, multiplied. The nearer to it, the better a strategy scales."
)


@dataclass(frozen=True)
class _Course:
    """A figure of one report along the axes of a plot; it has no line on an axis that it lacks."""

    report: int
    key: dict[str, Scalar]
    group: Group
    lines: Sequence[Line | None]
    style: str = "line"


def curves(chapter: Chapter) -> Section:
    """Every metric of the reports' curves, each setting in a plot of its own."""
    every = [(number, curve) for number, item in enumerate(chapter.shown) for curve in item.report.curves]
    found = [(number, curve) for number, curve in every if _axes([curve])]
    axes = _axes([curve for _, curve in found])
    courses = [
        _Course(number, curve.key, group_of(curve), [averaged(curve, axis) for axis in axes])
        for number, curve in found
    ]
    said = "Each line is the mean over the runs, its band reaches from the lowest run to the highest."
    if not any(len(curve.starts) > 1 for _, curve in found):
        said = "Each line is a single run."
    content = _line_plots(chapter, courses, axes)
    if axes and not any(axis in _OF_A_COURSE for axis in axes):
        called = " and the ".join(map(axis_name, axes))
        return Section(f"Over the {called}", f"Each figure by the {called}. {said}", content)
    steps = steps_apart(chapter.shown)
    said = f"How each figure went while it trained. {said}"
    said += "" if steps is None else f" A point was taken every {counted(steps, 'step')}."
    said += (
        " Choose along what: a strategy that is ahead by steps may be behind by seconds or bytes. Press a "
        "name to hide or show it."
    )
    has_distance = any(curve.metric == "consensus_distance" for _, curve in found)
    return Section("Over time", said + DISTANCE_HOW * has_distance, content)


def steps_apart(shown: Sequence[Shown]) -> int | None:
    """How many steps there are from one evaluation to the next; None where the reports do not agree."""
    (steps, *others) = {item.report.config.get("eval_every"): True for item in shown}
    return steps if not others and isinstance(steps, int) and is_number(steps) else None


def _axes(curves: Sequence[Curve]) -> list[str]:
    names = [axis for axis in axes_of(curves) if axis != WORKERS]
    return sorted(names, key=lambda axis: _OF_A_COURSE.index(axis) if axis in _OF_A_COURSE else -1)


def scaling_groups(shown: Sequence[Shown]) -> list[Group]:
    """The metrics of which a report has figures for several numbers of workers, or a prediction of them."""
    numbers: dict[tuple[int, Group], dict[Scalar, bool]] = {}
    for index, item in enumerate(shown):
        for row in filter(_is_scaling, item.report.rows):
            numbers.setdefault((index, group_of(row)), {})[row.key[WORKERS]] = True
        for curve in _predictions(item.report):
            counts = (number for points in curve.starts for number in points.get(WORKERS, []))
            numbers.setdefault((index, group_of(curve)), {}).update(dict.fromkeys(counts, True))
    return list({group: True for (_, group), found in numbers.items() if len(found) > 1})


def _is_scaling(row: Row) -> bool:
    value = row.key.get(WORKERS)
    return is_number(value) and float(value or 0) > 0 and bool(row.starts) and "rank" not in row.key


def _predictions(report: Report) -> list[Curve]:
    return [curve for curve in report.curves if WORKERS in axes_of([curve])]


def scaling_plots(chapter: Chapter) -> Markup:
    """Figures over the number of workers: measured as points on a line, predicted dashed, ideal dotted."""
    groups = scaling_groups(chapter.shown)
    measured: dict[tuple[int, Group, object], list[Row]] = {}
    predicted = []
    for number, item in enumerate(chapter.shown):
        for row in item.report.rows:
            if _is_scaling(row) and group_of(row) in groups:
                rest = tuple(entry for entry in row.identity[1] if entry[0] != WORKERS)
                measured.setdefault((number, group_of(row), rest), []).append(row)
        for curve in _predictions(item.report):
            line = averaged(curve, WORKERS)
            predicted.append(_Course(number, curve.key, group_of(curve), [line], "predicted"))
    lines = [
        _Course(number, rows[0].key, group, [_line_over(WORKERS, rows)], "points")
        for (number, group, _), rows in measured.items()
    ]
    return _line_plots(chapter, [*lines, *predicted], (WORKERS,))


def _line_over(name: str, rows: list[Row]) -> Line:
    """A line through rows that differ by a number in their key: medians, and how far starts reach."""
    ordered = sorted(rows, key=lambda row: float(row.key[name]))
    medians = [start_medians(row) for row in ordered]
    return Line(
        x=[float(row.key[name]) for row in ordered],
        mean=[percentile(row.samples, 50) for row in ordered],
        low=[min(values) for values in medians],
        high=[max(values) for values in medians],
        num_starts=max(len(row.starts) for row in ordered),
    )


def _line_plots(chapter: Chapter, courses: Sequence[_Course], axes: Sequence[str]) -> Markup:
    """A plot for each metric and setting, metric by metric, with switches for the series and the axis.

    Colours tell contenders apart and dashes reports, or colours the reports where nobody competes.
    """
    if not courses:
        return Markup()
    shown, figures = chapter.shown, chapter.figures
    contest = Contest((course.key for course in courses), aside=(WORKERS,) if WORKERS in axes else ())
    names = list(dict.fromkeys(contest.contender(course.key) for course in courses))
    is_by_report = len(names) == 1 and len(shown) > 1
    entries = [(name or "measured", chapter.colour_of(name)) for name in names if not is_by_report]
    entries = entries or [(item.label, item.number) for item in shown]
    number = figures.open_set(entries)
    charts: dict[Group, dict[str, Chart]] = {}
    for course in courses:
        of_group = charts.setdefault(course.group, {})
        chart = of_group.setdefault(contest.setting(course.key), Chart(course.group, axes))
        series = course.report if is_by_report else names.index(contest.contender(course.key))
        dash = 0 if is_by_report else course.report
        for place, line in enumerate(course.lines):
            if line is not None:
                chart.add(place, line, series=series, report=dash, style=course.style)
    parts = []
    for (metric, _, direction), of_group in charts.items():
        for setting, chart in of_group.items():
            if WORKERS in axes:
                _add_ideal(chart)
            plot = figures.place(*chart.figures(entries), number=number)
            parts.append(titled(f"{dotted(metric_title(metric), setting)} ({direction} is better)", plot))
    tabs = figures.tabs(number, "along", [axis_name(axis) for axis in axes])
    dashes = [element("span", item.label, kind=f"dash d{place % 3}") for place, item in enumerate(shown)]
    needs_key = len(shown) > 1 and not is_by_report
    controls = element("div", tabs, figures.legend(number), kind="controls")
    return joined([controls, how(joined(dashes)) if needs_key else "", beside_one_another(parts)])


def _add_ideal(chart: Chart) -> None:
    """What the fewest workers did, multiplied: for rates only. The fastest there sets it."""
    lines = [drawn.line for drawn in chart.lines[0] if drawn.line.x[0] > 0]
    if not chart.unit.endswith("/s") or chart.direction != "higher" or not lines:
        return
    origin = min(lines, key=lambda line: (line.x[0], -line.mean[0]))
    x = [origin.x[0], max(line.x[-1] for line in lines)]
    y = [origin.mean[0] * at / origin.x[0] for at in x]
    if x[1] > x[0]:
        chart.add(0, Line(x, y, y, y, 1), series=-1, style="ideal")


# --- staleness ---

MAX_BARS = 60
"""The most bars that a plot has; more are put into classes."""
STALENESS_HOW = (
    "How old a model or a gradient was when it was used, in updates: 0 is up to date, at 3 three updates had "
    "been made without it; 'ahead' came from a worker that had made more of them. Lower, that is further to "
    "the left, is better."
)


def histogram_plots(chapter: Chapter) -> Markup:
    """Bars for each contender, setting and report; '' where no staleness was counted."""
    found = _by_title(chapter, is_histogram, (BEHIND,))
    is_contest = len({contender: True for _, contender, _ in found.values()}) > 1
    parts = []
    for title, (item, contender, rows) in found.items():
        exact = histogram_of(rows)
        histogram = exact.in_classes(class_width(min(exact.counts), max(exact.counts), MAX_BARS))
        colour = chapter.colour_of(contender) if is_contest else item.number
        plot = chapter.figures.place(histogram_figure(histogram, colour, "Updates behind", " behind"))
        parts.append(titled(title, how(exact.said()) + plot))
    return beside_one_another(parts)


def _by_title(
    chapter: Chapter, is_of: Callable[[Row], bool], aside: Sequence[str]
) -> dict[str, tuple[Shown, str, list[Row]]]:
    """Rows that one plot shows together, under its title: with their report and contender."""
    rows = [(item, row) for item in chapter.shown for row in item.report.rows if row.starts and is_of(row)]
    contest = Contest((row.key for _, row in rows), aside)
    found: dict[str, tuple[Shown, str, list[Row]]] = {}
    for item, row in rows:
        contender = contest.contender(row.key)
        title = dotted(item.label, contender, contest.setting(row.key))
        found.setdefault(title, (item, contender, []))[2].append(row)
    return found


# --- who waited for whom ---

UNEVEN = 1.5
"""A worker that others wait for so many times as long as for the average one is named."""
WAITED, WAITING, AWAITED = "waited", "rank", "waited_for"
WAITS_HOW = (
    "How long the worker of each row waited for the worker of each column, on average over the runs; more "
    "colour is a longer wait, in one scale for all strategies. A column of more colour than the others is "
    "a worker that others wait for. A dash: the one never waited for the other. A strategy that is missing "
    "here never waits for a certain worker."
)


def is_wait(row: Row) -> bool:
    """Whether a row says how long one waited for another."""
    return row.metric == WAITED and {WAITING, AWAITED} <= row.key.keys()


def wait_plots(chapter: Chapter) -> Markup:
    """A heat map for each strategy, setting and report, all in one scale; '' where no waits are known."""
    maps = {name: rows for name, (_, _, rows) in _by_title(chapter, is_wait, (WAITING, AWAITED)).items()}
    longest = max((mean_of(row.samples) for rows in maps.values() for row in rows), default=0.0)
    parts = [titled(name, _wait_map(rows, longest, chapter.figures)) for name, rows in maps.items()]
    return beside_one_another(parts, kind="narrow")


def _wait_map(rows: list[Row], longest: float, figures: PageFigures) -> Markup:
    scale = scale_of(rows[0].metric, rows[0].unit, [longest])
    named = {row.key[name]: True for row in rows for name in (WAITING, AWAITED)}
    workers = sorted(named, key=_worker_order)
    cells = {(row.key[WAITING], row.key[AWAITED]): mean_of(row.samples) for row in rows}
    values = [[cells.get((waiting, awaited)) for awaited in workers] for waiting in workers]
    said = how(f"{_waits_said(cells, workers, scale)} Numbers are in {scale.unit}.")
    return said + figures.place(waits_figure(list(map(text, workers)), values, scale, longest))


def _worker_order(worker: Scalar) -> tuple[bool, float, str]:
    is_number = isinstance(worker, int | float)
    return not is_number, float(worker) if is_number else 0.0, text(worker)


def _waits_said(cells: Mapping[tuple[Scalar, Scalar], float], workers: Sequence[Scalar], scale: Scale) -> str:
    """The map in one sentence."""
    by_awaited = {
        worker: sum(value for (waiting, awaited), value in cells.items() if awaited == worker != waiting)
        for worker in workers
    }
    total = sum(by_awaited.values())
    if total <= 0:
        return "Nobody waited."
    worker = max(by_awaited, key=lambda name: by_awaited[name])
    most, in_all = by_awaited[worker], f"{scale.format(total)} of waiting in all"
    if most < UNEVEN * total / len(by_awaited):
        return f"{in_all}, evenly spread: no worker is waited for much longer."
    name = text(worker) if isinstance(worker, str) else f"rank {worker}"
    return f"{in_all}, {100 * most / total:.0f}% for {name} ({scale.format(most)})."
