import contextlib

import msgspec
import pytest
import torch

from shoal.bench.accuracy import (
    NUM_TESTS,
    AccuracyConfig,
    AccuracyRun,
    AccuracyWorker,
    beginner,
    examples_of,
    parts_of,
)
from shoal.bench.contenders import Contender
from shoal.bench.workers import BenchPlace

ALONE = Contender("all-reduce", "all-reduce")
CONFIG = AccuracyConfig(contenders=(ALONE,), num_workers=1, splits=("iid", "dirichlet:0.1"), steps=40)


@pytest.fixture
def school(tmp_path, monkeypatch):
    # what a process of its own is set to would stay with the tests that follow
    monkeypatch.setattr(BenchPlace, "set_up_process", lambda self: None)
    place = BenchPlace(0, 1, "key", str(tmp_path))
    return AccuracyWorker(place, msgspec.to_builtins(CONFIG), contextlib.ExitStack())


def test_a_worker_learns_and_its_time_and_accuracy_are_told(school):
    before = school.begin(msgspec.to_builtins(AccuracyRun(1, ALONE, "iid")))
    after = school.train(num_steps=80)
    assert before.seconds == 0.0
    assert before.accuracy < 0.5 < 0.8 < after.accuracy
    assert after.seconds > 0
    assert after.mean_loss < before.mean_loss
    # alone it is the mean of all
    assert after.mean_accuracy == after.accuracy
    assert after.consensus_distance == 0.0
    school.finish()


def test_each_run_begins_with_what_the_first_began_with(school):
    school.ready()
    looks = []
    for number in (1, 2):
        school.begin(msgspec.to_builtins(AccuracyRun(number, ALONE, "dirichlet:0.1")))
        looks.append(school.train(num_steps=10))
        school.finish()
    assert looks[0].mean_loss == looks[1].mean_loss


def test_so_many_examples_are_for_tests():
    assert len(examples_of(CONFIG, train=False)[0]) == NUM_TESTS["digits"]


def test_workers_have_parts_of_their_own():
    config = msgspec.structs.replace(CONFIG, num_workers=8)
    parts = [parts_of(config, rank) for rank in (0, 1)]
    assert len(parts[0]["iid"][0]) == len(parts[1]["dirichlet:0.1"][1]) == 179
    assert not torch.equal(parts[0]["iid"][1], parts[1]["iid"][1])


@pytest.mark.parametrize("model", ["small-mlp", "small-cnn"])
@pytest.mark.parametrize(("task", "side"), [("digits", 8), ("mnist", 28)])
def test_models_fit_the_task_and_are_equal_for_equal_seeds(task, side, model):
    config = msgspec.structs.replace(CONFIG, task=task, model=model)
    (one, _), (same, _) = beginner(config), beginner(config)
    other, _ = beginner(msgspec.structs.replace(config, seed=1))
    assert one(torch.zeros(2, 1, side, side)).shape == (2, 10)
    first, again, differing = (next(net.parameters()) for net in (one, same, other))
    assert torch.equal(first, again)
    assert not torch.equal(first, differing)
