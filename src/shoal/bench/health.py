"""What `shoal doctor` looks at: whether this machine is fit to run a peer.

The checks here weigh what `machine` finds; those that measure are `probes`'. The whole round takes about two
seconds and imports no torch.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shoal.bench.findings import Finding, fail, ok, warn
from shoal.bench.machine import (
    cpu_quota,
    gpus,
    installed_version,
    memory,
    processor_name,
    torch_build,
)
from shoal.bench.probes import check_clock, check_loopback, check_ports, check_switching, check_timers
from shoal.core.errors import IdentityError
from shoal.core.identity import Identity, default_identity_path, state_folder
from shoal.core.loop import new_event_loop
from shoal.core.placement import num_cores

MIN_PYTHON = (3, 11)
MIN_VERSIONS = {
    "torch": "2.6",
    "numpy": "1.26",
    "msgspec": "0.19",
    "cryptography": "43",
    "safetensors": "0.4.5",
    "uvloop": "0.21",
    "aiofastnet": "1.0",
}
"""What pyproject.toml asks for."""
FEW_DESCRIPTORS = 4096  # a peer that serves a few thousand others, with its files
SMALL_BYTES = 1 << 30
_DRIVER_ANSWER_S = 1.5  # doctor is a quick look
_GIB = float(1 << 30)


def check_python() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    says = f"{platform.python_implementation()} {version} on {platform.system()} {platform.machine()}."
    if sys.version_info[:2] < MIN_PYTHON:
        least = ".".join(map(str, MIN_PYTHON))
        return fail(says, f"install Python {least} or newer.", version=version)
    if sys.maxsize < 1 << 32:
        return fail(
            f"{says} It is a 32-bit build.", "install a 64-bit Python: torch has no other.", version=version
        )
    return ok(says, version=version)


def check_torch() -> Finding:
    """Which torch is installed, and for which device."""
    version = installed_version("torch")
    if version is None:
        return fail(
            "torch is not installed.", "pip install torch, as https://pytorch.org says for this machine."
        )
    if is_older(version, MIN_VERSIONS["torch"]):
        return fail(
            f"torch {version} is older than {MIN_VERSIONS['torch']}.",
            "pip install --upgrade torch",
            version=version,
        )
    build = torch_build()
    return ok(f"torch {version}, built for {build}.", version=version, build=build)


def check_packages() -> Finding:
    """The libraries that Shoal cannot do without."""
    names = ("numpy", "msgspec", "cryptography", "safetensors")
    versions = {name: installed_version(name) for name in names}
    wrong = [
        name for name, version in versions.items() if version is None or is_older(version, MIN_VERSIONS[name])
    ]
    says = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items()) + "."
    if wrong:
        wanted = " ".join(f"'{name}>={MIN_VERSIONS[name]}'" for name in wrong)
        return fail(says, f"pip install --upgrade {wanted}", **versions)
    return ok(says, **versions)


def check_loop() -> Finding:
    """Which event loop will move the bytes."""
    loop = new_event_loop()
    kind = type(loop).__module__.split(".")[0]
    loop.close()
    versions = {name: installed_version(name) for name in ("uvloop", "aiofastnet")}
    parts = [f"{name} {version or 'not installed'}" for name, version in versions.items()]
    says = f"The loop will be {kind}'s; {', '.join(parts)}."
    missing = [name for name, version in versions.items() if version is None]
    figures = {"loop": kind, **versions}
    if sys.platform == "win32" or sys.implementation.name != "cpython":
        return ok(says, **figures)  # neither has wheels there
    if missing:
        return warn(says, f"pip install {' '.join(missing)}: network calls become faster.", **figures)
    if kind != "uvloop":
        return warn(says, "pip install --force-reinstall uvloop: it is there but does not load.", **figures)
    return ok(says, **figures)


def check_processor() -> Finding:
    """The CPU, and how much of it this process may use."""
    model, cores, quota = processor_name(), num_cores(), cpu_quota()
    says = f"{model}, {cores} {'core' if cores == 1 else 'cores'}."
    if quota is not None and quota < cores:
        says = f"{model}, {cores} cores, of which this container may use {quota:g}."
    figures: dict[str, object] = {"model": model, "cores": cores, "quota_cores": quota}
    if min(cores, quota or cores) < 2:
        return warn(
            says,
            "give it two cores: network and training take turns on one, and figures mean little.",
            **figures,
        )
    return ok(says, **figures)


def check_gpus() -> Finding:
    """The GPUs, as the driver tells; torch is not asked."""
    told = gpus(_DRIVER_ANSWER_S)
    if not told.has_answered:
        return warn(
            f"nvidia-smi did not answer within {_DRIVER_ANSWER_S:g} s.",
            "run nvidia-smi yourself; if it only starts slowly, switch persistence on: nvidia-smi -pm 1",
        )
    if told.complaint:
        return warn(f"nvidia-smi finds no GPU: {told.complaint}", "check the driver: nvidia-smi", gpus=[])
    if not told.found:
        if sys.platform == "darwin" and platform.machine() == "arm64":
            return ok("Apple's own GPU (torch calls it 'mps').", gpus=["mps"])
        return ok("None that nvidia-smi knows of: models run on the CPU.", gpus=[])
    names = [str(gpu) for gpu in told.found]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    if installed_version("torch") is not None and torch_build() == "CPU":
        return warn(
            f"{', '.join(kinds)}, but torch is built for CPUs.",
            "install a torch with CUDA, as https://pytorch.org says, to use it.",
            gpus=names,
        )
    return ok(f"{', '.join(kinds)}.", gpus=names)


def check_memory() -> Finding:
    """Memory in all and to spare, within the container's limit where there is one."""
    total, available = memory()
    if total is None:
        return ok("The system does not tell.")
    says = f"{total / _GIB:.1f} GiB"
    says += f", {available / _GIB:.1f} GiB available." if available is not None else "."
    figures: dict[str, object] = {"total_bytes": total, "available_bytes": available}
    if available is not None and available < SMALL_BYTES:
        return warn(says, "close other programs: torch alone takes half a GiB in each worker.", **figures)
    return ok(says, **figures)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Where workers of one machine keep the buckets that they share."""
    if not folder.is_dir():
        if sys.platform != "linux":
            return ok(f"There is no {folder} on this system; the temporary folder is used.")
        return warn(
            f"There is no {folder}.", f"mount it: mount -t tmpfs tmpfs {folder}; files are used until then."
        )
    usage = shutil.disk_usage(folder)
    says = f"{folder}: {usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} GiB free."
    figures: dict[str, object] = {"total_bytes": usage.total, "free_bytes": usage.free}
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"shoal")
    except OSError as error:
        reason = error.strerror or str(error)
        return warn(
            f"{says} It cannot be written: {reason}.",
            f"free some space, or chmod 1777 {folder}; the temporary folder is used until then.",
            **figures,
        )
    if usage.free < SMALL_BYTES:
        return warn(
            says,
            f"remove what is left in {folder}, or make it larger: docker run --shm-size=8g, or "
            f"mount -o remount,size=8g {folder}",
            **figures,
        )
    return ok(says, **figures)


def check_descriptors() -> Finding:
    """How many files and sockets a process may have open."""
    try:
        import resource
    except ImportError:
        return ok("This system sets no limit on open files.")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ["no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard)]
    says = f"{shown[0]} open files at once, {shown[1]} if asked for."
    figures: dict[str, object] = {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= FEW_DESCRIPTORS:
        return ok(says, **figures)
    if hard == resource.RLIM_INFINITY or hard >= FEW_DESCRIPTORS:
        wanted = FEW_DESCRIPTORS * 16 if hard == resource.RLIM_INFINITY else min(hard, FEW_DESCRIPTORS * 16)
        return warn(says, f"before starting Shoal: ulimit -n {wanted}", **figures)
    return warn(
        says,
        "an administrator can raise it: 'nofile' in /etc/security/limits.conf, LimitNOFILE= in a systemd "
        "unit, docker run --ulimit nofile=65536",
        **figures,
    )


def check_terminal() -> Finding:
    """Whether somebody is watching."""
    is_terminal = sys.stdout.isatty()
    says = (
        "stdout is a terminal." if is_terminal else "stdout is no terminal: output is plain, without colours."
    )
    return ok(says, is_terminal=is_terminal)


def check_state() -> Finding:
    """The folder and the key that outlive a process."""
    folder = state_folder()
    next_step = f"make {folder} a folder that this user may write, or set SHOAL_STATE to another one."
    if not folder.exists():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            return fail(f"{folder} cannot be made in {above}.", next_step)
        return ok(f"{folder} will be made on first use.", folder=str(folder), peer_id=None)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"shoal")
    except OSError as error:
        return fail(f"{folder} cannot be written: {error.strerror or error}.", next_step)
    path = default_identity_path()
    if not path.exists():
        return ok(
            f"{folder} is writable; the identity is made on first use.", folder=str(folder), peer_id=None
        )
    try:
        peer_id = Identity.load(path).peer_id
    except IdentityError as error:
        return fail(error.what, error.next_step)
    return ok(
        f"{folder} is writable; this is peer {peer_id.short}.", folder=str(folder), peer_id=str(peer_id)
    )


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "packages": check_packages,
    "event loop": check_loop,
    "processor": check_processor,
    "GPUs": check_gpus,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "open files": check_descriptors,
    "ports": check_ports,
    "loopback": check_loopback,
    "timers": check_timers,
    "threads": check_switching,
    "clock": check_clock,
    "state folder": check_state,
    "terminal": check_terminal,
}
"""In the order in which `shoal doctor` shows them."""


def is_older(version: str, least: str) -> bool:
    """Compares the leading numbers: 2.6.0+cpu is as new as 2.6."""
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
