"""Eight or four bits a value, and one float32 scale a block: symmetric, from its largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.codecs.base import FormatCodec, is_finite, saturating_cast
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.specs import TensorSpec

_CACHED_VALUES = 65_536
_HALF_ZERO = 8  # how zero is written in four bits
_NUM_SEEDS = 2**32  # torch's generator on the CPU uses no more of one
_SEED_STRIDE = 1_000_003
_EXAMPLES = ("", ":1024", ":tensor", ":stochastic", ":1024,stochastic")
_MAX_DIGITS = 18  # of a number that travels as a 64-bit one


class Int8(FormatCodec):
    """Values as multiples of their block's scale, largest magnitude / 127.

    Smaller blocks lose less and send more scales; `block_size=None` has one scale for the whole tensor.
    A `generator` turns on stochastic rounding, which is right on average; one on the tensors' device saves a
    copy. Peers whose errors should cancel need different seeds: `reseed` makes them from the generator's own
    and a number of the peer. A block of zeros, or of values below 4e-37, is sent as zeros.
    """

    name = "int8"
    num_steps: ClassVar[int] = 127
    """The largest magnitude, as a multiple of the scale."""

    def __init__(self, block_size: int | None = 4096, generator: torch.Generator | None = None) -> None:
        if block_size is not None and block_size < 1:
            raise UsageError(f"a block holds at least one value, not {block_size}")
        self.block_size = block_size
        self.generator = generator
        self._first_seed = 0 if generator is None else generator.initial_seed()
        self._number = 0

    @classmethod
    def from_text(cls, text: str) -> Int8:
        """`1024`, `tensor` (one scale), `stochastic`, or two of them with a comma between.

        Who encodes gives the seed of stochastic rounding: its rank.
        """
        sizes: list[int | None] = []
        generator = None
        for word in text.split(",") if text else []:
            if word == "stochastic":
                generator = torch.Generator().manual_seed(0)
            elif word == "tensor":
                sizes = [None]
            elif len(word) <= _MAX_DIGITS and word.isascii() and word.isdigit() and int(word) > 0:
                sizes = [int(word)]
            else:
                raise UsageError(
                    f"codec {cls.name!r} does not know {word[:40]!r}",
                    next_step=", ".join(f"{cls.name}{rest}" for rest in _EXAMPLES),
                )
        return cls(sizes[0], generator) if sizes else cls(generator=generator)

    def options(self, spec: TensorSpec) -> tuple[int, ...]:
        """The options of the codec: the size of a block."""
        return (self.block_size or math.prod(spec.shape),)

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The values, and one scale for each block, the last of which may be shorter."""
        if len(options) != 1 or options[0] < 1:
            raise TensorError(f"{cls.name!r} has one option, the positive size of a block")
        count = math.prod(spec.shape)
        num_blocks = -(-count // options[0])
        return cls._values_spec(count), TensorSpec("float32", (num_blocks,))

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Find the scales first, as an inf or nan shows there, then quantise."""
        blocks = _blocks(flat.to(torch.float32), options[0])
        largest = torch.cat([torch.maximum(rows.amax(1), rows.amin(1).neg()) for rows, _ in blocks])
        if not is_finite(largest):
            return None
        scales, inverses = _scales(largest, self.num_steps)
        quantised = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
        for (rows, which), (places, _) in zip(blocks, _blocks(quantised, options[0]), strict=True):
            factors = inverses[which, None]
            # Pieces that stay in the cache between multiplying, rounding and narrowing: twice as fast.
            step = max(1, _CACHED_VALUES // rows.shape[1])
            for start in range(0, len(rows), step):
                piece = slice(start, start + step)
                places[piece].copy_(self._round(rows[piece] * factors[piece]))
        return [self._pack(quantised), scales]

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """Multiply each block by its scale."""
        packed, scales = parts
        values = cls._unpack(packed, math.prod(spec.shape)).to(torch.float32)
        for rows, which in _blocks(values, options[0]):
            rows.mul_(scales[which, None])
        return saturating_cast(values, dtype_named(spec.dtype))

    def reseed(self, number: int) -> None:
        """Round by the generator's own seed and this number, from the start; equal numbers round equally."""
        self._number = number
        if self.generator is not None:
            self.generator.manual_seed((self._first_seed * _SEED_STRIDE + number) % _NUM_SEEDS)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The generator's state and the number that it was seeded with, if there is a generator."""
        if self.generator is None:
            return {}
        return {"generator": self.generator.get_state(), "number": torch.tensor(self._number)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the rounding where the state was taken, if it was by this number.

        Otherwise two workers would round alike: this one goes on as it was seeded. So it does with a state
        from before there were numbers, which all workers had alike.
        """
        if self.generator is None or set(state) - {"number"} != {"generator"}:
            super().load_state_dict(state)
        elif "number" in state and int(state["number"]) == self._number:
            self.generator.set_state(state["generator"].cpu())

    def _round(self, scaled: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            return scaled.round_()
        noise = torch.rand(scaled.shape, generator=self.generator, device=self.generator.device).to(
            scaled.device
        )
        # The largest value lies a rounding error above 127 at times; the noise would lift it to 128.
        return scaled.add_(noise).floor_().clamp_(-self.num_steps, self.num_steps)

    @classmethod
    def _values_spec(cls, count: int) -> TensorSpec:
        return TensorSpec("int8", (count,))

    @classmethod
    def _pack(cls, quantised: torch.Tensor) -> torch.Tensor:
        return quantised

    @classmethod
    def _unpack(cls, packed: torch.Tensor, count: int) -> torch.Tensor:
        return packed


class Int4(Int8):
    """As `Int8` with multiples from -7 to 7, two in a byte, the first in the low half.

    Use error feedback: in a block with one large value small ones are rounded to nothing.
    """

    name = "int4"
    num_steps: ClassVar[int] = 7

    def __init__(self, block_size: int | None = 128, generator: torch.Generator | None = None) -> None:
        super().__init__(block_size, generator)

    @classmethod
    def _values_spec(cls, count: int) -> TensorSpec:
        return TensorSpec("uint8", (-(-count // 2),))

    @classmethod
    def _pack(cls, quantised: torch.Tensor) -> torch.Tensor:
        halves = (quantised + _HALF_ZERO).to(torch.uint8)
        if len(halves) % 2:
            halves = torch.cat([halves, halves.new_full((1,), _HALF_ZERO)])
        return halves[::2] | halves[1::2] << 4

    @classmethod
    def _unpack(cls, packed: torch.Tensor, count: int) -> torch.Tensor:
        halves = torch.stack([packed & 15, packed >> 4], 1).flatten()[:count]
        return halves.to(torch.int8) - _HALF_ZERO


def _blocks(values: torch.Tensor, block_size: int) -> list[tuple[torch.Tensor, slice]]:
    """The values as rows of whole blocks, then a row of what is left, each with where its scales are."""
    num_whole = len(values) // block_size
    end = num_whole * block_size
    blocks = [(values[:end].view(-1, block_size), slice(0, num_whole))] if num_whole else []
    if end < len(values):
        blocks.append((values[end:].view(1, -1), slice(num_whole, None)))
    return blocks


def _scales(largest: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's scale, and what to multiply its values by; zeros where that would overflow."""
    inverse = num_steps / largest
    is_usable = torch.isfinite(inverse)
    scale = largest / num_steps
    # num_steps × scale may round to more than float32 holds, though the value itself was finite.
    scale = torch.where(
        torch.isfinite(scale * num_steps), scale, torch.nextafter(scale, torch.zeros_like(scale))
    )
    zero = torch.zeros_like(scale)
    return torch.where(is_usable, scale, zero), torch.where(is_usable, inverse, zero)
