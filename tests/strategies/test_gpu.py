"""Models on a GPU, which the workers share: each strategy computes there what it does on the CPU."""

import contextlib
import uuid
import warnings

import pytest
import torch
from torch import nn

from contracts import strategy_checks as checks
from contracts.strategies import CASES, EVERY
from shoal.core import Placement
from shoal.group import GroupSettings, open_host_group, share
from shoal.group.opening import WithServers
from shoal.group.operations import GroupWrapper
from shoal.group.solo import SoloGroup
from shoal.strategies import make_strategy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

ON_GPU = ("all-reduce", "ddp", "neighbor", "hierarchical", "pair", "sma", "local-sgd", "diloco")
ON_GPU += ("push-sum", "window", "noloco", "sparse-loco")
CONTRACT = [name for name in EVERY if CASES[name].strategy in ON_GPU]
IN_STEP = {
    "all-reduce": ("all-reduce", {}),
    "all-reduce, local": ("all-reduce", {"local_steps": 3}),
    "all-reduce, monitored": ("all-reduce", {"monitor": True}),
    "ddp": ("ddp", {}),
    "neighbor": ("neighbor", {"topology": "ring"}),
    "neighbor, while": ("neighbor", {"order": "adapt-while-combine"}),
    "hierarchical": ("hierarchical", {}),
    "sma": ("sma", {"alpha": 0.4}),
    "local-sgd": ("local-sgd", {"local_steps": 3}),
    "local-sgd, momentum": ("local-sgd", {"local_steps": 2, "average_momentum": True}),
    "diloco": ("diloco", {"local_steps": 4}),
    "diloco, streaming": ("diloco", {"local_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5}),
    "noloco": ("noloco", {"local_steps": 4}),
    "sparse-loco": ("sparse-loco", {"local_steps": 4, "density": 0.2}),
    "window, barrier": ("window", {"force_barrier": True}),
}
"""What computes the same however fast its workers are."""
ASYNCHRONOUS = {"pair": ("pair", {}), "window": ("window", {}), "push-sum": ("push-sum", {})}
SERVED = {
    "async": ("parameter-server", {}),
    "bounded": ("parameter-server", {"mode": "bounded", "staleness": 0}),
    "sync": ("parameter-server", {"mode": "sync"}),
    "pulled seldom": ("parameter-server", {"pull_every": 2}),
    "compressed": ("parameter-server", {"compression": "fp16"}),
    "staleness-aware": ("staleness-aware", {}),
}
DEVICES = [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
"""Of the workers, and of the servers."""
NUM_STEPS = 10


def build(device, momentum=0.0):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def steps(group, model, optimizer, numbers):
    device = next(model.parameters()).device
    for number in numbers:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + group.rank)).to(device)
        optimizer.zero_grad()
        (model(x) - group.rank).square().mean().backward()
        optimizer.step()


def values(model):
    return [tensor.detach().cpu().double().flatten().tolist() for tensor in model.state_dict().values()]


def close(got, wanted):
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=2e-4, abs=2e-4)


def train(group, arguments):
    """Ten steps; with a `folder`, its checkpoint after five of them is taken up by a second model."""
    strategy = make_strategy(group, arguments["strategy"], **arguments["options"])
    model, optimizer = build(arguments["device"], arguments.get("momentum", 0.0))
    with strategy.attach(model, optimizer, stays=True):
        steps(group, model, optimizer, range(5))
        if "folder" in arguments:
            strategy.save(arguments["folder"])
        steps(group, model, optimizer, range(5, NUM_STEPS))
        assert next(model.parameters()).device.type == torch.device(arguments["device"]).type
    return values(model)


def resume(group, arguments):
    strategy = make_strategy(group, arguments["strategy"], **arguments["options"])
    model, optimizer = build(arguments["device"], arguments["momentum"])
    strategy.load(arguments["folder"])
    with strategy.attach(model, optimizer, stays=True):
        assert strategy.steps == 5
        steps(group, model, optimizer, range(5, NUM_STEPS))
    return values(model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", IN_STEP)
def test_the_same_as_on_the_cpu(workers, name, momentum):
    strategy, options = IN_STEP[name]
    arguments = {"strategy": strategy, "options": options, "momentum": momentum}
    wanted = workers.run(train, 2, {**arguments, "device": "cpu"}, timeout_s=60)
    got = workers.run(train, 2, {**arguments, "device": "cuda"}, timeout_s=60)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(
    ("strategy", "codec"), [("local-sgd", "int8"), ("diloco", "fp16"), ("window", "bf16")]
)
def test_what_is_sent_may_be_encoded(workers, strategy, codec):
    """All workers decode the same, where each has everybody's."""
    options = {"codec": codec, **({"local_steps": 5} if strategy != "window" else {})}
    arguments = {"strategy": strategy, "options": options, "device": "cuda"}
    first, second = workers.run(train, 2, arguments, timeout_s=60)
    assert all(torch.tensor(tensor).isfinite().all() for tensor in first + second)
    if strategy != "window":
        close(first[:2], second[:2])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", [name for name in IN_STEP if "monitored" not in name])
def test_a_checkpoint_of_a_gpu_is_taken_up(workers, tmp_path, name, device):
    strategy, options = IN_STEP[name]
    arguments = {"strategy": strategy, "options": options, "momentum": 0.9, "folder": str(tmp_path)}
    wanted = workers.run(train, 2, {**arguments, "device": "cuda"}, timeout_s=60)
    got = workers.run(resume, 2, {**arguments, "device": device}, timeout_s=60)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_checkpoint_of_workers_that_wait_for_nobody_is_taken_up(workers, tmp_path, name):
    strategy, options = ASYNCHRONOUS[name]
    arguments = {"strategy": strategy, "options": options, "momentum": 0.9, "folder": str(tmp_path)}
    workers.run(train, 2, {**arguments, "device": "cuda"}, timeout_s=60)
    for result in workers.run(resume, 2, {**arguments, "device": "cuda"}, timeout_s=60):
        assert all(torch.tensor(tensor).isfinite().all() for tensor in result)


def agree(group, arguments):
    """Nothing is learned, and workers that begin apart come together; where they do."""
    strategy = make_strategy(group, arguments["strategy"])
    model, optimizer = build("cuda")
    optimizer.param_groups[0]["lr"] = 0.0
    with strategy.attach(model, optimizer, stays=True):
        generator = torch.Generator().manual_seed(group.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        start = checks.flat(model).cpu()
        mean = checks.group_mean(group, start)
        before = strategy.consensus_distance()
        for number in range(40):
            steps(group, model, optimizer, [number])
            group.barrier().wait()  # none runs away
        strategy.settle()
        group.barrier().wait()
        after = strategy.consensus_distance()
        weight = getattr(strategy, "weight", 1.0)
        came = checks.group_mean(group, weight * checks.flat(model).cpu())
    return [after / before, ((came - mean).norm() / start.norm()).item()]


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_workers_that_wait_for_nobody_agree(workers, name):
    for distance, drift in workers.run(agree, 2, {"strategy": name}, timeout_s=60):
        assert distance < 0.05
        # push-sum keeps the mean whoever is faster; a half and a half of two that mix in turn do not quite
        assert drift < (1e-4 if name == "push-sum" else 0.6)


def on_gpu(group, arguments):
    getattr(checks, arguments["check"])(group, arguments["names"], "cuda")


@pytest.mark.parametrize("check", ["rounds", "limits", "loops"])
def test_the_contract_of_strategies(workers, check):
    workers.run(on_gpu, 2, {"check": check, "names": CONTRACT}, timeout_s=120)


class CountingReductions(GroupWrapper):
    num_reductions = 0

    def all_reduce(self, tensor, op="mean"):
        self.num_reductions += 1
        return super().all_reduce(tensor, op)


def reductions(group, options):
    """Of one backward pass through 40 MiB of gradients."""
    counting = CountingReductions(group)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(10)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with make_strategy(counting, "all-reduce", **options).attach(model, optimizer, stays=True):
        counting.num_reductions = 0
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        return counting.num_reductions


def test_buckets_are_large_unless_their_size_is_asked_for(workers):
    assert workers.run(reductions, 2, {}, timeout_s=60) == [1, 1]
    assert workers.run(reductions, 2, {"bucket_mib": 25}, timeout_s=60) == [2, 2]
    assert workers.run(reductions, 2, {"bucket_mib": 4}, timeout_s=60) == [10, 10]


@contextlib.contextmanager
def no_synchronisation():
    """What waits for the GPU inside of torch's operations is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def hidden_waits(group, arguments):
    strategy = make_strategy(group, arguments["strategy"], **arguments["options"])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(8, 6, device="cuda")
    with strategy.attach(model, optimizer, stays=True):
        for number in range(8):
            with no_synchronisation() if number >= 4 else contextlib.nullcontext():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return strategy.steps


@pytest.mark.parametrize(
    "name",
    [
        "all-reduce", "neighbor", "neighbor, while", "hierarchical", "sma", "local-sgd", "diloco",
        "diloco, streaming", "window, barrier", "pair", "window", "push-sum",
    ],
)  # fmt: skip
def test_no_step_waits_for_the_gpu(workers, name):
    strategy, options = (IN_STEP | ASYNCHRONOUS)[name]
    arguments = {"strategy": strategy, "options": options}
    assert workers.run(hidden_waits, 2, arguments, timeout_s=60) == [8, 8]


@contextlib.contextmanager
def beside_servers(group, num_servers):
    """The first members of a group are servers from now on."""
    key = share(group, str(uuid.uuid4()))[0]
    rank, size = group.rank - num_servers, group.size - num_servers
    own = SoloGroup()
    if rank >= 0 and size > 1:
        own = open_host_group(Placement(rank, size, rank, size, "test"), GroupSettings(key=key))
    with own:
        yield WithServers(own, group, num_servers)


def train_served(group, arguments):
    """The workers' values, and what the servers have counted; see `train`."""
    with beside_servers(group, arguments["num_servers"]) as part:
        strategy = make_strategy(part, arguments["strategy"], **arguments["options"])
        model, optimizer = build(arguments["devices"][part.role == "server"], 0.9)
        if part.role == "server":
            strategy.serve(model, optimizer)
            return strategy.stats
        if "resumed" in arguments:
            strategy.load(arguments["resumed"])
        with strategy.attach(model, optimizer, stays=True):
            if "resumed" not in arguments:
                steps(part, model, optimizer, range(5))
            if "folder" in arguments:
                strategy.save(arguments["folder"])
            steps(part, model, optimizer, range(5, NUM_STEPS))
            assert next(model.parameters()).device.type == arguments["devices"][0]
        return values(model)


def served(workers, num_workers, name, devices, num_servers=1, **more):
    strategy, options = SERVED[name]
    arguments = {"strategy": strategy, "options": options, "devices": devices, "num_servers": num_servers}
    results = workers.run(train_served, num_servers + num_workers, {**arguments, **more}, timeout_s=60)
    return results[num_servers:], results[:num_servers]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_one_worker_of_servers_trains_as_on_the_cpu(workers, name, devices, num_servers):
    (wanted,), _ = served(workers, 1, name, ["cpu", "cpu"], num_servers)
    (got,), servers = served(workers, 1, name, devices, num_servers)
    close(got, wanted)
    assert [server["num_applied"] for server in servers] == [NUM_STEPS] * num_servers


@pytest.mark.parametrize("devices", DEVICES)
def test_workers_of_a_synchronous_server_train_as_on_the_cpu(workers, devices):
    wanted, _ = served(workers, 2, "sync", ["cpu", "cpu"])
    got, _ = served(workers, 2, "sync", devices)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", [name for name in SERVED if name != "sync"])
def test_workers_of_a_server_that_wait_for_nobody_learn(workers, name, devices):
    results, (server,) = served(workers, 2, name, devices)
    assert all(torch.tensor(tensor).isfinite().all() for result in results for tensor in result)
    assert server["num_applied"] == 2 * NUM_STEPS
    assert server["num_refused"] == 0


@pytest.mark.parametrize("devices", DEVICES)
def test_a_checkpoint_of_servers_is_taken_up(workers, tmp_path, devices):
    wanted, _ = served(workers, 2, "sync", devices, folder=str(tmp_path))
    got, _ = served(workers, 2, "sync", devices[::-1], 2, resumed=str(tmp_path))
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine[:2], theirs[:2])


def push_a_nan(group, arguments):
    with beside_servers(group, 1) as part:
        strategy = make_strategy(part, "parameter-server", mode=arguments["mode"])
        model, optimizer = build(arguments["devices"][part.role == "server"])
        if part.role == "server":
            strategy.serve(model, optimizer)
            return strategy.stats["num_refused"]
        with strategy.attach(model, optimizer, stays=True):
            steps(part, model, optimizer, range(2))
            optimizer.zero_grad()
            model(torch.ones(8, 6, device=arguments["devices"][0])).square().mean().backward()
            if part.rank == 1:
                model[0].weight.grad[3, 3] = float("nan")
            optimizer.step()
            steps(part, model, optimizer, range(2, 4))
        return bool(checks.flat(model).isfinite().all())


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_servers_do_not_apply_what_is_not_finite(workers, mode, devices):
    arguments = {"mode": mode, "devices": devices}
    assert workers.run(push_a_nan, 3, arguments, timeout_s=60) == [1, True, True]
