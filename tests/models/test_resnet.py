import pytest
import torch

from shoal.models import resnet18, resnet50, resnext50_32x4d


@pytest.mark.parametrize(
    ("stem", "num_parameters", "side", "inner"),
    [("small", 11_173_962, 32, 32), ("large", 11_181_642, 64, 16)],
)
def test_stems_keep_or_quarter_the_image(stem, num_parameters, side, inner):
    seen = []
    with torch.device("meta"):
        model = resnet18(stem=stem)
        model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert seen == [(2, 64, inner, inner)]


def test_names_are_torchvisions_and_all_parameters_learn():
    with torch.device("meta"):
        model = resnet18(num_classes=7)
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    names = model.state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv2.weight", "fc.bias"} <= names
    assert {"layer4.0.downsample.0.weight", "layer4.0.downsample.1.bias"} <= names
    assert "layer1.0.downsample.0.weight" not in names


@pytest.mark.parametrize(
    ("build", "inner"),
    [(resnet50, (128, 128, 3, 3)), (resnext50_32x4d, (256, 8, 3, 3))],
)
def test_bottlenecks_stride_in_their_middle_and_group_it(build, inner):
    with torch.device("meta"):
        model = build()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes["layer2.0.conv2.weight"] == inner
    assert shapes["layer2.0.conv3.weight"] == (512, inner[0], 1, 1)
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert "layer1.1.downsample.0.weight" not in shapes
    assert shapes["fc.weight"] == (1000, 2048)
    first = model.layer2[0]
    assert (first.conv1.stride, first.conv2.stride, first.downsample[0].stride) == ((1, 1), (2, 2), (2, 2))


def test_weights_are_drawn_for_what_goes_out_of_a_convolution():
    torch.manual_seed(0)
    conv = resnet18().layer4[0].conv2.weight
    assert conv.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
