import sys

import pytest

from shoal.bench import machine as module
from shoal.bench.machine import Watch, describe_code, describe_machine, device_name


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
