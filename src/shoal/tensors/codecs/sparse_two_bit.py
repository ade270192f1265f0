"""The largest values of each chunk, in two bits each, and where they were in eight or nine.

After SparseLoCo (Sarfi et al. 2025, section 3): selecting chunk by chunk lets a position take 12 bits, where
one in the whole tensor takes 32. Positions that ascend need less (Elias 1974, Fano 1971): of each the low
bits are sent as they are, and the high ones as gaps. A chunk's kept values become one of two magnitudes with
a sign: the two that make the squared error least. At 2 % that is 102 bytes for 4096 values, 1/160 of float32.
"""

from __future__ import annotations

import math

import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.codecs.base import FormatCodec, is_finite, saturating_cast, working_dtype
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.specs import TensorSpec

CHUNK_SIZE = 4096
"""Values of which the largest are selected together."""
_MAX_LOW_BITS = 12
_LEVELS = torch.bfloat16
"""The type of magnitudes: what is learned late in training is too small for float16, whose steps end at
6e-8. The coarser rounding is little beside that to two magnitudes."""


class SparseTwoBit(FormatCodec):
    """The share `density` of the values of each chunk of 4096 in memory order; lower: stronger compression.

    The last chunk may be shorter; each keeps at least one value. What is left out or rounded is lost without
    error feedback.
    """

    name = "sparse-2bit"

    def __init__(self, density: float = 0.02) -> None:
        if not 0 < density <= 1:
            raise UsageError(f"sparse-2bit sends a share between 0 and 1, not {density}")
        self.density = density

    @classmethod
    def from_text(cls, text: str) -> SparseTwoBit:
        """The share of the values, as in `sparse-2bit:0.02`."""
        try:
            return cls(float(text)) if text else cls()
        except ValueError:
            raise UsageError(
                f"codec 'sparse-2bit' takes a share between 0 and 1, not {text[:40]!r}",
                next_step="sparse-2bit:0.02",
            ) from None

    def options(self, spec: TensorSpec) -> tuple[int, ...]:
        """How many values of a whole chunk are sent."""
        return (max(1, round(self.density * CHUNK_SIZE)),)

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """One buffer, for in a small message each further one is mostly padding.

        Two magnitudes for each chunk; then chunk by chunk the bits of its positions, and two for each value.
        """
        if len(options) != 1 or not 1 <= options[0] <= CHUNK_SIZE:
            raise TensorError(f"'sparse-2bit' has one option, a number of values from 1 to {CHUNK_SIZE}")
        return (TensorSpec("uint8", (sum(_sizes(math.prod(spec.shape), options[0])),)),)

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Select in each chunk, then round to the chunk's two magnitudes."""
        values = flat.to(working_dtype(flat.dtype))
        bits, levels = [], []
        start = 0
        for num_chunks, size, num_kept in _shapes(flat.numel(), options[0]):
            rows = values[start : start + num_chunks * size].view(num_chunks, size)
            start += num_chunks * size
            # nan counts as the largest here, so that looking at the selected finds any that there is
            magnitudes, places = rows.abs().topk(num_kept)
            if not is_finite(magnitudes):
                return None
            num_high, both = _two_levels(magnitudes)
            is_high = torch.arange(num_kept, device=flat.device) < num_high
            places, order = places.sort()
            codes = torch.stack([is_high.gather(1, order), rows.gather(1, places) < 0], 2).flatten(1)
            bits.append(torch.cat([_gaps_and_low_bits(places, size), codes], 1).flatten())
            levels.append(both)
        packed = saturating_cast(torch.cat(levels), _LEVELS).view(torch.uint8).flatten()
        return [torch.cat([packed, _pack(torch.cat(bits))])]

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """Zeros, and the signed magnitudes in their places."""
        count = math.prod(spec.shape)
        packed_levels, packed_bits = torch.split(parts[0], _sizes(count, options[0]))
        bits = _unpack(packed_bits)
        levels = packed_levels.view(_LEVELS).view(-1, 2).to(torch.float32)
        levels = saturating_cast(levels, dtype_named(spec.dtype))
        dense = torch.zeros(count, dtype=levels.dtype)
        start = chunk = at = 0
        for num_chunks, size, num_kept in _shapes(count, options[0]):
            width = _position_bits(size, num_kept) + 2 * num_kept
            told = bits[at : at + num_chunks * width].view(num_chunks, width)
            places = _places(told[:, : -2 * num_kept], size, num_kept)
            codes = told[:, -2 * num_kept :].view(num_chunks, num_kept, 2)
            # a chunk's magnitudes are the lower and the higher one
            values = levels[chunk : chunk + num_chunks].gather(1, codes[:, :, 0].long())
            rows = dense[start : start + num_chunks * size].view(num_chunks, size)
            rows.scatter_(1, places, torch.where(codes[:, :, 1] > 0, -values, values))
            start, chunk, at = start + num_chunks * size, chunk + num_chunks, at + num_chunks * width
        return dense


def _shapes(count: int, num_kept: int) -> list[tuple[int, int, int]]:
    """Of the whole chunks, and of what is left: how many there are, their size, and what each keeps."""
    num_whole, rest = divmod(count, CHUNK_SIZE)
    shapes = [(num_whole, CHUNK_SIZE, num_kept), (1, rest, -(-num_kept * rest // CHUNK_SIZE))]
    return [shape for shape in shapes if shape[0] and shape[1]]


def _sizes(count: int, num_kept: int) -> list[int]:
    """How many bytes the magnitudes take, and all bits of so many elements."""
    shapes = _shapes(count, num_kept)
    num_chunks = sum(num_alike for num_alike, _, _ in shapes)
    num_bits = sum(num_alike * (_position_bits(size, kept) + 2 * kept) for num_alike, size, kept in shapes)
    return [2 * _LEVELS.itemsize * num_chunks, -(-num_bits // 8)]


def _two_levels(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of each row, which descends, have the higher magnitude, and both magnitudes, lower first.

    The best two are the means of the first so many and of the others, and the best number has the largest sum
    of (sum² / number) over both: the squared error is what that lacks to the sum of squares.
    """
    num_kept = magnitudes.shape[1]
    largest = magnitudes[:, :1]
    # in units of the largest one, so that squares neither overflow nor vanish
    scaled = magnitudes / torch.where(largest > 0, largest, 1)
    num_high = torch.arange(1, num_kept + 1, device=magnitudes.device)
    num_low = num_kept - num_high
    high = scaled.cumsum(1)
    low = (high[:, -1:] - high).clamp_(min=0)
    score = high.square() / num_high + low.square() / num_low.clamp(min=1)
    best = score.argmax(1, keepdim=True)
    means = torch.cat([low / num_low.clamp(min=1), high / num_high], 1)
    both = means.gather(1, torch.cat([best, best + num_kept], 1))
    return best + 1, both * largest


def _low_bits(size: int, num_kept: int) -> int:
    """How many low bits of a position are sent as they are, so that all take least."""
    return min(range(_MAX_LOW_BITS + 1), key=lambda low: num_kept * low + (size - 1 >> low))


def _position_bits(size: int, num_kept: int) -> int:
    """How many bits the positions of one chunk take."""
    low = _low_bits(size, num_kept)
    return num_kept * low + (size - 1 >> low) + num_kept


def _gaps_and_low_bits(places: torch.Tensor, size: int) -> torch.Tensor:
    """The bits of each row of positions: for each a 1 behind a 0 for each step of its high bits; low bits."""
    num_kept, low = places.shape[1], _low_bits(size, places.shape[1])
    order = torch.arange(num_kept, device=places.device)
    gaps = torch.zeros(len(places), (size - 1 >> low) + num_kept, dtype=torch.bool, device=places.device)
    gaps.scatter_(1, (places >> low) + order, True)
    lows = places[:, :, None] >> torch.arange(low, device=places.device) & 1
    return torch.cat([gaps, lows.flatten(1).bool()], 1)


def _places(bits: torch.Tensor, size: int, num_kept: int) -> torch.Tensor:
    """The positions that rows of bits tell; TensorError unless they ascend inside of the chunk."""
    low = _low_bits(size, num_kept)
    gaps, lows = torch.split(bits, [(size - 1 >> low) + num_kept, num_kept * low], 1)
    if bool((gaps.sum(1, dtype=torch.int64) == num_kept).all()):
        high = gaps.nonzero()[:, 1].view(-1, num_kept) - torch.arange(num_kept)
        below = (lows.view(len(lows), num_kept, low).long() << torch.arange(low)).sum(2)
        places: torch.Tensor = high << low | below
        if bool((places[:, 1:] > places[:, :-1]).all()) and int(places[:, -1].max()) < size:
            return places
    raise TensorError("positions of a sparse-2bit tensor do not ascend, or lie outside a chunk")


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Eight bits a byte, the first in the lowest place."""
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
