import io

import msgspec
import pytest

from shoal.bench.convergence import ConvergenceConfig
from shoal.bench.convergence_summary import convergence_items, headline, summarize_convergence
from shoal.report import Curve, Report, Row
from shoal.report.tables import show

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
        rows=[*(rows(accuracies) if accuracies else ()), *failed],
        curves=curves(accuracies) if accuracies else [],
    )


def rows(accuracies):
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
