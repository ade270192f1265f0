import pytest
import torch

from shoal.core import UsageError
from shoal.models import MODELS, model_named

TORCHVISION = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
}
HEAVY = {"resnet101", "resnet152", "resnext101_32x8d"}


@pytest.mark.parametrize("name", TORCHVISION)
def test_they_have_as_many_parameters_as_torchvisions(name):
    assert MODELS[name].at(image_side=224, num_classes=1000).num_parameters() == TORCHVISION[name]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - HEAVY))
def test_a_random_batch_fits_its_network(name):
    with torch.device("meta"):
        model = MODELS[name].build()
    entry = MODELS[name]
    x, y = entry.random_batch(batch_size=2)
    assert x.shape == (2, *entry.input_shape)
    assert model(x.to("meta")).shape == (2, entry.num_classes)
    assert y.shape == (2,)
    assert y.dtype == torch.int64
    assert 0 <= y.min() <= y.max() < entry.num_classes


@pytest.mark.parametrize("name", sorted(MODELS.keys() - HEAVY))
@pytest.mark.parametrize("side", [None, 32])
def test_other_images_and_classes_fit_too(name, side):
    entry = MODELS[name].at(image_side=side or MODELS[name].smallest_side, num_classes=7)
    with torch.device("meta"):
        assert entry.build()(torch.empty(2, *entry.input_shape)).shape == (2, 7)
    assert MODELS[name].at() == MODELS[name]


def test_small_images_keep_their_size_in_a_residual_network():
    assert MODELS["resnet50"].input_shape == (3, 224, 224)
    assert MODELS["resnet18"].at(image_side=64).build().conv1.stride == (2, 2)
    assert MODELS["resnet18"].build().conv1.stride == (1, 1)


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match=r"vgg16 cannot take images of 8×8.*\n.*32×32 or more"):
        MODELS["vgg16"].at(image_side=8)
    with pytest.raises(UsageError, match="0 classes"):
        MODELS["lenet"].at(num_classes=0)
    with pytest.raises(UsageError, match=r"InceptionV3.*\n.*resnet18, .*vgg16, .*small-cnn"):
        model_named("InceptionV3")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("resnet50", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("VGG16", "vgg16"),
        ("ResNeXt50_32x4d", "resnext50_32x4d"),
        ("MobileNetV2", "mobilenet_v2"),
        ("small_mlp", "small-mlp"),
    ],
)
def test_names_are_found_however_they_are_spelled(spelling, name):
    assert model_named(spelling) is MODELS[name]
    assert MODELS[name].name == name


def test_batches_follow_the_seed():
    entry = MODELS["small-mlp"]
    (x, y), (same_x, same_y), (other_x, _) = (entry.random_batch(seed) for seed in (1, 1, 2))
    assert torch.equal(x, same_x)
    assert torch.equal(y, same_y)
    assert not torch.equal(x, other_x)
    assert len(x) == entry.batch_size
