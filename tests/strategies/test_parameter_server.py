import contextlib
import threading

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies import make_strategy
from shoal.strategies.parameter_server import ParameterServer
from strategies import loops
from strategies.servers import (
    PLACEMENTS,
    batch,
    flat,
    loss_of,
    model_and_optimizer,
    open_run,
    placed,
    run,
    train,
)

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


@pytest.fixture(params=PLACEMENTS, autouse=True)
def placement(request, monkeypatch):
    with placed(request.param, monkeypatch):
        yield request.param


def alone(num_steps, make=model_and_optimizer, rank=0):
    model, optimizer = make(0)
    train(model, optimizer, rank, range(num_steps))
    return flat(model)


def trained(num_steps):
    """Work that trains so long, and gives the parameters and what was counted."""

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(num_steps))
        return flat(model), strategy.stats

    return work


def made(kind, **settings):
    return lambda seed=0: model_and_optimizer(seed, kind, **settings)


PLAIN = made(torch.optim.SGD, lr=0.05)


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
@pytest.mark.parametrize(
    "make", [made(torch.optim.SGD, **SGD), made(torch.optim.Adam, lr=0.01)], ids=["sgd", "adam"]
)
def test_one_worker_trains_as_without_servers_bit_for_bit(make, mode, num_servers):
    ((parameters, stats),), servers = run(trained(6), 1, num_servers, make, mode=mode)
    assert torch.equal(parameters, alone(6, make))
    assert stats["num_pushes"] == stats["num_pulls"] == 6
    assert [server["num_applied"] for server in stats["servers"]] == [6] * num_servers
    assert stats["servers"] == servers
    assert sum(stats["pushed_bytes"]) == sum(server["pushed_bytes"] for server in servers)
    assert all(server["staleness"]["max_behind"] == 0 for server in servers)


@pytest.mark.parametrize("name", ["branches", "tied", "checkpointed", "words", "many small", "mixed dtypes"])
def test_models_that_are_hard_to_share(name):
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                loops.loss_of(model, 1, step).backward()
                optimizer.step()
        return model

    (model,), _ = run(work, 1, 2, lambda seed=0: made_loop(name, seed))
    reference, optimizer = made_loop(name, 0)
    for step in range(4):
        optimizer.zero_grad()
        loops.loss_of(reference, 1, step).backward()
        for parameter in reference.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
    assert loops.distance(model, reference) == 0


_making = threading.Lock()


def made_loop(name, seed):
    with _making:
        return loops.make(name, seed)


def test_large_and_channels_last_parameters_are_pushed_from_where_they_lie():
    def make(seed=0):
        with _making:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Conv2d(4, 1100, 8), nn.Flatten(), nn.Linear(1100, 3))
            model = model.to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def steps(model, optimizer):
        for step in range(2):
            x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad(set_to_none=False)
            model(x.to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            steps(model, optimizer)
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
            assert model[0].weight.grad is not None
        return flat(model)

    (got,), _ = run(work, 1, 1, make)
    reference, optimizer = make()
    steps(reference, optimizer)
    assert torch.equal(got, flat(reference))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_sync_is_training_with_everybodys_batches(num_workers):
    results, servers = run(trained(5), num_workers, 2, mode="sync")
    model, optimizer = model_and_optimizer(0)
    for step in range(5):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(num_workers)) / num_workers).backward()
        optimizer.step()
    for parameters, _ in results:
        torch.testing.assert_close(parameters, flat(model), rtol=1e-4, atol=1e-6)
        assert torch.equal(parameters, results[0][0])
    assert [server["num_applied"] for server in servers] == [5 * num_workers] * 2
    assert all(server["num_dropped"] == 0 for server in servers)


class Late:
    """Worker 1 computes its gradient, and pushes it only after worker 0 has done so many steps."""

    def __init__(self, num_steps):
        self.num_steps = num_steps
        self.has_computed, self.may_push = threading.Event(), threading.Event()

    def __call__(self, strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            if rank == 0:
                assert self.has_computed.wait(20)
                train(model, optimizer, 0, range(self.num_steps))
                self.may_push.set()
                return flat(model)
            loss_of(model, 1, 0).backward()
            self.has_computed.set()
            assert self.may_push.wait(20)
            optimizer.step()
            return flat(model)


def late_gradient():
    model, _ = PLAIN(0)
    loss_of(model, 1, 0).backward()
    return flat(model), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_a_backup_worker_that_is_late_is_dropped_and_goes_on_from_there():
    results, (server,) = run(Late(4), 2, mode="sync", num_aggregate=1)
    assert torch.equal(results[0], alone(4))
    assert torch.equal(results[1], results[0])
    assert (server["num_applied"], server["num_dropped"]) == (4, 1)


@pytest.mark.parametrize(("limit", "num_dropped"), [(3, 1), (4, 0)])
def test_gradients_that_are_too_old_are_dropped(limit, num_dropped):
    results, (server,) = run(Late(4), 2, make=PLAIN, drop_stale=limit)
    assert torch.equal(results[0], alone(4, PLAIN))
    assert torch.equal(results[1], results[0]) == bool(num_dropped)
    assert server["num_dropped"] == num_dropped
    assert server["staleness"]["max_behind"] == (0 if num_dropped else 4)


def test_an_old_gradient_is_applied_to_what_there_is_now():
    (before, late), (server,) = run(Late(4), 2, make=PLAIN)
    _, gradient = late_gradient()
    torch.testing.assert_close(late, before - 0.05 * gradient)
    assert server["staleness"]["behind"] == {0: 4, 4: 1}
    assert server["staleness"]["mean_behind"] == 4 / 5


def test_the_rate_falls_with_staleness():
    (before, late), _ = run(Late(4), 2, make=PLAIN, staleness_lr=True)
    torch.testing.assert_close(late, before - 0.05 / 4 * late_gradient()[1])


def test_a_delay_is_compensated():
    (before, late), _ = run(Late(4), 2, 2, make=PLAIN, delay_compensation=2.0)
    then, gradient = late_gradient()
    compensated = gradient + 2.0 * gradient * gradient * (before - then)
    torch.testing.assert_close(late, before - 0.05 * compensated)
    assert not torch.equal(late, before - 0.05 * gradient)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_the_bound_of_staleness_holds_exactly(staleness, num_servers):
    begun = [0, 0]
    is_ahead = threading.Event()
    leads = []

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            for step in range(8):
                if rank == 1 and step == 0:
                    # as slow as can be: it begins when the other has gone as far as it may
                    assert staleness == 0 or is_ahead.wait(20)
                begun[rank] += 1
                train(model, optimizer, rank, [step])
                if rank == 0:
                    leads.append(begun[0] - begun[1])
                    if step + 1 == staleness:
                        is_ahead.set()

    _, servers = run(work, 2, num_servers, mode="bounded", staleness=staleness)
    assert max(leads) == staleness
    assert [server["leads"]["max_behind"] for server in servers] == [staleness] * num_servers
    assert [server["leads"]["num_mixed"] for server in servers] == [16] * num_servers


def test_a_worker_that_has_left_is_not_waited_for():
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(8 if rank else 2))
        return flat(model)

    for mode in ("bounded", "sync"):
        _, (server,) = run(work, 2, mode=mode, staleness=1)
        assert server["num_pushes"] == 10


def test_a_schedule_on_the_worker_counts():
    def scheduled(model, optimizer):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)  # momentum, too
        train(model, optimizer, 0, range(8), lambda _: schedule.step())
        return flat(model)

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            return scheduled(model, optimizer)

    (parameters,), _ = run(work, 1)
    assert torch.equal(parameters, scheduled(*model_and_optimizer(0)))


def test_warm_up_counts():
    (parameters, _), *_ = run(trained(3), 1, warmup_steps=4, warmup_factor=0.2)[0]
    model, optimizer = model_and_optimizer(0)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 0.05 * (0.2 + 0.8 * step / 4)
        train(model, optimizer, 0, [step])
    assert torch.equal(parameters, flat(model))


@pytest.mark.parametrize(
    "options", [{"local_steps": 2}, {"pull_every": 2}, {"local_steps": 2, "pull_every": 2}]
)
def test_between_pulls_a_worker_steps_alone(options):
    results, (server,) = run(trained(4), 1, make=PLAIN, **options)
    ((parameters, stats),) = results
    torch.testing.assert_close(parameters, alone(4, PLAIN))
    assert server["num_pushes"] == 4 // options.get("local_steps", 1)
    assert stats["num_pulls"] == server["num_pushes"] // options.get("pull_every", 1)


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8", "top-k:0.3"])
def test_what_is_pushed_can_be_compressed(compression):
    ((parameters, stats),), (server,) = run(trained(8), 1, make=PLAIN, compression=compression)
    ((exact, plain),), _ = run(trained(8), 1, make=PLAIN)
    assert stats["pushed_bytes"][0] < 0.9 * plain["pushed_bytes"][0]
    assert stats["pushed_bytes"][0] == server["pushed_bytes"]
    moved = (alone(0) - exact).norm()
    assert 0 < (parameters - exact).norm() < 0.5 * moved


@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
def test_a_skipped_step_is_no_update_and_keeps_nobody_waiting(mode):
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if rank == 0 and step == 1:
                    continue  # as a GradScaler does that has met an inf
                optimizer.step()
        return flat(model)

    results, (server,) = run(work, 2, mode=mode, staleness=0)
    assert server["num_pushes"] == 7
    assert server["num_skipped"] == (0 if mode == "async" else 1)
    if mode == "sync":
        assert torch.equal(*results)


def test_workers_that_stay_can_attach_again():
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer, stays=True):
            train(model, optimizer, rank, range(2))
        with strategy.attach(model, optimizer, stays=True):
            train(model, optimizer, rank, range(2, 4))
        return flat(model)

    results, _ = run(work, 2, 2, mode="sync")
    assert torch.equal(*results)
    # the optimizer's state ended with the first
    assert not torch.equal(results[0], alone(4))


def test_a_checkpoint_holds_what_the_servers_have(tmp_path):
    def saving(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(3))
            strategy.save(tmp_path)
            train(model, optimizer, rank, range(3, 6))
        return flat(model)

    def loading(strategy, model, optimizer, rank):
        strategy.load(tmp_path)
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(3, 6))
        return flat(model)

    make = made(torch.optim.Adam, lr=0.01)
    through, _ = run(saving, 2, 2, make, mode="sync")
    resumed, _ = run(loading, 2, 1, make, mode="sync")
    torch.testing.assert_close(resumed[0], through[0])


def test_without_servers_one_worker_trains_alone_and_several_cannot():
    model, optimizer = model_and_optimizer(0)
    with make_strategy(SoloGroup(), "parameter-server").attach(model, optimizer):
        train(model, optimizer, 0, range(3))
    assert torch.equal(flat(model), alone(3))
    group = SoloGroup()
    group.size = 2
    with pytest.raises(UsageError, match=r"has no server(.|\n)*--num-servers 1"):
        ParameterServer(group).attach(model, optimizer)


def test_a_server_ends_its_program():
    with open_run(1) as (server, worker):
        ended = []

        def serve():
            with contextlib.suppress(SystemExit), server:
                try:
                    ParameterServer(server).attach(*model_and_optimizer(1))
                except SystemExit as end:
                    ended.append(end.code)
                    raise

        thread = threading.Thread(target=serve)
        thread.start()
        model, optimizer = model_and_optimizer(0)
        with ParameterServer(worker).attach(model, optimizer):
            train(model, optimizer, 0, range(1))
        thread.join(10)
        assert ended == [0]
        assert not worker.everybody.lost


def test_a_closure_is_refused():
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            with pytest.raises(UsageError, match="closure"):
                optimizer.step(lambda: loss_of(model, 0, 0))

    run(work, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "bounded", "pull_every": 2},
        {"mode": "sync", "delay_compensation": 0.1},
        {"delay_compensation": 0.1, "pull_every": 2},
        {"mode": "other"},
        {"num_aggregate": 0},
    ],
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(UsageError):
        ParameterServer(SoloGroup(), **wrong)


def test_different_options_are_an_error_on_all():
    with open_run(1) as (server, worker):
        errors = []

        def serve():
            try:
                ParameterServer(server).serve(*model_and_optimizer(1))
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError, match="options"):
            ParameterServer(worker, mode="sync").attach(*model_and_optimizer(0))
        thread.join(10)
        assert len(errors) == 1


def test_the_buffers_of_the_first_worker_are_taken():
    def make(seed=0):
        with _making:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model[1].running_mean.fill_(float(seed + 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            start = model[1].running_mean.clone()
            model(batch(rank, 0)[0]).square().mean().backward()
            optimizer.step()
        return start.tolist(), model[1].running_mean.tolist()

    ((first, after), (second, other)), _ = run(work, 2, make=make)
    assert first == second == [1.0] * 4
    assert after != other
