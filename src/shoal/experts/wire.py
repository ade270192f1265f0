"""What travels between clients and servers of experts: methods, their payloads, and tensors as buffers."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from shoal.core import TensorError
from shoal.experts.schema import ExpertSchema, TensorSchema, check_tensors
from shoal.tensors import EncodedMeta, TensorSpec, pack, size_bytes, unpack
from shoal.tensors.codecs import CODECS, Codec, Encoded, codec_from_name, decode
from shoal.tensors.codecs.base import PLAIN
from shoal.tensors.dtypes import dtype_name, dtype_named

INFO = "expert.info"
FORWARD = "expert.forward"
BACKWARD = "expert.backward"

ID_BYTES = 16
"""Of requests: random, so that nobody can guess another client's."""
_MAX_UID_CHARS = 256

CodecName = Annotated[str, msgspec.Meta(max_length=64)]
Uid = Annotated[str, msgspec.Meta(max_length=_MAX_UID_CHARS)]
RequestId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
MaybeId = Annotated[bytes, msgspec.Meta(max_length=ID_BYTES)]
"""Empty where there is none."""
Tensors = Annotated[tuple[EncodedMeta, ...], msgspec.Meta(max_length=256)]


class InfoRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks what an expert takes and gives."""

    uid: Uid


class Info(msgspec.Struct, frozen=True, array_like=True):
    """What an expert takes and gives, and how many samples its server takes at once."""

    schema: ExpertSchema
    max_batch_size: Annotated[int, msgspec.Meta(ge=1)]


class ForwardRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for an expert's outputs; the buffers are its inputs."""

    uid: Uid
    inputs: Tensors
    keep_as: MaybeId = b""
    """An id under which the server should keep the inputs for a backward; empty: it need not."""
    codec: CodecName = PLAIN
    """How the outputs should travel."""


class BackwardRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for gradients of an expert's inputs, and teaches it; the buffers are gradients, then inputs."""

    uid: Uid
    request_id: RequestId
    """However often a request comes under one id, it is applied once."""
    grad_outputs: Tensors
    inputs: Tensors = ()
    """None of them when they were kept."""
    kept_as: MaybeId = b""
    codec: CodecName = PLAIN


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the buffers of an answer are, and how busy the server is."""

    tensors: tuple[EncodedMeta | None, ...]
    """None stands for the gradient of an input that has none."""
    waited_s: float = 0.0
    """How long the request stood in line."""
    is_missing_inputs: bool = False
    """Of a backward: its inputs are kept no longer, send it again with them. Nothing was done."""


def make_wire_codec(name: str) -> Codec | None:
    """The codec of this name; None for plain tensors.

    Peers have no ranks: what a codec draws is seeded anew each time, so that the rounding errors of several
    clients, and of several answers, cancel.
    """
    if name == PLAIN:
        return None
    codec = codec_from_name(name)
    codec.reseed(secrets.randbits(32))
    return codec


def to_wire(
    tensors: Sequence[torch.Tensor | None], codec: Codec | None = None
) -> tuple[tuple[EncodedMeta | None, ...], list[Any]]:
    """Descriptions and buffers of tensors; plain ones on the CPU are sent from their own memory."""
    metas: list[EncodedMeta | None] = []
    buffers: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            metas.append(None)
        elif (
            codec is None
            and (meta := _usual_meta(tensor.dtype, tensor.shape)) is not None
            and (buffer := _bytes_in(tensor)) is not None
        ):
            metas.append(meta)
            buffers.append(buffer)
        elif codec is None:
            (spec,), raw = pack((tensor,))
            metas.append(EncodedMeta(PLAIN, spec))
            buffers += raw
        else:
            encoded = codec.encode(tensor)
            metas.append(encoded.meta)
            buffers += encoded.buffers
    return tuple(metas), buffers


def from_wire(metas: Sequence[EncodedMeta | None], buffers: Sequence[Any]) -> list[torch.Tensor | None]:
    """The tensors again, over the buffers where they are plain; TensorError when they do not fit together."""
    arrays = _usual_arrays(metas if type(metas) is tuple else tuple(metas))
    if arrays is not None and (usual := _tensors_over(arrays, buffers)) is not None:
        return list(usual)
    tensors: list[torch.Tensor | None] = []
    at = 0
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        if meta.codec == PLAIN:
            num = 1
            tensors += unpack((meta.spec,), buffers[at : at + 1])
        else:
            num = num_buffers(meta)
            tensors.append(decode(Encoded(meta, buffers[at : at + num])))
        at += num
    if at != len(buffers):
        raise TensorError(f"{len(buffers)} buffers came for tensors that have {at}")
    return tensors


class Fitting(msgspec.Struct, frozen=True):
    """Tensors that are what an expert takes, or gives: plain ones, in buffers of these sizes."""

    num_samples: int
    sizes: list[int]
    size_bytes: int
    metas: tuple[EncodedMeta | None, ...]
    arrays: _Arrays

    def tensors(self, buffers: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors in these buffers; as `from_wire`, for what was checked."""
        return _tensors_over(self.arrays, buffers) or from_wire(self.metas, buffers)  # type: ignore[return-value]


def fitting(
    schemas: tuple[TensorSchema, ...], metas: tuple[EncodedMeta | None, ...], sizes: Sequence[int]
) -> Fitting | None:
    """What is known of tensors that fit in every way; None: see what does not, or is unusual.

    The quick way for what nearly every message is; `check_inputs` and `check_sizes` know all others.
    """
    try:
        found = _remembered_fitting(schemas, metas)
    except (_Unusual, TensorError, TypeError):  # TypeError: made by hand, of what cannot be a key
        return None
    return found if found.sizes == sizes else None


def fitting_to_send(
    schemas: tuple[TensorSchema, ...], tensors: Sequence[torch.Tensor]
) -> tuple[Fitting, list[memoryview]] | None:
    """What is known of tensors that fit in every way, and the bytes in their own memory; None otherwise."""
    metas: list[EncodedMeta | None] = []
    buffers: list[memoryview] = []
    try:
        for tensor in tensors:
            buffer = _bytes_in(tensor)
            if buffer is None:
                return None
            metas.append(_usual_meta(tensor.dtype, tensor.shape))
            buffers.append(buffer)
        return _remembered_fitting(schemas, tuple(metas)), buffers
    except (_Unusual, TensorError):
        return None


def stacked(
    parts: Sequence[tuple[Sequence[EncodedMeta], Sequence[Any]]], allocate: Callable[[int], memoryview]
) -> list[torch.Tensor]:
    """The samples of several messages one after another, each tensor in memory of its own.

    For messages of one `fitting` schema: their bytes are copied, and torch is asked once for each tensor.
    """
    tensors = []
    for index, (dtype, shape) in enumerate(_remembered_arrays(tuple(parts[0][0]))):
        buffers = [buffers[index] for _, buffers in parts]
        memory = allocate(sum(map(len, buffers)))
        start = 0
        for buffer in buffers:
            memory[start : start + len(buffer)] = buffer
            start += len(buffer)
        tensors.append(torch.from_numpy(np.frombuffer(memory, dtype).reshape(-1, *shape[1:])))
    return tensors


def rows_of(
    metas: Sequence[EncodedMeta | None], buffers: Sequence[memoryview], sizes: Sequence[int]
) -> list[tuple[tuple[EncodedMeta | None, ...], list[memoryview]]]:
    """The inverse: messages of so many samples each, over the buffers of plain, contiguous tensors."""
    num_rows = sum(sizes)
    row_bytes = [len(buffer) // num_rows if num_rows else 0 for buffer in buffers]
    metas_of: dict[int, tuple[EncodedMeta | None, ...]] = {}
    parts = []
    start = 0
    for size in sizes:
        if size not in metas_of:
            metas_of[size] = tuple([meta and _of_samples(meta, size) for meta in metas])
        end = start + size
        cut = [buffer[start * row : end * row] for buffer, row in zip(buffers, row_bytes, strict=True)]
        parts.append((metas_of[size], cut))
        start = end
    return parts


def _of_samples(meta: EncodedMeta, num_samples: int) -> EncodedMeta:
    return EncodedMeta(PLAIN, TensorSpec(meta.spec.dtype, (num_samples, *meta.spec.shape[1:])))


def check_sizes(metas: Sequence[EncodedMeta | None], sizes: Sequence[int]) -> None:
    """TensorError when buffers of these sizes cannot be these tensors; before any is received.

    Whether a spec makes sense by itself is seen when the tensor is made.
    """
    expected: list[int] = []
    for meta in metas:
        if meta is None:
            continue
        if meta.codec == PLAIN:
            spec = meta.spec
            expected.append(math.prod(spec.shape) * dtype_named(spec.dtype).itemsize)
        else:
            size_bytes(meta.spec)  # that the spec itself is possible
            expected += [size_bytes(part) for part in _codec(meta).parts(meta.spec, meta.options)]
    if expected != list(sizes):
        raise TensorError(f"buffers of {list(sizes)[:8]} bytes came for tensors of {expected[:8]}")


# What was found out of a description is remembered: a client sends the same ones again and again. The caches
# are shared by all threads, and hold only what is short: descriptions of plain tensors of a few dimensions.
_NUM_REMEMBERED = 1024
_MAX_DIMS = 8
_USUAL = {
    getattr(torch, name): np.dtype(name)
    for name in ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8")
}
_USUAL_NUMPY = {dtype_name(dtype): numpy for dtype, numpy in _USUAL.items()}


_Arrays = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
"""What numpy calls tensors: their types and shapes."""


def _bytes_in(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a tensor; None where that is not all of it in order, or no other can read it."""
    if not tensor.is_cpu:
        return None
    try:
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return array.data.cast("B")
    except (TypeError, RuntimeError, ValueError, NotImplementedError):  # sparse, negated, nested, with gaps
        return None


def _tensors_over(arrays: _Arrays, buffers: Sequence[Any]) -> list[torch.Tensor] | None:
    """Tensors whose memory these buffers are; None when one of them cannot be used so."""
    tensors = []
    try:
        for (dtype, shape), buffer in zip(arrays, buffers, strict=True):
            array = np.frombuffer(buffer, dtype).reshape(shape)
            if not array.flags.carray:  # not writable, or badly aligned: to be copied
                return None
            tensors.append(torch.from_numpy(array))
    except (TypeError, ValueError):  # what is wrong is said by those who look closely
        return None
    return tensors


@functools.lru_cache(_NUM_REMEMBERED)
def _usual_meta(dtype: torch.dtype, shape: tuple[int, ...]) -> EncodedMeta | None:
    """How it is described; None for a type that numpy has not, for scalars, and for what is empty."""
    if dtype not in _USUAL or not 0 < len(shape) <= _MAX_DIMS or min(shape) < 1:
        return None
    return EncodedMeta(PLAIN, TensorSpec(dtype_name(dtype), tuple(shape)))


def _usual_arrays(metas: tuple[EncodedMeta | None, ...]) -> _Arrays | None:
    """What numpy calls these tensors; None unless all are plain, contiguous and not empty."""
    try:
        return _remembered_arrays(metas)
    except (_Unusual, TypeError):  # TypeError: made by hand, of what cannot be a key
        return None


@functools.lru_cache(_NUM_REMEMBERED)
def _remembered_arrays(metas: tuple[EncodedMeta | None, ...]) -> _Arrays:
    found: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
    for meta in metas:
        dtype = None if meta is None or meta.codec != PLAIN else _USUAL_NUMPY.get(meta.spec.dtype)
        if meta is None or dtype is None or meta.spec.strides is not None or meta.options:
            raise _Unusual
        if not 0 < len(meta.spec.shape) <= _MAX_DIMS or min(meta.spec.shape) < 1 or len(found) > _MAX_DIMS:
            raise _Unusual
        found.append((dtype, meta.spec.shape))
    return tuple(found)


@functools.lru_cache(_NUM_REMEMBERED)
def _remembered_fitting(schemas: tuple[TensorSchema, ...], metas: tuple[EncodedMeta | None, ...]) -> Fitting:
    arrays = _remembered_arrays(metas)
    num_samples = check_tensors("tensor", schemas, [meta.spec for meta in metas if meta is not None])
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in arrays]
    return Fitting(num_samples, sizes, sum(sizes), metas, arrays)


class _Unusual(Exception):
    """Not remembered: `lru_cache` keeps no errors."""


def specs_of(metas: Sequence[EncodedMeta]) -> list[TensorSpec]:
    """What the tensors are once decoded."""
    return [meta.spec for meta in metas]


def _codec(meta: EncodedMeta) -> Any:
    codec = CODECS.get(meta.codec)
    if codec is None:
        raise TensorError(
            f"a tensor came in an unknown encoding {meta.codec[:32]!r}",
            cause=f"this peer knows {', '.join(CODECS)}; the sender may be newer",
        )
    return codec


def num_buffers(meta: EncodedMeta) -> int:
    """How many buffers a tensor travels in."""
    return 1 if meta.codec == PLAIN else len(_codec(meta).parts(meta.spec, meta.options))
