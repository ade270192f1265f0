"""Facts about this machine and what is installed on it, found without importing torch.

Whether a fact is good or bad is `health`'s business, and which of them a report keeps `environment`'s.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

ANSWER_S = 1.5
"""How long a program may take to answer, where the caller does not say."""
NOT_RUNNABLE = 127  # what a shell says of a program that it cannot start


class Memory(NamedTuple):
    """Within the container's limit where there is one; None where the system does not tell."""

    total_bytes: int | None
    available_bytes: int | None


class Gpu(msgspec.Struct, frozen=True):
    """A GPU in the words of its driver: 'NVIDIA H200' with '143771 MiB'."""

    name: str
    memory: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.memory}" if self.memory else self.name


class Gpus(msgspec.Struct, frozen=True):
    """What the driver's own program says of them."""

    found: tuple[Gpu, ...] = ()
    complaint: str = ""
    """Why that program finds none; empty where it does, and where there is no such program."""
    has_answered: bool = True


def processor_name() -> str:
    """The CPU's name as its maker writes it, where the system tells."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        done = ask("sysctl", "-n", "machdep.cpu.brand_string")
        return (done.stdout.strip() if done else "") or platform.machine()
    return platform.processor() or platform.machine() or "an unknown processor"


def cpu_quota() -> float | None:
    """Cores that a Linux control group grants, None without a limit."""
    fields = read("/sys/fs/cgroup/cpu.max").split()
    if len(fields) == 2 and fields[0].isdecimal() and int(fields[1]) > 0:
        return int(fields[0]) / int(fields[1])
    return None


def memory() -> Memory:
    """Memory in all, and what is left of it."""
    fields = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in read("/proc/meminfo").splitlines())
        if rest.split()[:1] and rest.split()[0].isdecimal()
    }
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    limit, used = read("/sys/fs/cgroup/memory.max").strip(), read("/sys/fs/cgroup/memory.current").strip()
    if total is not None and limit.isdecimal() and int(limit) < total:
        total = int(limit)
        if available is not None and used.isdecimal():
            available = max(0, min(available, total - int(used)))
    if total is None and sys.platform == "win32":
        return _windows_memory()
    if total is None:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return Memory(None, None)
    return Memory(total, available)


def _windows_memory() -> Memory:
    import ctypes

    # MEMORYSTATUSEX: two 32-bit fields, then seven 64-bit ones, total and available physical memory first
    state = (ctypes.c_uint64 * 8)()
    ctypes.cast(state, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(state)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(state):  # type: ignore[attr-defined,unused-ignore]
        return Memory(None, None)
    return Memory(int(state[1]), int(state[2]))


def gpus(answer_s: float) -> Gpus:
    """The GPUs that NVIDIA's driver knows of; its program may take seconds where persistence is off."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus()
    done = ask(program, "--query-gpu=name,memory.total", "--format=csv,noheader", answer_s=answer_s)
    if done is None:
        return Gpus(has_answered=False)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        reason = " ".join((done.stderr or done.stdout).split())[:120] or f"exit code {done.returncode}"
        return Gpus(complaint=reason)
    parts = [line.partition(",") for line in lines]
    return Gpus(tuple(Gpu(name.strip(), size.strip()) for name, _, size in parts))


def installed_version(name: str) -> str | None:
    """A package's version, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_build() -> str:
    """The device that torch is built for, read from its files: importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "an unknown device"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return "an unknown device"
    for name, device in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if match is not None:
            return f"{device} {match[1]}"
    return "CPU"


def ask(*command: str, answer_s: float = ANSWER_S) -> subprocess.CompletedProcess[str] | None:
    """Run a program; None when it does not answer, and nobody waits for one that cannot even be killed.

    One that cannot be started has exit code 127, as in a shell.
    """
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, NOT_RUNNABLE, "", str(error))
    try:
        out, complaints = process.communicate(timeout=answer_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)
        return None
    return subprocess.CompletedProcess(command, process.returncode, out, complaints)


def read(path: str) -> str:
    """A file of the system's; empty where there is none."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
