"""A NaN or an infinity on one rank: who is named, in which step, and what warn, skip and stop do."""

import contextlib
import logging

import pytest
import torch
from torch import nn

from contracts.strategies import CASES, EVERY
from shoal.core.errors import ShoalError
from shoal.strategies import make_strategy
from strategies.fakes import Mirror
from strategies.servers import PLACEMENTS, flat, loss_of, placed
from strategies.servers import run as run_servers

NUM_STEPS = 9
RANK, STEP = 1, 5
NAMED = f"rank {RANK} sent a value that is not finite in step {STEP} "
NAN, INF = float("nan"), float("inf")


@contextlib.contextmanager
def lines_of():
    """What is said about values that are not finite."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shoal.strategies.nonfinite")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def train(group, name, mode, how, width=8):
    """Nine steps; lines, whether the model is finite at the end, and whether training went on after STEP."""
    case = CASES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=case.momentum)
    strategy = make_strategy(group, case.strategy, **case.options, on_nonfinite=mode)
    generator = torch.Generator().manual_seed(group.rank)
    weight, seen = model[0].weight, None
    with lines_of() as lines, strategy.attach(model, optimizer, stays=True):
        for step in range(NUM_STEPS):
            is_bad = group.rank == RANK and step == STEP
            if is_bad and how == "parameter":
                with torch.no_grad():
                    weight[width // 2, 1] = NAN
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4, generator=generator)).square().mean()
            if is_bad and how in ("loss", "infinite loss"):
                loss = loss * (NAN if how == "loss" else INF)
            loss.backward()
            if is_bad and how == "gradient":
                weight.grad[width // 2, 1] = INF
            optimizer.step()
            seen = flat(model) if step == STEP else seen
    is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return {"lines": lines, "is_finite": is_finite, "has_moved": not torch.equal(seen, flat(model))}


def train_all(group, arguments):
    results = {}
    for name in arguments["names"]:
        results[name] = train(group, name, arguments["mode"], arguments["how"])
        group.barrier().wait()
    return results


def blamed(result):
    """The lines that name a rank as the one that sent something."""
    return [line for line in result["lines"] if " ends with " not in line and " in all." not in line]


PARAMETERS = [name for name in EVERY if name not in ("all-reduce", "ddp")]
TRACKING = "gradient-tracking"  # sends nothing that is not finite, in any mode


@pytest.mark.parametrize(
    ("how", "names", "size"),
    [
        ("loss", list(EVERY), 2),
        ("parameter", ["all-reduce", "ddp", "neighbor", "pair", "window", TRACKING], 2),
        pytest.param("parameter", list(EVERY), 3, marks=pytest.mark.slow),
        pytest.param("infinite loss", list(EVERY), 4, marks=pytest.mark.slow),
        pytest.param("gradient", PARAMETERS, 2, marks=pytest.mark.slow),
    ],
)
def test_the_rank_and_step_are_named_once_and_nobody_else(workers, how, names, size):
    results = workers.run(train_all, size, {"names": names, "mode": "warn", "how": how}, timeout_s=120)
    for name in names:
        first, *others = blamed(results[RANK][name])
        if name != TRACKING:
            assert first.startswith(NAMED), name
        assert f"rank {RANK} " in first, name
        assert f"in step {STEP} " in first, name
        assert not others, name
        for rank in set(range(size)) - {RANK}:
            assert not blamed(results[rank][name]), (name, rank)


def test_skip_leaves_the_step_out_and_training_goes_on(workers):
    results = workers.run(train_all, 2, {"names": list(EVERY), "mode": "skip", "how": "loss"}, timeout_s=120)
    for name in EVERY:
        for rank, result in enumerate(each[name] for each in results):
            assert result["is_finite"], (name, rank)
            assert result["has_moved"], (name, rank)
            assert len(result["lines"]) == (rank == RANK), (name, rank, result["lines"])


def stop(group, arguments):
    """All ranks have a NaN in the same step: none has to wait for one that has failed."""
    model = nn.Linear(300, 300)  # above what `warn` looks at as a whole
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = make_strategy(group, arguments["name"], on_nonfinite="stop")
    mask = torch.ones(300, 300)
    model.weight.register_hook(lambda gradient: gradient * mask)

    def train_until_it_stops():
        with strategy.attach(model, optimizer):
            for step in range(NUM_STEPS):
                mask[7, 9] = NAN if step == STEP else 1.0
                optimizer.zero_grad()
                model(torch.ones(2, 300)).sum().backward()
                optimizer.step()

    with pytest.raises(ShoalError) as caught:
        train_until_it_stops()
    return str(caught.value)


@pytest.mark.parametrize("name", ["all-reduce", "neighbor", "pair"])
def test_stop_finds_a_single_value_of_a_large_tensor(workers, name):
    for rank, error in enumerate(workers.run(stop, 2, {"name": name})):
        assert f"rank {rank} has a value that is not finite in step {STEP} " in error
        assert "the gradient of weight holds nan" in error


def train_with_scaler(group, arguments):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=arguments["is_fused"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    strategy = make_strategy(group, arguments["name"], on_nonfinite=arguments["mode"])
    with lines_of() as lines, strategy.attach(model, optimizer):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            factor = INF if group.rank == RANK and step == STEP else 1.0
            scaler.scale(model(torch.ones(3, 4)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert bool(model.weight.isfinite().all())
    return lines


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("mode", ["warn", "stop"])
@pytest.mark.parametrize("name", ["all-reduce", "neighbor"])
def test_infinities_that_a_grad_scaler_leaves_out_are_not_counted(workers, name, mode, is_fused):
    arguments = {"name": name, "mode": mode, "is_fused": is_fused}
    assert workers.run(train_with_scaler, 2, arguments) == [[], []]


def test_gradients_that_are_mended_before_the_step_are_not_counted(workers):
    assert workers.run(train_mended, 2) == [[], []]


def train_mended(group, arguments):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lines_of() as lines, make_strategy(group, "all-reduce").attach(model, optimizer):
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)).sum() * (NAN if step == STEP else 1.0)).backward()
            for parameter in model.parameters():
                parameter.grad.nan_to_num_()
            optimizer.step()
    return lines


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("options", [{"mode": "async"}, {"mode": "sync"}, {"compression": "fp16"}])
def test_parameter_servers_refuse_gradients_that_are_not_finite(options, placement, monkeypatch):
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                if rank == RANK and step == STEP:
                    model[2].weight.grad[3, 3] = NAN
                optimizer.step()
        return bool(flat(model).isfinite().all())

    with lines_of() as lines, placed(placement, monkeypatch):
        (are_finite), (server,) = run_servers(work, 2, **options)
    assert are_finite == [True, True]
    assert len(lines) == 1
    assert lines[0].startswith(f"rank {RANK} has a value that is not finite in step {STEP} ")
    assert "the gradient of 2.weight holds nan" in lines[0]
    assert server["num_refused"] == 1


def test_a_worker_stops_that_parameter_servers_have_refused():
    def work(strategy, model, optimizer, rank):
        with strategy.attach(model, optimizer):
            for step in range(STEP):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            optimizer.zero_grad()
            (loss_of(model, rank, STEP) * NAN).backward()
            with pytest.raises(ShoalError) as caught:
                optimizer.step()
        return str(caught.value)

    (error,), _ = run_servers(work, 1, on_nonfinite="stop")
    assert f"rank 0 has a value that is not finite in step {STEP} " in error


def test_a_step_that_is_left_out_and_raises_gives_the_gradients_back():
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise RuntimeError("the optimizer fails")

    model = nn.Linear(2, 1)
    optimizer = Failing(model.parameters(), lr=0.1)
    strategy = make_strategy(Mirror(), "neighbor", topology="full", on_nonfinite="skip")

    def train_once():
        with strategy.attach(model, optimizer):
            (model(torch.ones(1, 2)).sum() * NAN).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="the optimizer fails"):
        train_once()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_that_are_hidden_for_two_reasons_come_back():
    model = torch.nn.Linear(2, 1)
    strategy = make_strategy(Mirror(), "local-sgd")
    with strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        model(torch.ones(1, 2)).sum().backward()
        given = [parameter.grad for parameter in model.parameters()]
        session.finite.hide_gradients()
        session.finite.hide_gradients()
        assert all(parameter.grad is None for parameter in model.parameters())
        session.finite.after_optimizer()
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), given, strict=True))
