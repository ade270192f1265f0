"""A state taken, written, read and loaded lets training go on as if it had never stopped."""

import json
import re

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, StepLR

from shoal.core import UsageError
from shoal.experts.classes import TrainingSettings, make_scheduler
from shoal.experts.expert import Expert
from shoal.experts.state import ExpertState

OPTIMIZERS = {
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.1),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), lr=0.1, amsgrad=True, fused=True),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, betas=(0.8, 0.9)),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    "adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
    "groups": lambda module: torch.optim.RMSprop(
        [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.3}], lr=0.1
    ),
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "linear": lambda optimizer: make_scheduler(
        optimizer, TrainingSettings(scheduler="linear", num_warmup_steps=2, num_training_steps=9)
    ),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=7),
    "steps": lambda optimizer: StepLR(optimizer, step_size=2),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 5]),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for each other take most of the time of what is so small."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make(optimizer="adam", scheduler="none", *, seed=0, width=4):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    optimizer = OPTIMIZERS[optimizer](module) if optimizer else None
    return Expert(
        "ffn.1",
        module,
        ((torch.randn(3, 4),), {}),
        optimizer=optimizer,
        scheduler=SCHEDULERS[scheduler](optimizer) if scheduler else None,
    )


def train(expert, num_steps, seed):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        expert.backward([torch.randn(5, 4, generator=rng)], [torch.randn(5, 2, generator=rng)])


def through_files(state):
    tensors = safetensors.torch.load(safetensors.torch.save(state.tensors))
    return ExpertState(tensors, json.loads(json.dumps(state.numbers, allow_nan=False)))


def assert_equal(one, other):
    one, other = one.state(), other.state()
    assert one.numbers == other.numbers
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_training_goes_on_to_the_bit(optimizer, scheduler):
    first = make(optimizer, scheduler)
    train(first, 3, seed=1)
    second = make(optimizer, scheduler, seed=5)
    assert second.load(through_files(first.state())) == []
    assert second.num_updates == 3
    assert_equal(first, second)
    for expert in (first, second):
        train(expert, 3, seed=2)
    assert_equal(first, second)


def test_a_rate_that_is_a_tensor_stays_one():
    module = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(module.parameters(), lr=torch.tensor(0.1))
    scheduler = StepLR(optimizer, step_size=1)
    expert = Expert("a", module, ((torch.randn(3, 4),), {}), optimizer=optimizer, scheduler=scheduler)
    saved = through_files(expert.state())
    expert.backward([torch.randn(5, 4)], [torch.randn(5, 4)])
    expert.load(saved)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.1))
    expert.backward([torch.randn(5, 4)], [torch.randn(5, 4)])
    assert torch.allclose(optimizer.param_groups[0]["lr"], torch.tensor(0.01))


def test_a_state_before_the_first_update_forgets_what_was_learned():
    fresh = make().state()
    trained = make()
    train(trained, 2, seed=1)
    assert trained.load(fresh) == []
    assert_equal(trained, make())


def test_a_state_shares_nothing_with_the_expert():
    expert = make()
    train(expert, 1, seed=1)
    state = expert.state()
    kept = {name: tensor.clone() for name, tensor in state.tensors.items()}
    other = make()
    other.load(state)
    train(expert, 1, seed=2)
    train(other, 1, seed=3)
    assert all(torch.equal(kept[name], tensor) for name, tensor in state.tensors.items())


def test_tied_and_oddly_laid_out_weights_can_be_written():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    module[0].bias = nn.Parameter(torch.zeros(8)[::2])
    state = Expert("tied", module, ((torch.randn(3, 4),), {})).state()
    assert sorted(through_files(state).tensors) == sorted(f"module.{name}" for name in module.state_dict())


def test_names():
    expert = make("momentum")
    train(expert, 1, seed=1)
    state = expert.state()
    assert {"module.0.weight", "module.1.running_mean", "optimizer.0.momentum_buffer"} <= state.tensors.keys()
    assert state.num_updates == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("module.0.bias"), "0.bias is missing"),
        (lambda tensors: tensors.update({"module.9.bias": torch.zeros(1)}), "9.bias is unknown"),
        (lambda tensors: tensors.update({"module.0.bias": torch.zeros(9)}), r"0.bias is torch.float32\[9\]"),
        (lambda tensors: tensors.update({"module.0.bias": torch.zeros(4).half()}), "0.bias is torch.float16"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, problem):
    state = make(seed=3).state()
    change(state.tensors)
    expert = make()
    with pytest.raises(UsageError, match=problem):
        expert.load(state)
    assert_equal(expert, make())


def test_a_long_list_of_misfits_is_cut():
    with pytest.raises(UsageError, match="and 2 more"):
        make(width=4).load(make(width=6).state())


def test_without_the_optimizers_part_it_starts_anew_and_says_so():
    trained = make(None, None)
    expert = make("adam", "linear")
    warnings = expert.load(trained.state())
    assert len(warnings) == 2
    assert all("ffn.1" in warning and "starts anew" in warning for warning in warnings)
    train(expert, 2, seed=1)


@pytest.mark.parametrize(("one", "other"), [("sgd", "adam"), ("adam", "adamw"), ("groups", "momentum")])
def test_another_optimizer_starts_anew(one, other):
    saved = make(one)
    train(saved, 1, seed=1)
    expert = make(other)
    (warning,) = expert.load(saved.state())
    assert "starts anew" in warning
    assert expert.num_updates == 1
    assert torch.equal(expert.module[0].weight, saved.module[0].weight)
    train(expert, 1, seed=2)


def test_another_learning_rate_is_told():
    saved, expert = make("momentum"), make("momentum")
    expert.optimizer.param_groups[0]["lr"] = 0.5
    assert expert.load(saved.state()) == ["expert ffn.1: lr is 0.1 as saved, not 0.5"]
    assert expert.optimizer.param_groups[0]["lr"] == 0.1


def test_how_an_optimizer_computes_is_its_own():
    saved, expert = make("adam"), make("amsgrad")
    train(saved, 1, seed=1)
    expert.load(saved.state())
    group = expert.optimizer.param_groups[0]
    assert group["fused"]
    assert not group["amsgrad"]
    train(expert, 1, seed=2)


@pytest.mark.parametrize(
    "numbers",
    [
        {"num_updates": "many", "optimizer": 3, "scheduler": [1]},
        {"optimizer": {"kind": "Adam"}, "scheduler": {"kind": "StepLR", "values": 7}},
        {"optimizer": None, "scheduler": {"kind": "LambdaLR", "values": {"step": 1, "optimizer": None}}},
    ],
)
def test_numbers_that_make_no_sense_do_no_harm(numbers):
    expert = make("adam", "linear")
    state = make("adam", "linear", seed=1).state()
    assert expert.load(ExpertState(state.tensors, numbers))
    assert expert.num_updates == 0
    train(expert, 2, seed=1)


def set_number(key, value):
    return lambda state: state.numbers["optimizer"]["groups"][0].update({key: value})


def set_tensor(key, value):
    return lambda state: state.tensors.update({f"optimizer.0.{key}": value})


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (set_tensor("exp_avg", torch.zeros(7)), r"exp_avg has the shape \[7\]"),
        (set_tensor("exp_avg", torch.zeros(())), r"exp_avg has the shape \[\]"),
        (set_tensor("exp_avg", torch.zeros(4, 4).half()), "exp_avg is of type torch.float16"),
        (set_tensor("exp_avg_sq", torch.full((4, 4), torch.nan)), "exp_avg_sq is not finite"),
        (set_tensor("step", torch.tensor(torch.inf)), "step is not finite"),
        (set_tensor("more", torch.zeros(3)), "more has the shape"),
        (lambda state: state.tensors.pop("optimizer.0.exp_avg_sq"), "exp_avg_sq is missing"),
        (lambda state: state.numbers["optimizer"]["values"].update({"0": {"exp_avg": 1}}), "is no tensor"),
        (lambda state: state.numbers["optimizer"]["values"].update({"0": {"x": [1e999]}}), "x is not finite"),
        (set_number("lr", torch.inf), "lr is not finite"),
        (set_number("lr", "fast"), "lr is no number"),
        (set_number("betas", [0.9]), "betas is not 2 numbers"),
    ],
)
def test_what_no_optimizer_could_go_on_with_starts_anew(harm, problem):
    saved, expert = make(), make(seed=5)
    train(saved, 1, seed=1)
    train(expert, 1, seed=1)
    state = saved.state()
    harm(state)
    (warning,) = expert.load(state)
    assert re.search(f"{problem}.* starts anew", warning)
    assert torch.equal(expert.module[0].weight, saved.module[0].weight)
    assert not expert.optimizer.state
    assert expert.optimizer.param_groups[0]["lr"] == 0.1
    train(expert, 2, seed=2)
    assert all(tensor.isfinite().all() for tensor in expert.state().tensors.values())


@pytest.mark.parametrize("scheduler", ["linear", "milestones"])
def test_a_copy_learns_at_its_own_rates_as_far_along_as_the_other(scheduler):
    saved, expert = make("adamw", scheduler), make("adamw", scheduler, seed=5)
    for group in expert.optimizer.param_groups:
        group.update(initial_lr=0.4, betas=(0.5, 0.6), lr=0.4)
    expert.scheduler.base_lrs = [0.4]
    train(saved, 4, seed=1)
    assert expert.load(saved.state(), keeps_settings=True) == []
    (own,), (other,) = expert.optimizer.param_groups, saved.optimizer.param_groups
    for _ in range(3):
        assert own["lr"] == pytest.approx(4 * other["lr"])
        assert own["betas"] == (0.5, 0.6)
        assert expert.scheduler.last_epoch == saved.scheduler.last_epoch
        train(saved, 1, seed=2)
        train(expert, 1, seed=2)
    state = saved.state()
    state.numbers["optimizer"]["groups"][0]["lr"] = 1e30
    state.numbers["scheduler"]["values"]["base_lrs"] = [1e30]
    before = own["lr"]
    expert.load(state, keeps_settings=True)
    assert own["lr"] == before
    train(expert, 1, seed=2)
    assert own["lr"] <= 0.4


def test_a_scheduler_that_cannot_be_saved_says_so():
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=9)
    scheduler.anneal = print
    expert = Expert("a", module, ((torch.randn(3, 4),), {}), optimizer=optimizer, scheduler=scheduler)
    with pytest.raises(UsageError, match="OneCycleLR"):
        expert.state()


class Extra(nn.Linear):
    def get_extra_state(self):
        return "words"


def test_an_extra_state_that_is_no_tensor_says_so():
    with pytest.raises(UsageError, match="_extra_state"):
        Expert("a", Extra(4, 4), ((torch.randn(3, 4),), {})).state()
