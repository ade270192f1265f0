"""MNIST's file format (IDX): a type, the sizes of the dimensions, raw bytes; packed by gzip or not.

Only unsigned bytes are known. Where files come from is left to the data sets.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from shoal.data.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTES = 8
_PACKERS_OWN_BYTES = 4096
"""A packed file is larger than its contents by less than this."""
_AUTO_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class IdxFile:
    """What a file must hold, to the bit."""

    name: str
    """Without .gz."""
    shape: tuple[int, ...]
    sha256: str
    """Of the unpacked file: packers differ."""

    @property
    def header(self) -> bytes:
        """How the unpacked file begins."""
        sizes = b"".join(size.to_bytes(4, "big") for size in self.shape)
        return bytes((0, 0, _UNSIGNED_BYTES, len(self.shape))) + sizes

    @property
    def size_bytes(self) -> int:
        """Of the unpacked file."""
        return len(self.header) + prod(self.shape)

    def read(self, path: Path) -> torch.Tensor:
        """Its contents, uint8; DataError where the file is another one or damaged."""
        try:
            with path.open("rb") as file:
                contents = file.read(self.size_bytes + _PACKERS_OWN_BYTES)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}.", next_step="check the file and its permissions."
            ) from error
        return self.parse(contents, str(path))

    def parse(self, contents: bytes, source: str) -> torch.Tensor:
        """The same of bytes that `source` names."""
        unpacked = self._unpack(contents, source) if contents.startswith(_GZIP_MAGIC) else contents
        if not unpacked.startswith(self.header):
            raise self._unfit(
                source, f"it does not begin as a file of {'×'.join(map(str, self.shape))} bytes"
            )
        if len(unpacked) != self.size_bytes:
            than = "longer" if len(unpacked) > self.size_bytes else "shorter"
            raise self._unfit(source, f"it is {than} than {self.size_bytes:,} bytes")
        if hashlib.sha256(unpacked).hexdigest() != self.sha256:
            raise self._unfit(source, "its checksum (SHA-256) is another one")
        flat = np.frombuffer(bytearray(unpacked), dtype=np.uint8, offset=len(self.header))
        return torch.from_numpy(flat.reshape(self.shape))

    def _unpack(self, contents: bytes, source: str) -> bytes:
        unpacker = zlib.decompressobj(_AUTO_GZIP)
        try:
            unpacked = unpacker.decompress(contents, self.size_bytes + 1)
        except zlib.error as error:
            raise self._unfit(source, f"it cannot be unpacked ({error})") from error
        if not unpacker.eof and len(unpacked) < self.size_bytes:
            raise self._unfit(source, "it ends too early")
        return unpacked

    def _unfit(self, source: str, what: str) -> DataError:
        return DataError(
            f"{source} is not the file {self.name} that it should be: {what}.",
            cause="a copy or download that broke off, or a file of the same name with other contents.",
            next_step=f"remove {source}, and copy it anew or let it be downloaded again.",
        )
