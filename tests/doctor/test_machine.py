""""""

import os
import sys
from collections import namedtuple

import pytest

from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.doctor import checks, machine
from shoal.doctor import machine as module
from shoal.doctor.machine import (
    Gpu,
    Gpus,
    Memory,
    Watch,
    ask,
    describe_code,
    describe_machine,
    device_name,
    ensure_open_files,
    gpus,
)

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")
SMALL = 0.2  # seconds that a program has to answer where it is not meant to
PLENTY = 20.0


def test_this_machine_tells_of_itself():
    assert machine.processor_name()
    assert num_cores() >= 1
    total_bytes, available_bytes = machine.memory()
    assert total_bytes > 1 << 20
    assert available_bytes is None or 0 <= available_bytes <= total_bytes
    assert machine.installed_version("msgspec")
    assert machine.installed_version("no-such-package") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor: 0\nmodel\t\t: 85\nmodel name\t: A Fine CPU\n", "A Fine CPU"),
        ("processor: 0\nModel\t\t: A Small Board\n", "A Small Board"),
    ],
)
def test_the_processor_is_named_by_what_the_system_says(files, text, name):
    files["/proc/cpuinfo"] = text
    assert machine.processor_name() == name


def test_a_processor_that_the_system_does_not_name_still_has_a_name(files):
    assert machine.processor_name()


@pytest.mark.parametrize(
    ("text", "quota"),
    [("250000 100000\n", 2.5), ("max 100000\n", None), ("", None), ("100 0\n", None)],
)
def test_a_containers_share_of_the_processor(files, text, quota):
    files["/sys/fs/cgroup/cpu.max"] = text
    assert machine.cpu_quota() == quota


def test_a_containers_share_of_the_memory(files):
    files["/proc/meminfo"] = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nHugePages: x\n"
    assert machine.memory() == Memory(64 << 30, 32 << 30)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.memory() == Memory(64 << 30, 32 << 30)
    files["/sys/fs/cgroup/memory.max"] = str(8 << 30)
    assert machine.memory() == Memory(8 << 30, 32 << 30)
    files["/sys/fs/cgroup/memory.current"] = str(9 << 30)
    assert machine.memory() == Memory(8 << 30, 0)


def test_a_system_that_does_not_tell_of_its_memory(files, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: (_ for _ in ()).throw(ValueError))
    assert machine.memory() == Memory(None, None)


@linux_only
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "printf 'NVIDIA H200,  143771 MiB\\nNVIDIA L4, 23034 MiB\\n'",
            Gpus((Gpu("NVIDIA H200", "143771 MiB"), Gpu("NVIDIA L4", "23034 MiB"))),
        ),
        ("echo 'driver mismatch' >&2; exit 9", Gpus(complaint="driver mismatch")),
        ("exit 0", Gpus(complaint="exit code 0")),
    ],
)
def test_the_driver_is_asked_for_gpus(program, script, told):
    program(script)
    assert gpus(PLENTY) == told


@linux_only
def test_a_driver_that_hangs_is_not_waited_for(program):
    program("exec sleep 30")
    assert gpus(SMALL) == Gpus(has_answered=False)


def test_without_the_drivers_program_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus(PLENTY) == Gpus()


def test_a_gpu_reads_as_the_driver_writes_it():
    assert str(Gpu("NVIDIA H200", "143771 MiB")) == "NVIDIA H200, 143771 MiB"
    assert str(Gpu("NVIDIA H200")) == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "CUDA 12.8"),
        ("cuda = None\nhip = '6.2'\n", "ROCm 6.2"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
    ],
)
def test_the_device_torch_is_built_for_is_read_from_its_files(tmp_path, monkeypatch, text, build):
    (tmp_path / "version.py").write_text(text)
    spec = namedtuple("Spec", "origin")(str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: spec)
    assert machine.torch_build() == build
    assert checks.check_torch().figures["build"] == build


def test_a_program_is_asked_and_heard():
    done = ask(
        sys.executable,
        "-c",
        "import sys; print('out'); print('no', file=sys.stderr); sys.exit(3)",
        answer_s=PLENTY,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (3, "out", "no")


def test_a_program_that_does_not_answer_or_cannot_start():
    assert ask(sys.executable, "-c", "import time; time.sleep(30)", answer_s=SMALL) is None
    assert ask("no-such-program-anywhere").returncode == machine.NOT_RUNNABLE


def test_a_file_that_is_missing_or_no_text_reads_as_empty(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert machine.read(str(tmp_path / "bytes")) == machine.read(str(tmp_path / "none")) == ""


@pytest.fixture
def fresh():
    """Forget which device there is, before and after."""
    device_name.cache_clear()
    yield
    device_name.cache_clear()


def test_the_machine_is_described_without_torch():
    machine = describe_machine()
    assert list(machine) == [
        "machine", "system", "processor", "cores", "memory_gib", "device", "topology", "versions",
    ]  # fmt: skip
    assert machine["cores"] >= 1
    assert machine["device"]
    assert machine["memory_gib"] is None or machine["memory_gib"] > 0
    assert machine["versions"]["torch"] == "2.13.0+cpu" or machine["versions"]["torch"]
    assert isinstance(machine["topology"], str)


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(module, "installed_version", {"torch": "2.9"}.get)
    versions = describe_machine()["versions"]
    assert (versions["torch"], versions["uvloop"]) == ("2.9", "not installed")


@pytest.mark.parametrize(("build", "version"), [("CUDA 12.4", "12.4"), ("CPU", None), ("ROCm 6.1", None)])
def test_the_version_of_cuda_is_that_of_torchs_build(monkeypatch, build, version):
    monkeypatch.setattr(module, "torch_build", lambda: build)
    assert describe_machine()["versions"].get("cuda") == version


@pytest.mark.skipif(sys.platform != "linux", reason="runs a shell script")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("printf 'NVIDIA H200, 143771 MiB\\nNVIDIA L4, 23034 MiB\\n'", "NVIDIA H200, NVIDIA L4"),
        ("exit 9", "cpu"),
        ("exec sleep 30", "unknown: nvidia-smi does not answer"),
    ],
)
def test_the_device_is_what_the_driver_says(program, monkeypatch, script, name):
    if "sleep" in script:
        monkeypatch.setattr(module, "_REPORT_ANSWER_S", 0.2)
    program(script)
    assert device_name() == name


def test_load_and_steal_are_seen_between_two_looks():
    watch = Watch()
    sum(range(2_000_000))  # some CPU time must pass between the looks
    state = watch.look()
    assert state["load_average"] >= 0
    assert 0 <= state.get("cpu_steal_percent", 0) <= 100


def test_code_is_named_by_version_and_commit(request):
    code = describe_code()
    assert code.version
    other = describe_code(request.config.rootpath / "src")
    assert other.version == code.version
    assert other.revision == code.revision


resource = pytest.importorskip("resource")


@pytest.fixture
def limits(monkeypatch):
    """The limits of a process: soft and hard."""
    held = [100, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: held.__setitem__(slice(None), pair))
    return held


def test_nothing_is_said_or_done_where_there_is_room(limits):
    assert ensure_open_files(100, should_raise=False) is None
    assert ensure_open_files(100, should_raise=True) == "The limit on open files is 100 already."
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert ensure_open_files(10**9, should_raise=False) is None


def test_it_is_raised_only_when_asked_and_said(limits):
    with pytest.raises(UsageError, match="needs up to 500 open files, and may have 100") as refused:
        ensure_open_files(500, should_raise=False)
    assert "--increase-file-limit" in str(refused.value)
    assert ensure_open_files(500, should_raise=True) == "Raised the limit on open files from 100 to 500."
    assert limits == [500, 1000]


def test_beyond_the_systems_own_limit_there_is_other_advice(limits):
    with pytest.raises(UsageError, match="--num-processes"):
        ensure_open_files(2000, should_raise=True)
    assert limits == [100, 1000]
