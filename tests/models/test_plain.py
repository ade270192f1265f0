import pytest
import torch

from shoal.models import lenet, vgg16


def test_lenet_is_of_the_papers_size_for_its_images():
    model = lenet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 61_706
    assert f"{61_706:,}" in lenet.__doc__
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert lenet(image_side=32)(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_vgg16_has_torchvisions_names_and_layers():
    with torch.device("meta"):
        model = vgg16(num_classes=7)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    convolutions = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    layers = [f"features.{index}" for index in convolutions] + [f"classifier.{index}" for index in (0, 3, 6)]
    assert list(shapes) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25_088)


@pytest.mark.slow
def test_vgg16s_layers_start_narrow():
    torch.manual_seed(0)
    last = vgg16(num_classes=10).classifier[-1]
    assert last.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert not last.bias.any()
