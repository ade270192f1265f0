import gzip
import hashlib

import pytest
import torch

from shoal.data import DataError
from shoal.data.idx import IdxFile

CONTENT = bytes((0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3)) + bytes(range(6))
FILE = IdxFile("six-idx2-ubyte", (2, 3), hashlib.sha256(CONTENT).hexdigest())


@pytest.mark.parametrize("contents", [CONTENT, gzip.compress(CONTENT)], ids=["plain", "packed"])
def test_reads_packed_and_plain(tmp_path, contents):
    path = tmp_path / "six"
    path.write_bytes(contents)
    assert torch.equal(FILE.read(path), torch.arange(6, dtype=torch.uint8).reshape(2, 3))


@pytest.mark.parametrize(
    ("contents", "what"),
    [
        (b"<html>not found</html>", "does not begin as a file of 2×3 bytes"),
        (b"", "does not begin"),
        (bytes((0, 0, 8, 1, 0, 0, 0, 6)) + bytes(range(6)), "does not begin"),
        (CONTENT[:-1], "shorter than 18 bytes"),
        (CONTENT + b"x", "longer than 18 bytes"),
        (CONTENT[:-1] + b"x", "checksum"),
        (gzip.compress(CONTENT)[:-12], "ends too early"),
        (gzip.compress(CONTENT)[:2] + bytes(20), "cannot be unpacked"),
        (gzip.compress(CONTENT + bytes(1 << 20)), "longer than 18 bytes"),
    ],
)
def test_what_is_wrong_is_said_with_the_next_step(tmp_path, contents, what):
    path = tmp_path / "six.gz"
    path.write_bytes(contents)
    with pytest.raises(DataError, match=what) as caught:
        FILE.read(path)
    assert str(path) in caught.value.what
    assert f"remove {path}" in caught.value.next_step


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"six cannot be read: No such file"):
        FILE.read(tmp_path / "six")
