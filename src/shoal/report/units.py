"""Numbers for people: 97.2 µs instead of 0.0000972, with as many digits as mean something."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_UP = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = {prefix + name: size for size, prefix in _UP for name in ("B", "B/s")} | {
    "bytes": 1.0,
    "bytes/s": 1.0,
}


@dataclass(frozen=True)
class Scale:
    """A factor and the unit it leads to; one for a whole row, so that its figures compare at a glance."""

    factor: float
    unit: str

    def format(self, value: float) -> str:
        """Write a value with the unit: '97.2 µs'."""
        return f"{self.number(value)} {self.unit}".rstrip()

    def number(self, value: float) -> str:
        """Write a value without the unit, in three digits: '97.2'."""
        return digits(value / self.factor)


def scale_for(unit: str, reference: float) -> Scale:
    """The scale in which `reference`, a value in `unit`, reads best."""
    size = abs(reference)
    if unit == "s":
        return _largest(_TIME, size, 1.0)
    if unit in _BYTES:
        rate = "/s" if unit.endswith("/s") else ""
        steps = tuple((factor, f"{prefix}B{rate}") for factor, prefix in _UP)
        return _largest(steps, size * _BYTES[unit], _BYTES[unit])
    if unit == "1/s":
        return _largest(tuple((factor, f"{prefix}/s") for factor, prefix in _UP), size, 1.0)
    if unit.endswith("/s") and size >= 1e4:
        return _largest(tuple((factor, f"{prefix} {unit}".strip()) for factor, prefix in _UP), size, 1.0)
    return Scale(1.0, "" if unit == "1" else unit)


def _largest(steps: tuple[tuple[float, str], ...], size: float, base: float) -> Scale:
    """The largest step not above `size`; `base` is what one of the original unit is worth in steps of 1."""
    for factor, unit in steps:
        if size >= factor * 0.9995:  # what would round up to the next step belongs to it
            return Scale(factor / base, unit)
    factor, unit = steps[-1] if size else next(step for step in steps if step[0] == 1.0)
    return Scale(factor / base, unit)


def digits(value: float, significant: int = 3) -> str:
    """Write the whole part at least, and otherwise `significant` digits: 1,234; 97.2; 0.00123; 1.2e-07."""
    size = abs(value)
    if size == 0:
        return "0"
    if not math.isfinite(size):
        return str(value)
    if size >= 1e9 or size < 1e-4:
        return f"{value:.{significant - 1}e}"
    exponent = int(f"{size:.{significant - 1}e}".partition("e")[2])
    return f"{value:,.{max(0, significant - 1 - exponent)}f}"


def counted(count: int, noun: str, several: str = "") -> str:
    """'1 peer', '1,234 peers'; `several` is the plural where it is not made by an s."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def ranged(values: Sequence[float], unit: str) -> str:
    """The median of several runs and how far they reach: '12.3 ms (median of 5 runs, 11.0 to 14.2)'."""
    median = statistics.median(values)
    scale = scale_for(unit, median) if unit == "s" or unit in _BYTES else Scale(1.0, unit)
    if len(values) == 1:
        return f"{scale.format(median)} (one run)"
    reach = f"{scale.number(min(values))} to {scale.number(max(values))}"
    return f"{scale.format(median)} (median of {len(values)} runs, {reach})"


def ratio(above: float, below: float) -> float:
    """0 where there is nothing to divide by: virtual time may stand still."""
    return above / below if below > 0 else 0.0


def rounded(value: float) -> float | int:
    """Round for a RESULT line: whole numbers stay as they are, others have four digits."""
    return int(value) if value == int(value) else float(f"{value:.4g}")


def percent(value: float | None, *, signed: bool = True) -> str:
    """'-10.3%', 'n/a' for None; never '-0.0%'."""
    if value is None:
        return "n/a"
    if abs(value) < 0.05:
        value = 0.0
    if abs(value) >= 999.5:
        return f"{value:{'+' if signed else ''},.0f}%"
    return f"{value:{'+' if signed else ''}.1f}%"
