"""Codecs: tensors as fewer bytes, with error feedback for what is lost."""

from shoal.tensors.codecs.base import Codec, Encoded, EncodedMeta, read_meta
from shoal.tensors.codecs.casts import BFloat16, Float16, Plain
from shoal.tensors.codecs.feedback import ErrorFeedback
from shoal.tensors.codecs.integers import Int4, Int8
from shoal.tensors.codecs.low_rank import LowRank
from shoal.tensors.codecs.registry import CODECS, codec_from_name, decode
from shoal.tensors.codecs.sparse_two_bit import SparseTwoBit
from shoal.tensors.codecs.top_k import TopK

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "Encoded",
    "EncodedMeta",
    "ErrorFeedback",
    "Float16",
    "Int4",
    "Int8",
    "LowRank",
    "Plain",
    "SparseTwoBit",
    "TopK",
    "codec_from_name",
    "decode",
    "read_meta",
]
