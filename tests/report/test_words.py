"""Pages name things for people, in one unit each."""

import pytest

from shoal.report.words import METRICS, key_label, key_words, scale_of

PLAIN = {
    "accuracy", "failures", "simulated", "latency", "loss", "memory", "staleness", "total", "waited", "wall",
}  # fmt: skip
"""Single words that people use."""


def test_no_figure_is_called_by_its_key():
    assert [
        key for key, info in METRICS.items() if info.words == key.replace("_", " ") and key not in PLAIN
    ] == []


def test_no_two_figures_of_one_unit_share_a_name_unless_they_are_one():
    same = {
        ("sec_per_iter", "seconds_per_iteration"),
        ("total", "wall"),
        ("virtual_s", "simulated"),
        ("samples_per_s", "throughput"),
    }
    names = {}
    for key, info in METRICS.items():
        names.setdefault(info.words, set()).add(key)
    assert {tuple(sorted(keys)) for keys in names.values() if len(keys) > 1} <= {
        tuple(sorted(pair)) for pair in same
    }


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ({"scenario": "experts", "num_peers": 12}, "experts, 12 peers"),
        ({"num_workers": 1}, "1 worker"),
        ({"num_processes": 1}, "1 process"),
        ({"contender": "pair", "split": "iid"}, "pair, split iid"),
        ({"learning_rate": 0.05, "batch_size": 2048}, "learning rate 0.05, batch size 2,048"),
        ({"size_bytes": 100, "in_flight": 64}, "100 bytes, 64 in flight"),
        ({"backward": True}, "backward calls: yes"),
    ],
)
def test_a_key_is_read_as_words(key, label):
    assert key_label(key) == label
    assert all("_" not in key_words(name) for name in key)


def test_shares_are_percent_and_rates_are_not_abbreviated():
    assert scale_of("final_accuracy", "", [0.26]).format(0.26) == "26.0 %"
    assert scale_of("samples_per_s", "1/s", [8070.0]).format(8070.0) == "8,070 /s"
    assert scale_of("echo", "GB/s", [1.5]).format(1.5) == "1.50 GB/s"
    assert scale_of("latency", "s", [0.002]).format(0.002) == "2.00 ms"
    assert all(info.unit == "" for info in METRICS.values() if info.shown == "percent")
