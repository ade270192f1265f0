import pytest

from shoal.bench.scaling import ScalingConfig, doubling
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.doctor import machine


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `shoal bench scaling`: its exit code, stderr, and the config that was to be measured."""
    asked = []
    monkeypatch.setattr(module, "run_and_tell", lambda typed, _, plan: asked.append(plan.config))

    def call(*arguments):
        code = run(["bench", "scaling", *map(str, arguments)])
        return code, capsys.readouterr().err, (asked[-1] if asked else None)

    return call


def test_the_document_s_command_is_of_one_strategy_with_one_number(call):
    flags = ["--no-cuda", "--disable_dynamic_topology", "--atc-style", "--batch-size", 64]
    code, _, config = call("--np", 4, "--dist-optimizer", "neighbor_allreduce", *flags)
    assert code == 0
    assert config == ScalingConfig(
        model="resnet18",
        image_size=32,
        num_classes=10,
        batch_sizes=(64,),
        num_workers=(4,),
        crew_size=4,
        strategies=("neighbor_allreduce",),
        is_dynamic=False,
        is_adapt_then_combine=True,
    )


def test_flags_reach_the_benchmark(call):
    sweep = ["--np", "4,1,2", "--batch-size", "64,32", "--strategies", "none,neighbor,all-reduce,neighbor"]
    sizes = ["--model", "ResNet50", "--image-size", 64, "--num-classes", 7, "--workers-per-machine", 2]
    times = ["--num-warmup-batches", 0, "--num-batches-per-iter", 3, "--num-iters", 5, "--short"]
    more = ["--option", "topology=ring", "--profile", "wan", "--predict", "--device", "cpu", "--seed", 3]
    _, _, config = call(*sweep, *sizes, *times, *more)
    assert config == ScalingConfig(
        model="resnet50",
        image_size=64,
        num_classes=7,
        batch_sizes=(64, 32),
        num_workers=(1, 2, 4),
        crew_size=4,
        workers_per_machine=2,
        strategies=("neighbor", "all-reduce"),
        options={"neighbor": {"topology": "ring"}},
        num_warmup_batches=0,
        num_batches_per_iter=3,
        num_iters=5,
        profile="wan",
        between="machines",
        should_predict=True,
        seed=3,
    )


def test_a_launcher_s_processes_are_measured_by_doubling(call, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert call("--no-cuda")[2].num_workers == (1, 2, 4, 6)
    assert call("--no-cuda", "--dist-optimizer", "allreduce")[2].num_workers == (6,)
    config = call("--no-cuda", "--np", "2,3")[2]
    assert (config.num_workers, config.crew_size) == ((2, 3), 6)


def test_a_profile_is_of_the_links_that_there_are(call):
    of_workers = ["--no-cuda", "--profile", "wan", "--np", 4]
    assert call(*of_workers)[2].between == "workers"
    assert call(*of_workers, "-H", "localhost:4")[2].between == "workers"
    assert call(*of_workers, "-H", "far:4")[2].between == "workers"
    assert call(*of_workers, "-H", "far:2,away:2")[2].between == "machines"
    assert call(*of_workers, "--workers-per-machine", 2)[2].between == "machines"


@pytest.mark.parametrize(("last", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8))])
def test_numbers_double_up_to_the_last(last, counts):
    assert doubling(last) == counts


def test_a_gpu_is_taken_where_there_is_one(call, monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    config = call("--np", 2)[2]
    assert (config.device, config.model, config.image_size) == ("cuda", "resnet50", 224)
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    assert call("--np", 2)[2].device == "cpu"
    assert call("--np", 2, "--device", "cuda", "-H", "far:2")[2].device == "cuda"
    code, complaint, _ = call("--device", "cuda")
    assert code != 0
    assert "no GPU" in complaint


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategies", "neighbour"], "no strategy 'neighbour'"),
        (["--strategies", "none"], "no strategy to measure"),
        (["--strategies", "sma", "--dist-optimizer", "horovod"], "one of both"),
        (["--np", "0"], "no workers"),
        (["--np", "two"], "no list of numbers"),
        (["--model", "inception"], "no model 'inception'"),
        (["--profile", "moon"], "moon"),
        (["--option", "topologie=ring"], "topologie"),
        (["--no-cuda", "--device", "cuda"], "--no-cuda"),
        (["--strategies", "parameter-server"], "bench training"),
        (["--np", "2", "--profile", "wan", "--between", "machines"], "split it: --workers-per-machine K"),
        (["--np", "2", "--profile", "wan", "--workers-per-machine", "2"], "or --between workers"),
        (["--np", "2", "--profile", "wan", "-H", "localhost:2", "--between", "machines"], "on one machine"),
        (["--between", "workers"], "there is none"),
    ],
)
def test_what_cannot_be_measured_is_bad_usage(call, arguments, says):
    code, complaint, config = call(*arguments)
    assert code != 0
    assert says in complaint
    assert config is None
