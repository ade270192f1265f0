"""Where a benchmark ran: the machine, what is installed, and what else was going on there."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import shoal
from shoal.report import Code

_PACKAGES = ("torch", "numpy", "msgspec", "uvloop", "aiofastnet", "cryptography")


def describe_machine() -> dict[str, Any]:
    """What does not change during a run."""
    return {
        "machine": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": _memory_gib(),
        "device": device_name(),
        "topology": _topology(),
        "versions": {"python": platform.python_version(), **_installed()},
    }


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
            spent = sum(now) - sum(self._cpu_before)
            if spent > 0:
                state["cpu_steal_percent"] = round(100 * (now[7] - self._cpu_before[7]) / spent, 2)
        self._cpu_before = now
        return state


def describe_code(source: Path | None = None) -> Code:
    """Version and commit of the package that runs, or of the one under `source`."""
    folder = source or Path(shoal.__file__).parent.parent
    version = shoal.__version__
    if source is not None:
        text = (source / "shoal" / "__init__.py").read_text()
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
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def device_name() -> str:
    """The GPUs where there are some, else 'cpu'; asks the driver, not torch."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = done.stdout.split("\n") if done.returncode == 0 else []
    return ", ".join(name.strip() for name in names if name.strip()) or "cpu"


def _topology() -> str:
    """How the devices hang together, as the machine's own tools say it."""
    for command in (["nvidia-smi", "topo", "-m"], ["lscpu", "--extended=CPU,NODE,SOCKET,CORE"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""


def _installed() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _processor() -> str:
    if sys.platform == "linux":
        for line in _read("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _cpu_times() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal; empty where the system does not tell."""
    fields = _read("/proc/stat").split("\n", 1)[0].split()[1:9]
    return [int(field) for field in fields] if len(fields) == 8 else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
