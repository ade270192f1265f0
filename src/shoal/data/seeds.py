"""Random numbers in which workers agree, or differ, by what they are seeded with."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """A seed of 32 bits: torch's generator on the CPU uses no more of one."""
    text = " ".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators of torch (on the CPU), Python and numpy, for a while; then as they were."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
