import pytest
import torch

from shoal.models import resnet18


@pytest.mark.parametrize(
    ("stem", "num_parameters", "side", "inner"),
    [("small", 11_173_962, 32, 32), ("large", 11_181_642, 64, 16)],
)
def test_stems_keep_or_quarter_the_image(stem, num_parameters, side, inner):
    model = resnet18(stem=stem)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    assert model(torch.zeros(2, 3, side, side)).shape == (2, 10)
    assert seen == [(2, 64, inner, inner)]


def test_names_are_torchvisions_and_all_parameters_learn():
    model = resnet18(num_classes=7)
    names = model.state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv2.weight", "fc.bias"} <= names
    assert {"layer4.0.downsample.0.weight", "layer4.0.downsample.1.bias"} <= names
    assert "layer1.0.downsample.0.weight" not in names
    model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
