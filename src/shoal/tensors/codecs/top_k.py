"""Only the largest values, and where they were. Of equal magnitudes the one that lies first is sent."""

from __future__ import annotations

import math

import numpy as np
import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.codecs.base import FormatCodec, is_finite
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.specs import TensorSpec

_SAMPLE_SIZE = 65_536
_INT32_MAX = 2**31 - 1


class TopK(FormatCodec):
    """The `fraction` of values with the largest magnitude (at least one); lower: stronger compression.

    What is left out is lost without error feedback.
    """

    name = "top-k"

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 1:
            raise UsageError(f"top-k sends a fraction between 0 and 1, not {fraction}")
        self.fraction = fraction

    @classmethod
    def from_text(cls, text: str) -> TopK:
        """The fraction, as in `top-k:0.01`."""
        try:
            return cls(float(text)) if text else cls()
        except ValueError:
            raise UsageError(
                f"codec 'top-k' takes a fraction between 0 and 1, not {text[:40]!r}", next_step="top-k:0.01"
            ) from None

    def options(self, spec: TensorSpec) -> tuple[int, ...]:
        """How many values are sent."""
        return (max(1, round(self.fraction * math.prod(spec.shape))),)

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Positions in memory order, ascending, and the values there."""
        count = math.prod(spec.shape)
        if len(options) != 1 or not 1 <= options[0] <= count:
            raise TensorError("'top-k' has one option, a number of values between 1 and all of them")
        position = "int32" if count - 1 <= _INT32_MAX else "int64"
        return TensorSpec(position, options), TensorSpec(spec.dtype, options)

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Select, and send positions in the narrowest type that holds them all."""
        positions = _largest(flat.abs(), options[0])
        if positions is None:
            return None
        narrow = torch.int32 if flat.numel() - 1 <= _INT32_MAX else torch.int64
        return [positions.to(narrow), flat[positions]]

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """Zeros, and the values in their places."""
        positions, values = parts
        count = math.prod(spec.shape)
        is_ascending = bool((positions[1:] > positions[:-1]).all())
        if not is_ascending or positions[0].item() < 0 or positions[-1].item() >= count:
            raise TensorError("positions of a top-k tensor do not ascend, or lie outside it")
        dense = torch.zeros(count, dtype=dtype_named(spec.dtype))
        return dense.index_copy_(0, positions.long(), values)


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor | None:
    """Positions of the k largest, ascending; None if one of them is inf or nan.

    A selection over all values is slow; a sample gives a bound that few values besides the k reach, and the
    selection runs over those. The result is exact: when the bound was too high, all values are candidates.
    """
    candidates = _above_sampled_bound(magnitudes, k)
    pool = magnitudes if candidates is None else magnitudes[candidates]
    # nan counts as the largest here, so that looking at the selected finds any that there is.
    selected = torch.topk(pool, k, sorted=False).values
    if not is_finite(selected):
        return None
    bound = selected.min()
    above = _where(pool > bound)
    equal = _where(pool == bound)[: k - len(above)]
    places = torch.cat([above, equal]).sort().values
    return places if candidates is None else candidates[places]


def _above_sampled_bound(magnitudes: torch.Tensor, k: int) -> torch.Tensor | None:
    step = len(magnitudes) // _SAMPLE_SIZE
    if step < 2:
        return None
    sample = magnitudes[::step]
    expected = k * len(sample) / len(magnitudes)
    # Four standard deviations: the bound is too high once in some ten thousand tensors.
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= len(sample) // 2:
        return None
    bound = torch.topk(sample, rank, sorted=False).values.min()
    # 'not less' rather than 'greater or equal': a nan must be among the candidates.
    candidates = _where((magnitudes < bound).logical_not_())
    return candidates if len(candidates) >= k else None


def _where(mask: torch.Tensor) -> torch.Tensor:
    """Positions of True, ascending; numpy finds sparse ones five times as fast as torch does."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)
