"""Classes by name, one's own from a module or file, and experts made of them."""

import sys

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.experts.classes import EXPERT_CLASSES, ExpertClass, TrainingSettings, expert_class, make_expert

SHAPES = {
    "ffn": ["float32[batch, 16]"],
    "transformer": ["float32[batch, 128, 16]", "bool[batch, 128]"],
    "nop": ["float32[batch, 16]"],
    "nop_delay": ["float32[batch, 16]"],
    "det_dropout": ["float32[batch, 16]", "bool[batch, 16]"],
    "lah-ffn": ["float32[batch, 16]"],
    "lah-transformer": ["float32[batch, 512, 16]"],
}


def test_every_class_has_a_shape_here():
    assert list(EXPERT_CLASSES) == list(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_class_gives_an_expert_that_trains(name):
    expert = make_expert("a.1", expert_class(name), 16, TrainingSettings(lr=0.1), seed=3)
    assert [str(schema) for schema in expert.schema.inputs] == SHAPES[name]
    assert expert.schema.outputs == expert.schema.inputs[:1]
    assert expert.schema.is_single
    if name == "nop_delay":
        expert.module.delay_s = 0.0
    args, _ = expert_class(name).example(16, 1)
    assert [tensor.shape[0] for tensor in args] == [1] * len(args)
    before = [parameter.detach().clone() for parameter in expert.module.parameters()]
    (output,) = expert.forward(args)
    given, *rest = expert.backward(args, [torch.randn_like(output)])
    assert given.shape == args[0].shape
    assert rest == [None] * (len(args) - 1)
    assert not any(map(torch.equal, before, expert.module.parameters()))
    assert expert.num_updates == bool(before)


@pytest.mark.parametrize("name", ["lah_ffn", "lah-ffn", "LAH-FFN", "nop-delay"])
def test_hyphens_and_underscores_are_the_same(name):
    assert expert_class(name).name in ("lah-ffn", "nop_delay")


def test_a_name_that_is_not_known():
    with pytest.raises(UsageError, match="Did you mean 'transformer'") as caught:
        expert_class("tranformer")
    assert "package.module:factory" in str(caught.value)


def test_the_seed_decides_and_torchs_generator_stays():
    ffn, training = expert_class("ffn"), TrainingSettings()
    before = torch.get_rng_state()
    one, same, other = (make_expert("a", ffn, 8, training, seed) for seed in (1, 1, 2**63 - 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.module.up.weight, same.module.up.weight)
    assert not torch.equal(one.module.up.weight, other.module.up.weight)


def test_training_settings_reach_the_expert():
    training = TrainingSettings("sgd", 0.5, scheduler="linear", num_training_steps=4, max_grad_norm=2.0)
    expert = make_expert("a", expert_class("ffn"), 8, training, 0)
    assert isinstance(expert.optimizer, torch.optim.SGD)
    assert expert.scheduler is not None
    assert expert.max_grad_norm == 2.0
    frozen = make_expert("a", expert_class("ffn"), 8, TrainingSettings("none", scheduler="none"), 0)
    assert frozen.optimizer is None


def test_a_hidden_dimension_of_nothing():
    with pytest.raises(UsageError, match="hidden dimension"):
        make_expert("a", expert_class("nop"), 0, TrainingSettings(), 0)


OWN = """
from __future__ import annotations
from dataclasses import dataclass

import torch
from torch import nn
from shoal.experts.classes import ExpertClass


@dataclass
class Widths:
    inner: int = 3


class Own(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.linear = nn.Linear(hidden_dim, Widths().inner)

    def forward(self, x, *, scale):
        return self.linear(x) * scale

    @staticmethod
    def example_inputs(hidden_dim, batch_size):
        return torch.randn(batch_size, hidden_dim), {"scale": torch.ones(batch_size, 1)}


class Told(nn.Linear):
    def example_inputs(self, hidden_dim, batch_size):
        return torch.randn(batch_size, 7, hidden_dim)


def told(hidden_dim):
    return Told(hidden_dim, 2)


def plain(hidden_dim):
    return nn.Linear(hidden_dim, 5)


def wrong(hidden_dim):
    return "a module"


def bad_example(hidden_dim):
    return plain(hidden_dim)


bad_example.example_inputs = lambda hidden_dim, batch_size: [1, 2]
whole = ExpertClass("whole", plain, lambda hidden_dim, batch_size: ((torch.zeros(batch_size, 4),), {}))
number = 3
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    path = tmp_path / "own_experts_of_a_test.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    for name in (path.stem, f"shoal_file_{path.stem}"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("factory", "inputs", "outputs"),
    [
        ("Own", ["float32[batch, 4]", "float32[batch, 1]"], "float32[batch, 3]"),
        ("told", ["float32[batch, 7, 4]"], "float32[batch, 7, 2]"),
        ("plain", ["float32[batch, 4]"], "float32[batch, 5]"),
        ("whole", ["float32[batch, 4]"], "float32[batch, 5]"),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_ones_own_class(own_file, is_file, factory, inputs, outputs):
    class_ = expert_class(f"{own_file if is_file else own_file.stem}:{factory}")
    assert isinstance(class_, ExpertClass)
    expert = make_expert("mine", class_, 4, TrainingSettings(), 0)
    assert [str(schema) for schema in expert.schema.inputs] == inputs
    assert str(expert.schema.outputs[0]) == outputs


def test_a_class_of_modules_from_a_package():
    class_ = expert_class("torch.nn:Flatten")
    assert isinstance(class_.make(1), nn.Flatten)


def test_ones_own_that_is_not_there(own_file, tmp_path):
    stem = own_file.stem
    with pytest.raises(UsageError, match="Did you mean 'plain'"):
        expert_class(f"{stem}:plan")
    with pytest.raises(UsageError, match="cannot be called"):
        expert_class(f"{stem}:number")
    with pytest.raises(UsageError, match="no module"):
        expert_class("no_such_package_of_a_test:factory")
    with pytest.raises(UsageError, match="names no expert class"):
        expert_class(":factory")
    with pytest.raises(UsageError, match="no file"):
        expert_class(f"{tmp_path / 'missing.py'}:factory")
    with pytest.raises(UsageError, match="gave str"):
        expert_class(f"{stem}:wrong").make(4)
    with pytest.raises(UsageError, match="example_inputs"):
        expert_class(f"{stem}:bad_example").example(4, 2)
