"""The digits set: 1,797 handwritten digits of 8×8 pixels, a file of the package.

Small enough to learn in seconds. Origin and licence are in assets/README.md.
"""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.data.idx import IdxFile

NUM_TRAINING = 1437
"""The first so many, of an order that was drawn once, are for training; 360 are left for tests."""

_FOLDER = Path(__file__).parent / "assets"
_IMAGES = IdxFile(
    "digits-images-idx3-ubyte",
    (1797, 8, 8),
    "295b998ba486cc5fe1a971982cbc0be5ba61af5332c0283d4bd7ae772c59048d",
)
_LABELS = IdxFile(
    "digits-labels-idx1-ubyte",
    (1797,),
    "56d4cdbb07f7c79e40e27fdc28b97e81f00cd17c07d11d12a07994f864b56fcd",
)
_DARKEST = 16


def digits(train: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 of n×1×8×8 from 0 to 1, and their labels, int64; for training or for tests."""
    part = slice(None, NUM_TRAINING) if train else slice(NUM_TRAINING, None)
    images, labels = (file.read(_FOLDER / f"{file.name}.gz")[part] for file in (_IMAGES, _LABELS))
    return images.unsqueeze(1) / _DARKEST, labels.long()
