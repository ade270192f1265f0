"""Flags of `shoal bench ddp`: the document's defaults, and how a process becomes one rank."""

import os

import msgspec
import pytest

from shoal.bench.ddp import DdpConfig
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.doctor import machine
from shoal.report import Code, Report, Row

PLACED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Give the config of a command line; nothing is measured."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in PLACED})

    def measure(benchmark, config, settings, **_):
        found.append(msgspec.convert(config, DdpConfig))
        key = {"model": "resnet18", "batch_size": 32, "label": "no ddp", "num_ranks": 1}
        row = Row(key=key, metric="sec_per_iter", unit="s", direction="lower", starts=[[0.5]])
        return [
            Report(
                benchmark="ddp",
                created="2026-01-02T03:04:05+00:00",
                config=config,
                code=Code(version="1"),
                environment={"versions": {"torch": "2.6.0"}},
                rows=[row],
            )
        ]

    monkeypatch.setattr(module, "run_benchmark", measure)

    def configured(*flags):
        assert run(["bench", "ddp", "--device", "cpu", *flags]) == 0
        return found[-1]

    return configured


@pytest.fixture
def four_gpus(monkeypatch):
    found = machine.Gpus((machine.Gpu("NVIDIA H200"),) * 4)
    monkeypatch.setattr(machine, "torch_build", lambda: "CUDA 12.4")
    monkeypatch.setattr(machine, "gpus", lambda answer_s: found)


def test_defaults_on_the_cpu(configured):
    config = configured()
    assert (config.models, config.image_size, config.num_workers) == (("resnet18",), 32, 2)
    assert (config.distributed_backend, config.options["bucket_mib"]) == ("gloo", 25.0)
    assert (config.num_warmup, config.num_iters, config.batch_size) == (5, 10, 32)


def test_defaults_on_gpus_are_the_documents(configured, four_gpus):
    config = configured("--device", "cuda")
    assert config.models == ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d")
    assert (config.image_size, config.num_workers, config.distributed_backend) == (224, 4, "nccl")


def test_workers_that_share_gpus_talk_by_gloo_and_not_by_nccl(configured, four_gpus, capsys):
    config = configured("--device", "cuda", "--np", "5", "--model", "resnet18")
    assert (config.device, config.image_size, config.distributed_backend) == ("cuda", 32, "gloo")
    assert "5 workers share 4 GPUs" in capsys.readouterr().err
    assert run(["bench", "ddp", "--np", "5", "--distributed-backend", "nccl"]) == 2
    assert "NCCL refuses workers that share a GPU" in capsys.readouterr().err


def test_strategies_of_ours_share_in_the_group_itself_on_gpus_too(configured, four_gpus):
    flags = ("--device", "cuda", "--strategy", "all-reduce", "--model", "resnet50")
    assert configured(*flags).distributed_backend == "shoal"
    assert configured(*flags, "--distributed-backend", "nccl").distributed_backend == "nccl"


def test_images_have_the_models_own_size_on_every_device(configured, four_gpus, capsys):
    sizes = [
        configured("--device", device, "--model", model).image_size
        for device in ("cpu", "cuda")
        for model in ("resnet18", "resnet50", "resnet18,resnet50")
    ]
    assert sizes == [32, 224, 224] * 2
    assert "--image-size 32 is quicker" in capsys.readouterr().err
    assert configured("--model", "resnet50", "--image-size", "64").image_size == 64


def test_models_in_other_spellings_and_strategies_by_other_names(configured):
    config = configured(
        "--model", "ResNet50,mobilenet-v2,resnet50", "--strategy", "sync-sgd", "--bucket-size", "1"
    )
    assert config.models == ("resnet50", "mobilenet_v2")
    assert (config.strategy, config.distributed_backend) == ("sync-sgd", "shoal")
    assert config.options["bucket_mib"] == 1.0
    assert config.bucket_size == 1
    assert configured("--strategy", "neighbor").bucket_size is None


def test_json_on_stdout_is_pytorchs_alone(configured, capsys):
    configured("--json", "-")
    out, err = capsys.readouterr()
    assert list(msgspec.json.decode(out)) == [
        "pytorch_version", "cuda_version", "distributed_backend", "bucket_size", "benchmark_results",
    ]  # fmt: skip
    assert "RESULT: " in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--world-size", "2"], "without --rank and --master-addr and --master-port"),
        (["--rank", "1"], "--rank says nothing without --world-size"),
        (["--model", "nope"], "There is no model 'nope'"),
        (["--option", "bucket_mib=1"], "say --bucket-size 1"),
        (["--strategy", "neighbor", "--bucket-size", "1"], "in buckets"),
        (["--device", "cuda"], "There is no GPU"),
    ],
)
def test_what_is_missing_is_said(configured, monkeypatch, capsys, flags, says):
    monkeypatch.setattr(machine, "torch_build", lambda: "CPU")
    assert run(["bench", "ddp", *flags]) == 2
    assert says in capsys.readouterr().err


def test_flags_of_one_copy_a_rank_place_this_process(configured, monkeypatch):
    joined = []

    def join(stack, run):
        joined.append({name: os.environ.get(name) for name in PLACED[:4]})
        raise SystemExit(0)

    monkeypatch.setattr(module, "_join", join)
    flags = ["--world-size", "2", "--rank", "1", "--master-addr", "localhost", "--master-port", "29500"]
    with pytest.raises(SystemExit):
        run(["bench", "ddp", *flags])
    assert joined == [{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}]


def test_a_world_of_one_needs_nothing_more(configured):
    assert configured("--world-size", "1").num_workers == 1
