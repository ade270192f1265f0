"""What the tables of a report and of a comparison say; how they look is `tables`'."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from shoal.core.untrusted import visible_line
from shoal.report.curves import BEHIND, averaged, axes_of, histogram_of, is_histogram
from shoal.report.diff import Diff, RowDiff, RowVerdict
from shoal.report.schema import Curve, Report, Row, Scalar, label_of, text
from shoal.report.statistics import PERCENTILES, Lead, summarize
from shoal.report.tables import Column, Line, Table
from shoal.report.units import counted, digits, percent, scale_for

Group = tuple[str, str, str]
Items = list[Table | Line | str]
Figure = TypeVar("Figure", Row, Curve)

DEVIATION = "± in the table is the standard deviation over the runs."
"""For tables of text, which say how far runs lie apart; a page has the interval of their mean."""
_MAX_NAMED = 4
"""More names share a word."""
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "quiet": "dim"}
"""Of a line on a terminal, by the tone of a verdict."""


def group_of(figure: Row | Curve) -> Group:
    """Its metric, unit and direction: what one chart or table can show together."""
    return figure.metric, figure.unit, figure.direction


def groups(rows: Iterable[Figure]) -> dict[Group, list[Figure]]:
    """Rows or curves by their group."""
    grouped: dict[Group, list[Figure]] = {}
    for row in rows:
        grouped.setdefault(group_of(row), []).append(row)
    return grouped


def shared_key(rows: Iterable[Row | Curve]) -> dict[str, Scalar]:
    """The entries of the keys that all rows have in common; none where there is only one row."""
    keys = [row.key for row in rows]
    if len(keys) < 2:
        return {}
    return {name: value for name, value in keys[0].items() if all(key.get(name) == value for key in keys)}


def short_label(row: Row | Curve, shared: dict[str, Scalar]) -> str:
    """The row's key without the shared entries; the metric where nothing else is left."""
    return label_of({name: row.key[name] for name in row.key if name not in shared}) or visible_line(
        row.metric
    )


def group_title(group: Group, shared: dict[str, Scalar]) -> str:
    """Metric, unit and direction, then what all rows of the group share."""
    metric, unit, direction = group
    about = visible_line(f"{metric} ({unit + ', ' if unit else ''}{direction} is better)")
    return about + (f"  {label_of(shared)}" if shared else "")


def title_line(report: Report) -> Line:
    """What was measured, when, and by which code: the first line of what a benchmark prints."""
    return f"{report.benchmark}  {report.created}  code {report.code}".rstrip(), "bold"


def headline(report: Report) -> list[str]:
    """What the benchmark found, in its own short sentences; empty where it wrote none."""
    found = report.result.get("headline", [])
    return [text(sentence) for sentence in (found if isinstance(found, list | tuple) else [found])]


def contest_line(what: str, lead: Lead, shown: Callable[[float], str], missing: Sequence[str] = ()) -> str:
    """Who is ahead by one figure, in words; nobody is named first where the samples do not tell.

    Those behind a winner come with their means, the best first. `shown` writes a mean. `missing` are those
    that do not have the figure in every run.
    """
    means = {name: shown(mean) for name, mean in lead.means.items()}

    def listed(names: Sequence[str]) -> str:
        """In the order of the contest, so that names that are not told apart look like no ranking."""
        return named([name for name in means if name in names])

    def span(names: Sequence[str]) -> str:
        least, most = (means[end(names, key=lambda name: lead.means[name])] for end in (min, max))
        return least if least == most else f"{least}–{most}"

    first = lead.names[0]
    if len(means) == 1:
        runs = counted(lead.num_samples, "run")
        if not missing:
            return f"{what}: {first}, {means[first]} ({runs})."
        few = "" if lead.is_enough else f" ({lead.why_not()})"
        others = missing[0] if len(missing) == 1 else "the others"
        return f"{what}: {first}, {means[first]}, in {lead.num_samples} of {runs}; {others} in fewer{few}."
    if len(lead.names) == 1:
        return f"{what}: {first}, {means[first]}; then {_followers(lead, means)}."
    between = behind = ""
    if lead.between:
        tied_with = [name for name in lead.names if name != first]
        among = tied_with[0] if len(tied_with) == 1 else "all of these"
        are = "is" if len(lead.between) == 1 else "are"
        between = f"; {listed(lead.between)} {are} behind {first}, but not behind {among}"
    if lead.behind:
        behind = f"; behind them {'is' if len(lead.behind) == 1 else 'are'} {listed(lead.behind)}"
    tied = f"{listed(lead.names)} are not told apart, {span(lead.names)} ({lead.why_not()})"
    return f"{what}: {tied}{between}{behind}."


def _followers(lead: Lead, means: Mapping[str, str]) -> str:
    """Those behind a winner, each with its mean, the best first; and whether they are told apart."""
    if len(lead.behind) == 1:
        return f"{lead.behind[0]}, {means[lead.behind[0]]}"
    followers = [f"{name} ({means[name]})" for name in lead.behind]
    said = "" if lead.is_behind_in_order else "; intervals of some of these overlap"
    if len({lead.places[name]: True for name in lead.behind}) == 1:
        said = f", and these {len(followers)} are not told apart"
    return named(followers) + said


def runs_of(seeds: Sequence[int]) -> str:
    """'3 runs of each, with the seeds 0, 1 and 2'; no more than a few of them are named."""
    runs = counted(len(seeds), "run")
    if not seeds:
        return f"{runs} of each"
    return f"{runs} of each, with the seed{'s' * (len(seeds) > 1)} {named(list(map(str, seeds)))}"


def rarely_averaging(contenders: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence on those that do several steps from one exchange to the next; none where nobody does."""
    rare = {}
    for contender in contenders:
        local_steps = contender.get("options", {}).get("local_steps", 1)
        if isinstance(local_steps, int) and local_steps > 1:
            rare[str(contender["name"])] = local_steps
    told = ", ".join(f"{name} {steps}" for name, steps in rare.items())
    return [f"Steps from one exchange between workers to the next, where there are several: {told}."] * bool(
        told
    )


def with_every_seed(num_seeds: int) -> str:
    """For a sentence on who did something with every seed, of which there may be one alone."""
    return "with every seed" if num_seeds > 1 else "with the one seed of this run"


def named(names: Sequence[str]) -> str:
    """The names with 'and', and no more than a few of them."""
    if len(names) > _MAX_NAMED:
        names = [*names[: _MAX_NAMED - 1], f"{len(names) - _MAX_NAMED + 1} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def report_items(report: Report) -> Items:
    """The headline, the statistics, the histograms and the curves of one report."""
    code = f"  code {report.code}" if report.code.version else ""
    items: Items = [(f"{report.benchmark}  {report.created}{code}".rstrip(), "bold"), *headline(report), ""]
    for group, rows in groups(row for row in report.rows if not is_histogram(row)).items():
        shared = shared_key(rows)
        columns = (
            Column("row", "left", wraps=True),
            Column("starts"),
            *(Column(f"p{q}") for q in PERCENTILES),
        )
        table = Table(group_title(group, shared), (*columns, Column("noise")))
        for row in rows:
            summary = summarize(row)
            cells = ["-"] * (len(PERCENTILES) + 2)
            if summary is None:
                table.notes[len(table.rows)] = (f"failed: {row.error}", "red")
            else:
                scale = scale_for(row.unit, summary.median)
                known = summary.percentiles
                values = [scale.format(known[q]) if q in known else "-" for q in PERCENTILES]
                cells = [str(summary.num_starts), *values, percent(summary.noise_percent, signed=False)]
            table.rows.append((short_label(row, shared), *cells))
        items.append(table)
    return items + histogram_items(report.rows) + curve_items(report.curves)


def histogram_items(rows: Iterable[Row]) -> Items:
    """Bars of how far behind gradients were, for all whose keys differ in nothing else."""
    counted = [row for row in rows if is_histogram(row) and row.starts]
    without = {**shared_key(counted), BEHIND: True}
    found: dict[str, list[Row]] = {}
    for row in counted:
        label = label_of({name: value for name, value in row.key.items() if name not in without})
        found.setdefault(label, []).append(row)
    items: Items = []
    for label, of_one in found.items():
        histogram = histogram_of(of_one)
        items += [(f"{of_one[0].metric}  {label}".rstrip(), "bold"), *histogram.lines(), histogram.said(), ""]
    return items


def curve_items(curves: Iterable[Curve]) -> Items:
    """Say where each curve began and ended, and its best point; of several starts, their mean."""
    items: Items = []
    for group, found in groups(curves).items():
        shared = shared_key(found)
        columns = (Column("curve", "left", wraps=True), Column("starts"), Column("points"))
        table = Table(
            group_title(group, shared), (*columns, *map(Column, ("first", "last", "best", "best at")))
        )
        for curve in found:
            axis = next(iter(axes_of([curve])), "")
            line = averaged(curve, axis)
            cells = [str(len(curve.starts)), *["-"] * 5]
            if line is not None:
                is_better = max if curve.direction == "higher" else min
                best = is_better(range(len(line.mean)), key=lambda index: line.mean[index])
                scale = scale_for(curve.unit, line.mean[-1])
                values = (line.mean[0], line.mean[-1], line.mean[best])
                where = _where(axis, line.x[best], line.x[-1])
                cells = [str(line.num_starts), str(len(line.x)), *map(scale.format, values), where]
            table.rows.append((short_label(curve, shared), *cells))
        items.append(table)
    return items


def _where(axis: str, x: float, end: float) -> str:
    """'step 40', '1.20 s', '3.00 MB'; in the scale of the curve's end."""
    if axis in {"s", "bytes"}:
        return scale_for("s" if axis == "s" else "B", end).format(x)
    return f"{axis} {x:,.0f}" if x.is_integer() else f"{axis} {digits(x)}"


def diff_items(diff: Diff) -> Items:
    """The comparison: what differs around the rows, then all percentiles with the verdict under each row."""
    items: Items = [_header(diff)]
    items += [(f"Warning: {warning}", "yellow") for warning in diff.warnings]
    items += [""] * bool(diff.warnings)
    pairs = {row.baseline.identity: row for row in diff.rows}
    for group, rows in groups(row.baseline for row in diff.rows).items():
        items.append(_percentile_table(group, [pairs[row.identity] for row in rows]))
    return [*items, *unpaired_lines(diff), counts_text(diff)]


def unpaired_lines(diff: Diff) -> list[str]:
    """One line for each row that only one report has."""
    sides = [("baseline", row) for row in diff.only_baseline] + [("test", row) for row in diff.only_test]
    lines = []
    for side, row in sides:
        failure = f" (failed: {row.error})" if row.error is not None else ""
        lines.append(f"Only in the {side}: {row.label} {row.metric}{failure}")
    return [*lines, ""] if lines else []


def counts_text(diff: Diff) -> str:
    """'13 rows: 2 worse, 11 no difference found'; what did not occur is left out."""
    counts = [f"{diff.count(verdict)} {verdict.label}" for verdict in RowVerdict if diff.count(verdict)]
    return f"{counted(len(diff.rows), 'row')}, negative is worse: {', '.join(counts)}"


def verdict_text(row: RowDiff) -> str:
    """The verdict with what it rests on, as one line."""
    judgement, label = row.judgement, row.verdict.label
    starts = f"{len(row.baseline.starts)} and {len(row.test.starts)} starts"
    if row.verdict is RowVerdict.TOO_FEW:
        needs = f"needs {judgement.starts_needed} on each side to find {judgement.effect_percent:g}%"
        return f"{label}: {starts}, {needs}"
    if not row.changes:
        return f"{label}: {row.test.error or row.baseline.error}"
    return f"{label}: median {percent(judgement.change_percent)} (interval {interval_text(row)}), {starts}"


def interval_text(row: RowDiff) -> str:
    """'-12.1% to -8.3%', or '-' where nothing was judged."""
    judgement = row.judgement
    if judgement.low_percent is None or judgement.high_percent is None:
        return "-"
    return f"{percent(judgement.low_percent)} to {percent(judgement.high_percent)}"


def _header(diff: Diff) -> Table:
    columns = (
        Column(diff.baseline.benchmark, "left"),
        Column("baseline", "left", wraps=True),
        Column("test", "left", wraps=True),
    )
    created = ("created", diff.baseline.created or "-", diff.test.created or "-")
    return Table(
        "", columns, [created, *((item.name, item.baseline, item.test) for item in diff.differences)]
    )


def _percentile_table(group: Group, rows: list[RowDiff]) -> Table:
    shared = shared_key(row.baseline for row in rows)
    columns = (Column("row", "left", wraps=True), Column("", "left"), *(Column(f"p{q}") for q in PERCENTILES))
    table = Table(group_title(group, shared), columns)
    for row in rows:
        sides, cells = "", [""] * len(PERCENTILES)
        if row.changes:
            sides = "baseline\ntest\nchange"
            scale = scale_for(row.baseline.unit, row.changes[0].baseline or 0.0)
            cells = []
            for change in row.changes:
                sides_of_one = (
                    "-" if side is None else scale.format(side) for side in (change.baseline, change.test)
                )
                is_known = change.baseline is not None and change.test is not None
                cells.append("\n".join([*sides_of_one, percent(change.percent) if is_known else "-"]))
        table.notes[len(table.rows)] = (verdict_text(row), STYLES[row.verdict.tone])
        table.rows.append((short_label(row.baseline, shared), sides, *cells))
    return table
