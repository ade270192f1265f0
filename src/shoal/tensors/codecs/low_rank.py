"""A matrix as the product of two thin ones, by one step of subspace iteration a round.

After PowerSGD (Vogels et al., 2019, algorithm 1), between one sender and one receiver: both factors travel,
and the sender starts each round from the last one's right factor, so that the subspace improves while
gradients change slowly. A tensor is cut, in memory order, into the matrix nearest to a square, whose
factors are the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from shoal.core.errors import TensorError, UsageError
from shoal.tensors.codecs.base import FormatCodec, is_finite, saturating_cast, working_dtype
from shoal.tensors.dtypes import dtype_named
from shoal.tensors.specs import TensorSpec, memory_shape

_WARM = "warm/"
_MAX_DIGITS = 18


class LowRank(FormatCodec):
    """Factors of `rank` columns; lower: stronger compression. Vectors and scalars are sent plain.

    What lies outside the subspace is lost without error feedback. All peers with one `seed` start from the
    same subspace.
    """

    name = "low-rank"

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise UsageError(f"a rank is at least 1, not {rank}")
        self.rank = rank
        self.seed = seed
        self._warm: dict[str, torch.Tensor] = {}

    @classmethod
    def from_text(cls, text: str) -> LowRank:
        """The rank, as in `low-rank:4`."""
        if not text:
            return cls()
        is_number = len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()
        if not is_number or int(text) < 1:
            raise UsageError(
                f"codec 'low-rank' takes a positive rank, not {text[:40]!r}", next_step="low-rank:4"
            )
        return cls(int(text))

    def options(self, spec: TensorSpec) -> tuple[int, ...] | None:
        """The matrix's rows, and the rank; None for what is no matrix."""
        sizes = memory_shape(spec)
        if len(sizes) < 2:
            return None
        count = math.prod(sizes)
        rows = min((math.prod(sizes[:cut]) for cut in range(1, len(sizes))), key=lambda r: r + count // r)
        return rows, min(self.rank, rows, count // rows)

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The left factor, orthonormal, and the right one."""
        count = math.prod(spec.shape)
        if len(options) != 2 or options[0] < 1 or count % options[0]:
            raise TensorError("'low-rank' has two options, the rows of a matrix and a rank")
        rows, rank = options
        columns = count // rows
        if not 1 <= rank <= min(rows, columns):
            raise TensorError(f"a matrix of {rows} × {columns} has no factors of rank {rank}")
        return TensorSpec(spec.dtype, (rows, rank)), TensorSpec(spec.dtype, (columns, rank))

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """One step of subspace iteration from the slot's last right factor."""
        rows, rank = options
        matrix_mn = flat.view(rows, -1).to(working_dtype(flat.dtype))
        start_nr = self._start(matrix_mn, rank)
        warm_nr = self._warm.get(slot)
        if warm_nr is None or warm_nr.shape != start_nr.shape:
            warm_nr = start_nr
        image_mr = matrix_mn @ warm_nr.to(matrix_mn)
        # An inf or nan anywhere in the matrix is one in this product: inf × 0 is nan.
        if not is_finite(image_mr):
            return None
        # Householder's method: orthonormal columns whatever the rank of the image, zero included.
        left_mr = torch.linalg.qr(image_mr).Q
        right_nr = matrix_mn.T @ left_mr
        factors = [left_mr.to(flat.dtype).contiguous(), right_nr.to(flat.dtype).contiguous()]
        if not is_finite(factors[1]):
            return None
        self._warm[slot] = _revived(right_nr, start_nr)
        return factors

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """The product of the factors."""
        dtype = dtype_named(spec.dtype)
        left_mr, right_nr = (part.to(working_dtype(dtype)) for part in parts)
        return saturating_cast((left_mr @ right_nr.T).view(-1), dtype)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Each slot's right factor."""
        return {_WARM + slot: factor for slot, factor in self._warm.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from the subspaces of the state; those of other slots are forgotten."""
        if not all(key.startswith(_WARM) for key in state):
            raise UsageError(f"not the state of a low-rank codec: {sorted(state)[:3]}")
        self._warm = {key.removeprefix(_WARM): factor.clone() for key, factor in state.items()}

    def _start(self, matrix_mn: torch.Tensor, rank: int) -> torch.Tensor:
        # Drawn on the CPU, so that the start does not depend on the device.
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(matrix_mn.shape[1], rank, generator=generator).to(matrix_mn)


def _revived(right_nr: torch.Tensor, start_nr: torch.Tensor) -> torch.Tensor:
    """The next round's start, in which columns that have died (rank deficiency) are drawn anew."""
    norms = right_nr.norm(dim=0)
    is_dead = norms <= norms.amax() * torch.finfo(right_nr.dtype).eps
    # Normalised, so that a round of large gradients cannot make the next product overflow.
    return torch.where(is_dead, start_nr, right_nr / norms.masked_fill(is_dead, 1))
