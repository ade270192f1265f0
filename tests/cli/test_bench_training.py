import json

import pytest

from shoal.bench.processes import by_hand
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.doctor import machine
from shoal.doctor.machine import Gpu, Gpus
from shoal.report import Report


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `run_and_tell` is asked for, by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    seen = {}

    def stand_in(typed, benchmark, plan):
        seen.update(benchmark=benchmark, config=plan.config, run=plan.run, where=plan.where)
        seen["result"] = plan.summarize

    monkeypatch.setattr(module, "run_and_tell", stand_in)
    return seen


@pytest.fixture
def call(asked, capsys):
    """Run `shoal bench training`, and give its exit code, stdout and stderr."""

    def call(*arguments):
        code = run(["bench", "training", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return call


def test_by_default_it_is_of_the_mlp_in_ten_pairs(call, asked):
    assert call()[0] == 0
    config = asked["config"]
    assert (config.model, config.batch_size, config.num_workers, config.num_pairs) == ("mlp", 64, 2, 10)
    assert config.strategies == ("all-reduce", "neighbor", "pair", "sma", "ddp")
    assert config.options["neighbor"]["topology"] == "exponential-2"
    assert (config.device, config.slow_rank, config.kungfu) == ("cpu", None, None)
    assert asked["run"].starts == 1
    report = Report(benchmark="training", created="", config={})
    assert asked["result"](report)["fraction_of_ceiling"] == {}


def test_options_reach_the_benchmark(call, asked):
    call("--model", "resnet18", "--strategies", "none,neighbor,pair", "--option", "topology=ring", "-np", 3)
    config = asked["config"]
    assert (config.model, config.image_size, config.batch_size, config.num_workers) == ("resnet18", 32, 32, 3)
    assert config.strategies == ("neighbor", "pair", "ddp")
    assert config.options["neighbor"]["topology"] == "ring"


def test_a_slow_worker_has_a_rank_and_a_factor(call, asked):
    call("--slow-worker", "2:4.5", "-np", 3, "--block-seconds", 0.5)
    assert (asked["config"].slow_rank, asked["config"].slow_factor) == (2, 4.5)
    assert asked["config"].block_s == 0.5


def test_parameter_servers_are_beside_the_workers(call, asked):
    call("--strategies", "parameter-server", "--num-servers", 2, "--option", "mode=sync")
    assert asked["config"].num_servers == 2
    assert asked["config"].options["parameter-server"]["mode"] == "sync"


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        (("--strategies", "none,sma"), ("sma", "ddp")),
        (("--strategies", "distributed-data-parallel,sma"), ("distributed-data-parallel", "sma")),
        (("--strategies", "sma,ddp", "--no-ddp"), ("sma",)),
        (("--no-ddp",), ("all-reduce", "neighbor", "pair", "sma")),
    ],
)
def test_ddp_is_in_the_same_run_unless_it_is_switched_off(call, asked, arguments, measured):
    assert call(*arguments)[0] == 0
    assert asked["config"].strategies == measured


def test_several_machines_bring_the_hierarchical_strategy_along(call, asked):
    call("--workers-per-machine", 1, "--short")
    assert asked["config"].strategies[-1] == "hierarchical"
    assert asked["config"].workers_per_machine == 1
    assert asked["config"].num_pairs < 10


@pytest.mark.parametrize(
    ("flag", "strategy"),
    [
        ("--kungfu=sync-sgd", "all-reduce"),
        ("--kf-optimizer=async-sgd", "pair"),
        ("--kf_optimizer=Sync_SGD_NCCL", "all-reduce"),
    ],
)
def test_a_command_of_kungfus_document_measures_that_strategy_alone(call, asked, flag, strategy):
    sizes = ("--num-warmup-batches", 10, "--num-batches-per-iter", 5, "--num-iters", 7)
    assert call(flag, "--model=ResNet50", "--batch-size=64", "--fuse", "--no-cuda", *sizes)[0] == 0
    config = asked["config"]
    assert config.strategies == (strategy,)
    assert config.kungfu == flag.partition("=")[2].lower().replace("_", "-")
    assert (config.model, config.image_size, config.batch_size) == ("resnet50", 224, 64)
    assert (config.num_warmup, config.iterations, config.num_pairs) == (10, 5, 7)


def test_flags_of_kungfus_script_that_change_nothing_say_what_they_mean_here(call, asked):
    code, _, said = call("--kungfu", "sma", "--eager", "--xla", "--optimizer", "SGD")
    assert (code, asked["config"].strategies) == (0, ("sma",))
    assert "--eager: PyTorch computes eagerly anyway." in said
    assert "--xla: nothing is compiled here" in said


@pytest.fixture
def two_gpus(monkeypatch, asked):
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda _: Gpus((Gpu("A"), Gpu("B"))))


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ((), "cuda"),
        (("-np", 3), "cuda"),
        (("--no-cuda",), "cpu"),
        (("--device", "cpu"), "cpu"),
        (("--strategies", "all-reduce,choco"), "cuda"),
        (("--kungfu", "async-sgd"), "cuda"),
        (("--device", "cuda", "--strategies", "choco", "-np", 3), "cuda"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_neither_workers_nor_strategies_change_the_device_or_the_image_size(call, asked, arguments, device):
    _, _, err = call(*arguments, "--model", "resnet50")
    assert asked["config"].device == device
    assert asked["config"].image_size == 224
    assert ("--image-size 32 is quicker" in err) == (device == "cpu")
    assert ("3 workers share 2 GPUs" in err) == (3 in arguments)


@pytest.mark.usefixtures("two_gpus")
def test_the_default_strategies_are_the_same_on_every_device(call, asked):
    call()
    on_gpus = asked["config"].strategies
    call("--device", "cpu")
    assert asked["config"].strategies == on_gpus


def test_images_change_their_size_by_the_flag_alone(call, asked):
    _, _, err = call("--model", "resnet50", "--image-size", 64)
    assert (asked["config"].device, asked["config"].image_size) == ("cpu", 64)
    assert "quicker" not in err


ROLE = ("--ps_hosts", "127.0.0.1:2222", "--worker_hosts", "127.0.0.1:1,127.0.0.1:2")


def test_a_worker_that_is_started_by_hand_has_a_report_of_its_own(call, asked):
    assert call(*ROLE, "--job_name", "worker", "--task_index", 1, "--num-iters", 30)[0] == 0
    config = asked["config"]
    assert (config.strategies, config.iterations, config.batch_size) == (("parameter-server",), 30, 64)
    assert asked["run"].report.name.startswith("training-worker-1-")
    assert isinstance(asked["where"], by_hand.WorkerByHand)


def test_what_a_worker_by_hand_is_told_is_heard(call, asked, monkeypatch):
    roles = []
    monkeypatch.setattr(by_hand, "WorkerByHand", lambda role, say: roles.append(role))
    flags = ("--iterations", 7, "--network-interface", "eth1", "--device", "cpu", "--no-cuda", "--fuse")
    assert call(*ROLE, "--job_name", "worker", *flags)[0] == 0
    assert asked["config"].iterations == 7
    assert roles[0].network_interface == "eth1"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-np", "2"), "--np means nothing"),
        (("-H", "a:2"), "-H means nothing"),
        (("--ssh-user", "me"), "--ssh-user means nothing"),
        (("--num-servers", "1"), "--num-servers means nothing"),
        (("--starts", "1"), "--starts means nothing"),
        (("--short",), "--short means nothing"),
        (("--workers-per-machine", "1"), "--workers-per-machine means nothing"),
        (("--block-seconds", "1"), "--block-seconds means nothing"),
        (("--num-batches-per-iter", "10"), "--num-batches-per-iter means nothing"),
        (("--no-ddp",), "--no-ddp means nothing"),
        (("--device", "cuda"), "There is no GPU"),
        (("--device", "cuda", "--no-cuda"), "--no-cuda and --device cuda contradict"),
        (("--num-iters", "3", "--iterations", "3"), "--num-iters and --iterations are the same"),
    ],
)
def test_flags_that_mean_nothing_by_hand_are_refused(call, asked, flags, says):
    code, _, complaint = call(*ROLE, "--job-name", "worker", *flags)
    assert (code, asked) == (2, {})
    assert says in complaint


@pytest.mark.usefixtures("two_gpus")
def test_a_worker_by_hand_computes_on_a_gpu_if_there_is_one_and_it_is_not_told_otherwise(call, asked):
    assert call(*ROLE, "--job-name", "worker")[0] == 0
    assert asked["config"].device == "cuda"
    assert call(*ROLE, "--job-name", "worker", "--device", "cpu")[0] == 0
    assert asked["config"].device == "cpu"


def test_a_server_by_hand_has_no_report(call, asked):
    code, _, complaint = call(*ROLE, "--job-name", "ps", "--report", "x.json")
    assert (code, asked) == (2, {})
    assert "A server measures nothing that --report could hold" in complaint


def test_a_server_that_is_started_by_hand_tells_what_it_has_counted(call, asked, monkeypatch):
    monkeypatch.setattr(by_hand, "serve", lambda role, config, say: {"num_applied": 3, "num_pushes": 4})
    code, out, _ = call(*ROLE, "--job_name", "ps")
    assert (code, asked) == (0, {})
    *_, told, result = out.splitlines()
    assert told == "All workers have left: 3 gradients of 4 applied."
    assert json.loads(result.removeprefix("RESULT: "))["task_index"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategies", "magic"),
        ("--strategies", "none"),
        ("--option", "topology"),
        ("--option", "x=1"),
        ("--model", "resnet51"),
        ("--model", "vgg16", "--image-size", "8"),
        ("--slow-worker", "2:10"),
        ("--slow-worker", "1"),
        ("--slow-worker", "1:0.5"),
        ("--kungfu", "sync"),
        ("--optimizer", "adam"),
        ("--kungfu", "sma", "--strategies", "sma"),
        ("--device", "cuda", "--no-cuda"),
        ("--num-servers", "2"),
        ("--iterations", "2", "--num-batches-per-iter", "2"),
        ("--job-name", "ps"),
        (*ROLE, "--job-name", "worker", "--task-index", "2"),
        (*ROLE, "--job-name", "worker", "--strategies", "pair"),
    ],
)
def test_what_there_is_not_is_bad_usage(call, asked, arguments):
    code, out, complaint = call(*arguments)
    assert (code, out) == (2, "")
    assert complaint.startswith("shoal: ")
    assert not asked
