"""Data sets, and each worker's part of them."""

from shoal.data.digits_set import digits
from shoal.data.errors import DataError
from shoal.data.loader import ShardedLoader
from shoal.data.mnist_set import mnist
from shoal.data.parts import Part, Remainder
from shoal.data.sampler import ShardSampler
from shoal.data.sharding import shard

__all__ = ["DataError", "Part", "Remainder", "ShardSampler", "ShardedLoader", "digits", "mnist", "shard"]
