import msgspec
import pytest
import torch

from shoal import data
from shoal.bench import convergence as module
from shoal.bench.convergence import ConvergenceConfig, ConvergenceScenario, Course, run_seed, together
from shoal.bench.frame import Measured, MeasuredCurve, Noted
from shoal.core import BenchmarkError, UsageError

SMALL = ConvergenceConfig(
    num_experts=4, layer_dim=8, num_layers=2, num_active=2, num_trainers=3, steps=8, eval_every=3, num_seeds=2
)


def course(accuracies, staleness):
    num_updates = [1024 * (index + 1) for index in range(len(accuracies))]
    return Course(
        num_updates=num_updates,
        virtual_s=[float(at) for at in num_updates],
        losses=[0.5] * len(accuracies),
        accuracies=accuracies,
        train_updates=[64],
        train_s=[1.0],
        train_losses=[2.0],
        staleness=staleness,
        expert_staleness={0: 7},
        figures={"mean_staleness": 1.0, "virtual_s": 5.0},
        wall_s=3.0,
    )


@pytest.fixture
def measure(monkeypatch):
    """What the scenario tells of the courses, or errors, that its seeds come back with."""

    def measure(*answers):
        told = [answer if isinstance(answer, Exception) else _as_json(answer) for answer in answers]
        monkeypatch.setattr(module, "run_tasks", lambda *_, **__: iter(told))
        config = msgspec.structs.replace(SMALL, num_seeds=len(answers))
        return list(ConvergenceScenario(msgspec.to_builtins(config), 1337).run(lambda _: None))

    return measure


def _as_json(answer):
    return msgspec.json.decode(msgspec.json.encode(answer))


def rows(told, metric):
    return [each for each in told if isinstance(each, Measured) and each.metric == metric]


def test_each_seed_is_a_start_of_every_row_and_curve(measure):
    told = measure(course([0.1, 0.9, 0.5, 0.7], {0: 4}), course([0.2, 0.2, 0.2, 0.2], {0: 4}))
    assert [row.samples for row in rows(told, "val_accuracy")] == [[0.7], [0.2]]
    assert [row.samples for row in rows(told, "val_accuracy_last_5")] == [[pytest.approx(0.6)], [0.2]]
    curves = [each for each in told if isinstance(each, MeasuredCurve)]
    assert [curve.metric for curve in curves] == ["val_accuracy", "val_loss", "train_loss"] * 2
    assert curves[0].points["step"] == [1024, 2048, 3072, 4096]
    assert curves[2].points == {"value": [2.0], "step": [64], "s": [1.0]}


def test_every_seed_counts_at_each_place_so_that_seeds_stay_in_order(measure):
    told = measure(course([0.1], {0: 4, 5: 1}), course([0.1], {2: 3}))
    counts = {
        row.key["behind"]: [each.samples[0] for each in rows(told, "staleness") if each.key == row.key]
        for row in rows(told, "staleness")
        if row.key["of"] == "trainers"
    }
    assert counts == {0: [4, 0], 2: [0, 3], 5: [1, 0]}


def test_what_differs_from_run_to_run_is_noted_apart(measure):
    told = measure(course([0.1], {0: 1}))
    (noted,) = [each for each in told if isinstance(each, Noted)]
    assert noted.facts["wall_s_by_seed"] == {"1337": 3.0}
    assert noted.facts["wall_s"] >= 0
    assert not any("wall" in each.metric for each in told if not isinstance(each, Noted))


def test_a_seed_that_fails_or_diverges_is_a_row_of_its_own(measure):
    told = measure(BenchmarkError("out of\nmemory."), {"error": "diverged."}, course([0.3], {0: 1}))
    first, second, third = rows(told, "val_accuracy")
    assert (first.key["seed"], first.error) == (1337, "out of memory.")
    assert (second.key["seed"], second.error) == (1338, "diverged.")
    assert third.samples == [0.3]


@pytest.fixture
def few_images(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(12, 1, 28, 28, generator=generator)
    monkeypatch.setattr(data, "mnist", lambda train, folder: (images, torch.arange(12) % 10))


def test_training_that_diverges_says_when(few_images):
    settings = msgspec.structs.replace(SMALL.of_seed(1337), learning_rate=1e30)
    answer = run_seed({"settings": msgspec.to_builtins(settings), "data_dir": None}, lambda _: None)
    assert answer["error"].startswith("diverged: the loss was no number after ")


def test_a_seed_is_trained_and_equal_in_a_second_run(few_images):
    progress = []
    task = {"settings": msgspec.to_builtins(SMALL.of_seed(1338)), "data_dir": None}
    first, second = (msgspec.convert(run_seed(task, progress.append), Course) for _ in range(2))
    assert first.num_updates == [3, 6, 8]
    assert sum(first.staleness.values()) == 8
    assert first.figures["touched_experts"] > 0
    assert first.diverged_after is None
    assert msgspec.structs.replace(first, wall_s=0) == msgspec.structs.replace(second, wall_s=0)
    assert progress[-1] == "updates: 8 of 8"


def test_progress_counts_the_updates_of_all_seeds():
    told = []
    tell = together(told.append, 100, 3)
    for text in ("1/3 updates: 64 of 100", "2/3 updates: 10 of 100", "1/3 updates: 100 of 100", "3/3 lost"):
        tell(text)
    assert told == [
        "3 seeds, updates: 64 of 300",
        "3 seeds, updates: 74 of 300",
        "3 seeds, updates: 110 of 300",
        "3/3 lost",
    ]
    together(told.append, 100, 1)("updates: 64 of 100")
    assert told[-1] == "1 seed, updates: 64 of 100"


def test_an_experiment_has_a_name_that_tells_it_from_others():
    assert ConvergenceConfig().setup == "dmoe 64×4 dim 512, 64 trainers, 1000 ms"
    assert ConvergenceConfig().resolved().setup == ConvergenceConfig().setup
    assert ConvergenceConfig(compute_ms=2000).setup.endswith("1000 ms, computing 2000 ms")
    config = ConvergenceConfig(num_experts=16, failure_rate=0.1, is_faithful=True, delay_ms=0.5)
    assert config.setup == "dmoe 16×4 dim 512, 64 trainers, 0.5 ms, 10% failures, faithful"
    large = ConvergenceConfig(model="large-ffn", layer_dim=1024)
    assert large.setup == "large-ffn 4 blocks dim 1024, 64 trainers, 1000 ms"


def test_seeds_follow_the_first():
    assert list(SMALL.seeds) == [1337, 1338]
    assert SMALL.of_seed(1338).seed == 1338
    assert SMALL.of_seed(1338).num_experts == 4


@pytest.mark.parametrize("wrong", [{"num_seeds": 0}, {"failure_rate": 1.0}, {"learning_rate": 0.0}])
def test_what_cannot_be_learned_is_refused(wrong):
    with pytest.raises(UsageError):
        ConvergenceConfig(**wrong)
