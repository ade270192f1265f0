"""What travels between clients and servers of experts: methods, their payloads, and tensors as buffers."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch

from shoal.core import TensorError
from shoal.experts.schema import ExpertSchema
from shoal.tensors import EncodedMeta, TensorSpec, pack, size_bytes, unpack
from shoal.tensors.codecs import CODECS, Codec, Encoded, codec_from_name, decode
from shoal.tensors.codecs.base import PLAIN
from shoal.tensors.dtypes import dtype_named

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
