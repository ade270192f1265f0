"""SwarmTraining through its public door, on real sockets: several members in threads of one process."""

import threading

import pytest
import torch
from torch import nn

import shoal
from shoal.core import ShoalError, UsageError
from shoal.group import SoloGroup
from shoal.strategies import make_strategy
from shoal.strategies.swarm import seconds_to_the_round

TIMEOUT_S = 60


def network(width=8):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def batches(num, seed=3, size=16):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        inputs = torch.randn(size, 6, generator=generator)
        yield inputs, inputs[:, :2]


def step(model, optimizer, batch):
    inputs, targets = batch
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def train(model, optimizer, num, seed=3):
    for batch in batches(num, seed):
        step(model, optimizer, batch)


def begin(**options):
    return shoal.SwarmTraining(shoal.connect(listen="127.0.0.1:0"), run="test", **options)


def values(model):
    return [tensor.detach().clone() for tensor in model.state_dict().values() if tensor.is_floating_point()]


def assert_close(model, other):
    for mine, theirs in zip(values(model), values(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Members:
    """Members in threads, each with a swarm, a model and an optimizer of its own."""

    def __init__(self, **options):
        self.options = {"run": "test", **options}
        self.first = None
        self.threads = []
        self.failures = []

    def connect(self):
        if self.first is None:
            self.first = swarm = shoal.connect(listen="127.0.0.1:0").open()
        else:
            swarm = shoal.connect(self.first.address)
        return swarm

    def start(self, work, make_model=network, make_optimizer=sgd, **options):
        """Runs `work(strategy, model, optimizer)` inside of attach, in a thread; gives all three."""
        strategy = shoal.SwarmTraining(self.connect(), **{**self.options, **options})
        model = make_model()
        optimizer = make_optimizer(model)
        attached = threading.Event()

        def live():
            try:
                with strategy.attach(model, optimizer):
                    attached.set()
                    work(strategy, model, optimizer)
            except Exception as error:  # noqa: BLE001  # the test's own thread raises it
                self.failures.append(error)
                attached.set()

        thread = threading.Thread(target=live, daemon=True)
        thread.start()
        self.threads.append(thread)
        assert attached.wait(TIMEOUT_S)
        return strategy, model, optimizer

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        if self.first is not None:
            self.first.close()
        if error[0] is None:
            assert not self.failures, self.failures


class Meeting:
    """Members that wait for each other: who leaves alone would leave the others' last rounds to them."""

    def __init__(self, num):
        self.barrier = threading.Barrier(num)

    def __call__(self):
        self.barrier.wait(TIMEOUT_S)


def train_until(strategy, model, optimizer, num_steps, seed, meet, pause_s=0.0):
    """Steps together with the others until the run has made so many, and ends together with them."""
    meet()
    for batch in batches(100_000, seed):
        step(model, optimizer, batch)
        threading.Event().wait(pause_s)  # a slow machine
        if strategy.run_steps >= num_steps:
            break
    meet()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        sgd,
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.8, nesterov=True),
        lambda model: torch.optim.Adam(model[1:].parameters(), 0.01, weight_decay=0.1),
        lambda model: torch.optim.AdamW(
            [{"params": model[0].weight, "lr": 0.02}, {"params": model[1:].parameters()}], 0.01
        ),
    ],
    ids=["momentum", "nesterov", "adam", "adamw with groups"],
)
def test_a_swarm_of_one_is_plain_training(make_optimizer):
    plain, model = network(), network()
    # the gradient of a bias before a BatchNorm is rounding alone, which Adam would blow up
    plain[0].bias.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    train(plain, make_optimizer(plain), 5)
    strategy = begin(target_samples=16)
    optimizer = make_optimizer(model)
    with strategy.attach(model, optimizer):
        train(model, optimizer, 5)
        assert strategy.run_steps == 5
    assert_close(model, plain)
    assert strategy.ledger.num_committed == strategy.ledger.num_added == 80


def test_accumulated_batches_and_skipped_steps_alone():
    """Two backward passes a step, and a GradScaler that leaves one step out."""

    def loop(model, optimizer, strategy=None):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        given = list(batches(6))
        given[2][0][0, 0] = float("inf")
        for pair in (given[0:2], given[2:4], given[4:6]):
            optimizer.zero_grad()
            for inputs, targets in pair:
                scaler.scale((model(inputs) - targets).square().mean() / 2).backward()
            scaler.step(optimizer)
            scaler.update()

    def layer():
        torch.manual_seed(1)
        return nn.Linear(6, 2)

    plain, model = layer(), layer()
    loop(plain, sgd(plain))
    strategy, optimizer = begin(target_samples=32), sgd(model)
    with strategy.attach(model, optimizer):
        loop(model, optimizer)
    assert_close(model, plain)
    assert strategy.ledger.num_added == 64


def test_two_members_step_alike_and_every_sample_is_counted():
    meet = Meeting(2)
    states = {}
    with Members(target_samples=64) as members:

        def work(strategy, model, optimizer):
            number = len(states.setdefault("seeds", []))
            states["seeds"].append(number)
            train_until(strategy, model, optimizer, 4, number, meet)

        pairs = [members.start(work) for _ in range(2)]
    (first, model, _), (second, other, _) = pairs
    for strategy in (first, second):
        ledger = strategy.ledger
        assert ledger.is_balanced
        assert ledger.num_added == ledger.num_committed + ledger.num_lost
        assert ledger.num_committed > 0
    assert not torch.equal(model[0].weight, network()[0].weight)
    if first.run_steps == second.run_steps:
        assert all(map(torch.equal, values(model), values(other)))


def test_a_batch_that_would_come_too_late_for_the_next_round_is_not_begun():
    assert seconds_to_the_round(0.0, 1.0, 1.0) == 0.0  # nothing is known yet
    assert seconds_to_the_round(10.0, 2.0, 1.0) == 0.0
    assert seconds_to_the_round(10.0, 9.4, 1.0) == 0.0  # there is the time for half of it
    assert seconds_to_the_round(10.0, 9.8, 1.0) == pytest.approx(0.7)
    assert seconds_to_the_round(10.0, 15.0, 1.0) == 0.5  # it is late: waited for, but not long
    assert all(seconds_to_the_round(10.0, since / 10, 1.0) <= 1.0 for since in range(200))


def test_who_joins_late_has_the_runs_state_and_another_model_is_refused():
    go_on = threading.Event()
    with Members(target_samples=16) as members:

        def wait(strategy, model, optimizer):
            train(model, optimizer, 4)
            ready.set()
            go_on.wait(TIMEOUT_S)

        ready = threading.Event()
        _, model, _ = members.start(wait)
        try:
            assert ready.wait(TIMEOUT_S)
            before = values(model)
            joined = {}

            def look(strategy, model, optimizer):
                joined["values"], joined["steps"] = values(model), strategy.run_steps
                joined["peers"] = strategy.num_peers

            members.start(look, make_optimizer=lambda model: sgd(model))[1]
            members.threads[-1].join(TIMEOUT_S)
            assert (joined["steps"], joined["peers"]) == (4, 2)
            assert all(map(torch.equal, joined["values"], before))

            members.start(look, make_model=lambda: network(9))
            (error,) = members.failures
            members.failures.clear()
            assert isinstance(error, UsageError)
            assert "0.weight has shape [8, 6] in the run 'test', and shape [9, 6] here" in str(error)

            members.start(look, make_optimizer=lambda model: sgd(model, lr=0.2))
            (error,) = members.failures
            members.failures.clear()
            assert "learning_rate=0.1" in str(error)
            assert "learning_rate=0.2" in str(error)
        finally:
            go_on.set()


@pytest.mark.parametrize(
    ("overlap", "options"),
    [
        ("none", {"codec": "int8"}),
        ("delayed", {"codec": "int8"}),
        ("streaming", {"codec": "int4", "upload_limit": 50.0, "download_limit": 50.0}),
    ],
)
def test_local_steps_average_what_members_have_learned(overlap, options):
    """One member is slower: it brings the steps that it has made when a round begins."""
    meet = Meeting(2)
    with Members(local_steps=8, overlap=overlap, **options) as members:

        def quick(strategy, model, optimizer):
            train_until(strategy, model, optimizer, 3, 1, meet)

        def slow(strategy, model, optimizer):
            train_until(strategy, model, optimizer, 3, 2, meet, pause_s=0.02)

        first, second = members.start(quick), members.start(slow)
    assert first[0].ledger.is_balanced
    assert second[0].ledger.is_balanced
    # on a busy machine the slow one may miss its rounds
    assert first[0].ledger.num_committed + second[0].ledger.num_committed > 0
    inputs, targets = next(batches(1, 9, 200))
    for _, model, _ in (first, second):
        untrained = (network()(inputs) - targets).square().mean()
        assert (model(inputs) - targets).square().mean() < untrained


@pytest.mark.parametrize("codec", ["fp16", "int4", "top-k:0.1"])
def test_codecs(codec):
    meet = Meeting(2)
    with Members(target_samples=64, codec=codec) as members:
        pairs = [
            members.start(lambda *given, seed=seed: train_until(*given, 3, seed, meet)) for seed in range(2)
        ]
    for strategy, model, _ in pairs:
        assert strategy.ledger.is_balanced
        assert not torch.equal(model[3].weight, network()[3].weight)


def test_a_scheduler_counts_the_runs_steps():
    def linear(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    plain, model = network(), network()
    optimizer = sgd(plain)
    schedule = linear(optimizer)
    for batch in batches(4):
        step(plain, optimizer, batch)
        schedule.step()
    strategy = begin(target_samples=16, scheduler=linear)
    optimizer = sgd(model)
    with strategy.attach(model, optimizer):
        train(model, optimizer, 4)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 5)
    assert_close(model, plain)


def test_gradients_that_are_not_finite_are_left_out():
    model = network()
    optimizer, before = sgd(model), values(model)
    strategy = begin(target_samples=16)
    with strategy.attach(model, optimizer):
        step(model, optimizer, (torch.full((16, 6), float("nan")), torch.zeros(16, 2)))
        assert strategy.ledger.num_added == 0
        assert torch.equal(model[0].weight, before[0])
    model = network()
    strategy, optimizer = begin(target_samples=16, on_nonfinite="stop"), sgd(model)
    with pytest.raises(ShoalError, match="not finite"), strategy.attach(model, optimizer):
        step(model, optimizer, (torch.full((16, 6), float("nan")), torch.zeros(16, 2)))


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    """Momentum comes along: two steps, saved, and two more are as four in a row."""
    plain, model = network(), network()
    train(plain, sgd(plain), 4)
    given = list(batches(4))
    strategy, optimizer = begin(target_samples=16), sgd(model)
    with strategy.attach(model, optimizer):
        for batch in given[:2]:
            step(model, optimizer, batch)
        strategy.save(tmp_path)
    again = network()
    strategy, optimizer = begin(target_samples=16), sgd(again)
    strategy.load(tmp_path)
    with strategy.attach(again, optimizer):
        for batch in given[2:]:
            step(again, optimizer, batch)
    assert_close(again, plain)


def test_how_many_samples_a_step_has():
    class Odd(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.rows)

    class Batch:
        rows = torch.zeros(16, 6)

    model = Odd(6, 2)
    optimizer = sgd(model)
    with begin(target_samples=16).attach(model, optimizer):
        model(Batch()).sum().backward()
        with pytest.raises(UsageError, match="batch_size"):
            optimizer.step()
    strategy = begin(target_samples=16, batch_size=5)
    optimizer = sgd(model)
    with strategy.attach(model, optimizer):
        model(Batch()).sum().backward()
        optimizer.step()
        assert strategy.ledger.num_added == 5
    assert strategy.ledger.lost == [("training ended before a round took them", 5)]


def test_what_is_said_too_much_or_too_little():
    with pytest.raises(UsageError, match="both given"):
        begin(target_samples=16, local_steps=4)
    model = network()
    with pytest.raises(UsageError, match=r"target_samples=4096.*local_steps=100"):
        begin().attach(model, sgd(model))
    with pytest.raises(UsageError, match=r"RMSprop.*\n.*\n.*local_steps"):
        begin(target_samples=16).attach(model, torch.optim.RMSprop(model.parameters()))
    strategy = make_strategy(SoloGroup(), "swarm", run="alone", local_steps="2")
    optimizer = torch.optim.RMSprop(model.parameters())
    with strategy.attach(model, optimizer):
        train(model, optimizer, 2)
        assert strategy.run_steps == 1


def test_a_client_trains_with_one_that_can_be_called():
    meet = Meeting(2)
    with Members(target_samples=64) as members:
        members.start(lambda *what: train_until(*what, 4, 1, meet))
        with shoal.connect(members.first.address) as client:
            assert client.address is None
            members.connect = lambda: client
            strategy, *_ = members.start(lambda *what: train_until(*what, 4, 2, meet))
            members.threads[-1].join(TIMEOUT_S)
            assert strategy.ledger.num_committed > 0
            assert strategy.run_steps >= 4


def test_one_swarm_has_one_run_at_a_time():
    with shoal.connect(listen="127.0.0.1:0") as swarm:
        for _ in range(2):
            model = network()
            optimizer = sgd(model)
            strategy = shoal.SwarmTraining(swarm, run="test", target_samples=16)
            with strategy.attach(model, optimizer):
                other = network()
                second = shoal.SwarmTraining(swarm, run="other", target_samples=16)
                with pytest.raises(UsageError, match="connect a second time"):
                    second.attach(other, sgd(other))
                train(model, optimizer, 1)
                assert strategy.run_steps == 1


def test_a_robust_run_on_sockets_is_audited_and_nobody_is_banned():
    found = []
    with Members(target_samples=48, robust="centered-clip") as members:
        meet = Meeting(3)

        def work(strategy, model, optimizer):
            train_until(strategy, model, optimizer, 5, len(members.threads), meet)
            run = strategy._opened.run  # what nobody but a test asks for
            found.append((run.audits.num_audited, run.context.bans.num_changes, strategy.run_steps))
            meet()

        for _ in range(3):
            members.start(work)
    assert sum(num_audited for num_audited, _, _ in found) > 0
    assert not any(num_bans for _, num_bans, _ in found)
    assert all(num_steps >= 5 for _, _, num_steps in found)


def test_a_sparse_codec_does_not_go_with_robust_averages():
    with pytest.raises(UsageError, match="does not go with the codec"):
        shoal.SwarmTraining(target_samples=16, robust="median", codec="top-k:0.01")


def test_members_of_a_robust_run_refuse_one_that_takes_the_mean():
    with Members(target_samples=16, robust="median") as members:
        done = threading.Event()
        members.start(lambda *_: done.wait(TIMEOUT_S))
        model = network()
        other = shoal.SwarmTraining(members.connect(), run="test", target_samples=16)
        with pytest.raises(UsageError, match="median"), other.attach(model, sgd(model)):
            pass
        done.set()
