"""Facts about this machine and what is installed on it, found without importing torch.

`describe_machine`, `describe_code` and `Watch` have what a report keeps of where it ran. Whether a fact is
good or bad is for `checks` to say.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal._version import __version__
from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.report import Code

ANSWER_S = 1.5
"""How long a program may take to answer, where the caller does not say."""
NOT_RUNNABLE = 127  # what a shell says of a program that it cannot start


_DRIVER_ANSWER_S = 10.0
_PACKAGES = ("torch", "numpy", "msgspec", "uvloop", "aiofastnet", "cryptography")
_REPORT_ANSWER_S = 30.0  # a report without its device or commit is worth less than the wait


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


def default_device() -> str:
    """'cuda' where torch is built for it and the driver tells of a GPU; torch is not imported to know."""
    has_gpu = torch_build().startswith("CUDA") and bool(gpus(_DRIVER_ANSWER_S).found)
    return "cuda" if has_gpu else "cpu"


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


# --- what a report keeps ---


def describe_machine() -> dict[str, Any]:
    """What does not change during a run."""
    device, _, version = torch_build().partition(" ")
    return {
        "machine": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": num_cores(),
        "memory_gib": None if (total := memory().total_bytes) is None else round(total / 2**30, 1),
        "device": device_name(),
        "topology": _topology(),
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) or "not installed" for name in _PACKAGES},
            **({"cuda": version} if device == "CUDA" else {}),
        },
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
            spent = sum(now) - sum(self._cpu_before)  # none between two looks within one tick of the kernel
            stolen = now[7] - self._cpu_before[7]
            state["cpu_steal_percent"] = round(100 * stolen / spent, 2) if spent > 0 else 0.0
        self._cpu_before = now
        return state


def describe_code(source: Path | None = None) -> Code:
    """Version and commit of the package that runs, or of the one under `source`."""
    folder = source or Path(__file__).parents[2]
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
    done = ask("git", "-C", str(folder), *arguments, answer_s=_REPORT_ANSWER_S)
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


@functools.cache
def device_name() -> str:
    """The GPUs where there are some, else 'cpu'; asks the driver, not torch."""
    told = gpus(_REPORT_ANSWER_S)
    if not told.has_answered:
        return "unknown: nvidia-smi does not answer"
    return ", ".join(gpu.name for gpu in told.found) or "cpu"


def _topology() -> str:
    """How the devices hang together, as the machine's own tools say it."""
    for command in (("nvidia-smi", "topo", "-m"), ("lscpu", "--extended=CPU,NODE,SOCKET,CORE")):
        done = ask(*command, answer_s=_REPORT_ANSWER_S)
        if done is not None and done.returncode == 0:
            return done.stdout.strip()
    return ""


def _cpu_times() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal; empty where the system does not tell."""
    fields = read("/proc/stat").split("\n", 1)[0].split()[1:9]
    return [int(field) for field in fields] if len(fields) == 8 else []


# --- open files ---


def ensure_open_files(num_files: int, *, should_raise: bool) -> str | None:
    """See that this process, and those it starts, may open so many; what was changed, in words.

    UsageError when they may not, and `should_raise` is not set or does not help.
    """
    if sys.platform == "win32":
        return None  # sockets are not files there
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, num_files):
        return (
            f"The limit on open files is {soft if soft >= 0 else 'none'} already." if should_raise else None
        )
    is_possible = _allows(hard, num_files)
    if not should_raise or not is_possible:
        raise UsageError(
            f"A process of this benchmark needs up to {num_files} open files, and may have {soft}.",
            cause="every peer has a UDP and a TCP socket of its own.",
            next_step=f"add --increase-file-limit, or run `ulimit -n {num_files}` first."
            if is_possible
            else f"use more --num-processes or fewer --num-peers: the system's own limit is {hard}.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return f"Raised the limit on open files from {soft} to {num_files}."


def _allows(limit: int, num_files: int) -> bool:
    import resource

    return limit == resource.RLIM_INFINITY or limit >= num_files
