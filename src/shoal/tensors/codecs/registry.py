"""Codecs by name: on the command line, and on the wire."""

from __future__ import annotations

import torch

from shoal.core.errors import TensorError, UsageError, did_you_mean
from shoal.tensors.codecs.base import Encoded, EncodedMeta, FormatCodec
from shoal.tensors.codecs.casts import BFloat16, Float16, Plain
from shoal.tensors.codecs.integers import Int4, Int8
from shoal.tensors.codecs.low_rank import LowRank
from shoal.tensors.codecs.sparse_two_bit import SparseTwoBit
from shoal.tensors.codecs.top_k import TopK
from shoal.tensors.specs import DEFAULT_LIMITS

CODECS: dict[str, type[FormatCodec]] = {
    "none": Plain,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "int4": Int4,
    "top-k": TopK,
    "low-rank": LowRank,
    "sparse-2bit": SparseTwoBit,
}


def codec_from_name(text: str) -> FormatCodec:
    """The codec of `name` or `name:parameter`, such as `int8`, `top-k:0.01` or `low-rank:4`."""
    name, _, parameter = text.strip().partition(":")
    name = name.lower().replace("_", "-")
    if name not in CODECS:
        raise UsageError(
            f"unknown codec {name[:32]!r}.{did_you_mean(name, CODECS, cutoff=0.5)}",
            next_step=f"use one of {', '.join(CODECS)}",
        )
    return CODECS[name].from_text(parameter)


def decode(encoded: Encoded, max_bytes: int = DEFAULT_LIMITS.max_bytes) -> torch.Tensor:
    """The tensor, by whichever codec it was encoded; see `Codec.decode` for what can go wrong."""
    name = encoded.meta.codec if isinstance(encoded.meta, EncodedMeta) else None
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        raise TensorError(
            f"a tensor came in an unknown encoding {str(name)[:32]!r}",
            cause=f"this peer knows {', '.join(CODECS)}; the sender may be newer",
        )
    return codec.decode(encoded, max_bytes)
