import torch

from shoal.models import mobilenet_v2


def test_names_are_torchvisions():
    with torch.device("meta"):
        model = mobilenet_v2()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes["features.0.0.weight"] == (32, 3, 3, 3)
    assert shapes["features.1.conv.0.0.weight"] == (32, 1, 3, 3)
    assert shapes["features.1.conv.1.weight"] == (16, 32, 1, 1)
    assert shapes["features.2.conv.0.0.weight"] == (96, 16, 1, 1)
    assert shapes["features.2.conv.3.running_mean"] == (24,)
    assert shapes["features.17.conv.2.weight"] == (320, 960, 1, 1)
    assert shapes["features.18.1.bias"] == (1280,)
    assert shapes["classifier.1.weight"] == (1000, 1280)
    assert len(shapes) == 314


def test_shortcuts_are_where_shapes_allow_them_and_all_parameters_learn():
    with torch.device("meta"):
        model = mobilenet_v2(num_classes=7)
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    has_shortcut = [block.has_shortcut for block in model.features[1:-1]]
    repeats = [1, 2, 3, 4, 3, 3, 1]
    assert has_shortcut == [index > 0 for repeat in repeats for index in range(repeat)]
