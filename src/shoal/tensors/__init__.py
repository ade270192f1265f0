"""What travels and where it lives: wire specs, flat buckets, and codecs with error feedback."""

from shoal.tensors.buckets import DEFAULT_BUCKET_BYTES, Bucket, BucketLayout, BucketSlot
from shoal.tensors.codecs import (
    CODECS,
    BFloat16,
    Codec,
    Encoded,
    EncodedMeta,
    ErrorFeedback,
    Float16,
    Int8,
    LowRank,
    Plain,
    SparseTwoBit,
    TopK,
    codec_from_name,
    decode,
    read_meta,
)
from shoal.tensors.dtypes import DTYPES
from shoal.tensors.flat import Allocate, Flat, ParameterBuffers, private_memory
from shoal.tensors.packing import allocate_for, pack, unpack
from shoal.tensors.specs import (
    TensorLimits,
    TensorSpec,
    check,
    describe,
    is_sharded,
    local_part,
    read_specs,
    size_bytes,
)
from shoal.transport.memory import ALIGNMENT_BYTES, aligned_memory

__all__ = [
    "ALIGNMENT_BYTES",
    "CODECS",
    "DEFAULT_BUCKET_BYTES",
    "DTYPES",
    "Allocate",
    "BFloat16",
    "Bucket",
    "BucketLayout",
    "BucketSlot",
    "Codec",
    "Encoded",
    "EncodedMeta",
    "ErrorFeedback",
    "Flat",
    "Float16",
    "Int8",
    "LowRank",
    "ParameterBuffers",
    "Plain",
    "SparseTwoBit",
    "TensorLimits",
    "TensorSpec",
    "TopK",
    "aligned_memory",
    "allocate_for",
    "check",
    "codec_from_name",
    "decode",
    "describe",
    "is_sharded",
    "local_part",
    "pack",
    "private_memory",
    "read_meta",
    "read_specs",
    "size_bytes",
    "unpack",
]
