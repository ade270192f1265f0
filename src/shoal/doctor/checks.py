"""What `shoal doctor` looks at: whether this machine is fit to run a peer.

A check is a function without arguments that returns a `CheckResult`: a status, one sentence, and what to do
where it is not ok. Some weigh what `machine` finds; those at the end measure, quickly, to find a machine in
trouble. The whole round takes about two seconds and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shoal.core.clock import SYSTEM_CLOCK
from shoal.core.errors import IdentityError, ShoalError
from shoal.core.identity import Identity, default_identity_path, state_folder
from shoal.core.loop import SWITCH_INTERVAL_S, LoopThread, new_event_loop
from shoal.core.placement import num_cores
from shoal.doctor.machine import cpu_quota, gpus, installed_version, memory, processor_name, torch_build
from shoal.report.statistics import percentile, percentiles
from shoal.report.tables import Column, Line, Table

log = logging.getLogger(__name__)

Status = Literal["ok", "warn", "fail"]
STYLES = {"warn": "yellow", "fail": "bold red"}
"""How the terminal shows what is not ok, in rich's words."""


class CheckResult(msgspec.Struct, frozen=True):
    """What a check found: one sentence, the figures in it, and what to do where it is not ok."""

    status: Status
    says: str
    next_step: str = ""
    figures: dict[str, object] = {}
    name: str = ""
    took_s: float = 0.0


def ok(says: str, **figures: object) -> CheckResult:
    """A result with nothing to do about it."""
    return CheckResult("ok", says, figures=figures)


def warn(says: str, next_step: str, **figures: object) -> CheckResult:
    """Works, but slower or less far than it could."""
    return CheckResult("warn", says, next_step, figures)


def fail(says: str, next_step: str, **figures: object) -> CheckResult:
    """Shoal cannot work like this."""
    return CheckResult("fail", says, next_step, figures)


def run_checks(checks: Mapping[str, Callable[[], CheckResult]]) -> list[CheckResult]:
    """Run each check in turn; one that raises stands as failed, with its error in one line."""
    findings = []
    for name, check in checks.items():
        began_s = time.perf_counter()
        try:
            finding = check()
        except Exception as error:
            log.debug("The check '%s' raised", name, exc_info=True)
            next_step = error.next_step if isinstance(error, ShoalError) else ""
            what = error.what if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
            finding = fail(
                f"The check itself failed: {' '.join(what.split())}",
                next_step or f"run 'shoal --verbose doctor' and report what it says of '{name}'.",
            )
        took_s = time.perf_counter() - began_s
        findings.append(msgspec.structs.replace(finding, name=name, took_s=round(took_s, 3)))
    return findings


def results_table(findings: Sequence[CheckResult]) -> Table:
    """A row for each check; one that is not ok has its next step under it."""
    table = Table(
        "", (Column("check", "left"), Column("status", "left"), Column("finding", "left", wraps=True))
    )
    for index, finding in enumerate(findings):
        table.rows.append((finding.name, finding.status, finding.says))
        if finding.status != "ok":
            note: Line = (f"Next: {finding.next_step}", STYLES[finding.status])
            table.notes[index] = note
    return table


def summary_of(findings: Sequence[CheckResult]) -> str:
    """The sentence under the table of this machine's checks."""
    warned, failed = (
        [finding.name for finding in findings if finding.status == status] for status in ("warn", "fail")
    )
    if failed:
        return f"Shoal cannot work here yet: see {', '.join(failed)}." + (
            f" Advice on {', '.join(warned)}." if warned else ""
        )
    if warned:
        return f"Shoal works here; there is advice on {', '.join(warned)}."
    return "Shoal works here."


# --- what is there ---

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
"""The least versions, as pyproject.toml asks for them."""
FEW_DESCRIPTORS = 4096  # a peer that serves a few thousand others, with its files
SMALL_BYTES = 1 << 30
_DRIVER_ANSWER_S = 1.5  # doctor is a quick look
_GIB = float(1 << 30)


def check_python() -> CheckResult:
    """The interpreter and the machine that it is built for."""
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


def check_torch() -> CheckResult:
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


def check_packages() -> CheckResult:
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


def check_loop() -> CheckResult:
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


def check_processor() -> CheckResult:
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


def check_gpus() -> CheckResult:
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


def check_memory() -> CheckResult:
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


def check_shared_memory(folder: Path = Path("/dev/shm")) -> CheckResult:
    """Looks at where workers of one machine keep the buckets that they share."""
    if not folder.is_dir():
        if sys.platform != "linux":
            return ok(f"There is no {folder} on this system; the temporary folder is used.")
        return warn(
            f"There is no {folder}.", f"mount it: mount -t tmpfs tmpfs {folder}; files are used until then."
        )
    usage = shutil.disk_usage(folder)
    says = f"{folder}: {usage.total / _GIB:.1f} GiB, {usage.free / _GIB:.1f} GiB free."
    figures: dict[str, object] = {"total_bytes": usage.total, "free_bytes": usage.free}
    if reason := _why_not_written(folder):
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


def check_descriptors() -> CheckResult:
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


def check_terminal() -> CheckResult:
    """Whether somebody is watching."""
    is_terminal = sys.stdout.isatty()
    says = (
        "stdout is a terminal." if is_terminal else "stdout is no terminal: output is plain, without colours."
    )
    return ok(says, is_terminal=is_terminal)


def check_state() -> CheckResult:
    """The folder and the key that outlive a process."""
    folder = state_folder()
    next_step = f"make {folder} a folder that this user may write, or set SHOAL_STATE to another one."
    if not folder.exists():
        above = next(parent for parent in folder.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            return fail(f"{folder} cannot be made in {above}.", next_step)
        return ok(f"{folder} will be made on first use.", folder=str(folder), peer_id=None)
    if reason := _why_not_written(folder):
        return fail(f"{folder} cannot be written: {reason}.", next_step)
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


def _why_not_written(folder: Path) -> str:
    """Why no file can be written there, in the system's words; empty where one can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"shoal")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_older(version: str, least: str) -> bool:
    """Compares the leading numbers: 2.6.0+cpu is as new as 2.6."""
    return _numbers(version) < _numbers(least)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


# --- what is measured ---

LOOPBACK = "127.0.0.1"
SLOW_LOOPBACK_GB_S = 0.5
LATE_TIMER_S = 0.010
LATE_SWITCH_S = 0.005
COARSE_CLOCK_S = 0.002
_ANSWER_S = 1.0
_PORT_TRIES = 8
_EARLIEST_YEAR, _LATEST_YEAR = 2025, 2100


def check_ports() -> CheckResult:
    """One port number for TCP and UDP both, as every peer needs, and a connection to it."""
    next_step = "check the firewall's rules for 127.0.0.1, and whether this user may open ports."
    with contextlib.ExitStack() as stack:
        try:
            listener, datagrams = _bind_both(stack)
        except OSError as error:
            return fail(f"No port of {LOOPBACK} can be bound for TCP and UDP: {error.strerror}.", next_step)
        port = listener.getsockname()[1]
        try:
            caller = stack.enter_context(socket.create_connection((LOOPBACK, port), _ANSWER_S))
            listener.settimeout(_ANSWER_S)
            accepted = stack.enter_context(listener.accept()[0])
            accepted.settimeout(_ANSWER_S)
            caller.sendall(b"shoal")
            is_heard = accepted.recv(5) == b"shoal"
            way = "TCP"
            if is_heard:
                sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sender.sendto(b"shoal", (LOOPBACK, port))
                datagrams.settimeout(_ANSWER_S)
                way = "UDP"
                is_heard = datagrams.recv(5) == b"shoal"
        except OSError as error:
            return fail(f"A listening socket on {LOOPBACK} cannot be reached: {error}.", next_step)
    if not is_heard:
        return fail(f"{way} to {LOOPBACK} arrives damaged.", next_step)
    return ok("TCP and UDP share a port number, and a listening socket can be reached.", port=port)


def _bind_both(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    for attempt in range(_PORT_TRIES):
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            datagrams.bind(listener.getsockname())
        except OSError:
            if attempt == _PORT_TRIES - 1:
                raise
            continue  # some other program has this number for UDP
        return listener, datagrams
    raise AssertionError


def check_loopback(seconds: float = 0.2, chunk_bytes: int = 1 << 20) -> CheckResult:
    """How fast blocking sockets move bytes between two threads."""
    received = bytearray(chunk_bytes)
    chunk = memoryview(bytes(chunk_bytes))
    num_bytes = 0
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        sender = stack.enter_context(socket.create_connection(listener.getsockname(), _ANSWER_S))
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(_ANSWER_S)
        began_s = time.perf_counter()

        def send() -> None:
            with contextlib.suppress(OSError):
                while time.perf_counter() - began_s < seconds:
                    sender.sendall(chunk)
                sender.shutdown(socket.SHUT_WR)

        with _thread(send):
            while count := receiver.recv_into(received):
                num_bytes += count
        took_s = time.perf_counter() - began_s
    speed = num_bytes / took_s / 1e9
    says = f"{speed:.1f} GB/s one way through TCP on {LOOPBACK}."
    if speed < SLOW_LOOPBACK_GB_S:
        return warn(
            says,
            "see what else runs here (top); a virtual machine or a security program may slow sockets down.",
            gb_per_s=round(speed, 2),
        )
    return ok(says, gb_per_s=round(speed, 2))


def check_timers(num_sleeps: int = 60, sleep_s: float = 0.002) -> CheckResult:
    """How late the loop wakes up from a short sleep."""

    async def measure() -> list[float]:
        late_s = []
        for _ in range(num_sleeps):
            began_s = time.perf_counter()
            await asyncio.sleep(sleep_s)
            late_s.append(time.perf_counter() - began_s - sleep_s)
        return late_s

    with LoopThread("doctor") as loop:
        p50_s, p95_s = percentiles(loop.run(measure()), (50, 95))
    says = f"A sleep of {sleep_s * 1e3:g} ms ends {_shown(p50_s)} late (p50), {_shown(p95_s)} (p95)."
    figures = {"p50_s": p50_s, "p95_s": p95_s}
    if p95_s > LATE_TIMER_S:
        return warn(says, "see what else runs here (top): latencies measured now mean little.", **figures)
    return ok(says, **figures)


def check_switching(num_echoes: int = 40, most_s: float = 0.4) -> CheckResult:
    """How long a call to the loop takes beside a busy Python thread, at two switch intervals."""
    is_over = threading.Event()

    def be_busy() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(100):
                number += 1

    def measure(loop: LoopThread, interval_s: float) -> float:
        sys.setswitchinterval(interval_s)
        took_s: list[float] = []
        began_s = time.perf_counter()
        while len(took_s) < num_echoes and time.perf_counter() - began_s < most_s:
            start_s = time.perf_counter()
            loop.run(asyncio.sleep(0))
            took_s.append(time.perf_counter() - start_s)
        return percentile(took_s, 95)

    usual_s = sys.getswitchinterval()
    with LoopThread("doctor") as loop:
        loop.run(asyncio.sleep(0))
        try:
            with _thread(be_busy, before_join=is_over.set):
                slow_s = measure(loop, usual_s)
                fast_s = measure(loop, SWITCH_INTERVAL_S)
        finally:
            sys.setswitchinterval(usual_s + 5e-7)  # it rounds down to a millionth
    says = (
        f"Beside a busy Python thread a call to the loop takes {_shown(slow_s)} (p95); "
        f"{_shown(fast_s)} with the switch interval that Shoal's own processes set."
    )
    figures = {
        "p95_s": slow_s,
        "interval_s": usual_s,
        "p95_at_short_interval_s": fast_s,
        "short_interval_s": SWITCH_INTERVAL_S,
    }
    if fast_s > LATE_SWITCH_S:
        return warn(says, "see what else runs here (top): too few cores are free.", **figures)
    return ok(says, **figures)


def check_clock() -> CheckResult:
    """A calendar that certificates and records can live by, and a clock that can time a call."""
    today = datetime.datetime.fromtimestamp(SYSTEM_CLOCK.wall_s(), datetime.UTC)
    tick_s = _tick_s()
    figures = {"wall": today.isoformat(timespec="seconds"), "tick_s": tick_s}
    says = f"{today:%Y-%m-%d %H:%M} UTC; the monotonic clock ticks every {_shown(tick_s)}."
    if not _EARLIEST_YEAR <= today.year < _LATEST_YEAR:
        return fail(
            says,
            "set the clock (timedatectl set-ntp true): records expire and certificates hold by it.",
            **figures,
        )
    if tick_s > COARSE_CLOCK_S:
        return warn(says, "nothing to do: short waits are rounded to these ticks.", **figures)
    return ok(says, **figures)


def _tick_s() -> float:
    """The smallest step that the monotonic clock shows, of a few."""
    steps_s = []
    for _ in range(5):
        before_s = SYSTEM_CLOCK.now_s()
        while (now_s := SYSTEM_CLOCK.now_s()) == before_s:
            pass
        steps_s.append(now_s - before_s)
    return min(steps_s)


def _shown(seconds: float) -> str:
    if abs(seconds) >= 0.001:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs" if abs(seconds) >= 1e-6 else f"{seconds * 1e9:.0f} ns"


@contextlib.contextmanager
def _thread(function: Callable[[], None], before_join: Callable[[], None] | None = None) -> Iterator[None]:
    thread = threading.Thread(target=function, daemon=True)  # law: it measures threads
    thread.start()
    try:
        yield
    finally:
        if before_join is not None:
            before_join()
        thread.join(_ANSWER_S)


CHECKS: dict[str, Callable[[], CheckResult]] = {
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
