"""`all-reduce` beside torch's DDP, and in all the loops that people write."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.ddp import TorchDDP
from strategies import loops

STEPS = 50
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda model: torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-2}], lr=1e-3
    ),
}


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 12, generator=generator), torch.randint(4, (16,), generator=generator)


def small_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))


def train(group, kind, *, optimizer="sgd", clip=None, accumulation=1, inf_at=None):
    """The user's loop, 50 steps; the parameters at its end."""
    model = small_model(group.rank)
    optimizer = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=inf_at is not None, init_scale=64.0)
    strategy = kind(group)
    with strategy.attach(model, optimizer, stays=True):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(accumulation):
                x, y = batch(group.rank, step * accumulation + part)
                last = part == accumulation - 1
                with contextlib.nullcontext() if last else strategy.accumulate():
                    with torch.autocast("cpu", torch.bfloat16, enabled=inf_at is not None):
                        loss = nn.functional.cross_entropy(model(x), y)
                    if inf_at == step and group.rank == 1:
                        loss = loss * torch.inf
                    scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), strategy.steps


def compare(group, cases):
    differences = {}
    for name, case in cases.items():
        ours, steps = train(group, GradientAllReduce, **case)
        theirs, _ = train(group, TorchDDP, **case)
        assert torch.isfinite(ours).all()
        assert steps == STEPS
        differences[name] = [(ours - theirs).abs().max().item(), ours.abs().sum().item()]
    return differences


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
def test_equals_ddp_after_50_steps(workers):
    cases = {
        "sgd": {},
        "momentum": {"optimizer": "momentum"},
        "adam": {"optimizer": "adam"},
        "clipping": {"clip": 0.05},
        "accumulation": {"accumulation": 3, "optimizer": "momentum"},
        "mixed precision": {"inf_at": 7, "clip": 0.5},
    }
    first, second = workers.run(compare, 2, cases)
    assert first.keys() == cases.keys()
    for name, (difference, size) in first.items():
        assert difference < 2e-6, name
        assert second[name] == [difference, size], name


def odd_models(group, arguments):
    """Every model of `loops`, 4 steps with clipping, against one worker with all batches."""
    differences = {}
    for name in loops.MODELS:
        model, optimizer = loops.make(name, group.rank)
        with GradientAllReduce(group, bucket_mib=0.1).attach(model, optimizer, stays=True):
            for step in range(4):
                optimizer.zero_grad()
                loops.loss_of(model, group.rank, step).backward()
                if name == "branches":
                    assert model.never.weight.grad is None
                    is_taken = any(loops.way(rank, step) == "right" for rank in range(group.size))
                    assert (model.right.weight.grad is not None) == is_taken
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        differences[name] = loops.distance(model, loops.plain(name, group.size, 4, clip=0.5))
    return differences


@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_worker_with_all_batches(workers, size):
    for differences in workers.run(odd_models, size):
        assert differences.keys() == loops.MODELS.keys()
        assert max(differences.values()) < 1e-6, differences


def odd_loops(group, arguments):
    """Ways to come to a gradient; in each, `.grad` must be the mean of what the members computed alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(
        memory_format=torch.channels_last
    )
    parameters = list(model.parameters())
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    strategy = GradientAllReduce(group)

    def loss(of, rank, number=0):
        x = torch.randn(2, 3, 3, 3, generator=torch.Generator().manual_seed(10 * number + rank))
        return of(x).square().mean()

    def expect(*weighted):
        """Mean over ranks of the sum of losses."""
        twin.zero_grad()
        (sum(w * loss(twin, r, n) for r in range(group.size) for n, w in weighted) / group.size).backward()
        for parameter, other in zip(parameters, twin.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)
            assert parameter.grad.stride() == parameter.stride()
            assert parameter.grad.data_ptr() % 64 == 0

    rank = group.rank
    with strategy.attach(model, optimizer, stays=True):
        loss(model, rank).backward()
        expect((0, 1))
        loss(model, rank, 1).backward()  # a second pass adds to what is shared
        expect((0, 1), (1, 1))
        optimizer.zero_grad(set_to_none=False)
        views = [parameter.grad for parameter in parameters]
        loss(model, rank, 2).backward()
        expect((2, 1))
        assert all(parameter.grad is view for parameter, view in zip(parameters, views, strict=True))
        optimizer.zero_grad()
        value = loss(model, rank, 3)
        value.backward(retain_graph=True)
        value.backward()
        expect((3, 2))
        optimizer.zero_grad()
        value = loss(model, rank, 4)
        torch.autograd.grad(value, [model[2].weight], retain_graph=True)  # accumulates nothing
        value.backward()
        expect((4, 1))
        optimizer.zero_grad()
        with strategy.accumulate():
            loss(model, rank, 5).backward()
        # the second pass uses the last layer alone; the first one's gradients are shared with it
        model[2](torch.zeros(1, 4)).sum().mul(0).backward()
        expect((5, 1))
        optimizer.zero_grad()
        value = loss(model, rank, 6)
        with warnings.catch_warnings(action="ignore"):
            value.backward(create_graph=True)
        expect((6, 1))
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.zeros(1, 3, 3, 3))
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        loss(model, rank, 7).backward()
        expect((7, 1))
    loss(model, rank, 8).backward()
    return strategy.steps


def test_every_way_to_a_gradient(workers):
    # gradients that were there and went without a step were those of a skipped one
    assert workers.run(odd_loops, 2) == [7, 7]


def local_steps(group, arguments):
    results = {}
    for kind in (GradientAllReduce, TorchDDP):
        model, optimizer = loops.make("tied", group.rank)
        replicas = [loops.make("tied", 0) for _ in range(group.size)]
        strategy = kind(group, local_steps=3)
        with strategy.attach(model, optimizer, stays=True):
            for step in range(6):
                optimizer.zero_grad()
                loops.loss_of(model, group.rank, step).backward()
                optimizer.step()
                for rank, (replica, its_optimizer) in enumerate(replicas):
                    its_optimizer.zero_grad()
                    loops.loss_of(replica, rank, step).backward()
                    its_optimizer.step()
                if step in (2, 5):
                    with torch.no_grad():
                        for parts in zip(*[replica.parameters() for replica, _ in replicas], strict=True):
                            mean = torch.stack(parts).mean(0)
                            for part in parts:
                                part.copy_(mean)
                assert loops.distance(model, replicas[group.rank][0]) < 1e-6, (kind, step)
            results[strategy.name] = [strategy.rounds, strategy.consensus_distance()]
    return results


def test_local_steps_average_parameters(workers):
    for results in workers.run(local_steps, 2):
        for rounds, distance in results.values():
            assert rounds == 2
            assert distance < 1e-6


def uneven(group, arguments):
    """Rank r has 3 + 2 r batches. Whoever is left goes on with the mean over those that are left."""
    kinds = {"all-reduce": GradientAllReduce(group)}
    if arguments["with_ddp"]:
        kinds = {"ddp": TorchDDP(group, is_uneven=True)}
    for strategy in kinds.values():
        model, optimizer = loops.make("tied", group.rank)
        with strategy.attach(model, optimizer):
            for step in range(3 + 2 * group.rank):
                optimizer.zero_grad()
                loops.loss_of(model, group.rank, step).backward()
                optimizer.step()
        reference, optimizer = loops.make("tied", 0)
        last = group.size - 1 if strategy.name == "ddp" else group.rank  # Join ends with the last one's model
        for step in range(3 + 2 * last):
            left = [rank for rank in range(group.size) if step < 3 + 2 * rank]
            optimizer.zero_grad()
            (sum(loops.loss_of(reference, rank, step) for rank in left) / len(left)).backward()
            optimizer.step()
        difference = loops.distance(model, reference)
    return difference


def test_uneven_data(workers):
    assert max(workers.run(uneven, 3, {"with_ddp": False})) < 1e-6
    assert max(workers.run(uneven, 2, {"with_ddp": True})) < 1e-6
