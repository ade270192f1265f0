"""Servers are killed, stopped, told to end, and flooded, or answer nonsense; who uses them goes on."""

import asyncio
import collections
import contextlib
import functools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from experts.processes import serve_processes
from shoal.core import Deadline, LoopThread, PeerLeaving, ShoalError
from shoal.dht import connect
from shoal.dht.settings import DHTSettings
from shoal.experts.client.client import ExpertClient
from shoal.experts.config import HostingConfig
from shoal.experts.mixture import MixtureOfExperts
from shoal.experts.names import get_experts
from shoal.experts.server.checkpoints import Checkpoints
from shoal.experts.server.hosting import hosted

pytestmark = [
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="looks at processes as Linux shows them"
    ),
    pytest.mark.timeout(120),
]
WIDTH = 16
EXPERTS = """
import time
import torch
from torch import nn

class Affine(nn.Module):
    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x * 2 + 1

class Slow(Affine):
    def forward(self, x):
        time.sleep(0.02)
        return x * 2 + 1

class SlowLinear(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)

class NotANumber(Affine):
    def forward(self, x):
        return x * float("nan")

class TooNarrow(Affine):
    def forward(self, x):
        return x if len(x) == 3 else x[:, 1:]  # the example that tells what it gives has 3 samples

class BadGradient(Affine):
    def forward(self, x):
        return _BadGradient.apply(x)

class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")
"""


@pytest.fixture
def swarm():
    with connect(listen="127.0.0.1:0") as swarm:
        yield swarm


@pytest.fixture
def processes():
    with serve_processes() as processes:
        yield processes


class Training:
    """A mixture that learns to be another function, step by step."""

    def __init__(self, swarm, **options):
        torch.manual_seed(0)
        self.moe = MixtureOfExperts(swarm, "ffn", WIDTH, (3, 3), k_best=4, refresh_s=3.0, **options)
        self.head = nn.Linear(WIDTH, WIDTH)
        self._x = torch.randn(512, WIDTH)
        self._y = (self._x @ torch.randn(WIDTH, WIDTH)).tanh()
        parameters = [*self.moe.parameters(), *self.head.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=3e-3)
        self.losses = []
        self.seconds = []
        self.failed = {}
        """Peers of experts that failed in forward or backward, by uid."""
        self.called = []

    def step(self, between=lambda: None):
        began_s = time.monotonic()
        rows = torch.randint(len(self._x), (64,))
        loss = (self.head(self.moe(self._x[rows])) - self._y[rows]).square().mean()
        between()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.monotonic() - began_s)
        self.called = [call.uid for call in self.moe.last_call.experts if call.is_answered]
        for call in self.moe.last_call.experts:
            if call.error or call.backward_error:
                self.failed.setdefault(call.uid, []).append(
                    (len(self.losses) - 1, str(call.peer), call.error or call.backward_error)
                )

    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()

    def until(self, condition, timeout_s):
        """Train until it is so; how long that took."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() < began_s + timeout_s, self.moe.last_call
            self.step()
        return time.monotonic() - began_s

    def loss(self, start, end):
        return sum(self.losses[start:end]) / len(self.losses[start:end])


def three_servers(processes, swarm, folder):
    shared = ("--join", swarm.address, "--listen", "127.0.0.1:0", "--hidden-dim", WIDTH, "--lr", 3e-3)
    shared += ("--checkpoint-dir", folder, "--checkpoint-every-s", 1, "--declare-s", 3)
    rows = [[f"ffn.{row}.{column}" for column in range(3)] for row in range(3)]
    started = [processes.start(*shared, *(f"--uid={uid}" for uid in row)) for row in rows]
    adopter = processes.start(*shared, "--adopt", "--adopt-s", 0.5, "--seed", 9)
    return [process.ready() for process in started], rows, adopter.ready()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_training_goes_on_when_a_server_is_lost_and_its_experts_come_back(processes, swarm, tmp_path, number):
    servers, rows, adopter = three_servers(processes, swarm, tmp_path)
    lost, uids = servers[1], rows[1]
    training, saved = Training(swarm), Checkpoints(tmp_path)
    training.run(50)
    training.until(lambda: all((saved.num_updates(uid) or 0) > 10 for uid in uids), 20)
    num_before = len(training.losses)
    training.step(between=lambda: lost.send(number))
    assert sorted(training.failed) == uids
    for uid in uids:
        ((_, peer, error),) = training.failed[uid]
        assert lost.peer_id[:8] in peer
        assert error.startswith(("PeerLost", "PeerUnreachable", "DeadlineExceeded")), error
    training.until(lambda: set(uids) <= adopter.numbers("expert_updates_total").keys(), 40)
    num_saved = {uid: adopter.numbers("expert_updates_total")[uid] for uid in uids}
    assert min(num_saved.values()) > 10  # those of the one that was lost: it had all of them by then
    training.until(
        lambda: all(adopter.numbers("expert_updates_total")[uid] > num_saved[uid] for uid in uids), 20
    )
    assert max(training.seconds[num_before:]) < 5
    training.run(50)
    assert training.loss(-10, None) < 0.7 * training.loss(num_before - 10, num_before)
    if number is signal.SIGSTOP:
        lost.send(signal.SIGCONT)
        num_updates = lost.numbers("expert_updates_total")
        training.until(
            lambda: all(lost.numbers("expert_updates_total")[uid] > num_updates[uid] for uid in uids), 20
        )
        assert set(uids) <= set(training.called)


@pytest.fixture(scope="module")
def experts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts") / "own_experts.py"
    path.write_text(EXPERTS)
    return path


def test_servers_that_answer_nonsense_are_left_out_and_named(swarm, experts_file, monkeypatch):
    monkeypatch.setattr(
        "shoal.experts.server.hosting.DHTSettings", functools.partial(DHTSettings, call_s=0.25)
    )
    bad = {"NotANumber": "NaN or infinity", "TooNarrow": "float32[5, 7]", "BadGradient": "not finite"}
    with contextlib.ExitStack() as closing:
        for index, name in enumerate(["Affine", *bad]):
            config = HostingConfig(
                expert_class=f"{experts_file}:{name}",
                hidden_dim=8,
                device="cpu",
                num_loops=1,
                join=(str(swarm.address),),
                uid=(f"own.{index}",),
            )
            closing.enter_context(hosted(config))
        moe = MixtureOfExperts(swarm, "own", 8, (4,), k_best=4)
        x = torch.randn(5, 8, requires_grad=True)
        y = moe(x)
        assert y.isfinite().all()
        errors = {call.uid: call.error for call in moe.last_call.experts}
        for index, name in enumerate(["NotANumber", "TooNarrow"], start=1):
            assert bad[name] in errors[f"own.{index}"]
        assert errors["own.0"] is errors["own.3"] is None
        y.sum().backward()
        assert x.grad.isfinite().all()
        assert "not finite" in moe.last_call.experts[3].backward_error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_large_calls_all_succeed_and_equal_the_local_module(processes, experts_file):
    num_calls, num_clients = 5000, 4
    server = processes.start("--expert-class", f"{experts_file}:Affine", "--hidden-dim", 1024).ready()
    base = torch.randn(2048, 1024)

    def ask(offset):
        with ExpertClient() as client:
            expert = client.expert("expert0", server.peer)
            for index in range(offset, num_calls, num_clients):
                x = base + index
                with torch.no_grad():
                    y = expert(x)
                assert torch.equal(y, x.mul_(2).add_(1)), index
        return len(range(offset, num_calls, num_clients))

    with ThreadPoolExecutor(num_clients) as pool:
        assert sum(pool.map(ask, range(num_clients))) == num_calls
    assert server.numbers("failed_requests_total") == {"": 0.0}


@pytest.mark.slow
def test_512_clients_with_one_sample_each_and_memory_that_stays(processes):
    num_clients, num_calls = 512, 4
    server = processes.start("--hidden-dim", 64, "--max-batch-size", 8192).ready()

    async def ask(client, x, is_training):
        for _ in range(num_calls):
            forwarded = await client.forward("expert0", [server.peer], [x], is_kept=is_training)
            if is_training:
                (gradient,) = await client.backward(forwarded, [x], [torch.ones(1, 64)])
                assert gradient.shape == x.shape

    async def ask_all(clients, is_training):
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(ask(client, torch.randn(1, 64), is_training))

    with LoopThread("clients") as loop, contextlib.ExitStack() as closing:
        clients = [closing.enter_context(ExpertClient(loop=loop)) for _ in range(num_clients)]

        def growth_mib(num_rounds, *, is_training):
            loop.run(ask_all(clients, is_training))
            before_mib = server.rss_mib
            for _ in range(num_rounds):
                loop.run(ask_all(clients, is_training))
            return server.rss_mib - before_mib

        assert growth_mib(4, is_training=False) < 8
        remembered_mib = 4 * num_clients * num_calls * 4 / 1024  # a few KiB for each backward's answer
        assert growth_mib(4, is_training=True) < 8 + remembered_mib
    assert server.numbers("failed_requests_total") == {"": 0.0}
    assert server.numbers("samples_total") == {"": 5 * num_clients * num_calls * 3}


@pytest.mark.slow
def test_a_server_that_is_told_to_end_finishes_saves_and_withdraws(processes, swarm, experts_file, tmp_path):
    where = ("--join", swarm.address, "--listen", "127.0.0.1:0", "--checkpoint-dir", tmp_path)
    uids = [f"own.{index}" for index in range(4)]
    server = processes.start(
        *where,
        "--expert-class",
        f"{experts_file}:SlowLinear",
        "--hidden-dim",
        8,
        *(f"--uid={uid}" for uid in uids),
    ).ready()
    num_done, endings = [], []
    is_told = threading.Event()

    def ask(index):
        with ExpertClient(swarm) as client:
            expert = client.expert(uids[index % 4])
            while True:
                if len(num_done) > 100 and not is_told.is_set():
                    is_told.set()
                    server.send(signal.SIGTERM)
                x = torch.randn(2, 8, requires_grad=True)
                try:
                    y = expert(x)
                    y.sum().backward()
                except ShoalError as error:
                    endings.append(error)
                    return
                num_done.append(index)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))
    code, result = server.end()
    assert code == 0, server.said
    assert {type(error) for error in endings} == {PeerLeaving}, endings
    assert len(endings) == 16
    assert swarm.run(get_experts(swarm.dht, uids, latest=True)) == [None] * 4
    checkpoints = Checkpoints(tmp_path)
    num_saved = sum(checkpoints.load(uid).state.numbers["num_updates"] for uid in uids)
    assert num_saved == result["num_updates"] > 0


@pytest.mark.slow
def test_replicas_share_the_load_average_and_outlive_one_another(processes, swarm):
    shared = ("--join", swarm.address, "--listen", "127.0.0.1:0", "--hidden-dim", WIDTH, "--uid", "ffn.1.2")
    shared += ("--replica-sync-s", 1, "--lr", 1e-2)
    first = processes.start(*shared).ready()
    second = processes.start(*shared, "--seed", 5).ready()
    x = torch.randn(64, WIDTH)
    is_over = threading.Event()
    with ExpertClient(swarm) as client, ThreadPoolExecutor(4) as pool:
        expert = client.expert("ffn.1.2")
        assert sorted(str(peer.id) for peer in expert.peers) == sorted([first.peer_id, second.peer_id])
        list(pool.map(lambda _: expert(x).square().mean().backward(), range(200)))
        num_updates = [server.numbers("expert_updates_total")["ffn.1.2"] for server in (first, second)]
        assert min(num_updates) >= 20  # a copy of the other has none of its own

        alone = [client.expert("ffn.1.2", server.peer) for server in (first, second)]
        ends_s = time.monotonic() + 15
        while not torch.allclose(*(each(x) for each in alone), atol=1e-5):
            assert time.monotonic() < ends_s

        def ask(_):
            seconds = []
            while not is_over.is_set():
                began_s = time.monotonic()
                expert(x)
                seconds.append(time.monotonic() - began_s)
            return max(seconds)

        asked = [pool.submit(ask, index) for index in range(4)]
        try:
            first.kill()
            num_before = second.numbers("samples_total")[""]
            while second.numbers("samples_total")[""] < num_before + 200 * len(x):
                assert not any(each.done() for each in asked), asked
        finally:
            is_over.set()
        assert max(each.result() for each in asked) < 2


@pytest.mark.slow
@pytest.mark.parametrize("other", ["expert0", "expert1"])
def test_a_client_that_floods_a_server_does_not_starve_another(processes, experts_file, other):
    server = processes.start(
        *("--expert-class", f"{experts_file}:Slow", "--hidden-dim", 8, "--num-experts", 2),
        *("--max-batch-size", 4, "--max-waiting", 64),
    ).ready()
    x = torch.randn(4, 8)
    outcomes = collections.Counter()
    is_over = threading.Event()

    async def flood(client):
        while not is_over.is_set():
            try:
                await client.forward("expert0", [server.peer], [x], is_kept=False, deadline=Deadline.after(3))
                outcomes["answered"] += 1
            except ShoalError as error:
                outcomes[type(error).__name__] += 1

    with ExpertClient() as flooding, ExpertClient() as polite:
        expert = polite.expert(other, server.peer)
        with torch.no_grad(), flooded(flooding, flood, is_over, num_tasks=200):
            while server.numbers("waiting_requests")[""] < 60:
                pass
            seconds = []
            for _ in range(20):
                began_s = time.monotonic()
                expert(x)
                seconds.append(time.monotonic() - began_s)
    assert sorted(seconds)[len(seconds) // 2] < 0.2  # the whole line is six times as long
    assert outcomes["answered"] > len(seconds)
    assert outcomes.keys() <= {"answered", "PeerBusy", "DeadlineExceeded"}, outcomes


@contextlib.contextmanager
def flooded(client, flood, is_over, num_tasks):
    async def start():
        return [asyncio.create_task(flood(client)) for _ in range(num_tasks)]

    async def end(tasks):
        await asyncio.gather(*tasks)

    tasks = client.run(start())
    try:
        yield
    finally:
        is_over.set()
        client.run(end(tasks))
