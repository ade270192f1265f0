"""What workers and servers do when they save, and when GradScaler or a checkpoint has been at work."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shoal.core import CheckpointError, UsageError
from shoal.core.run_options import VARIABLE, RunOptions
from shoal.strategies.parameter_server import ParameterServer
from shoal.strategies.parameter_server.server import SyncServer
from shoal.tensors.checkpoint import newest_first
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


@pytest.fixture(params=PLACEMENTS, autouse=True)
def placement(request, monkeypatch):
    with placed(request.param, monkeypatch):
        yield request.param


def plain(seed=0, **settings):
    return model_and_optimizer(seed, torch.optim.SGD, **{"lr": 0.05, **settings})


def adam(seed=0):
    return model_and_optimizer(seed, torch.optim.Adam, lr=0.01)


def saved_flat(path):
    model, _ = model_and_optimizer()
    model.load_state_dict(load_file(path / "model.safetensors"))
    return flat(model)


def test_who_was_dropped_may_skip_the_next_step(monkeypatch):
    are_ahead, has_computed, has_skipped = threading.Barrier(3), threading.Event(), threading.Event()
    skip = SyncServer._skip

    def noticed(self, worker):
        skip(self, worker)
        has_skipped.set()

    monkeypatch.setattr(SyncServer, "_skip", noticed)

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            if rank < 2:
                assert has_computed.wait(20)
                train(model, optimizer, rank, range(2))
                are_ahead.wait(20)
                assert has_skipped.wait(20)
                train(model, optimizer, rank, [2])
                return
            loss_of(model, rank, 0).backward()
            has_computed.set()
            are_ahead.wait(20)
            optimizer.step()  # too late
            optimizer.zero_grad()
            loss_of(model, rank, 1).backward()
            optimizer.zero_grad()  # as a GradScaler's loop does that has met an inf

    _, (server,) = run(work, 3, mode="sync", num_aggregate=2)
    assert (server["num_skipped"], server["num_pushes"]) == (1, 7)
    assert server["num_dropped"] >= 1


@pytest.mark.parametrize("what", ["save", "consensus_distance", "global_average_every"])
def test_a_slow_worker_with_backups_catches_up_with_those_that_wait_for_it(tmp_path, what):
    are_ahead = threading.Barrier(3)

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            if rank < 2:
                train(model, optimizer, rank, range(2))
            are_ahead.wait(20)
            train(model, optimizer, rank, range(2 if rank < 2 else 0, 3))
            if what == "save":
                strategy.save(tmp_path)
            elif what == "consensus_distance":
                strategy.consensus_distance()
            return flat(model), strategy.steps

    every = 3 if what == "global_average_every" else 0
    results, _ = run(work, 3, 2, mode="sync", num_aggregate=2, global_average_every=every)
    assert all(torch.equal(parameters, results[0][0]) and steps == 3 for parameters, steps in results)


@pytest.mark.parametrize("options", [{}, {"delay_compensation": 0.1}, {"mode": "bounded"}], ids=str)
def test_a_checkpoint_has_all_that_was_pushed_before_it(tmp_path, options):
    is_saving = threading.Event()

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            if rank:
                assert is_saving.wait(20)
            train(model, optimizer, rank, range(3))
            is_saving.set()
            return strategy.save(tmp_path), flat(model)

    ((path, first), (_, second)), _ = run(work, 2, 2, adam, **options)
    assert torch.equal(saved_flat(path), first)
    assert torch.equal(first, second)
    assert load_file(path / "optimizer.safetensors")["state.0.step"] == 6


def test_the_checkpoint_of_the_end_is_what_the_servers_have(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, RunOptions(checkpoint=str(tmp_path)).to_environment()[VARIABLE])
    has_trained, has_ended = threading.Event(), threading.Event()

    def work(strategy, model, optimizer, rank):
        start = strategy.steps
        with strategy.attach(model, optimizer):
            start = strategy.steps
            if rank and not start:
                assert has_trained.wait(20)
            train(model, optimizer, rank, range(strategy.steps, 3))
            has_trained.set()
            if rank == 0:
                assert has_ended.wait(20)
            got = flat(model)
        has_ended.set()
        return start, got

    ((_, first), (_, second)), _ = run(work, 2, 2, adam)
    checkpoint = next(newest_first(tmp_path))
    assert checkpoint.manifest.step == 3
    assert torch.equal(saved_flat(checkpoint.path), second)
    assert not torch.equal(first, second)
    state = checkpoint.state("optimizer")["state"]
    assert [kept["step"] for _, kept in sorted(state.items())] == [6] * 6
    has_ended.clear()
    ((start, resumed), _), _ = run(work, 2, 1, adam)
    assert start == 3
    assert torch.equal(resumed, second)


class Strange(torch.optim.SGD):
    """Its state holds what no file can."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["strange"] = object()
        return super().step(closure)


def test_a_state_of_servers_that_cannot_be_written_is_an_error_on_all(tmp_path):
    model_and_optimizer()  # from the first SGD on, torch calls its hooks once more for one that inherits

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(1))
            with pytest.raises(CheckpointError, match="type object"):
                strategy.save(tmp_path)

    run(work, 2, make=lambda seed=0: model_and_optimizer(seed, Strange, lr=0.05))
    assert not list(newest_first(tmp_path))


def scaled(model, optimizer, should_clip):
    """Four steps, in the second of which there is an inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, step) * (float("inf") if step == 1 else 1)).backward()
        if should_clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return flat(model)


@pytest.mark.parametrize(("mode", "local_steps"), [("async", 1), ("sync", 1), ("async", 2)])
@pytest.mark.parametrize("should_clip", [False, True])
def test_a_fused_optimizer_leaves_the_scale_of_gradients_to_be_divided_out(mode, local_steps, should_clip):
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            return scaled(model, optimizer, should_clip)

    def make(seed=0):
        return plain(seed, fused=True)

    (parameters,), (server,) = run(work, 1, make=make, mode=mode, local_steps=local_steps)
    expected = scaled(*plain(), should_clip)
    torch.testing.assert_close(parameters, expected)
    assert server["num_pushes"] == {1: 3, 2: 1}[local_steps]
    assert server["num_skipped"] == (mode == "sync")


def test_the_first_workers_settings_are_taken_also_of_an_optimizer_without_state():
    def work(strategy, model, optimizer, rank):
        group = optimizer.param_groups[0]
        if rank == 0:
            group.update(lr=0.2, initial_lr=0.3, nesterov=False)  # as after loading a checkpoint
            group["strange"] = object()
        with strategy.attach(model, optimizer):
            train(model, optimizer, rank, range(1))
        return group["lr"], group.get("initial_lr"), "strange" in group

    results, _ = run(work, 2, make=plain)
    assert results == [(0.2, 0.3, True), (0.2, 0.3, False)]


def test_another_optimizer_on_a_server_is_an_error_on_all():
    with open_run(1) as (server, worker):
        errors = []

        def serve():
            try:
                ParameterServer(server).serve(*adam(1))
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UsageError, match="another optimizer"):
            ParameterServer(worker).attach(*plain())
        thread.join(10)
        assert len(errors) == 1


@pytest.mark.parametrize("compensation", [0.0, 0.1])
def test_who_has_skipped_a_step_goes_on_from_what_there_is_now(compensation):
    has_computed, is_ahead, has_seen = threading.Event(), threading.Event(), threading.Event()

    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            if rank == 0:
                assert has_computed.wait(20)
                train(model, optimizer, rank, range(2))
                is_ahead.set()
                assert has_seen.wait(20)
                return flat(model)
            loss_of(model, rank, 0).backward()
            has_computed.set()
            assert is_ahead.wait(20)
            optimizer.zero_grad()
            strategy.settle()
            has_seen.set()
            return flat(model)

    results, _ = run(work, 2, make=plain, mode="bounded", delay_compensation=compensation)
    assert torch.equal(*results)


@pytest.mark.parametrize("compression", ["int8", "top-k:0.3"])
def test_what_compression_has_kept_of_a_parameter_waits_until_that_has_a_gradient(compression):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def make(seed=0):
        torch.manual_seed(0)
        model = Branches()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def work(strategy, model, optimizer, rank):
        weight = model.second.weight
        start, total = weight.detach().clone(), torch.zeros(3, 6)
        with strategy.attach(model, optimizer):
            for step in range(4):
                optimizer.zero_grad()
                x, y = batch(0, step)
                loss = (model.first(x) - y).square().mean()
                if step != 1:
                    loss = loss + (model.second(x) - y).square().mean() * (step == 0)
                loss.backward()
                assert (weight.grad is None) == (step == 1)
                total += 0 if weight.grad is None else weight.grad
                optimizer.step()
            return start - weight.detach(), total, strategy._client._feedback.residuals["0"].clone()

    ((moved, total, kept),), _ = run(work, 1, make=make, compression=compression)
    # biases and weights share a chunk: all that was kept of a weight is somewhere in it
    spans = [kept[start : start + 18].view(3, 6) for start in range(len(kept) - 17)]
    assert min(float((moved + rest - total).abs().max()) for rest in spans) < 1e-5
