"""Codecs that send raw bytes, or the same numbers in 16 bits."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from shoal.core.errors import TensorError
from shoal.tensors.codecs.base import PLAIN, FormatCodec, is_finite
from shoal.tensors.dtypes import dtype_name, dtype_named
from shoal.tensors.specs import TensorSpec


class Plain(FormatCodec):
    """Raw bytes: nothing is lost, and nothing is copied."""

    name = PLAIN

    def options(self, spec: TensorSpec) -> None:
        """The options of the codec: none."""
        return

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """Gives the tensor itself as the only part."""
        return (spec,)

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Compresses nothing: None lets the tensor travel as it is."""
        return None

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """The bytes as they came."""
        return parts[0].reshape(-1)


class _Cast(FormatCodec):
    """Values beyond the largest of the target become the largest; error feedback sends the rest later."""

    target: ClassVar[torch.dtype]

    def options(self, spec: TensorSpec) -> tuple[int, ...]:
        """A cast has none."""
        return ()

    @classmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """One buffer, in memory order."""
        if options:
            raise TensorError(f"{cls.name!r} has no options, but {len(options)} came")
        return (TensorSpec(dtype_name(cls.target), (math.prod(spec.shape),)),)

    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """Cast, and look for overflow in the result, which is half as long."""
        cast = flat.to(self.target)
        if is_finite(cast):
            return [cast]
        if not is_finite(flat):
            return None
        largest = torch.finfo(self.target).max
        return [flat.clamp(-largest, largest).to(self.target)]

    @classmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """Cast back; every 16-bit value exists in 32 bits."""
        return parts[0].to(dtype_named(spec.dtype))


class Float16(_Cast):
    """Half precision: 11 bits of fraction, at most 65504."""

    name = "fp16"
    target = torch.float16


class BFloat16(_Cast):
    """Brain float: 8 bits of fraction, the range of float32."""

    name = "bf16"
    target = torch.bfloat16
