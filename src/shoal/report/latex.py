r"""A table for a paper: LaTeX with booktabs' rules, means with deviations, and the best of each column bold.

What stands in it is up to who has the figures; here it is escaped and set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.schema import Direction
from shoal.report.statistics import mean_of, percentile, variance_of
from shoal.report.units import scale_for

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
class Figures:
    """A column of figures: the samples of each row, one for each seed; empty where there are none."""

    name: str
    unit: str
    direction: Direction | None
    """Which way is better; None for a column without a winner."""
    samples: Sequence[Sequence[float]] = ()


def escape(text: str) -> str:
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


def latex_table(names: Sequence[str], columns: Sequence[Figures], caption: str, label: str = "") -> str:
    """A whole `table`; `names` are the rows'. Figures of a column have one unit, which its heading names."""
    cells = [_column(column) for column in columns]
    heads = ["", *(head for head, _ in cells)]
    body = [
        " & ".join([escape(name), *(column[row] for _, column in cells)]) + r" \\"
        for row, name in enumerate(names)
    ]
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(caption)}}}",
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


def _column(column: Figures) -> tuple[str, list[str]]:
    """The heading, and a cell for each row."""
    means = [mean_of(samples) for samples in column.samples if samples]
    scale = scale_for(column.unit, percentile([abs(mean) for mean in means], 50) if means else 1.0)
    head = escape(column.name + (f" ({scale.unit})" if scale.unit else ""))
    winner = None
    if column.direction is not None and len(means) > 1:
        winner = max(means) if column.direction == "higher" else min(means)
    cells = []
    for samples in column.samples:
        if not samples:
            cells.append(NOTHING)
            continue
        shown = plus_minus([sample / scale.factor for sample in samples])
        cells.append(rf"$\mathbf{{{shown}}}$" if mean_of(samples) == winner else f"${shown}$")
    return head, cells
