"""Models of the user's own: `package.module:factory` or `file.py:factory`."""

import pytest
import torch

from shoal.core import UsageError
from shoal.models import model_named

NETS = """
import torch
from torch import nn

number = 3

def convolutional():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 7))

def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))

def told():
    return convolutional(), {"input_shape": (3, 16, 16), "num_classes": 6, "batch_size": 4}

def with_shape():
    return convolutional(), (3, 20, 20)

class Attributed(nn.Module):
    input_shape = (2, 9)
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(9, 4)
    def forward(self, x):
        return self.layer(x).sum(1)

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)
    def forward(self, x):
        return self.head(self.tokens(x))

def with_argument(width):
    return nn.Linear(width, width)

def nothing():
    return 3

def odd():
    return nn.Sequential(nn.Unflatten(1, (5, 2)), nn.Linear(9, 4))

def recurrent():
    return nn.Identity()

def wrong():
    return flat(), {"inputs": 3}

def too_many():
    return flat(), {"input_shape": (12,), "num_classes": 9}
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    (tmp_path / "shoal_test_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("factory", "input_shape", "num_classes", "is_guessed"),
    [
        ("convolutional", (3, 32, 32), 7, True),
        ("flat", (12,), 5, True),
        ("told", (3, 16, 16), 6, False),
        ("with_shape", (3, 20, 20), 7, False),
        ("Attributed", (2, 9), 4, False),
        ("Text", (64,), 30, True),
    ],
)
@pytest.mark.parametrize("where", ["shoal_test_nets", "shoal_test_nets.py"])
def test_what_it_takes_is_told_or_guessed(nets, where, factory, input_shape, num_classes, is_guessed):
    entry = model_named(f"{where}:{factory}")
    assert entry.name == f"{where}:{factory}"
    assert (entry.input_shape, entry.num_classes, entry.is_guessed) == (input_shape, num_classes, is_guessed)
    model = entry.build()
    assert entry.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    x, y = entry.random_batch(batch_size=3)
    assert model(x).shape == (*y.shape, 7 if factory == "told" else num_classes)


def test_images_and_sequences_of_another_size(nets):
    assert model_named("shoal_test_nets:convolutional").at(image_side=48).input_shape == (3, 48, 48)
    assert model_named("shoal_test_nets:Text").at(num_tokens=5).input_shape == (5,)
    with pytest.raises(UsageError, match="has 7 classes of its own"):
        model_named("shoal_test_nets:convolutional").at(num_classes=10)
    with pytest.raises(UsageError, match="takes no images"):
        model_named("shoal_test_nets:flat").at(image_side=10)


def test_a_file_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "shoal_test_layers.py").write_text("WIDTH = 6\n")
    text = "from shoal_test_layers import WIDTH\nfrom torch import nn\nnet = lambda: nn.Linear(WIDTH, 2)\n"
    (tmp_path / "there" / "net.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["there_is_none"])
    assert model_named("there/net.py:net").input_shape == (6,)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shoal_test_reefs:net", r"no module 'shoal_test_reefs'[\s\S]*Try: start in the folder"),
        ("nowhere/net.py:net", r"no file 'nowhere/net.py'[\s\S]*Try: give its path"),
        ("shoal_test_nets:convolutionl", r"has no 'convolutionl'. Did you mean 'convolutional'\?"),
        ("shoal_test_nets:number", r"is a int, which cannot be called"),
        ("shoal_test_nets:with_argument", r"without arguments: missing a required argument: 'width'"),
        ("shoal_test_nets:nothing", r"returns a int, which is no nn.Module"),
        (
            "shoal_test_nets:odd",
            r"fails on inputs that were guessed[\s\S]*\(9,\): [\s\S]*Try: let the factory",
        ),
        ("shoal_test_nets:recurrent", r"none can be guessed[\s\S]*Try: let the factory return"),
        ("shoal_test_nets:wrong", r"says of its inputs is wrong[\s\S]*Try: say some of input_shape"),
        ("shoal_test_nets:too_many", r"said to have 9 classes, and gives logits of 5"),
        ("shoal_test_nets:", r"names no model[\s\S]*package.module:NAME"),
    ],
)
def test_what_is_wrong_is_said_with_the_next_step(nets, name, says):
    with pytest.raises(UsageError, match=says):
        model_named(name)


def test_what_the_module_itself_raises_passes_through(nets):
    (nets / "shoal_test_broken.py").write_text("import shoal_test_absent\n")
    with pytest.raises(ModuleNotFoundError, match="shoal_test_absent"):
        model_named("shoal_test_broken:net")


def test_equal_seeds_draw_equal_models(nets):
    entry = model_named("shoal_test_nets.py:flat")
    torch.manual_seed(3)
    first = entry.build()
    torch.manual_seed(3)
    assert torch.equal(first[1].weight, entry.build()[1].weight)
