"""Figures of documents stand beside ours where the setup is the same, and only there."""

import pytest

from report import samples
from shoal.report.html.plots import Shown
from shoal.report.html.published import beside_documents

SAME = {
    "num_experts": 16, "num_clients": 128, "num_batches_per_client": 16, "batch_size": 2048,
    "hidden_dim": 1024, "device": "cuda:0", "backward": True, "expert_class": "ffn",
}  # fmt: skip


def section(benchmark="experts", config=SAME, rows=None):
    key = {"scenario": "default", "num_clients": 128}
    rows = rows or [samples.row(key, "samples_per_s", "1/s", "higher", [[40_000.0]])]
    return beside_documents([Shown(samples.report(benchmark, rows, config=config))])


def test_the_same_setup_has_both_figures_and_the_source():
    content = section().content
    for words in ("28,581 /s", "40,000 /s", "GTX 1080 Ti", "--preset default"):
        assert words in content
    assert "Not compared" not in content
    assert "97,604" not in content, "the forward pass alone is another measurement"


def test_another_setup_says_how_it_differs_and_compares_nothing():
    content = section(config=SAME | {"batch_size": 32, "device": "cpu"}).content
    assert "28,581 /s" in content
    assert "40,000" not in content
    assert "batch size 2,048 there, 32 here" in content
    assert "device cuda there, cpu here" in content


@pytest.mark.parametrize(
    "config", [{}, {"backward": True, "expert_class": "ffn"}, SAME | {"expert_class": "nop"}]
)
def test_what_no_document_measured_has_no_section(config):
    assert section(config=config).content == ""
    assert section("transport").content == ""


def test_of_a_table_of_models_only_those_that_ran_are_shown():
    config = {
        "models": ["resnet101"],
        "batch_size": 32,
        "image_size": 224,
        "num_workers": 16,
        "device": "cuda",
    }
    key = {"model": "resnet101", "batch_size": 32, "label": "2M/8G"}
    content = section("ddp", config, [samples.row(key, "sec_per_iter", "s", "lower", [[0.2]])]).content
    assert "179 ms" in content
    assert "200 ms" in content
    assert "resnet50" not in content


def test_a_report_of_somebody_else_breaks_nothing():
    config = {"backward": True, "expert_class": "ffn", "batch_size": [{"a": "<b>"}], "device": None}
    assert "&lt;b&gt;" in section(config=config).content
