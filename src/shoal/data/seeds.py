"""Random numbers in which workers agree, or differ, by what they are seeded with."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """A seed of 32 bits: torch's generator on the CPU uses no more of one."""
    text = " ".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def generator_states(own: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Of torch (on the CPU), Python and numpy, and of generators of one's own: plain values and tensors."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.default_generator.get_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "own": [generator.get_state() for generator in own],
    }


def set_generators(states: Mapping[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Sets the generators to a state that was read before."""
    torch.default_generator.set_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    for generator, state in zip(own, states["own"], strict=False):
        generator.set_state(state)


def states_of_process() -> dict[str, Any]:
    """Those of all generators that a process has, on GPUs too."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {**generator_states(), "cuda": cuda}


def set_states_of_process(states: Mapping[str, Any]) -> None:
    """Sets all generators to a state that was read before; those of GPUs where there are as many."""
    set_generators(states)
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


@contextlib.contextmanager
def kept_generators(own: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Whatever is drawn inside leaves the generators as they were."""
    states = generator_states(own)
    try:
        yield
    finally:
        set_generators(states, own)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators of torch (on the CPU), Python and numpy, for a while; then as they were."""
    with kept_generators():
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
