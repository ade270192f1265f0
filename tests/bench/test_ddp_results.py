"""The document's layouts, to the blank."""

import msgspec
import pytest

from shoal.bench.ddp import (
    DdpConfig,
    ddp_items,
    encode_ddp,
    header_lines,
    options_of,
    slowest_rank,
    summarize_ddp,
    table_lines,
)
from shoal.report import Code, Report, Row

TOPOLOGY = "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18"


def row(metric, label, num_ranks, starts=(), error=None, **key):
    key = {"model": "resnet18", "batch_size": 32, "label": label, "num_ranks": num_ranks, **key}
    starts = [list(start) for start in starts]
    return Row(key=key, metric=metric, unit="s", direction="lower", starts=starts, error=error)


def make(rows, topology="CPU NODE", cuda=None, **changed):
    versions = {"torch": "2.6.0"} if cuda is None else {"torch": "2.6.0+cu124", "cuda": cuda}
    config = DdpConfig(options=options_of("ddp", {}, 25), num_iters=2, **changed)
    return Report(
        benchmark="ddp",
        created="2026-01-02T03:04:05+00:00",
        config=msgspec.to_builtins(config),
        seeds=[0],
        code=Code(version="0.1.0"),
        environment={
            "machine": "worker-0",
            "versions": versions,
            "processor": "a CPU",
            "device": "NVIDIA H200",
            "cores": 2,
            "topology": topology,
        },
        rows=rows,
    )


@pytest.fixture
def report():
    return make(
        [
            row("sec_per_iter", "no ddp", 1, [[0.097, 0.0971]]),
            row("sec_per_iter", "1M/1G", 1, [[0.100, 0.1002]]),
            row("sec_per_iter", "1M/2G", 2, [[0.104, 0.104, 0.12, 0.12]]),
            row("slowest_over_fastest", "1M/2G", 2, [[1.15, 1.15]]),
        ]
    )


def text(report):
    return [item if isinstance(item, str) else item[0] for item in ddp_items(report)]


def figures(*pairs):
    names = ("p50", "p75", "p90", "p95")
    return "".join(
        f"  {name}:  {seconds}s  {rate:>6}/s" for name, (seconds, rate) in zip(names, pairs, strict=False)
    )


def test_the_table_is_the_documents_to_the_blank(report):
    lines = list(table_lines([row for row in report.rows if row.metric == "sec_per_iter"]))
    assert lines == [
        " " * 22 + "      sec/iter    ex/sec" * 4,
        "   1 GPUs --   no ddp:" + figures(("0.097", 329), ("0.097", 329), ("0.097", 329), ("0.097", 329)),
        "   1 GPUs --    1M/1G:" + figures(("0.100", 319), ("0.100", 319), ("0.100", 319), ("0.100", 319)),
        "   2 GPUs --    1M/2G:" + figures(("0.112", 285), ("0.120", 266), ("0.120", 266), ("0.120", 266)),
    ]
    assert figures(("0.097", 329), ("0.104", 9)) == "  p50:  0.097s     329/s  p75:  0.104s       9/s"
    assert [line in text(report) for line in lines] == [True] * 4


def test_the_header_says_what_was_measured_with(report):
    lines = list(header_lines(report))
    for line in (
        "* Shoal version: 0.1.0",
        "* PyTorch version: 2.6.0",
        "* CUDA version: None",
        "* Distributed backend: gloo",
        "* Maximum bucket size: 25MB",
        "* Image size: 32x32",
        "* Iterations: 5 to warm up, 2 measured",
        "* Device: a CPU",
        "* Machine: worker-0",
        "--- lscpu ---",
        "CPU NODE",
    ):
        assert line in lines
    assert any(line.startswith("On the CPU") for line in lines)


def test_a_topology_of_gpus_is_named_and_loses_its_tabs_and_escapes(report):
    changed = make(
        report.rows,
        TOPOLOGY,
        cuda="12.4",
        device="cuda",
        distributed_backend="nccl",
        strategy="neighbor",
        bucket_size=None,
        num_workers=4,
    )
    lines = list(header_lines(changed))
    at = lines.index("--- nvidia-smi topo -m ---")
    assert lines[at + 2 : at + 4] == ["        GPU0    GPU1", "GPU0     X      NV18"]
    assert "* Device: NVIDIA H200" in lines
    assert "* CUDA version: 12.4" in lines
    assert msgspec.json.decode(encode_ddp(changed))["cuda_version"] == "12.4"
    assert not any("bucket" in line or line.startswith("On the CPU") for line in lines)


def test_more_workers_than_cores_are_pointed_out(report):
    assert not any("share" in line for line in header_lines(report))
    assert any("4 workers share 2 cores" in line for line in header_lines(make(report.rows, num_workers=4)))


def test_uneven_ranks_are_named_and_even_ones_are_not(report):
    assert any("1.15 times" in line and "rank 1 is the slowest" in line for line in text(report))
    even = make([*report.rows[:3], row("slowest_over_fastest", "1M/2G", 2, [[1.01, 1.01]])])
    assert not any("slowest" in line for line in text(even))


def test_the_slowest_rank_is_found_over_all_starts():
    pooled = row(
        "sec_per_iter", "1M/2G", 2, [[1.0, 1.0, 1.1, 1.1], [9.0, 9.0, 1.2, 1.2], [1.0, 1.0, 1.3, 1.3]]
    )
    assert slowest_rank(pooled, num_iters=2) == 1


def test_failed_stages_and_starts_are_lines(report):
    start = Row(
        key={"scenario": "start", "start": 2}, metric="completed", unit="", direction="higher", error="x"
    )
    failed = make([*report.rows[:2], row("sec_per_iter", "1M/2G", 2, error="rank 1 is lost"), start])
    assert "1M/2G failed: rank 1 is lost" in text(failed)
    assert "failed: x" in text(failed)
    assert summarize_ddp(failed)["failed"] == 2


def test_another_machine_is_a_warning(report):
    other = Row(
        key={"machine": 1, "host": "b", "differs_in": "cores"},
        metric="like_machine_0",
        unit="",
        direction="higher",
        starts=[[0.0]],
    )
    lines = text(make([other, *report.rows]))
    assert "Warning: b differs from the first machine: cores." in lines
    assert "* Machine: worker-0, and 1 more" in lines


def test_the_result_has_every_stage_and_a_headline(report):
    result = summarize_ddp(report)
    assert result["models"]["resnet18"]["1M/2G"]["sec_per_iter"]["p50"] == 0.112
    assert result["models"]["resnet18"]["no ddp"]["examples_per_s_per_worker"] == 329.7
    assert result["slowest_over_fastest"] == {"resnet18 1M/2G": 1.15}
    [headline] = result["headline"]
    assert headline.startswith(
        "resnet18 takes 0.112 s an iteration on 2 workers (1M/2G): each worker at 87 %"
    )
    assert headline.endswith("at 87 % of the speed of one without ddp.")


def test_pytorchs_file_is_one_line_of_json(report):
    assert msgspec.json.decode(encode_ddp(report))["bucket_size"] == 25
    assert encode_ddp(report).count(b"\n") == 1
