"""The text set: the documentation of Shoal as it was one day, a file of the package, to learn to write.

How it was made is in assets/README.md.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import torch

from shoal.core.errors import UsageError
from shoal.data.errors import DataError

FILE = Path(__file__).parent / "assets" / "docs-text.gz"
PAGE_END = b"\f"
NUM_CHARACTERS = 96
"""The end of a line, which is 0, and what ASCII can print, from 1."""

_DIGEST = "1198f78c6651a01229bf39f6ad5d75a5271976625936563f8d177d4c86749df4"
_NUM_PARTS = 10  # of each page the last one is for tests


def is_known(character: str) -> bool:
    """Whether the set may have it."""
    return character == "\n" or (character.isascii() and character.isprintable())


def next_characters(num_before: int, train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """So many characters one after another, uint8 of n×`num_before`, and the one that follows, int64.

    For training the beginnings of all pages, for tests their ends.
    """
    windows = torch.cat(_windows(num_before, train=train))
    return windows[:, :-1].contiguous(), windows[:, -1].long()


def encode(text: str) -> torch.Tensor:
    """Gives the number of each character, uint8; UsageError for one that the set does not have."""
    unknown = next((character for character in text if not is_known(character)), None)
    if unknown is not None:
        raise UsageError(
            f"The text has the character {unknown!r}, which has no number.",
            cause="the set has what ASCII can print, and the end of a line.",
            next_step="write it with such characters, or leave it out.",
        )
    codes = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) if text else torch.empty(0)
    return torch.where(codes == ord("\n"), 0, codes - (ord(" ") - 1)).to(torch.uint8)


def decode(codes: torch.Tensor) -> str:
    """Gives the text whose characters have these numbers."""
    return "".join("\n" if code == 0 else chr(code + ord(" ") - 1) for code in codes.tolist())


def pages(num_before: int) -> torch.Tensor:
    """The page that each example for training is from."""
    counts = torch.tensor([len(windows) for windows in _windows(num_before, train=True)])
    return torch.arange(len(counts)).repeat_interleave(counts)


def _windows(num_before: int, *, train: bool) -> list[torch.Tensor]:
    windows = []
    for page in _read().split(PAGE_END):
        codes = encode(page.decode())
        end = len(codes) - len(codes) // _NUM_PARTS
        windows.append((codes[:end] if train else codes[end:]).unfold(0, num_before + 1, 1))
    return windows


def _read() -> bytes:
    text = gzip.decompress(FILE.read_bytes())
    if hashlib.sha256(text).hexdigest() != _DIGEST:
        raise DataError(
            f"{FILE} is not the text that Shoal was made with.",
            cause="the file was changed or is damaged.",
            next_step="install Shoal again.",
        )
    return text
