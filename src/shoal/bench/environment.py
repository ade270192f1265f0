"""Where a benchmark ran, as its report keeps it: the machine, the code, and what else was going on there.

The facts themselves are `machine`'s.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Any

import shoal
from shoal._version import __version__
from shoal.bench.machine import ask, gpus, installed_version, memory, processor_name, read, torch_build
from shoal.core.placement import num_cores
from shoal.report import Code

_PACKAGES = ("torch", "numpy", "msgspec", "uvloop", "aiofastnet", "cryptography")
_ANSWER_S = 30.0  # a report without its device or commit is worth less than the wait


def describe_machine() -> dict[str, Any]:
    """What does not change during a run."""
    return {
        "machine": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": num_cores(),
        "memory_gib": _memory_gib(),
        "device": device_name(),
        "topology": _topology(),
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) or "not installed" for name in _PACKAGES},
            **_cuda_version(),
        },
    }


def _cuda_version() -> dict[str, str]:
    """That torch is built for; empty for another device."""
    device, _, version = torch_build().partition(" ")
    return {"cuda": version} if device == "CUDA" else {}


class Watch:
    """What else the machine does: looked at when a run begins and when it ends."""

    def __init__(self) -> None:
        self._cpu_before = _cpu_times()

    def look(self) -> dict[str, Any]:
        """Load average now, and the share of CPU time that was stolen since the last look."""
        now = _cpu_times()
        state: dict[str, Any] = {}
        if hasattr(os, "getloadavg"):
            state["load_average"] = round(os.getloadavg()[0], 2)
        if now and self._cpu_before:
            spent = sum(now) - sum(self._cpu_before)  # none between two looks within one tick of the kernel
            stolen = now[7] - self._cpu_before[7]
            state["cpu_steal_percent"] = round(100 * stolen / spent, 2) if spent > 0 else 0.0
        self._cpu_before = now
        return state


def describe_code(source: Path | None = None) -> Code:
    """Version and commit of the package that runs, or of the one under `source`."""
    folder = source or Path(shoal.__file__).parent.parent
    version = __version__
    if source is not None:
        text = (source / "shoal" / "_version.py").read_text()
        version = next(
            (line.split('"')[1] for line in text.splitlines() if line.startswith("__version__")), ""
        )
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None or _git(folder, "ls-files", "--error-unmatch", "shoal/__init__.py") is None:
        return Code(version=version)  # installed somewhere inside another project's repository
    return Code(
        version=version, revision=revision, is_dirty=bool(_git(folder, "status", "--porcelain", "--", "."))
    )


def _git(folder: Path, *arguments: str) -> str | None:
    done = ask("git", "-C", str(folder), *arguments, answer_s=_ANSWER_S)
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


@functools.cache
def device_name() -> str:
    """The GPUs where there are some, else 'cpu'; asks the driver, not torch."""
    told = gpus(_ANSWER_S)
    if not told.has_answered:
        return "unknown: nvidia-smi does not answer"
    return ", ".join(gpu.name for gpu in told.found) or "cpu"


def _topology() -> str:
    """How the devices hang together, as the machine's own tools say it."""
    for command in (("nvidia-smi", "topo", "-m"), ("lscpu", "--extended=CPU,NODE,SOCKET,CORE")):
        done = ask(*command, answer_s=_ANSWER_S)
        if done is not None and done.returncode == 0:
            return done.stdout.strip()
    return ""


def _memory_gib() -> float | None:
    total_bytes = memory().total_bytes
    return None if total_bytes is None else round(total_bytes / 2**30, 1)


def _cpu_times() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal; empty where the system does not tell."""
    fields = read("/proc/stat").split("\n", 1)[0].split()[1:9]
    return [int(field) for field in fields] if len(fields) == 8 else []
