"""Tables as aligned text, coloured through rich on a terminal and plain in a pipe or a log; and as LaTeX.

A cell may have several lines, and a row a note under all its cells. Keys are never cut: they wrap between
their entries, and only a single entry wider than its column makes a table wider than asked. What the tables
say is for `views`, and for each benchmark.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TextIO

import msgspec

from shoal.core.untrusted import visible
from shoal.report.schema import Direction
from shoal.report.statistics import MIN_SEEDS, lead_of, mean_of, percentile, variance_of
from shoal.report.units import scale_for

WIDTH = 80
"""Of text that does not go to a terminal."""
GAP = "  "
Line = tuple[str, str]
"""A line and its style, in rich's words; '' for none."""


@dataclass(frozen=True)
class Column:
    """A heading, which side its cells align to, and whether they may wrap (between words) to save width."""

    name: str
    align: Literal["left", "right"] = "right"
    wraps: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: dict[int, Line] = field(default_factory=dict)
    """Under the row of that index, as wide as the table."""

    def lines(self, width: int = WIDTH, rule: str = "-") -> list[Line]:
        """Lay it out, at most `width` columns wide where the cells allow it; no line can steer a terminal."""
        return self._visible()._lines(width, rule)

    def _visible(self) -> Table:
        return Table(
            visible(self.title),
            tuple(replace(column, name=visible(column.name)) for column in self.columns),
            [tuple(visible(cell) for cell in row) for row in self.rows],
            {index: (visible(note), style) for index, (note, style) in self.notes.items()},
        )

    def _lines(self, width: int, rule: str) -> list[Line]:
        widths = self._widths(width)
        total = sum(widths) + len(GAP) * (len(widths) - 1)
        blocks = [[(line, "") for line in self._block(cells, widths)] for cells in self.rows]
        for index, (note, style) in self.notes.items():
            blocks[index] += [("  " + line, style) for line in wrap(note, max(total, width) - 2)]
        lines: list[Line] = [(self.title, "bold")] if self.title else []
        lines += [(line, "dim") for line in self._block([column.name for column in self.columns], widths)]
        lines.append((GAP.join(rule * size for size in widths), "dim"))
        is_tall = any(len(block) > 1 for block in blocks)
        for number, block in enumerate(blocks):
            lines += [("", "")] * (is_tall and number > 0)
            lines += block
        return lines

    def _block(self, cells: Sequence[str], widths: list[int]) -> list[str]:
        columns = [
            wrap(cell, size) if column.wraps else cell.split("\n")
            for cell, size, column in zip(cells, widths, self.columns, strict=True)
        ]
        lines = []
        for number in range(max(len(parts) for parts in columns)):
            parts = [parts[number] if number < len(parts) else "" for parts in columns]
            padded = [
                part.ljust(size) if column.align == "left" else part.rjust(size)
                for part, size, column in zip(parts, widths, self.columns, strict=True)
            ]
            lines.append(GAP.join(padded).rstrip())
        return lines

    def _widths(self, width: int) -> list[int]:
        """What each column needs; those that may wrap share what the others leave."""
        texts = [
            [column.name, *(row[index] for row in self.rows)] for index, column in enumerate(self.columns)
        ]
        needs = [max(len(line) for text in cells for line in text.split("\n")) for cells in texts]
        least = [
            max((len(word) for text in cells for word in text.split()), default=0) if column.wraps else need
            for cells, need, column in zip(texts, needs, self.columns, strict=True)
        ]
        excess = sum(needs) + len(GAP) * (len(needs) - 1) - width
        while excess > 0:
            widest = max(range(len(needs)), key=lambda index: needs[index] - least[index])
            if needs[widest] <= least[widest]:
                break
            needs[widest] -= 1
            excess -= 1
        return needs


def wrap(text: str, width: int) -> list[str]:
    """Break between words only; a longer word keeps a line to itself."""
    lines: list[str] = []
    for part in text.split("\n"):
        line = ""
        for word in part.split():
            if line and len(line) + 1 + len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def lines_of(items: Sequence[Table | Line | str], width: int, rule: str) -> list[Line]:
    """Lay out tables, each with an empty line after it, and lines of text; none of them steers a terminal."""
    lines: list[Line] = []
    for item in items:
        if isinstance(item, Table):
            lines += [*item.lines(width, rule), ("", "")]
        else:
            line, style = (item, "") if isinstance(item, str) else item
            lines.append((visible(line), style))
    return lines


def show(items: Sequence[Table | Line | str], stream: TextIO) -> None:
    """Write tables, each with an empty line after it, and lines of text."""
    is_terminal = stream.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
    lines = lines_of(items, width, "─" if is_terminal else "-")
    if not is_terminal:
        emit("\n".join(line for line, _ in lines), stream)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def emit(text: str, stream: TextIO) -> None:
    """Write text and a newline; where the stream cannot encode a character (µ in ASCII) it is replaced.

    What cannot be seen is written out: names from files and other machines must not steer the terminal.
    """
    text = visible(text)
    try:
        print(text, file=stream)
    except UnicodeEncodeError:
        print(text.replace("µ", "u").encode("ascii", "replace").decode(), file=stream)


def result_line(result: dict[str, object]) -> str:
    """The last line of every command: `RESULT: {json}`, without the sentences that are for pages alone."""
    told = {name: value for name, value in result.items() if name != "conditions"}
    return "RESULT: " + msgspec.json.encode(told).decode()


def tell_result(result: dict[str, object], stream: TextIO) -> None:
    """Print the last line for programs that read it; not on a terminal, which ends with what people read."""
    if not stream.isatty():
        emit(result_line(result), stream)


# --- for a paper: booktabs' rules, means with deviations, the best of each column bold ---

NOTHING = "--"
MAX_DECIMALS = 6
_SIGNIFICANT = 3
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "µ": r"$\mu$",
    "±": r"$\pm$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class LatexColumn:
    """A column of figures: the samples of each row, one for each seed; empty where there are none."""

    name: str
    unit: str
    direction: Direction | None
    """Which way is better; None for a column without a winner."""
    samples: Sequence[Sequence[float]] = ()
    resolution: Sequence[float] = ()
    """Of each row, how coarsely it was measured; as `lead_of` takes it."""
    num_needed: int = MIN_SEEDS
    """Samples of each row with which one may be marked."""


def latex_escape(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def plus_minus(samples: Sequence[float]) -> str:
    r"""`12.3 \pm 0.4`, for math mode; the deviation (n - 1) is left out of a single one."""
    mean = mean_of(samples)
    if len(samples) < 2:
        return f"{mean:.{_decimals(mean, _SIGNIFICANT)}f}"
    deviation = math.sqrt(variance_of(samples))
    decimals = max(_decimals(mean, _SIGNIFICANT), min(_decimals(deviation, 1), _decimals(mean, 4)))
    return rf"{mean:.{decimals}f} \pm {deviation:.{decimals}f}"


def _decimals(value: float, significant: int) -> int:
    """Digits after the point that leave so many significant ones; none for zero and what is not finite."""
    if value == 0 or not math.isfinite(value):
        return 0
    return min(MAX_DECIMALS, max(0, significant - 1 - math.floor(math.log10(abs(value)))))


def latex_table(names: Sequence[str], columns: Sequence[LatexColumn], caption: str, label: str = "") -> str:
    """A whole `table`; `names` are the rows'. Figures of a column have one unit, which its heading names."""
    cells = [_column(column) for column in columns]
    heads = ["", *(head for head, _ in cells)]
    body = [
        " & ".join([latex_escape(name), *(column[row] for _, column in cells)]) + r" \\"
        for row, name in enumerate(names)
    ]
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_escape(caption)}}}",
        *([rf"\label{{{label}}}"] if label else []),
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(heads) + r" \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _column(column: LatexColumn) -> tuple[str, list[str]]:
    """The heading, and a cell for each row."""
    means = [mean_of(samples) for samples in column.samples if samples]
    scale = scale_for(column.unit, percentile([abs(mean) for mean in means], 50) if means else 1.0)
    head = latex_escape(column.name + (f" ({scale.unit})" if scale.unit else ""))
    winner = None
    if column.direction is not None and len(means) > 1:
        rivals = {str(place): samples for place, samples in enumerate(column.samples) if samples}
        coarse = {str(place): step for place, step in enumerate(column.resolution) if str(place) in rivals}
        lead = lead_of(rivals, column.direction, column.num_needed, coarse)
        winner = lead.names[0] if lead.is_told_apart else None
    cells = []
    for place, samples in enumerate(column.samples):
        if not samples:
            cells.append(NOTHING)
            continue
        shown = plus_minus([sample / scale.factor for sample in samples])
        cells.append(rf"$\mathbf{{{shown}}}$" if str(place) == winner else f"${shown}$")
    return head, cells
