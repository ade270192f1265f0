"""All rows of one metric on a page: drawn on one axis, in a table of their statistics, and one row closer."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.report.html.figures import percentiles_figure, quantiles_figure, rows_figure, samples_figure
from shoal.report.html.markup import (
    Markup,
    Section,
    beside_one_another,
    element,
    folded,
    how,
    joined,
    pill,
    swatch,
    table,
    titled,
)
from shoal.report.html.plots import PageFigures, Shown, dotted
from shoal.report.schema import Report, Row, Scalar, is_number
from shoal.report.statistics import PERCENTILES, is_known, summarize
from shoal.report.units import Scale, percent
from shoal.report.views import Group, group_of, shared_key
from shoal.report.words import (
    ABSENT,
    arrow_of,
    key_label,
    key_words,
    metric_title,
    metric_words,
    scale_of,
    value_words,
)

MIN_SAMPLES = 3
"""So few are all in the overview: a closer look has nothing more to show."""
MARKS_HOW = (
    " A dot is a median, a thick line the middle half of the measurements, a thin one p5 to p95; "
    "where there are too few for these, each is drawn."
)


class ReportGroup:
    """Rows of one metric and unit over several reports; a line of `rows` has one row, or None, for each."""

    def __init__(self, benchmark: str = "", group: Group = ("", "", "")) -> None:
        self.benchmark = benchmark
        self.group = group
        self.metric, self.unit, self.direction = group
        self.rows: list[list[Row | None]] = []

    @property
    def present(self) -> list[Row]:
        """The first row of each line, which names it."""
        return [_first(line) for line in self.rows]

    @property
    def measured(self) -> list[Row]:
        """All rows of all reports."""
        return [row for line in self.rows for row in line if row is not None]

    @property
    def is_mixed(self) -> bool:
        """Whether the rows are of several metrics, which share a table and no axis."""
        return len({(row.metric, row.unit): True for row in self.present}) > 1

    @property
    def is_of_facts(self) -> bool:
        """Whether every start gave a single figure, which has no distribution."""
        return all(len(start) == 1 for row in self.measured for start in row.starts)

    def label(self, index: int) -> str:
        """What tells a line from the others."""
        row, shared = self.present[index], shared_key(self.present)
        label, words = row_label(row, shared), metric_words(row.metric)
        if self.is_mixed:
            return words if label == words else dotted(words, label)
        if label == words:
            entries = {name: True for other in self.present for name in other.key if name not in row.key}
            return next((ABSENT[name] for name in entries if name in ABSENT), label)
        return label


def _first(line: Sequence[Row | None]) -> Row:
    return next(row for row in line if row is not None)


def row_label(row: Row, shared: dict[str, Scalar]) -> str:
    """A row for people, by what it does not share with the others; its metric where nothing else is left."""
    own = {name: value for name, value in row.key.items() if name not in shared}
    return key_label(own) or metric_words(row.metric)


def group_reports(reports: Sequence[Report]) -> list[ReportGroup]:
    """All rows of all reports, lined up by identity, in the order in which they first occur."""
    groups: dict[object, ReportGroup] = {}
    lines: dict[object, list[Row | None]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            key = (report.benchmark, group_of(row))
            line = lines.get((key, row.identity))
            if line is None:
                line = lines[key, row.identity] = [None] * len(reports)
                groups.setdefault(key, ReportGroup(*key)).rows.append(line)
            line[number] = row
    return list(groups.values())


def gathered(groups: Sequence[ReportGroup]) -> list[ReportGroup]:
    """Groups of a single line in one table, after the others: a metric of one figure needs no chapter."""
    lone = [group for group in groups if len(group.rows) == 1]
    if len(lone) < 2:
        return list(groups)
    mixed = ReportGroup()
    mixed.rows = [group.rows[0] for group in lone]
    return [*(group for group in groups if len(group.rows) > 1), mixed]


def metric_section(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> Section:
    """Everything about one metric, or about several of one figure each."""
    drawn = distribution(group, shown, figures)
    near = folded("One row closer", closer(group, shown, figures), is_open=len(shown) > 1)
    content = joined([drawn, statistics_table(group, shown), near])
    if group.is_mixed:
        about = "Figures of which there is one of each kind; ↑ higher is better."
        return Section("Single figures", about, content)
    shared = key_label(shared_key(group.present))
    title = metric_title(group.metric)
    about = f"{title}{f', all with {shared}' if shared else ''}; {group.direction} is better."
    return Section(title, about + MARKS_HOW * bool(drawn), content, group.metric)


# --- drawn ---


def distribution(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> Markup:
    """All rows on one axis; beside it which share of samples took how long, for times of a single report."""
    if group.is_mixed or not any(len(row.samples) > 1 for row in group.measured):
        return Markup()
    labels = [group.label(index) for index in range(len(group.rows))]
    reports = [(item.label, item.number) for item in shown]
    overview = figures.place(rows_figure(group.group, labels, group.rows, reports))
    if len(shown) > 1:
        return overview
    return beside_one_another(
        [overview, percentile_plot(list(zip(labels, group.present, strict=True)), figures)]
    )


def percentile_plot(rows: Sequence[tuple[str, Row]], figures: PageFigures) -> Markup:
    """The share of samples up to each time, a line for each named row; '' without enough samples."""
    enough = [
        (name, number, row)
        for number, (name, row) in enumerate(rows)
        if row.unit == "s" and is_known(len(row.samples), PERCENTILES[-1])
    ]
    if not enough:
        return Markup()
    plot = figures.switched(((name, colour) for name, colour, _ in enough), quantiles_figure(enough))
    return titled("Share of measurements that took at most so long", plot)


def closer(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> Markup:
    """One row at a time: its percentiles in every report beside each other, and its samples by start."""
    lines = [
        (group.label(index), line)
        for index, line in enumerate(group.rows)
        if any(row is not None and len(row.samples) > MIN_SAMPLES for row in line)
    ]
    if not lines or group.is_of_facts:
        return Markup()
    number = figures.open_set((item.label, item.number) for item in shown)
    picker = figures.picker(number, "Row", [label for label, _ in lines])
    swatches = [swatch(item.number, item.label) for item in shown if item.label]
    content = element("div", picker, *swatches, kind="controls")
    share = figures.share_samples(len(lines))
    bars, spreads = [], []
    for _, line in lines:
        first = _first(line)
        named = [(item.label, item.number, row) for item, row in zip(shown, line, strict=True)]
        measured = [(name, colour, row) for name, colour, row in named if row is not None and row.starts]
        num_starts = sum(len(row.starts) for *_, row in measured)
        if len(shown) > 1:
            bars.append(percentiles_figure(group_of(first), measured))
        spreads.append(samples_figure(first.metric, first.unit, named, max(6, share // max(1, num_starts))))
    if bars:
        content += titled("Percentiles", figures.place(*bars, number=number))
    note = how("Dots are measurements, from left to right in time; a line is the median of its run.")
    return content + titled("Measurements by run", note + figures.place(*spreads, number=number))


# --- tables ---


def key_columns(rows: Sequence[Row], names: Sequence[str]) -> list[Markup]:
    """Headings of entries of the rows' keys, numbers to the right."""
    return [
        element(
            "th",
            key_words(name),
            kind="key number" if all(is_number(row.key.get(name)) for row in rows) else "key",
            title=name,
        )
        for name in names
    ]


def key_cells(row: Row, names: Sequence[str], span: int = 1) -> list[Markup]:
    """The entries of a row's key under `key_columns`."""
    look: dict[str, str | int] = {"scope": "row", "rowspan": span if span > 1 else ""}
    return [
        element(
            "th",
            value_words(name, value, row.metric),
            kind="key number" if is_number(value) else "key",
            **look,
        )
        for name, value in ((name, row.key.get(name)) for name in names)
    ]


def metric_name(key: str) -> Markup:
    """What a figure is called, with its key in the tooltip."""
    return element("span", metric_words(key), title=key)


def number_cell(*content: str, kind: str = "number") -> Markup:
    """A cell of a figure."""
    return element("td", *content, kind=kind)


def telling_names(rows: Sequence[Row]) -> list[str]:
    """Names of the key entries that tell the rows apart, in the order of the benchmark."""
    shared = shared_key(rows)
    return list(dict.fromkeys(name for row in rows for name in row.key if name not in shared))


def statistics_table(group: ReportGroup, shown: Sequence[Shown]) -> Markup:
    """Every row of a group with its figures, one line for each report that has it; '' where all are zero.

    A column that says nothing (percentiles that no row has samples enough for) is left out.
    """
    names, is_mixed = telling_names(group.present), group.is_mixed
    lines: list[list[tuple[Shown, Row]]] = []
    zeros: dict[str, bool] = {}
    for index, of_line in enumerate(group.rows):
        if _is_zero(of_line):
            zeros[metric_words(_first(of_line).metric) if is_mixed else group.label(index)] = True
        else:
            lines.append([(item, row) for item, row in zip(shown, of_line, strict=True) if row is not None])
    note = how(f"Zero throughout: {', '.join(zeros)}." if zeros else "")
    if not lines:
        return note
    known = [found for line in lines for _, row in line if (found := summarize(row)) is not None]
    scale = None if is_mixed else scale_of(group.metric, group.unit, [each.median for each in known])
    figures = {
        "runs": True,
        "measurements": any(each.num_samples > each.num_starts for each in known),
        **{_q_name(q): any(q in each.percentiles for each in known) for q in PERCENTILES},
        "mean": any(each.num_samples > 1 for each in known),
        "spread": any(each.num_samples > 1 for each in known),
        "noise floor": any(each.noise_percent is not None for each in known),
    }
    columns = [name for name, is_said in figures.items() if is_said]
    unit = Markup("<br>") + element("small", scale.unit) if scale is not None and scale.unit else ""
    head = [
        *key_columns(group.present, names),
        *([element("th", "figure")] if is_mixed else []),
        *([element("th", "report")] if len(shown) > 1 else []),
        *(
            element(
                "th", name, "" if name in {"runs", "measurements", "noise floor"} else unit, kind="number"
            )
            for name in columns
        ),
    ]
    body = []
    for line in lines:
        for place, (item, row) in enumerate(line):
            cells = key_cells(row, names, len(line)) if place == 0 else []
            if is_mixed and place == 0:
                named = (metric_name(row.metric), " ", arrow_of(row.metric, row.direction))
                cells.append(element("td", *named, rowspan=len(line)))
            if len(shown) > 1:
                cells.append(element("td", swatch(item.number, item.label)))
            cells += _figure_cells(row, columns, scale)
            body.append(element("tr", *cells, kind="" if place else "first"))
    return table(head, body, "statistics") + note


def _q_name(q: int) -> str:
    return "median" if q == 50 else f"p{q}"


def _is_zero(line: Sequence[Row | None]) -> bool:
    """Whether nothing happened in any report: a count or a time of zero, of which less is better."""
    return all(
        row is None or (row.direction == "lower" and bool(row.starts) and not any(row.samples))
        for row in line
    )


def _figure_cells(row: Row, columns: Sequence[str], scale: Scale | None) -> list[Markup]:
    """Cells under those headings; in a scale of the row's own, with the unit, where the table has none."""
    summary = summarize(row)
    if summary is None:
        return [
            element("td", pill("failed", "bad"), f" {row.error or ''}", kind="error", colspan=len(columns))
        ]
    own = scale or scale_of(row.metric, row.unit, [summary.median])

    def show(value: float) -> str:
        if row.unit in {"", "1"} and own.factor == 1.0 and value.is_integer() and abs(value) < 1e15:
            return f"{value:,.0f}"  # a count
        return own.format(value) if scale is None else own.number(value)

    noise = "–" if summary.noise_percent is None else "±" + percent(summary.noise_percent, signed=False)
    cells = {
        "runs": f"{summary.num_starts:,}",
        "measurements": f"{summary.num_samples:,}",
        **{_q_name(q): show(value) for q, value in summary.percentiles.items()},
        "mean": show(summary.mean),
        "spread": show(summary.spread) if summary.num_samples > 1 else "–",
        "noise floor": noise,
    }
    return [number_cell(cells.get(name, "–")) for name in columns]
