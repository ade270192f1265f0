"""The largest values of each chunk, in two bits each, and where they were in twelve.

After SparseLoCo (Sarfi et al. 2025, section 3): selecting chunk by chunk lets a position take 12 bits, where
one in the whole tensor takes 32. A chunk's kept values become one of two magnitudes with a sign: the two that
make the squared error least. At 2 % that is 148 bytes for 4096 values, a hundredth and less of float32.
"""

from __future__ import annotations

import math

import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.codecs.base import FormatCodec, is_finite, saturating_cast, working_dtype
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.specs import TensorSpec

CHUNK_SIZE = 4096
"""All positions that twelve bits can tell apart."""
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

        Two magnitudes for each chunk, then positions inside the chunks, ascending, then two bits a value.
        """
        if len(options) != 1 or not 1 <= options[0] <= CHUNK_SIZE:
            raise TensorError(f"'sparse-2bit' has one option, a number of values from 1 to {CHUNK_SIZE}")
        return (TensorSpec("uint8", (sum(_sizes(math.prod(spec.shape), options[0])),)),)

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Select in each chunk, then round to the chunk's two magnitudes."""
        values = flat.to(working_dtype(flat.dtype))
        positions, codes, levels = [], [], []
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
            positions.append(places.flatten())
            codes.append((2 * (rows.gather(1, places) < 0) + is_high.gather(1, order)).flatten())
            levels.append(both)
        packed = [
            saturating_cast(torch.cat(levels), _LEVELS).view(torch.uint8).flatten(),
            _pack_positions(torch.cat(positions)),
            _pack_codes(torch.cat(codes)),
        ]
        return [torch.cat(packed)]

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """Zeros, and the signed magnitudes in their places."""
        count = math.prod(spec.shape)
        shapes = _shapes(count, options[0])
        num_all = sum(num_chunks * num_kept for num_chunks, _, num_kept in shapes)
        packed_levels, packed_positions, packed_codes = torch.split(parts[0], _sizes(count, options[0]))
        positions = _unpack_positions(packed_positions, num_all)
        codes = _unpack_codes(packed_codes, num_all)
        levels = packed_levels.view(_LEVELS).view(-1, 2).to(torch.float32)
        levels = saturating_cast(levels, dtype_named(spec.dtype))
        dense = torch.zeros(count, dtype=levels.dtype)
        start = chunk = kept = 0
        for num_chunks, size, num_kept in shapes:
            end = kept + num_chunks * num_kept
            places = positions[kept:end].view(num_chunks, num_kept)
            if not bool((places[:, 1:] > places[:, :-1]).all()) or int(places[:, -1].max()) >= size:
                raise TensorError("positions of a sparse-2bit tensor do not ascend, or lie outside a chunk")
            code = codes[kept:end].view(num_chunks, num_kept)
            # a chunk's magnitudes are the lower and the higher one
            values = levels[chunk : chunk + num_chunks].gather(1, code & 1)
            rows = dense[start : start + num_chunks * size].view(num_chunks, size)
            rows.scatter_(1, places, torch.where(code > 1, -values, values))
            start, chunk, kept = start + num_chunks * size, chunk + num_chunks, end
        return dense


def _shapes(count: int, num_kept: int) -> list[tuple[int, int, int]]:
    """Of the whole chunks, and of what is left: how many there are, their size, and what each keeps."""
    num_whole, rest = divmod(count, CHUNK_SIZE)
    shapes = [(num_whole, CHUNK_SIZE, num_kept), (1, rest, -(-num_kept * rest // CHUNK_SIZE))]
    return [shape for shape in shapes if shape[0] and shape[1]]


def _sizes(count: int, num_kept: int) -> list[int]:
    """How many bytes the magnitudes, the positions and the values of so many elements take."""
    shapes = _shapes(count, num_kept)
    num_chunks = sum(num_alike for num_alike, _, _ in shapes)
    num_all = sum(num_alike * num_each for num_alike, _, num_each in shapes)
    return [2 * _LEVELS.itemsize * num_chunks, -(-3 * num_all // 2), -(-num_all // 4)]


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


def _pack_positions(positions: torch.Tensor) -> torch.Tensor:
    """Two of twelve bits in three bytes; an odd last one in two."""
    first, second = torch.nn.functional.pad(positions, (0, len(positions) % 2)).view(-1, 2).unbind(1)
    packed = torch.stack([first & 255, (first >> 8) | (second & 15) << 4, second >> 4], 1)
    return packed.flatten()[: -(-3 * len(positions) // 2)].to(torch.uint8)


def _unpack_positions(packed: torch.Tensor, count: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(packed.long(), (0, -len(packed) % 3))
    low, middle, high = padded.view(-1, 3).unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1).flatten()[:count]


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    quarters = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    shifts = torch.arange(0, 8, 2, device=codes.device)
    return (quarters << shifts).sum(1).to(torch.uint8)


def _unpack_codes(packed: torch.Tensor, count: int) -> torch.Tensor:
    return (packed.long()[:, None] >> torch.arange(0, 8, 2) & 3).flatten()[:count]
