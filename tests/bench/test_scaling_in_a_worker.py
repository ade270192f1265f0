import contextlib
import json
import sys

import msgspec
import pytest

from shoal.bench.contenders import NONE
from shoal.bench.scaling import ScalingConfig, ScalingPoint, ScalingWorker
from shoal.bench.workers import BenchPlace

CONFIG = ScalingConfig(
    model="small-cnn",
    image_size=8,
    num_classes=5,
    num_workers=(1,),
    strategies=("neighbor",),
    num_warmup_batches=2,
    num_batches_per_iter=3,
)


def point(strategy, batch_size=4):
    return msgspec.to_builtins(ScalingPoint(strategy, batch_size, 1))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A worker that is alone, in this very process."""
    # what a process of its own is set to would stay with the tests that follow
    monkeypatch.setattr(BenchPlace, "set_up_process", lambda self: None)
    with contextlib.ExitStack() as stack:
        yield ScalingWorker(BenchPlace(0, 1, "alone", str(tmp_path)), msgspec.to_builtins(CONFIG), stack)


def count_steps(bench, strategy):
    steps = []
    bench._opened[strategy].trainee.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    return steps


def test_a_worker_warms_up_once_and_then_iterates(bench):
    assert bench.open(1, point("neighbor")) is None
    bench.attach("neighbor")
    steps = count_steps(bench, "neighbor")
    bench.warm_up("neighbor")
    bench.warm_up("neighbor")
    assert len(steps) == 2
    assert bench.iterate("neighbor") > 0
    assert len(steps) == 5
    bench.close("neighbor")
    assert not bench._opened


def test_none_stays_until_the_batch_is_another(bench):
    bench.open(1, point(NONE))
    first = bench._opened[NONE]
    bench.open(2, point(NONE))
    assert bench._opened[NONE] is first
    bench.open(3, point(NONE, batch_size=8))
    assert bench._opened[NONE].batch_size == 8


def test_what_cannot_be_is_told_and_not_raised(bench):
    options = {"neighbor": {"topology": "inner-outer-ring:3"}}
    bench._config = msgspec.structs.replace(CONFIG, options=options)
    assert "takes no parameter" in bench.open(1, point("neighbor"))
    bench.close("neighbor")


@pytest.mark.parametrize("name", ["horovod", "hvd"])
def test_a_lone_worker_does_not_train_under_the_name_of_what_is_not_installed(bench, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert bench.open(1, point(name)).startswith("Horovod is not there: ")


@pytest.mark.slow
def test_a_trace_is_one_of_chrome(bench, tmp_path):
    bench.open(1, point(NONE))
    file = tmp_path / "folder" / "trace.json"
    bench.trace(NONE, str(file))
    assert json.loads(file.read_text())["traceEvents"]
