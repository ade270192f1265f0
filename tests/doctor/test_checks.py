""""""

import errno
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from shoal.core import IdentityError
from shoal.core.identity import Identity, default_identity_path, write_private_file
from shoal.doctor import checks
from shoal.doctor.checks import CHECKS, CheckResult, fail, is_older, ok, run_checks, warn


def test_a_check_that_raises_is_a_failed_finding():
    def broken():
        raise OSError(errno.EIO, "the disk\nis on fire")

    def ours():
        raise IdentityError("There is no home.", next_step="set SHOAL_STATE.")

    first, second, third = run_checks({"disk": broken, "home": ours, "after": lambda: ok("Fine.")})
    assert first.status == second.status == "fail"
    assert first.says == "The check itself failed: OSError: [Errno 5] the disk is on fire"
    assert "shoal --verbose doctor" in first.next_step
    assert (second.says, second.next_step) == (
        "The check itself failed: There is no home.",
        "set SHOAL_STATE.",
    )
    assert third.status == "ok"


def test_the_three_kinds_of_finding():
    assert ok("Fine.", size=1) == CheckResult("ok", "Fine.", figures={"size": 1})
    assert warn("Slow.", "wait.") == CheckResult("warn", "Slow.", "wait.")
    assert fail("Broken.", "mend it.").status == "fail"


ROOT = Path(__file__).parents[2]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
SLOW = ("loopback", "timers", "threads")  # each has a test of its own


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in SLOW])
def test_every_check_says_one_sentence_and_what_to_do(name):
    (finding,) = run_checks({name: CHECKS[name]})
    assert finding.name == name
    assert finding.status in ("ok", "warn")
    assert finding.says.endswith(".")
    assert "\n" not in finding.says
    assert bool(finding.next_step) == (finding.status != "ok")
    assert finding.took_s < 2


def test_no_check_imports_torch():
    code = (
        "import sys; from shoal.doctor.checks import CHECKS, check_torch;"
        "assert check_torch().status == 'ok'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_least_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"])
    assert {name: asked[name] for name in checks.MIN_VERSIONS} == checks.MIN_VERSIONS
    assert project["requires-python"] == f">={'.'.join(map(str, checks.MIN_PYTHON))}"


@pytest.mark.parametrize(
    ("version", "least", "expected"),
    [
        ("2.6.0+cpu", "2.6", False),
        ("2.6", "2.6.0", False),
        ("2.13.0", "2.6", False),
        ("2.5.1", "2.6", True),
        ("2.6.0a0+git1", "2.6", False),
        ("1.26.4", "1.26", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, least, expected):
    assert is_older(version, least) is expected


def test_an_old_python_is_a_failure(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1, "final", 0))
    finding = checks.check_python()
    assert finding.status == "fail"
    assert "Python 3.11" in finding.next_step


@pytest.mark.parametrize(
    ("versions", "says"),
    [({}, "torch is not installed"), ({"torch": "2.5.1"}, "torch 2.5.1 is older than 2.6")],
)
def test_a_missing_or_old_torch_is_a_failure(monkeypatch, versions, says):
    monkeypatch.setattr(checks, "installed_version", versions.get)
    finding = checks.check_torch()
    assert finding.status == "fail"
    assert says in finding.says
    assert "torch" in finding.next_step


def test_missing_packages_are_named_with_the_command_to_install_them(monkeypatch):
    versions = {"numpy": "1.20", "msgspec": "0.20", "cryptography": "50"}
    monkeypatch.setattr(checks, "installed_version", versions.get)
    finding = checks.check_packages()
    assert finding.status == "fail"
    assert "safetensors missing" in finding.says
    assert finding.next_step == "pip install --upgrade 'numpy>=1.26' 'safetensors>=0.4.5'"


@linux_only
def test_without_uvloop_there_is_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    finding = checks.check_loop()
    assert (finding.status, finding.figures["loop"]) == ("warn", "asyncio")
    assert "does not load" in finding.next_step
    monkeypatch.setattr(checks, "installed_version", {}.get)
    assert checks.check_loop().next_step.startswith("pip install uvloop aiofastnet")


def test_a_containers_share_of_the_processor_is_told(files, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    files["/proc/cpuinfo"] = "processor: 0\nmodel name\t: A Fine CPU\n"
    files["/sys/fs/cgroup/cpu.max"] = "250000 100000\n"
    finding = checks.check_processor()
    assert finding.status == "ok"
    assert finding.says == "A Fine CPU, 64 cores, of which this container may use 2.5."
    files["/sys/fs/cgroup/cpu.max"] = "50000 100000\n"
    assert checks.check_processor().status == "warn"
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    assert checks.check_processor().says == "A Fine CPU, 64 cores."


def test_a_system_that_tells_nothing_of_itself_is_fine(files, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert checks.check_memory().status == "ok"
    assert checks.check_processor().figures["model"]


@linux_only
@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        (
            "printf 'NVIDIA H200, 143771 MiB\\nNVIDIA H200, 143771 MiB\\n'",
            "warn",
            "2 x NVIDIA H200, 143771 MiB",
        ),
        ("echo 'driver mismatch' >&2; exit 9", "warn", "driver mismatch"),
        ("exit 0", "warn", "finds no GPU"),
        ("exec sleep 30", "warn", "did not answer"),
    ],
)
def test_what_nvidia_smi_says_is_told(program, monkeypatch, script, status, says):
    monkeypatch.setattr(checks, "_DRIVER_ANSWER_S", 0.2)
    monkeypatch.setattr(checks, "torch_build", lambda: "CPU")
    program(script)
    finding = checks.check_gpus()
    assert finding.status == status
    assert says in finding.says
    assert finding.next_step


@linux_only
def test_gpus_are_fine_with_a_torch_for_them(program, monkeypatch):
    monkeypatch.setattr(checks, "torch_build", lambda: "CUDA 12.8")
    program("echo 'NVIDIA H200, 143771 MiB'")
    finding = checks.check_gpus()
    assert (finding.status, finding.says) == ("ok", "1 x NVIDIA H200, 143771 MiB.")


def test_a_containers_memory_counts_and_little_is_a_warning(files):
    files["/proc/meminfo"] = "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\nHugePages: x\n"
    assert checks.check_memory().says == "64.0 GiB, 32.0 GiB available."
    files["/sys/fs/cgroup/memory.max"] = str(8 << 30)
    files["/sys/fs/cgroup/memory.current"] = str(7 << 30)
    assert checks.check_memory().says == "8.0 GiB, 1.0 GiB available."
    files["/sys/fs/cgroup/memory.current"] = str(8 << 30)
    assert checks.check_memory().status == "warn"


def test_shared_memory_that_is_small_missing_or_not_ours_is_a_warning(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    finding = checks.check_shared_memory(tmp_path)
    assert finding.status == "warn"
    assert "--shm-size" in finding.next_step
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage(8 << 30, 0, 8 << 30))
    assert checks.check_shared_memory(tmp_path).status == "ok"
    assert list(tmp_path.iterdir()) == []

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert "cannot be written: Permission denied" in checks.check_shared_memory(tmp_path).says
    monkeypatch.setattr(sys, "platform", "linux")
    assert checks.check_shared_memory(tmp_path / "none").status == "warn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert checks.check_shared_memory(tmp_path / "none").status == "ok"


@pytest.mark.parametrize(
    ("limits", "status", "next_step"),
    [
        ((4096, 4096), "ok", ""),
        ((1024, 1_048_576), "warn", "ulimit -n 65536"),
        ((256, 8192), "warn", "ulimit -n 8192"),
        ((256, "infinity"), "warn", "ulimit -n 65536"),
        ((256, 1024), "warn", "limits.conf"),
        (("infinity", "infinity"), "ok", ""),
    ],
)
def test_few_descriptors_are_a_warning_with_the_way_to_more(monkeypatch, limits, status, next_step):
    resource = pytest.importorskip("resource")
    limits = tuple(resource.RLIM_INFINITY if limit == "infinity" else limit for limit in limits)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    finding = checks.check_descriptors()
    assert finding.status == status
    assert next_step in finding.next_step


def test_the_state_folder_is_looked_at_but_not_made(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path / "a" / "b"))
    assert "will be made" in checks.check_state().says
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_text("")
    finding = checks.check_state()
    assert finding.status == "fail"
    assert "SHOAL_STATE" in finding.next_step


def test_the_state_folder_tells_who_this_peer_is(monkeypatch):
    identity = Identity.load_or_create()
    assert checks.check_state().figures["peer_id"] == str(identity.peer_id)
    write_private_file(default_identity_path(), b"damaged", replace=True)
    finding = checks.check_state()
    assert finding.status == "fail"
    assert "shoal keys new" in finding.next_step

    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert "cannot be written: Read-only file system" in checks.check_state().says


def test_the_clock_and_ports_of_this_machine_are_fine():
    findings = run_checks({"ports": checks.check_ports, "clock": checks.check_clock})
    assert [finding.status for finding in findings] == ["ok", "ok"]


def test_ports_that_cannot_be_bound_or_reached_are_failures(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", refuse)
        finding = checks.check_ports()
        assert finding.status == "fail"
        assert "cannot be reached" in finding.says
    monkeypatch.setattr(socket, "create_server", refuse)
    finding = checks.check_ports()
    assert finding.status == "fail"
    assert "firewall" in finding.next_step


def test_a_number_that_udp_cannot_have_is_tried_again(monkeypatch):
    class Busy(socket.socket):
        num_refusals = 2

        def bind(self, address):
            if self.type == socket.SOCK_DGRAM and Busy.num_refusals:
                Busy.num_refusals -= 1
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Busy)
    assert checks.check_ports().status == "ok"
    assert Busy.num_refusals == 0
    Busy.num_refusals = 1000
    assert "Address already in use" in checks.check_ports().says


def test_loopback_moves_bytes_and_a_slow_one_is_a_warning(monkeypatch):
    finding = checks.check_loopback(seconds=0.02)
    assert finding.figures["gb_per_s"] > 0.01
    monkeypatch.setattr(checks, "SLOW_LOOPBACK_GB_S", 1e6)
    assert checks.check_loopback(seconds=0.01).status == "warn"


def test_timers_are_measured_and_late_ones_are_a_warning(monkeypatch):
    finding = checks.check_timers(num_sleeps=5, sleep_s=0.001)
    assert finding.figures["p50_s"] <= finding.figures["p95_s"]
    monkeypatch.setattr(checks, "LATE_TIMER_S", -1)
    assert checks.check_timers(num_sleeps=2, sleep_s=0.001).status == "warn"


def test_the_switch_interval_is_as_before_after_it_was_measured(monkeypatch):
    before = sys.getswitchinterval()
    finding = checks.check_switching(num_echoes=3)
    assert sys.getswitchinterval() == before
    assert finding.figures["interval_s"] == before
    monkeypatch.setattr(checks, "LATE_SWITCH_S", -1)
    assert checks.check_switching(num_echoes=2).status == "warn"


@pytest.mark.parametrize(("wall_s", "status"), [(0.0, "fail"), (1.8e9, "ok"), (5e9, "fail")])
def test_a_calendar_of_another_age_is_a_failure(monkeypatch, wall_s, status):
    class Wrong:
        now_s = staticmethod(checks.SYSTEM_CLOCK.now_s)

        def wall_s(self):
            return wall_s

    monkeypatch.setattr(checks, "SYSTEM_CLOCK", Wrong())
    assert checks.check_clock().status == status


def test_a_coarse_clock_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "_tick_s", lambda: 0.0156)
    assert checks.check_clock().status == "warn"
