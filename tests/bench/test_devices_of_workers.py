import pytest

from shoal.bench import contenders
from shoal.bench.contenders import (
    device_of,
    has_shared_gpus,
    num_gpus,
    tell_slow_images,
    workers_device,
)
from shoal.bench.ranks import HostFlags
from shoal.core import UsageError
from shoal.doctor import machine

HERE = HostFlags()


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda _: machine.Gpus((machine.Gpu("A"), machine.Gpu("B"))))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("found", "asked", "device"),
    [("cuda", "auto", "cuda"), ("cuda", "cpu", "cpu"), ("cpu", "auto", "cpu"), ("cuda", "cuda", "cuda")],
)
def test_gpus_are_taken_where_there_are_any_unless_told(monkeypatch, found, asked, device):
    monkeypatch.setattr(machine, "default_device", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_of(asked) == device
    assert device_of("auto", no_cuda=True) == "cpu"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("visible", "device"), [("", "cpu"), ("-1", "cpu"), ("1", "cuda")])
def test_gpus_that_a_variable_hides_are_not_taken(monkeypatch, visible, device):
    """KungFu's line of a parameter server begins with CUDA_VISIBLE_DEVICES=""."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_of("auto") == device
    if device == "cpu":
        with pytest.raises(UsageError, match=r"no GPU[\s\S]*CUDA_VISIBLE_DEVICES"):
            device_of("cuda")


def test_gpus_that_are_not_there_are_asked_for_in_vain_on_this_machine_alone(monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    assert device_of("cuda", is_here=False) == "cuda"
    with pytest.raises(UsageError, match="no GPU"):
        device_of("cuda")
    with pytest.raises(UsageError, match="--no-cuda"):
        device_of("cuda", no_cuda=True)


@pytest.mark.usefixtures("two_gpus")
def test_workers_that_share_gpus_stay_there_and_are_told(capsys, monkeypatch):
    monkeypatch.setattr(contenders, "num_cores", lambda: 3)
    assert workers_device("auto", HERE, 2) == "cuda"
    assert capsys.readouterr().err == ""
    assert workers_device("auto", HERE, 3) == "cuda"
    assert capsys.readouterr().err == "3 workers share 2 GPUs.\n"
    assert workers_device("cpu", HERE, 3) == "cpu"
    assert workers_device("auto", HostFlags(hosts="far:4"), 4) == "cuda"
    assert capsys.readouterr().err == ""


def test_workers_that_share_cores_are_told(capsys, monkeypatch):
    monkeypatch.setattr(contenders, "num_cores", lambda: 2)
    workers_device("cpu", HERE, 2)
    workers_device("cpu", HostFlags(hosts="far:4"), 4)
    assert capsys.readouterr().err == ""
    workers_device("cpu", HERE, 3)
    assert capsys.readouterr().err == "3 workers share 2 cores.\n"


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_are_hidden_from_the_workers_do_not_count(monkeypatch):
    assert (num_gpus(), has_shared_gpus(HERE, 2)) == (2, False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (num_gpus(), has_shared_gpus(HERE, 2)) == (1, True)
    assert not has_shared_gpus(HostFlags(hosts="far:2"), 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_launcher_s_workers_share_the_gpus_of_their_own_machine(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    placed = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in placed.items():
        monkeypatch.setenv(name, value)
    assert not has_shared_gpus(HERE, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert has_shared_gpus(HERE, 4)
    assert workers_device("auto", HERE, 4) == "cuda"
    assert capsys.readouterr().err == ""


def test_large_images_on_a_cpu_are_told_and_stay_large(capsys):
    for side, device in ((32, "cpu"), (224, "cuda")):
        tell_slow_images(side, device)
    assert capsys.readouterr().err == ""
    tell_slow_images(224, "cpu")
    assert "224×224" in capsys.readouterr().err
