"""How long a packet takes, as a distribution: constant, normal, exponential, Pareto, or what was recorded.

Each turns one uniform number into a delay (its quantile function), so that what draws the numbers decides
what can be repeated. Numbers in the descriptions are milliseconds, samplers give seconds.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated

import msgspec

Sampler = Callable[[float], float]
"""From a number above 0 and below 1 to seconds."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

_MS = 1e-3
_DRAW = struct.Struct("<8Q")
_TAIL = 100.0  # times the floor: where a Pareto distribution ends when nothing else is said


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="constant"):
    """Always the same; a bare number in a profile means this."""

    value: NotNegative

    def sampler(self) -> Sampler:
        """A function from a uniform number to seconds."""
        value_s = self.value * _MS
        return lambda _: value_s


class Normal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="normal"):
    """A bell curve, cut off below `floor`: what lies there is spread over the rest of the curve."""

    mean: NotNegative
    deviation: Positive
    floor: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.floor > self.mean:
            raise ValueError(f"the floor {self.floor:g} lies above the mean {self.mean:g}")

    def sampler(self) -> Sampler:
        """A function from a uniform number to seconds."""
        curve = NormalDist(self.mean * _MS, self.deviation * _MS)
        quantile = curve.inv_cdf
        cut_off = curve.cdf(self.floor * _MS)
        kept = 1 - cut_off
        if cut_off < 2**-53:  # nothing that a float could tell
            return quantile
        return lambda uniform: quantile(cut_off + uniform * kept)


class Exponential(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="exponential"
):
    """Mostly short, sometimes long: the delays of Learning@home (Ryabinin & Gusev 2020, section 4)."""

    mean: Positive

    def sampler(self) -> Sampler:
        """A function from a uniform number to seconds."""
        mean_s, log = self.mean * _MS, math.log
        return lambda uniform: -mean_s * log(uniform)


class Pareto(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pareto"):
    """A heavy tail above `floor`: a smaller `shape` makes it heavier; nothing takes longer than `cap`."""

    floor: Positive
    shape: Positive
    cap: Positive | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"the cap {self.cap:g} lies below the floor {self.floor:g}")

    def sampler(self) -> Sampler:
        """A function from a uniform number to seconds."""
        floor_s, power = self.floor * _MS, -1 / self.shape
        cap_s = floor_s * _TAIL if self.cap is None else self.cap * _MS
        least = (cap_s / floor_s) ** (1 / power)  # a smaller number gives more than the cap; none overflows
        return lambda uniform: floor_s * uniform**power if uniform > least else cap_s


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recorded"):
    """What was measured: drawn at random, or one after the other and again from the start."""

    samples: Annotated[list[NotNegative], msgspec.Meta(min_length=1)]
    in_order: bool = False

    def sampler(self) -> Sampler:
        """A function from a uniform number to seconds."""
        samples_s = [sample * _MS for sample in self.samples]
        num_samples = len(samples_s)
        if not self.in_order:
            return lambda uniform: samples_s[int(uniform * num_samples)]
        turn = -1

        def replay(_: float) -> float:
            nonlocal turn
            turn = (turn + 1) % num_samples
            return samples_s[turn]

        return replay


Delay = NotNegative | Constant | Normal | Exponential | Pareto | Recorded
"""A delay as a profile writes it."""


def sampler_of(delay: float | Constant | Normal | Exponential | Pareto | Recorded) -> Sampler:
    """A sampler of its own: one that replays keeps its place."""
    return (Constant(delay) if isinstance(delay, int | float) else delay).sampler()


class Draws:
    """Uniform numbers, above 0 and below 1, that depend on a seed and on names, and on nothing else.

    Counted blocks of BLAKE2 instead of `random.Random`: a simulation keeps one of these for each direction of
    each link, and 2.5 KB of state each would be most of its memory.
    """

    __slots__ = ("_block", "_count", "_key")

    def __init__(self, seed: int, *names: str) -> None:
        self._key = digest_of(seed, *names)
        self._count = 0
        self._block: list[int] = []

    def uniform(self) -> float:
        """Draw the next number."""
        block = self._block
        if not block:
            digest = hashlib.blake2b(self._key + self._count.to_bytes(8, "little")).digest()
            self._count += 1
            self._block = block = list(_DRAW.unpack(digest))
        return ((block.pop() >> 12) + 0.5) * 2**-52


def digest_of(seed: int, *names: str) -> bytes:
    """32 bytes that tell a seed and names from all others, the same in every process."""
    hasher = hashlib.blake2b(digest_size=32, person=b"shoal draws")
    for part in (str(seed), *names):
        raw = part.encode()
        hasher.update(len(raw).to_bytes(8, "little") + raw)
    return hasher.digest()
