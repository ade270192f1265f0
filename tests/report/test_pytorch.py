import msgspec
import pytest

from shoal.core.errors import NotComparable, ReportError
from shoal.report import Report, Row, compare, load
from shoal.report.pytorch import diff_lines, to_document
from shoal.report.views import unpaired_lines


def document(seconds, *, models=("resnet50",), ranks=(1, 2, 16), bucket_size=25):
    return {
        "pytorch_version": "1.4.0a0+05140f0",
        "cuda_version": None,
        "distributed_backend": "nccl",
        "bucket_size": bucket_size,
        "benchmark_results": [
            {
                "model": model,
                "batch_size": 32,
                "result": [{"ranks": [0], "measurements": [9.0]}]
                + [{"ranks": list(range(n)), "measurements": [seconds * (1 + n / 100)] * 4} for n in ranks],
            }
            for model in models
        ],
    }


@pytest.fixture
def read(tmp_path):
    def read(content, name="report.json"):
        path = tmp_path / name
        path.write_bytes(msgspec.json.encode(content))
        return load(path)

    return read


def test_the_layout_is_that_of_pytorchs_tool_to_the_blank(read):
    old = read(document(0.1) | {"note": "x"})
    new = read(document(0.11, bucket_size=1))
    assert diff_lines(compare(old, new)) == [
        "                                 baseline                      test",
        "                     --------------------      --------------------",
        "bucket_size:                           25  vs                     1",
        "cuda_version:                        None  vs                  None",
        "distributed_backend:                 nccl  vs                  nccl",
        "note:                                   x  vs                     -",
        "pytorch_version:          1.4.0a0+05140f0  vs       1.4.0a0+05140f0",
        "",
        "Benchmark: resnet50 with batch size 32",
        "",
        "                  sec/iter    ex/sec      diff        sec/iter    ex/sec      diff",
        "   1 GPUs:  p75:    0.111s     288/s    -10.0%  p95:    0.111s     288/s    -10.0%",
        "   2 GPUs:  p75:    0.112s     285/s    -10.0%  p95:    0.112s     285/s    -10.0%",
        "  16 GPUs:  p75:    0.128s     250/s    -10.0%  p95:    0.128s     250/s    -10.0%",
        "",
    ]


def test_faster_is_positive_and_percentiles_interpolate(read):
    old, new = document(0.1, ranks=(4,)), document(0.1, ranks=(4,))
    old["benchmark_results"][0]["result"][1]["measurements"] = [1.0, 3.0, 2.0]
    new["benchmark_results"][0]["result"][1]["measurements"] = [0.5, 1.5, 1.0]
    line = diff_lines(compare(read(old), read(new)))[-2]
    assert line == "   4 GPUs:  p75:    1.250s      25/s    +50.0%  p95:    1.450s      22/s    +50.0%"


def test_a_missing_model_or_size_misaligns_nothing(read):
    old = read(document(0.1, models=("resnet50", "resnet101", "vgg16"), ranks=(1, 2, 4)))
    new = read(document(0.1, models=("vgg16", "resnet101"), ranks=(2, 4, 8)))
    diff = compare(old, new)
    assert [(pair.test.key["model"], pair.test.key["num_ranks"]) for pair in diff.rows] == [
        ("resnet101", 2), ("resnet101", 4), ("vgg16", 2), ("vgg16", 4),
    ]  # fmt: skip
    assert all(change.percent in (0, None) for pair in diff.rows for change in pair.changes)
    text = "\n".join(unpaired_lines(diff))
    assert text.count("Only in the baseline: model=resnet50 ") == 3
    assert "Only in the test: model=vgg16 batch_size=32 num_ranks=8" in text


def test_the_run_without_ddp_is_read_but_not_compared(read):
    report = read(document(0.1, ranks=(1,)))
    assert [row.key["has_ddp"] for row in report.rows] == [False, True]
    assert len(compare(report, report).rows) == 1


def test_runs_of_equal_size_stay_apart(read):
    report = read(document(0.1, ranks=(8, 8)))
    assert [row.key.get("occurrence") for row in report.rows] == [None, None, 2]


def test_a_run_without_measurements_is_a_failed_row(read):
    content = document(0.1, ranks=(1,))
    content["benchmark_results"][0]["result"][1]["measurements"] = []
    assert [row.error for row in read(content).failed] == ["no measurements"]


def test_it_never_pairs_with_a_report_of_shoal(read, make_report):
    with pytest.raises(NotComparable, match="the baseline is PyTorch's DDP-benchmark JSON"):
        compare(read(document(0.1)), make_report())


def test_a_damaged_file_names_the_place(read):
    content = document(0.1)
    content["benchmark_results"][0]["result"][1]["measurements"][2] = "slow"
    with pytest.raises(ReportError, match=r"result\[1\]\.measurements\[2\]"):
        read(content)


def swept(*, strategy="ddp", failed=()):
    def row(model, label, num_ranks, starts):
        key = {"model": model, "batch_size": 32, "image_size": 32, "label": label, "num_ranks": num_ranks}
        named = {"error": "lost"} if label in failed else {"starts": starts}
        return Row(key=key, metric="sec_per_iter", unit="s", direction="lower", **named)

    rows = [
        row(model, label, num_ranks, [[0.1] * num_ranks, [0.2] * num_ranks])
        for model in ("resnet18", "vgg16")
        for label, num_ranks in (("no ddp", 1), ("1M/1G", 1), ("1M/2G", 2))
    ]
    skew = Row(
        key={"model": "resnet18"}, metric="slowest_over_fastest", unit="", direction="lower", starts=[[1]]
    )
    config = {
        "strategy": strategy,
        "distributed_backend": "gloo",
        "bucket_size": 25,
        "batch_size": 32,
    }
    environment = {"versions": {"torch": "2.6.0"}}
    return Report(benchmark="ddp", created="", config=config, environment=environment, rows=[*rows, skew])


def test_a_sweep_is_written_in_pytorchs_schema_with_starts_pooled():
    assert to_document(swept())["benchmark_results"][1]["model"] == "vgg16"
    written = to_document(swept())
    written["benchmark_results"].pop()
    assert written == {
        "pytorch_version": "2.6.0",
        "cuda_version": None,
        "distributed_backend": "gloo",
        "bucket_size": 25,
        "benchmark_results": [
            {
                "model": "resnet18",
                "batch_size": 32,
                "result": [
                    {"ranks": [0], "measurements": [0.1, 0.2]},
                    {"ranks": [0], "measurements": [0.1, 0.2]},
                    {"ranks": [0, 1], "measurements": [0.1, 0.1, 0.2, 0.2]},
                ],
            }
        ],
    }


def test_what_was_written_is_read_and_compared(read):
    report = read(to_document(swept()))
    assert diff_lines(compare(report, report))[-3:] == [
        "   1 GPUs:  p75:    0.175s     182/s     -0.0%  p95:    0.195s     164/s     -0.0%",
        "   2 GPUs:  p75:    0.200s     160/s     -0.0%  p95:    0.200s     160/s     -0.0%",
        "",
    ]


def test_a_failed_stage_is_left_out_and_the_baseline_keeps_its_place():
    failed = to_document(swept(failed=("no ddp", "1M/1G")))["benchmark_results"][0]["result"]
    assert failed == [
        {"ranks": [0], "measurements": []},
        {"ranks": [0, 1], "measurements": [0.1, 0.1, 0.2, 0.2]},
    ]


def test_another_strategy_is_compared_as_configuration(read):
    ddp, other = read(to_document(swept())), read(to_document(swept(strategy="all-reduce")))
    assert "strategy:                               -  vs            all-reduce" in diff_lines(
        compare(ddp, other)
    )
