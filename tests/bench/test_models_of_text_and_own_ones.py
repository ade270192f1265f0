"""GPTs with synthetic tokens, reported in tokens/s, and models of the user's own, in all that train."""

import msgspec
import pytest

from shoal.bench.accuracy import AccuracyFlags, AccuracyScenario, accuracy_config
from shoal.bench.contenders import tell_inputs
from shoal.bench.ddp import DdpConfig, DdpFlags, DdpScenario, ddp_config, ddp_items, summarize_ddp
from shoal.bench.frame import RunFlags
from shoal.bench.ranks import HostFlags
from shoal.bench.scaling import ScalingConfig, ScalingFlags, ScalingScenario, scaling_config
from shoal.bench.tables.scaling import scaling_items, summarize_scaling
from shoal.bench.tables.training import summarize_training, training_items
from shoal.bench.training import TrainingConfig, TrainingFlags, TrainingScenario, training_config
from shoal.core import UsageError
from shoal.models import model_named
from shoal.report import Report, Row

NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))

def seen():
    return nn.Conv2d(3, 4, 3), {"input_shape": (3, 8, 8)}

def of_digits():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def of_few():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return "net.py:net"


def report_of(benchmark, scenario, config):
    rows = {}
    for row in scenario.run(lambda text: None):
        if isinstance(row, Row):
            rows[row.identity] = row
    return Report(benchmark=benchmark, created="", config=config, rows=list(rows.values()))


def text_of(items):
    return "\n".join(item if isinstance(item, str) else str(getattr(item, "title", item)) for item in items)


def test_a_text_has_tokens_and_an_image_a_side():
    args = HostFlags(), RunFlags()
    config = training_config(TrainingFlags(model="gpt-nano", device="cpu"), *args)
    assert (config.image_size, config.sequence_length, config.batch_size) == (None, 64, 32)
    config = scaling_config(ScalingFlags(model="gpt-small", sequence_length=9, device="cpu"), *args)
    assert (config.model, config.image_size, config.sequence_length) == ("gpt-small", None, 9)
    assert config.num_classes == 50257
    config = ddp_config(DdpFlags(model=("gpt-nano", "small-cnn"), sequence_length=9, device="cpu"), *args)
    assert (config.models, config.image_size, config.sequence_length) == (("gpt-nano", "small-cnn"), 8, 9)


@pytest.mark.parametrize(
    ("flags", "make", "says"),
    [
        (TrainingFlags(model="mlp", sequence_length=3, device="cpu"), training_config, "mlp reads no tokens"),
        (TrainingFlags(model="gpt-nano", image_size=3, device="cpu"), training_config, "takes no images"),
        (
            ScalingFlags(model="gpt-nano", num_classes=3, device="cpu"),
            scaling_config,
            "256 classes of its own",
        ),
        (ScalingFlags(model="gpt-nano", predict=True, device="cpu"), scaling_config, "no cost model of text"),
        (DdpFlags(model=("gpt-nano",), image_size=3, device="cpu"), ddp_config, "takes no images"),
        (DdpFlags(model=("mlp",), sequence_length=3, device="cpu"), ddp_config, "mlp reads no tokens"),
        (DdpFlags(model=("restnet18",), device="cpu"), ddp_config, "Did you mean 'resnet18'"),
    ],
)
def test_sizes_of_other_inputs_are_refused(flags, make, says):
    with pytest.raises(UsageError, match=says):
        make(flags, HostFlags(), RunFlags())


def test_a_guess_is_told(net, capsys):
    tell_inputs(model_named(net), "cpu")
    assert "net.py:net is given inputs of 12, as guessed from its first layer" in capsys.readouterr().err
    tell_inputs(model_named("gpt-nano"), "cpu")
    tell_inputs(model_named("small-cnn"), "cuda")
    assert capsys.readouterr().err == ""
    tell_inputs(model_named("inception_v3"), "cpu")
    assert "--image-size 75 is quicker" in capsys.readouterr().err


def test_a_model_that_returns_no_logits_is_refused(net):
    with pytest.raises(UsageError, match=r"logits of shape \(2, 4, 6, 6\), not of \(batch, classes\)"):
        model_named("net.py:seen")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-nano", "net.py:net"])
def test_training(net, model):
    config = TrainingConfig(
        model=model,
        sequence_length=8 if model == "gpt-nano" else None,
        batch_size=2,
        strategies=("all-reduce",),
        num_pairs=1,
        num_warmup=1,
        block_s=0.1,
    )
    document = {"model": model, "sequence_length": config.sequence_length, "num_workers": 2, "batch_size": 2}
    report = report_of("training", TrainingScenario(msgspec.to_builtins(config), 0), document)
    assert not report.failed
    result = summarize_training(report)
    if model == "gpt-nano":
        # both are rounded to a tenth
        assert result["tokens_per_s"]["none"] == pytest.approx(8 * result["examples_per_s"]["none"], abs=0.5)
        assert "tokens/s, mean" in text_of(training_items(report))
        assert "tokens/s" in result["headline"][0]
    else:
        assert "tokens_per_s" not in result


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-nano", "net.py:net"])
def test_scaling(net, model):
    is_text = model == "gpt-nano"
    config = ScalingConfig(
        model=model,
        image_size=None,
        sequence_length=8 if is_text else None,
        num_classes=256 if is_text else 5,
        batch_sizes=(2,),
        num_workers=(2,),
        strategies=("all-reduce",),
        num_warmup_batches=1,
        num_batches_per_iter=1,
        num_iters=1,
    )
    report = report_of(
        "scaling", ScalingScenario(msgspec.to_builtins(config), 0), msgspec.to_builtins(config)
    )
    assert not report.failed
    assert ("tokens_per_s" if is_text else "images_per_s") in summarize_scaling(report)
    text = text_of(scaling_items(report))
    assert ("Total tok/sec on 2 GPU(s)" in text) == is_text
    assert ("gpt-nano, sequences of 8 tokens, 256 in the vocabulary" in text) == is_text


@pytest.mark.slow
def test_ddp(net):
    config = DdpConfig(
        models=("gpt-nano", net),
        image_size=None,
        sequence_length=8,
        batch_size=2,
        num_warmup=1,
        num_iters=2,
        options={"bucket_mib": 25},
    )
    report = report_of("ddp", DdpScenario(msgspec.to_builtins(config), 0), msgspec.to_builtins(config))
    assert not report.failed
    models = summarize_ddp(report)["models"]
    last = models["gpt-nano"]["1M/2G"]
    assert last["tokens_per_s_per_worker"] == pytest.approx(8 * last["examples_per_s_per_worker"], abs=0.5)
    assert "tokens_per_s_per_worker" not in models[net]["1M/2G"]
    text = text_of(ddp_items(report))
    assert "* Tokens of an example: 8" in text
    assert text.count("tok/sec") == text.count(" ex/sec") == 4
    assert "Image size" not in text


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("net.py:net", "net.py:net fails on the images of digits, of shape (1, 8, 8)"),
        ("net.py:of_few", "returns logits of shape (5,) for an image of digits"),
        ("smal-mlp", "There is no model 'smal-mlp' for digits. Did you mean 'small-mlp'"),
    ],
)
def test_who_cannot_learn_a_task_is_told_so_before_anything_runs(net, model, says):
    with pytest.raises(UsageError) as caught:
        accuracy_config(AccuracyFlags(model=model, device="cpu"), HostFlags(), RunFlags())
    assert says in caught.value.what


def test_a_model_of_ones_own_learns_a_task(net):
    asked = AccuracyFlags(
        model="net.py:of_digits",
        strategies=("all-reduce",),
        num_workers=1,
        splits=("iid",),
        steps=40,
        device="cpu",
    )
    config = msgspec.to_builtins(accuracy_config(asked, HostFlags(), RunFlags()))
    report = report_of("accuracy", AccuracyScenario(config, 0), config)
    (reached,) = [row.samples[0] for row in report.rows if row.metric == "final_accuracy"]
    assert reached > 0.7
