"""What a codec is: a tensor becomes fewer bytes, and only what travels is needed to make it a tensor again.

A codec that writes a format describes it once, in `parts`: which buffers, of which dtype and shape, belong
to a tensor of a given spec. The sender reads from it whether encoding saves bytes at all; the receiver holds
a stranger's claim to it before anything is allocated.

Three kinds of tensor are always sent plain, whatever the codec: those that are not float16, bfloat16, float32
or float64; those that would not become smaller; and those that hold an inf or a nan, which reach the receiver
as they are, so that a gradient scaler sees them there and skips the step as it would without a codec.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import msgspec
import torch

from shoal.core.errors import LimitExceeded, TensorError, UsageError
from shoal.tensors.packing import densify, pack, reshape_dense, unpack
from shoal.tensors.specs import DEFAULT_LIMITS, TensorSpec, size_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PLAIN = "none"
"""The format of raw bytes, which every codec may fall back to and every codec decodes."""

LOSSY_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that codecs compress."""


class EncodedMeta(msgspec.Struct, frozen=True, array_like=True):
    """What travels beside the buffers: the format, the tensor's spec, and the numbers of the format."""

    codec: str
    spec: TensorSpec
    options: tuple[int, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """One tensor as it travels. Buffers may be the tensor's own memory: send them before it changes."""

    meta: EncodedMeta
    buffers: Sequence[ReadableBuffer]

    @property
    def buffer_bytes(self) -> int:
        """What the buffers take: the bytes that a codec's formula counts."""
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)

    @property
    def size_bytes(self) -> int:
        """What travels: the buffers, and the meta as MessagePack."""
        return self.buffer_bytes + len(msgspec.msgpack.encode(self.meta))


def read_meta(value: object) -> EncodedMeta:
    """The meta from what MessagePack decoded; TensorError if it is not one."""
    try:
        return msgspec.convert(value, EncodedMeta)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise TensorError(f"not the description of an encoded tensor: {error}") from None


class Codec(ABC):
    """Tensors to fewer bytes and back."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, slot: str = "") -> Encoded:
        """Encode a tensor; `slot` names it among those whose state the codec keeps between calls."""

    @abstractmethod
    def decode(self, encoded: Encoded, max_bytes: int = DEFAULT_LIMITS.max_bytes) -> torch.Tensor:
        """The tensor, on the CPU, in the dtype, shape and strides it had; plain ones share the buffers.

        Safe on what a hostile peer sent: TensorError when it does not fit together, LimitExceeded, before
        anything is allocated, when the tensor would take more than `max_bytes`.
        """

    def reseed(self, number: int) -> None:  # noqa: B027 - most codecs draw nothing
        """Draw what is random by this number from now on; a codec that draws nothing stays as it is.

        Workers whose rounding errors should cancel in a mean give their ranks.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs, flat, as safetensors stores it."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a state; UsageError if it belongs to another kind of codec."""
        if state:
            raise UsageError(f"{type(self).__name__} keeps no state, but was given {sorted(state)[:3]}")


class FormatCodec(Codec):
    """A codec that writes a format of its own, with `name` on the wire and on the command line."""

    name: ClassVar[str]

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The codec that `name:text` stands for; `text` is empty when there was no colon."""
        if text:
            raise UsageError(f"codec {cls.name!r} takes no parameter, but was given {text!r}")
        return cls()

    @abstractmethod
    def options(self, spec: TensorSpec) -> tuple[int, ...] | None:
        """The numbers with which this codec encodes a tensor of the spec; None: plain."""

    @classmethod
    @abstractmethod
    def parts(cls, spec: TensorSpec, options: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        """The buffers of a tensor of the (checked) spec; TensorError if the options make no sense."""

    @abstractmethod
    def compress(self, flat: torch.Tensor, options: tuple[int, ...], slot: str) -> list[torch.Tensor] | None:
        """The parts of a non-empty tensor given in memory order; None if it can only be sent plain."""

    @classmethod
    @abstractmethod
    def expand(cls, parts: list[torch.Tensor], spec: TensorSpec, options: tuple[int, ...]) -> torch.Tensor:
        """The tensor's elements in memory order; the parts are as `parts` said, their content is a claim."""

    def encode(self, tensor: torch.Tensor, slot: str = "") -> Encoded:
        """Encode a tensor; the same tensors in the same order give the same bytes."""
        flat, spec = densify(tensor)
        options = self.options(spec) if spec.dtype in LOSSY_DTYPES and flat.numel() else None
        if options is not None and self.size_bytes(spec, options) < size_bytes(spec):
            parts = self.compress(flat, options, slot)
            if parts is not None:
                return Encoded(EncodedMeta(self.name, spec, options), pack(parts)[1])
        return _raw(flat, spec)

    @classmethod
    def size_bytes(cls, spec: TensorSpec, options: tuple[int, ...]) -> int:
        """What the buffers of such a tensor take together."""
        return sum(size_bytes(part) for part in cls.parts(spec, options))

    @classmethod
    def decode(cls, encoded: Encoded, max_bytes: int = DEFAULT_LIMITS.max_bytes) -> torch.Tensor:
        """See `Codec.decode`; needs no instance, for all that is needed has travelled."""
        spec, options = _checked(encoded.meta, max_bytes)
        if encoded.meta.codec == PLAIN:
            return unpack([spec], encoded.buffers)[0]
        if encoded.meta.codec != cls.name:
            raise TensorError(f"a tensor encoded as {str(encoded.meta.codec)[:32]!r} came to {cls.name!r}")
        if spec.dtype not in LOSSY_DTYPES or 0 in spec.shape:
            raise TensorError(f"{spec.dtype} of shape {list(spec.shape)} is never sent as {cls.name!r}")
        parts = unpack(cls.parts(spec, options), encoded.buffers)
        return reshape_dense(cls.expand(parts, spec, options), spec)


def plain(tensor: torch.Tensor) -> Encoded:
    """The tensor as raw bytes, which any codec decodes."""
    return _raw(*densify(tensor))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a non-empty tensor holds neither inf nor nan (one pass; `isfinite().all()` takes twenty)."""
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for itself, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def saturating_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as another float dtype, where finite values stay finite; inf becomes the largest, too."""
    if tensor.dtype is dtype:
        return tensor
    largest = torch.finfo(dtype).max
    return (tensor if largest >= torch.finfo(tensor.dtype).max else tensor.clamp(-largest, largest)).to(dtype)


def _raw(flat: torch.Tensor, spec: TensorSpec) -> Encoded:
    return Encoded(EncodedMeta(PLAIN, spec), pack([flat])[1])


def _checked(meta: EncodedMeta, max_bytes: int) -> tuple[TensorSpec, tuple[int, ...]]:
    if not isinstance(meta, EncodedMeta):
        raise TensorError(f"expected the meta of an encoded tensor, not {type(meta).__name__}")
    size = size_bytes(meta.spec)
    if size > max_bytes:
        raise LimitExceeded(
            f"an encoded tensor would take {size} bytes, {max_bytes} are allowed",
            next_step="raise max_bytes if tensors of this size are expected",
        )
    options = meta.options
    if not isinstance(options, tuple) or not all(type(option) is int for option in options):
        raise TensorError("the options of an encoded tensor are integers")
    return meta.spec, options
