""""""

import io
import itertools

import msgspec
import pytest
import torch

from shoal import data
from shoal.bench import convergence as module
from shoal.bench.convergence import (
    ConvergenceConfig,
    ConvergenceScenario,
    SeedRun,
    check_memory,
    convergence_items,
    free_bytes,
    headline,
    memory_text,
    num_at_once,
    run_seed,
    summarize_convergence,
    together,
)
from shoal.bench.frame import Noted
from shoal.core import BenchmarkError, UsageError
from shoal.doctor.machine import Memory
from shoal.report import Curve, Report, Row
from shoal.report.tables import show
from shoal.simulate.mixture.settings import MixtureEvaluation, MixtureResult, MixtureRunSettings, TrainLoss

SMALL = ConvergenceConfig(
    num_experts=4, layer_dim=8, num_layers=2, num_active=2, num_trainers=3, steps=8, eval_every=3, num_seeds=2
)


def course(accuracies, staleness):
    evaluations = [
        MixtureEvaluation(num_updates=at, virtual_s=float(at), loss=0.5, accuracy=accuracy)
        for at, accuracy in zip(itertools.count(1024, 1024), accuracies)
    ]
    result = MixtureResult(
        evaluations=evaluations,
        train_loss=[TrainLoss(num_updates=64, virtual_s=1.0, loss=2.0)],
        staleness=staleness,
        expert_staleness={0: 7},
        virtual_s=5.0,
        num_touched_experts=3,
        num_lost=0,
    )
    return SeedRun(result, wall_s=3.0)


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
    return [each for each in told if isinstance(each, Row) and each.metric == metric]


def test_each_seed_is_a_start_of_every_row_and_curve(measure):
    told = measure(course([0.1, 0.9, 0.5, 0.7], {0: 4}), course([0.2, 0.2, 0.2, 0.2], {0: 4}))
    assert [row.samples for row in rows(told, "val_accuracy")] == [[0.7], [0.2]]
    assert [row.samples for row in rows(told, "val_accuracy_last_5")] == [[pytest.approx(0.6)], [0.2]]
    curves = [each for each in told if isinstance(each, Curve)]
    assert [curve.metric for curve in curves] == ["val_accuracy", "val_loss", "train_loss"] * 2
    assert curves[0].starts[0]["step"] == [1024, 2048, 3072, 4096]
    assert curves[2].starts[0] == {"value": [2.0], "step": [64], "s": [1.0]}


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
    runs = (msgspec.convert(run_seed(task, progress.append), SeedRun, str_keys=True) for _ in range(2))
    first, second = (run.result for run in runs)
    assert [each.num_updates for each in first.evaluations] == [3, 6, 8]
    assert sum(first.staleness.values()) == 8
    assert first.num_touched_experts > 0
    assert first.diverged_after is None
    assert first == second
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


SMALL_MEMORY = MixtureRunSettings(num_experts=4, layer_dim=32)
LARGE = MixtureRunSettings(num_experts=256)


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many cores, with memory for so many seeds of SMALL."""

    def machine(cores, num_seeds):
        free = None if num_seeds is None else int(num_seeds * SMALL_MEMORY.memory_bytes())
        monkeypatch.setattr(module, "memory", lambda: Memory(free, free))
        monkeypatch.setattr(module, "num_cores", lambda: cores)

    return machine


@pytest.mark.parametrize(
    ("cores", "fitting", "expected"),
    [(2, 9, 3), (1, 9, 1), (8, 9, 3), (8, 2.5, 2), (8, 0.5, 1), (2, None, 3)],
)
def test_seeds_run_side_by_side_as_cores_and_memory_allow(machine, cores, fitting, expected):
    machine(cores, fitting)
    assert num_at_once(SMALL_MEMORY, 3) == expected


def test_a_gpu_takes_one_seed_after_another():
    assert num_at_once(MixtureRunSettings(device="cuda"), 5) == 1


def test_the_line_says_what_it_takes_and_whether_that_fits(machine):
    machine(2, 4)
    text = memory_text(SMALL_MEMORY, 3, free_bytes("cpu"))
    assert "for a seed" in text
    assert "3 seeds at once" in text
    assert text.endswith("that fits.")
    assert memory_text(LARGE, 1, 1 << 30).endswith("1.07 GB are free: that does NOT fit.")
    assert memory_text(LARGE, 1, None).endswith("how much is free is not known.")


def test_what_does_not_fit_is_refused_with_a_way_out():
    check_memory(SMALL_MEMORY, SMALL_MEMORY.memory_bytes())
    check_memory(LARGE, None)
    with pytest.raises(
        UsageError, match="--num-experts or --layer-dim, another --device, or --force"
    ) as caught:
        check_memory(LARGE, 1 << 30)
    assert "of memory, and 1.07 GB are free" in caught.value.what


CONFIG = ConvergenceConfig(num_experts=16, layer_dim=128, num_trainers=16, steps=4096, num_seeds=2)
KEY = {"contender": CONFIG.setup}


def row(metric, starts, key=None, unit=""):
    return Row(key=key or KEY, metric=metric, unit=unit, direction="lower", starts=starts)


def curve(metric, *starts):
    points = [
        {"value": list(values), "step": [1024.0 * (at + 1) for at in range(4)], "s": [64.0] * 4}
        for values in starts
    ]
    return Curve(key=KEY, metric=metric, unit="", direction="higher", starts=points)


def report(accuracies, *, config=CONFIG, failed=()):
    return Report(
        benchmark="convergence",
        created="2026-01-02T03:04:05+00:00",
        config=msgspec.to_builtins(config),
        environment={"wall_s": 12.0},
        rows=[*(rows_summary(accuracies) if accuracies else ()), *failed],
        curves=curves(accuracies) if accuracies else [],
    )


def rows_summary(accuracies):
    medians = [[sorted(values[-3:])[1]] for values in accuracies]
    num_seeds = len(accuracies)
    return [
        row("val_accuracy", medians),
        row("val_accuracy_last_5", medians),
        row("mean_staleness", [[15.0]] * num_seeds),
        row("virtual_s", [[320.0]] * num_seeds, unit="s"),
        row("staleness", [[9.0]] * num_seeds, {**KEY, "of": "trainers", "behind": 0}),
        row("staleness", [[1.0]] * num_seeds, {**KEY, "of": "trainers", "behind": 4}),
    ]


def curves(accuracies):
    return [curve("val_accuracy", *accuracies), curve("val_loss", *[[0.5] * 4] * len(accuracies))]


FAILED = Row(
    key={**KEY, "seed": 1338}, metric="val_accuracy", unit="", direction="higher", error="no memory."
)


@pytest.fixture
def two_seeds():
    return report([[0.5, 0.90, 0.92, 0.94], [0.5, 0.91, 0.99, 0.93]])


def test_the_result_is_the_median_of_all_last_evaluations(two_seeds):
    result = summarize_convergence(two_seeds)
    assert result["val_accuracy"] == 0.925
    assert result["val_accuracy_std"] == pytest.approx(0.0071)
    assert result["mean_staleness"] == 15
    assert result["virtual_s"] == 320
    assert result["num_seeds"] == 2
    assert "wall_s" not in result
    assert "failed" not in result


def test_the_headline_says_how_well_was_learned_and_how_late(two_seeds):
    learned, late = headline(two_seeds)
    assert learned == (
        "dmoe 16×4 dim 128, 16 trainers, 1000 ms: 92.5 ± 0.7 % of the test images after 4,096 updates, "
        "the median of the last 3 evaluations of 2 seeds."
    )
    assert late == "An update was 15.0 behind on average; they took 320 s of virtual time."


def test_seeds_that_failed_are_told():
    told = report([[0.5, 0.90, 0.92, 0.94]], failed=[FAILED])
    assert headline(told)[-1] == "1 of 2 seeds did not come to an end."
    assert summarize_convergence(told)["failed"] == 1
    nothing = report([], failed=[FAILED])
    assert headline(nothing) == ["No seed came to its end."]
    assert "val_accuracy" not in summarize_convergence(nothing)
    assert "no memory." in printed(nothing)


def printed(told):
    stream = io.StringIO()
    show(convergence_items(told), stream)
    return stream.getvalue()


def test_the_terminal_shows_every_evaluation_and_the_staleness(two_seeds):
    text = printed(two_seeds)
    assert "4,096      64.00  93.50 ± 0.71" in text
    assert "mean ± deviation over seeds" in text
    assert "seeds 1337 to 1338" in text
    assert "  90.0%  ████" in text
    assert "The gate is trained" in text


def test_a_single_seed_has_no_deviation():
    text = printed(report([[0.5, 0.90, 0.92, 0.94]], config=msgspec.structs.replace(CONFIG, num_seeds=1)))
    assert "±" not in text
    assert "seed 1337." in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"is_faithful": True}, "gate not trained, experts' gradients not delayed, one lock"),
        ({"is_faithful": True, "model": "large-ffn"}, "As the original: one lock"),
        ({"is_faithful": True, "model": "large-ffn"}, "held 45 ms for an update."),
        ({"model": "large-ffn", "window_ms": 0.0}, "side by side, 1,900 ms for an update.\n"),
        ({"window_ms": 50.0}, "those that end within 50 ms do so together.\n"),
    ],
)
def test_how_it_was_done_is_said(fields, words):
    config = msgspec.structs.replace(CONFIG, **fields).resolved()
    assert words in printed(report([[0.5, 0.9, 0.9, 0.9]], config=config))


def test_many_evaluations_are_thinned_to_a_table_that_can_be_read():
    values = [index / 100 for index in range(100)]
    points = {"value": values, "step": [float(at) for at in range(100)], "s": values}
    told = report([[0.5, 0.9, 0.9, 0.9]])
    long = [msgspec.structs.replace(each, starts=[points]) for each in told.curves]
    text = printed(msgspec.structs.replace(told, curves=long))
    assert sum(line.strip().endswith("-") and "." in line for line in text.splitlines()) == 24
