"""What memory `shoal bench convergence` takes, and whether there is that much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.bench.frame import Tell
from shoal.bench.machine import memory
from shoal.bench.workers import run_tasks
from shoal.core import BenchmarkError, UsageError
from shoal.core.placement import num_cores
from shoal.report.units import scale_for

if TYPE_CHECKING:
    from shoal.simulate.mixture_settings import MixtureSettings


def free_bytes(device: str) -> int | None:
    """What is left on the device; None where nobody tells. A GPU is asked by a process of its own."""
    if device == "cpu":
        return memory().available_bytes
    asked = run_tasks(
        "shoal.bench.convergence_memory:ask_device",
        [{"device": device}],
        num_processes=1,
        tell=lambda text: None,
    )
    for answer in asked:
        if isinstance(answer, BenchmarkError):
            raise answer
        return int(answer)
    return None


def ask_device(task: Mapping[str, Any], tell: Tell) -> int:
    """What is free on a GPU, asked in a process whose end gives back what asking takes."""
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(task["device"]))
    return free


def num_at_once(settings: MixtureSettings, num_seeds: int) -> int:
    """Seeds that train side by side: on CPUs as many as cores and memory allow, on a GPU one.

    Up to twice as many as cores go at once: three on two cores take turns, and no core waits for the last.
    """
    if settings.device != "cpu":
        return 1
    available_bytes = memory().available_bytes
    fitting = num_seeds if available_bytes is None else available_bytes // settings.memory_bytes()
    cores = num_cores()
    return max(1, min(num_seeds if num_seeds <= 2 * cores else cores, fitting))


def memory_text(settings: MixtureSettings, num_seeds: int, available_bytes: int | None) -> str:
    """What it takes and what there is, in one line."""
    weights, needed = settings.parameter_bytes(), settings.memory_bytes()
    at_once = num_at_once(settings, num_seeds)
    where = "memory" if settings.device == "cpu" else "memory of the GPU"
    text = f"about {_size(needed)} of {where} for a seed ({_size(weights)} of them weights)"
    text += f", {at_once} seeds at once" if at_once > 1 else ""
    if available_bytes is None:
        return f"{text}; how much is free is not known."
    fits = "that fits" if needed * at_once <= available_bytes else "that does NOT fit"
    return f"{text}; {_size(available_bytes)} are free: {fits}."


def check_memory(settings: MixtureSettings, available_bytes: int | None) -> None:
    """UsageError where not even one seed fits."""
    if available_bytes is None or settings.fits(available_bytes):
        return
    kind = "" if settings.device == "cpu" else " of the GPU"
    sizes = "--layer-dim" if settings.model == "large-ffn" else "--num-experts or --layer-dim"
    raise UsageError(
        f"This needs about {_size(settings.memory_bytes())} of memory{kind}, and "
        f"{_size(available_bytes)} are free.",
        cause="weights, the three moments of AMSGrad for each, and the gradients that are under way.",
        next_step=f"a smaller {sizes}, another --device, or --force to try nevertheless.",
    )


def _size(size_bytes: int) -> str:
    return scale_for("B", size_bytes).format(size_bytes)
