"""Figures from raw samples: percentiles, medians by start, and the noise that equal runs show. Plain Python.

Whether two rows differ is for `diff` to say; Student's t distribution, which it needs, stands here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from shoal.core.errors import UsageError
from shoal.report.schema import Row

PERCENTILES = (50, 75, 90, 95)
_LARGE = 1e300
"""Near the largest float: sums of such values overflow."""


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between the two nearest samples (numpy's default)."""
    return _at(sorted(samples), q)


def percentiles(samples: Iterable[float], qs: Iterable[float] = PERCENTILES) -> tuple[float, ...]:
    """Several percentiles of the same samples, in the order of `qs`."""
    ordered = sorted(samples)
    return tuple(_at(ordered, q) for q in qs)


def is_known(num_samples: int, q: float) -> bool:
    """Whether at least one of so many samples lies beyond a percentile; a median is always known."""
    return num_samples > 0 and (q == 50 or num_samples * min(q, 100 - q) >= 100)


def known_percentile(samples: Sequence[float], q: float) -> float | None:
    """The q-th percentile; None where there are too few samples for one."""
    return percentile(samples, q) if is_known(len(samples), q) else None


def known_percentiles(samples: Iterable[float], qs: Iterable[int] = PERCENTILES) -> dict[int, float]:
    """Those of several percentiles for which there are samples enough."""
    ordered = sorted(samples)
    return {q: _at(ordered, q) for q in qs if is_known(len(ordered), q)}


def _at(ordered: Sequence[float], q: float) -> float:
    if not ordered:
        raise UsageError("no samples, so no percentile")
    if not 0 <= q <= 100:
        raise UsageError(f"a percentile is between 0 and 100, not {q}")
    position = (len(ordered) - 1) * (q / 100)
    lower = math.floor(position)
    upper = min(lower + 1, len(ordered) - 1)
    low, high, fraction = ordered[lower], ordered[upper], position - lower
    if math.isinf(high - low):
        return low * (1 - fraction) + high * fraction
    if fraction < 0.5:
        return low + (high - low) * fraction
    return high - (high - low) * (1 - fraction)  # exact at a fraction of one, as numpy does it


@dataclass(frozen=True)
class Summary:
    """The figures of one row, in its unit. Percentiles are numeric: p95 of a rate is its high end."""

    num_starts: int
    num_samples: int
    mean: float
    spread: float
    """Sample standard deviation (n - 1) over all samples; 0 for a single one."""
    median: float
    percentiles: dict[int, float]
    """Those of p50 to p95 for which there are samples enough."""
    noise_percent: float | None
    """What `noise_floor` says of the row."""


def summarize(row: Row) -> Summary | None:
    """Compute all figures of a row; None for one that failed."""
    samples = sorted(row.samples)
    if not samples:
        return None
    return Summary(
        num_starts=len(row.starts),
        num_samples=len(samples),
        mean=mean_of(samples),
        spread=math.sqrt(variance_of(samples)) if len(samples) > 1 else 0.0,
        median=_at(samples, 50),
        percentiles=known_percentiles(samples),
        noise_percent=noise_floor(row),
    )


def start_medians(row: Row) -> list[float]:
    """The median of each process start, in order: the independent observations of a row."""
    return [percentile(start, 50) for start in row.starts]


def noise_floor(row: Row) -> float | None:
    """How far equal measurements of this row are apart, in percent: a smaller change means nothing by itself.

    With several starts: nine of ten pairs of starts have medians nearer to each other than this. With one
    start: its samples are dealt to two halves in turns of 1, 2, 4, … samples, and the halves' medians differ
    by at most this; it misses what changes from start to start, so it is a lower bound. None with one start
    of fewer than eight samples.
    """
    medians = start_medians(row)
    if len(medians) > 1:
        return percentile([_apart(first, second) for first, second in combinations(medians, 2)], 90)
    if not medians or len(row.starts[0]) < 8:
        return None
    samples, turn, largest = row.starts[0], 1, 0.0
    while turn * 4 <= len(samples):
        halves: tuple[list[float], list[float]] = ([], [])
        for index, sample in enumerate(samples):
            halves[index // turn % 2].append(sample)
        largest = max(largest, _apart(percentile(halves[0], 50), percentile(halves[1], 50)))
        turn *= 2
    return largest


def _apart(first: float, second: float) -> float:
    """The difference in percent of the mean size, the same from either side; at most 200."""
    if max(abs(first), abs(second)) > _LARGE:
        first, second = first / _LARGE, second / _LARGE
    size = abs(first) + abs(second)
    return 200 * abs(first - second) / size if size else 0.0


def change_percent(baseline: float, test: float, direction: str) -> float | None:
    """The change from baseline to test, negative when worse; None where it has no percentage.

    That is where the baseline is zero, or so small that the percentage is too large for a float.
    """
    if baseline == test:
        return 0.0
    if baseline == 0:
        return None
    change = 100 * (test - baseline) / abs(baseline)
    if not math.isfinite(change):
        return None
    return change if direction == "higher" else -change


def mean_of(values: Sequence[float]) -> float:
    """The mean; exactly the common value where all are equal."""
    if min(values) == max(values):
        return values[0]
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def variance_of(values: Sequence[float]) -> float:
    """The sample variance (n - 1); exactly zero where all are equal, infinite where it is no float.

    Needs two values.
    """
    mean = mean_of(values)
    try:
        return math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1)
    except OverflowError:
        return math.inf


# --- who leads, and whether that is more than chance ---

MIN_SEEDS = 3
"""With fewer repetitions of a training nobody leads: one seed's order is another seed's disorder."""
MIN_TIMED_STARTS = 5
"""The same for timings, whose starts differ by more than their samples show."""
_TAIL = 0.025  # on either side of an interval of 95 %
_EVENLY = math.sqrt(12)  # the deviation of what is spread evenly over an interval is the interval by this
_ROUNDING = 1e-6  # two steps that were summed up in another order are equal


@dataclass(frozen=True)
class Lead:
    """Who is ahead by one figure: a single name where the evidence tells it apart from all others."""

    names: tuple[str, ...]
    """The one with the best mean first, then all that are not told apart from it."""
    behind: tuple[str, ...]
    """Those that are worse than each of `names` by more than chance, the best first."""
    between: tuple[str, ...]
    """Those that are worse than the first, and not told apart from another of `names`."""
    places: Mapping[str, tuple[int, int]]
    """The best and the worst place that each may have; the same for those that nothing tells apart."""
    means: Mapping[str, float]
    num_samples: int
    """The fewest that a contender has."""
    num_needed: int

    @property
    def is_told_apart(self) -> bool:
        """Whether one of several contenders is ahead of all others by more than chance."""
        return len(self.names) == 1 and bool(self.behind)

    @property
    def is_behind_in_order(self) -> bool:
        """Whether those behind the first are told apart from each other as well."""
        places = [self.places[name] for name in self.behind]
        return len(set(places)) == len(places) and all(best == worst for best, worst in places)

    @property
    def is_enough(self) -> bool:
        """Whether there are samples enough to name anybody."""
        return self.num_samples >= self.num_needed

    def why_not(self) -> str:
        """Says why nobody is named: too few runs, or intervals that overlap."""
        if self.is_enough:
            return "their 95 % intervals overlap"
        runs = "one run" if self.num_samples == 1 else f"{self.num_samples} runs"
        return f"{runs} of each: a ranking needs {self.num_needed}"


def lead_of(
    samples: Mapping[str, Sequence[float]],
    direction: str,
    num_needed: int,
    resolution: Mapping[str, float] | None = None,
) -> Lead:
    """Tells who leads by one figure, of which each contender has independent samples, one or more.

    The interval of a mean is `half_interval`. Its deviation, as a share of the mean, is at least the median
    of all contenders': a few samples that agree by chance prove nothing. `resolution` says how coarsely a
    contender was measured: equal samples may be a step of that apart, and so may the means of two. Where
    many contenders with many samples make some pair differ by chance, intervals are wider (`_t_of_pairs`).
    """
    sign = -1 if direction == "higher" else 1
    coarse = dict.fromkeys(samples, 0.0) | dict(resolution or {})
    means = {name: mean_of(found) for name, found in samples.items()}
    order = sorted(means, key=lambda name: sign * means[name])
    num_samples = min(len(found) for found in samples.values())
    if num_samples < max(2, num_needed):
        everywhere = dict.fromkeys(order, (1, len(order)))
        return Lead(tuple(order), (), (), everywhere, means, num_samples, num_needed)
    least = usual_deviation(samples.values())
    of_pairs = _t_of_pairs([len(found) for found in samples.values()])
    half = {
        name: half_interval(found, coarse[name], least * abs(means[name]))
        * max(1.0, of_pairs / t_quantile(_TAIL, len(found) - 1))
        for name, found in samples.items()
    }

    def is_ahead(one: str, other: str) -> bool:
        step = max(coarse[one], coarse[other]) * (1 + _ROUNDING)
        return sign * (means[other] - means[one]) > max(half[one] + half[other], step)

    places = {
        name: (
            1 + sum(is_ahead(other, name) for other in order),
            len(order) - sum(is_ahead(name, other) for other in order),
        )
        for name in order
    }
    names = [name for name in order if not is_ahead(order[0], name)]
    behind = [name for name in order if all(is_ahead(one, name) for one in names)]
    between = [name for name in order if name not in names and name not in behind]
    return Lead(tuple(names), tuple(behind), tuple(between), places, means, num_samples, num_needed)


def usual_deviation(samples: Iterable[Sequence[float]]) -> float:
    """The median of the contenders' deviations, each as a share of its mean; 0 where all have one sample."""
    shares = [
        math.sqrt(variance_of(found)) / abs(mean_of(found)) if mean_of(found) else 0.0
        for found in samples
        if len(found) > 1
    ]
    return percentile(shares, 50) if shares else 0.0


def half_interval(samples: Sequence[float], resolution: float = 0.0, least_deviation: float = 0.0) -> float:
    """Half of the 95 % interval of the samples' mean, Student's; infinite for a single one.

    Samples were rounded to steps of `resolution`, where it is given: equal ones may differ by as much.
    """
    if len(samples) < 2:
        return math.inf
    deviation = max(math.sqrt(variance_of(samples)), least_deviation, resolution / _EVENLY)
    return t_quantile(_TAIL, len(samples) - 1) * deviation / math.sqrt(len(samples))


def _t_of_pairs(counts: Sequence[int]) -> float:
    """The t of an interval with which no two of all contenders' intervals are apart by chance alone.

    Bonferroni over the pairs, with the degrees of freedom of all samples together. Two means differ by the
    root of two errors of one, and two intervals that just touch by twice one's half: hence the root.
    """
    num_pairs = max(1, len(counts) * (len(counts) - 1) // 2)
    return t_quantile(_TAIL / num_pairs, sum(counts) - len(counts)) / math.sqrt(2)


# --- Student's t ---

_TINY = 1e-300
_PRECISION = 1e-15


def t_survival(t: float, freedom: float) -> float:
    """P(T > t) for `freedom` > 0 degrees of freedom, which need not be whole."""
    if freedom <= 0 or math.isnan(t):
        raise UsageError(f"Student's t needs a number and positive degrees of freedom, not {t} and {freedom}")
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    if square < freedom:
        centre = _incomplete_beta(0.5, freedom / 2, square / (freedom + square))
        tail = (1 - centre) / 2
    else:
        tail = _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square)) / 2
    return tail if t > 0 else 1 - tail


def t_quantile(tail: float, freedom: float) -> float:
    """The t that leaves `tail` (above 0, at most one half) above it."""
    if not 0 < tail <= 0.5:
        raise UsageError(f"a tail is above 0 and at most 0.5, not {tail}")
    low, high = 0.0, 1.0
    while t_survival(high, freedom) > tail:
        low, high = high, high * 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_survival(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), from the side on which the continued fraction converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
