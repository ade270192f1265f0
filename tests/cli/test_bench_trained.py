import pytest

from shoal.bench import experts_config
from shoal.cli.bench_trained import device_of, entry_of
from shoal.core import UsageError


@pytest.mark.parametrize(
    ("found", "asked", "device"),
    [("cuda", None, "cuda"), ("cuda", "cpu", "cpu"), ("cpu", None, "cpu"), ("cuda", "cuda", "cuda")],
)
def test_gpus_are_taken_where_there_are_any_unless_told(monkeypatch, found, asked, device):
    monkeypatch.setattr(experts_config, "default_device", lambda: found)
    assert device_of(asked) == device
    assert device_of(None, no_cuda=True) == "cpu"


def test_gpus_that_are_not_there_are_asked_for_in_vain_on_this_machine_alone(monkeypatch):
    monkeypatch.setattr(experts_config, "default_device", lambda: "cpu")
    assert device_of("cuda", is_here=False) == "cuda"
    with pytest.raises(UsageError, match="no GPU"):
        device_of("cuda")
    with pytest.raises(UsageError, match="--no-cuda"):
        device_of("cuda", no_cuda=True)


def test_images_are_small_on_a_cpu_unless_told():
    sides = [
        entry_of("ResNet50", side, device).image_side for device in ("cpu", "cuda") for side in (None, 64)
    ]
    assert sides == [32, 64, 224, 64]
    assert entry_of("lenet", None, "cpu").image_side == 28
    assert entry_of("resnet50", None, "cpu", num_classes=7).num_classes == 7
