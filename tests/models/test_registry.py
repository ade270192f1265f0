import pytest
import torch

from shoal.core import UsageError
from shoal.models import MODELS, loss_of, model_named

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
    "densenet121": 7_978_856,
}
HEAVY = {"resnet101", "resnet152", "resnext101_32x8d"}
TEXT = {"gpt-nano": 100_272, "gpt-small": 124_439_808}
LIGHT_IMAGES = sorted(MODELS.keys() - HEAVY - TEXT.keys())


@pytest.mark.parametrize("name", TORCHVISION)
def test_they_have_as_many_parameters_as_torchvisions(name):
    assert MODELS[name].at(image_side=224, num_classes=1000).num_parameters() == TORCHVISION[name]


@pytest.mark.parametrize("name", LIGHT_IMAGES)
def test_a_random_batch_fits_its_network(name):
    with torch.device("meta"):
        model = MODELS[name].build()
    entry = MODELS[name]
    x, y = entry.random_batch(batch_size=2)
    assert x.shape == (2, *entry.input_shape)
    assert model.eval()(x.to("meta")).shape == (2, entry.num_classes)
    assert y.shape == (2,)
    assert y.dtype == torch.int64
    assert 0 <= y.min() <= y.max() < entry.num_classes


@pytest.mark.parametrize("name", LIGHT_IMAGES)
@pytest.mark.parametrize("side", [None, 32])
def test_other_images_and_classes_fit_too(name, side):
    entry = MODELS[name].at(image_side=max(side or 0, MODELS[name].smallest_side), num_classes=7)
    with torch.device("meta"):
        assert entry.build()(torch.empty(2, *entry.input_shape)).shape == (2, 7)
    assert MODELS[name].at() == MODELS[name]


def test_inception_has_a_second_head_while_it_trains_on_large_images():
    entry = MODELS["inception_v3"]
    assert (entry.image_side, entry.num_parameters()) == (299, 27_161_264)
    assert entry.at(image_side=298).num_parameters() == 23_834_568
    with torch.device("meta"):
        model = entry.build()
        x = torch.empty(2, *entry.input_shape)
        assert [logits.shape for logits in model(x)] == [(2, 1000), (2, 1000)]
        assert model.eval()(x).shape == (2, 1000)


def test_the_loss_of_a_second_head_counts_less():
    main, other, labels = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    both = loss_of((main, other), labels)
    torch.testing.assert_close(both, loss_of(main, labels) + 0.3 * loss_of(other, labels))


@pytest.mark.parametrize("name", TEXT)
def test_a_model_of_text_predicts_the_next_token(name):
    entry = MODELS[name].at(num_tokens=16)
    assert entry.num_parameters() == TEXT[name]
    assert MODELS[name].num_tokens == MODELS[name].max_tokens
    x, y = entry.random_batch(seed=3, batch_size=2)
    assert x.shape == y.shape == (2, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert 0 <= x.min() <= x.max() < entry.num_classes
    with torch.device("meta"):
        assert entry.build()(x.to("meta")).shape == (2, 16, entry.num_classes)


def test_no_position_of_a_gpt_sees_later_ones():
    torch.manual_seed(0)
    model, (x, _) = MODELS["gpt-nano"].build(), MODELS["gpt-nano"].random_batch(batch_size=1)
    changed = x.clone()
    changed[0, 40] = (changed[0, 40] + 1) % 256
    before, after = model(x)[0], model(changed)[0]
    torch.testing.assert_close(before[:40], after[:40])
    assert not torch.allclose(before[40:], after[40:])


def test_a_gpt_learns_what_it_is_shown_often():
    torch.manual_seed(0)
    model, (x, y) = MODELS["gpt-nano"].build(), MODELS["gpt-nano"].random_batch(batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # log 256
    assert losses[-1] < losses[0] / 2


def test_small_images_keep_their_size_in_a_residual_network():
    assert MODELS["resnet50"].input_shape == (3, 224, 224)
    assert MODELS["resnet18"].at(image_side=64).build().conv1.stride == (2, 2)
    assert MODELS["resnet18"].build().conv1.stride == (1, 1)


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match=r"vgg16 cannot take images of 8×8.*\n.*32×32 or more"):
        MODELS["vgg16"].at(image_side=8)
    with pytest.raises(UsageError, match="0 classes"):
        MODELS["lenet"].at(num_classes=0)
    with pytest.raises(UsageError, match=r"restnet50.. Did you mean 'resnet50' or .*\n.*resnet18, .*own"):
        model_named("restnet50")
    with pytest.raises(UsageError, match=r"AlexNet.*\n.*resnet18, .*vgg16, .*small-cnn"):
        model_named("AlexNet")
    with pytest.raises(UsageError, match=r"gpt-nano cannot read sequences of 65 tokens.*\n.*1 to 64"):
        MODELS["gpt-nano"].at(num_tokens=65)
    with pytest.raises(UsageError, match="gpt-nano takes no images"):
        MODELS["gpt-nano"].at(image_side=32)
    with pytest.raises(UsageError, match="resnet50 reads no tokens"):
        MODELS["resnet50"].at(num_tokens=32)
    with pytest.raises(UsageError, match="256 classes of its own"):
        MODELS["gpt-nano"].at(num_classes=10)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("resnet50", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("VGG16", "vgg16"),
        ("ResNeXt50_32x4d", "resnext50_32x4d"),
        ("MobileNetV2", "mobilenet_v2"),
        ("small_mlp", "small-mlp"),
        ("InceptionV3", "inception_v3"),
        ("DenseNet-121", "densenet121"),
        ("GPT-Nano", "gpt-nano"),
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
