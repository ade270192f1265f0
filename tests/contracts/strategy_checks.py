"""What workers do in `test_strategy.py`.

Each function runs in every worker of a group, walks through the cases that it is given, and asserts there:
one run of the pool checks many things. Some can be asked for a model on another `device`.
"""

import contextlib
import copy
import io

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from contracts.strategies import (
    CASES,
    DEVICE,
    MODELS,
    OUTSIDE,
    ManySmall,
    Mixed,
    Point,
    are_equal,
    bits,
    flat,
    group_mean,
    make,
    net,
    one_step,
    unequal,
)
from shoal.core import DeadlineExceeded
from shoal.group import Handle
from shoal.group.operations import GroupWrapper
from shoal.group.wrappers import Metered
from shoal.tensors import ALIGNMENT_BYTES, BucketLayout
from shoal.topology import make_topology
from shoal.topology.graphs import branches

# --- alone ---


def train_plainly(model, optimizer, num_steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    return bits(model, optimizer)


def alone(group, names):
    """Bit for bit what plain training does, in the memory that the parameters had."""
    for name in names:
        plain = net()
        wanted = train_plainly(plain, torch.optim.Adam(plain.parameters()), 4)
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        memory = [parameter.data_ptr() for parameter in model.parameters()]
        strategy = make(group, CASES[name], global_average_every=2)
        with strategy.attach(model, optimizer, stays=True):
            got = train_plainly(model, optimizer, 4)
            assert memory == [parameter.data_ptr() for parameter in model.parameters()]
            assert strategy.steps == 4
        assert are_equal(got, wanted), name


# --- rounds ---


class Counting(GroupWrapper):
    """Counts, for each parameter, the operations whose tensor its value or its gradient lies in.

    A value may lie in another buffer after a step: where buffers take turns, an operation in place is given
    the one that is the next.
    """

    def watch(self, model):
        self.parameters = list(model.parameters())
        self.counts = [0] * len(self.parameters)
        self.num_pulls = 0
        self.spans = []
        self.places = [{parameter.data_ptr()} for parameter in self.parameters]

    def count(self):
        """Counts what a step has done."""
        for index, parameter in enumerate(self.parameters):
            places = self.places[index] | {
                each.data_ptr() for each in (parameter, parameter.grad) if each is not None
            }
            self.counts[index] += sum(
                any(start <= place < end for place in places) for start, end in self.spans
            )
            self.places[index] = {parameter.data_ptr()}
        self.spans = []

    def window(self, *arguments, **named):
        window = super().window(*arguments, **named)
        put, add, publish, fetch = window.put, window.add, window.publish, window.fetch
        window.put = lambda to, tensor, **more: put(to, self._see(tensor), **more)
        window.add = lambda to, tensor, **more: add(to, self._see(tensor), **more)
        window.publish = lambda tensor, version: publish(self._see(tensor), version)
        window.fetch = lambda peer: self._pull(fetch, peer)
        return window

    def _pull(self, fetch, peer):
        self.num_pulls += 1
        return fetch(peer)

    def _see(self, tensor):
        self.spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def all_reduce(self, tensor, op="mean"):
        self._see(tensor)
        return super().all_reduce(tensor, op)

    def exchange(self, tensor, weights, *, out=None):
        self._see(tensor)
        return super().exchange(tensor, weights, out=out)


def rounds(group, names, device=DEVICE):
    """Each tensor goes once a round, and a doubly stochastic average keeps the mean."""
    for name in names:
        case = CASES[name]
        for kind in MODELS.values():
            torch.manual_seed(group.rank)
            model = kind().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=case.momentum)
            counting = Counting(group)
            counting.watch(model)
            strategy = make(counting, case)
            with strategy.attach(model, optimizer, stays=True):
                unequal(group, model)
                mean = group_mean(group, flat(model))
                before = strategy.consensus_distance()
                counting.watch(model)
                for _ in range(3):
                    one_step(model, optimizer, torch.ones(3, device=device))
                    counting.count()
                    if not case.waits:
                        group.barrier().wait()  # so that all have something of each other
                if case.strategy == "push-sum":
                    assert counting.counts == [strategy.num_pushed] * len(counting.counts), name
                    assert strategy.num_pushed + strategy.num_held == 3
                elif case.sends_in_place and case.shares_through_group:
                    assert counting.counts == [3] * len(counting.counts), name
                if case.strategy == "pair":
                    # a snapshot that was overwritten while it was read is pulled again
                    assert counting.num_pulls >= 3
                    assert strategy.stats["num_mixed"] + strategy.stats["num_unmixed"] == 3
                assert strategy.rounds == 3
                after = strategy.consensus_distance()
                if case.keeps_mean:
                    torch.testing.assert_close(group_mean(group, flat(model)), mean, rtol=0, atol=2e-6)
                if strategy.shares_gradients:
                    assert after == before, name
                else:
                    assert after < 0.7 * before, name
                values = flat(model)
            if strategy.has_last_round and not strategy.is_equal_after_round:
                values = mean.to(device)  # which the end has made of them
            torch.testing.assert_close(flat(model), values, rtol=0, atol=2e-6 * case.keeps_mean)
            assert all(parameter.is_contiguous() for parameter in model.parameters())


def padded_bytes(parameters, *, has_flags):
    """Of all parameters in one flat buffer; gradients have a flag for each tensor behind them."""
    (layout,) = BucketLayout.plan(parameters, max_bytes=2**40)
    flags = -(-4 * len(layout.slots) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if has_flags else 0
    return layout.size_bytes + flags


def has_partner(group, round_number):
    """Of an odd number of workers the last in the order of the round has none."""
    order = torch.randperm(group.size, generator=torch.Generator().manual_seed(round_number)).tolist()
    return group.size % 2 == 0 or order[-1] != group.rank


def sparse_message_bytes(num_values):
    """82 of 4096 values, two magnitudes a chunk; a head in 64 bytes, and padding to 64.

    A value takes two bits, one for its gap and its place's low bits; the gaps together so many as there are
    places without them.
    """
    sizes = [min(4096, num_values - start) for start in range(0, num_values, 4096)]
    num_bits = 0
    for size in sizes:
        num_kept = -(-82 * size // 4096)
        num_bits += min(num_kept * (2 + 1 + low) + (size - 1 >> low) for low in range(13))
    payload = 4 * len(sizes) + -(-num_bits // 8)
    return 64 + -(-payload // 64) * 64


MIXED = ("gradient-tracking", "exact-diffusion", "extra", "d2", "momentum")


def metered(group, names):
    """Bytes on the wire, as the strategy's formula says."""
    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        model = ManySmall()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=case.momentum)
        meter = Metered(group)
        strategy = make(meter, case)
        with strategy.attach(model, optimizer, stays=True):
            meter.reset()
            num_partners = 0
            for _ in range(4):
                num_partners += strategy.session.random_partner() is not None
                one_step(model, optimizer, torch.ones(3))
            if not case.waits:
                strategy.settle()
            totals = {
                op: traffic
                for op, traffic in meter.totals().items()
                if traffic.received_bytes or traffic.sent_bytes
            }
        size = padded_bytes(list(model.parameters()), has_flags=strategy.shares_gradients)
        n = group.size
        if case.strategy in ("all-reduce", "diloco"):
            op, wanted = "all_reduce", 4 * (2 * (n - 1) * size // n)
        elif case.strategy == "neighbor":
            topology = make_topology(case.options.get("topology", "exponential-2"), n)
            degrees = [len(topology.weights(group.rank, turn).sources) for turn in range(4)]
            op, wanted = "exchange", size * sum(degrees)
        elif case.strategy in MIXED:
            # momentum, and what tracks gradients, go as parameters do; momentum with a flag for each tensor
            more = {
                "gradient-tracking": size,
                "momentum": padded_bytes(list(model.parameters()), has_flags=True),
            }
            degrees = [len(strategy.topology.sources(group.rank, turn)) for turn in range(4)]
            op, wanted = "exchange", (size + more.get(case.strategy, 0)) * sum(degrees)
        elif case.strategy == "sgp":
            # and a weight with the parameters, in double precision
            topology = make_topology("one-peer-exponential", n)
            degrees = [len(topology.sources(group.rank, turn)) for turn in range(4)]
            op, wanted = "exchange", (size + 8) * sum(degrees)
        elif case.strategy == "relay":
            # with each sum of models, whose it is and how many they are
            degree = len(branches("binary", n)[group.rank])
            op, wanted = "exchange", 4 * (size + 16) * degree
        elif case.strategy == OUTSIDE:
            # parameters and slow weights, to and from the partner; with an odd number one has none
            op, wanted = "exchange", 2 * size * num_partners
        elif case.strategy == "choco":
            degree = len(make_topology("ring", n).destinations(group.rank))
            # one byte for each value, and a scale for each block of them
            assert totals["send"].sent_bytes == 4 * degree * (size // 4 + 4 * -(-size // 4 // 4096)), name
            op, wanted = "send", 0
        elif case.strategy == "noloco":
            num_pairs = sum(has_partner(group, round_number) for round_number in range(4))
            op, wanted = "exchange", num_pairs * size
        elif case.strategy == "sparse-loco":
            op, wanted = "all_gather", 4 * (n - 1) * sparse_message_bytes(size // 4)
        elif case.strategy in ("hierarchical", "sma", "local-sgd"):
            op, wanted = "exchange", 4 * (n - 1) * size
        elif case.strategy in ("push-sum", "window"):
            # to one neighbour a round, and nothing comes back
            op = "put" if case.strategy == "window" else "add"
            num_writes = 4 if case.strategy == "window" else strategy.num_pushed
            assert totals[op].sent_bytes == num_writes * size, name
            wanted = 0
        else:
            # one that was overwritten comes again, one whose publisher was at it does not come
            num_brought = totals["fetch"].received_bytes // size
            assert strategy.stats["num_mixed"] <= num_brought <= totals["fetch"].num_calls
            op, wanted = "fetch", num_brought * size
        assert list(totals) == [op], name
        assert totals[op].received_bytes == wanted, name
        if wanted and op != "fetch":
            assert totals[op].sent_bytes == wanted, name


# --- failures ---


class Failing(GroupWrapper):
    """Rounds take place, but once `is_armed` their results do not come."""

    is_armed = False

    def _issue(self, operation, start):
        handle = start()
        is_round = operation.name in ("all_reduce", "all_gather", "exchange", "fetch")
        return _Failure(handle) if self.is_armed and is_round else handle


class _Failure(Handle):
    def __init__(self, inner):
        self._inner = inner

    def wait(self, deadline=None):
        self._inner.wait(deadline)
        raise DeadlineExceeded("too late")

    def is_done(self):
        return self._inner.is_done()


def aborted(group, names):
    """A round that fails changes nothing that trains, and the step is left undone where it comes later."""
    for name in names:
        case = CASES[name]
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        failing = Failing(group)
        strategy = make(failing, case)
        with contextlib.suppress(DeadlineExceeded), strategy.attach(model, optimizer):
            train_plainly(model, optimizer, 2, seed=group.rank)
            plain = net()
            plain.load_state_dict(model.state_dict())
            plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
            plain_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            before = bits(model, optimizer)
            failing.is_armed = True
            train_plainly(model, optimizer, 1)
            raise AssertionError(f"{name} has not noticed")
        train_plainly(plain, plain_optimizer, 1)
        buffers = len(list(model.buffers()))
        wanted = before if case.is_step_undone else bits(plain, plain_optimizer)
        got = bits(model, optimizer)
        num = len(list(model.parameters()))
        # BatchNorm's statistics are those of the forward, which took place
        del got[num : num + buffers], wanted[num : num + buffers]
        assert are_equal(got, wanted), name
        group.barrier().wait()


# --- what is learned ---


def limits(group, names, device=DEVICE):
    """The minimiser of the mean for replicas; the others get near it as the learning rate decays."""
    targets = torch.randn(group.size, 5, generator=torch.Generator().manual_seed(3))
    spread = (targets - targets.mean(0)).norm(dim=1).max()
    for name in names:
        case = CASES[name]
        model = Point().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=case.momentum)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 6))
        strategy = make(group, case)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(60):
                one_step(model, optimizer, targets[group.rank].to(device))
                rate.step()
                if not case.waits:
                    group.barrier().wait()  # none runs away, whatever else the machine has to do
            distance = (model.x.detach().cpu() - targets.mean(0)).norm()
            mean = group_mean(group, model.x.detach())
        if case.are_replicas_equal and case.keeps_mean:
            assert distance < 1e-3 * spread, (name, distance, spread)
        elif case.keeps_mean:
            assert (mean - targets.mean(0)).norm() < 1e-3 * spread, name
            assert distance < 0.3 * spread, (name, distance, spread)
        else:
            # who waits for mass to come is on its own for a while
            bound = 0.8 if case.strategy == "push-sum" else 0.5
            assert distance < bound * spread, (name, distance, spread)


# --- the loops that people write ---


def loops(group, names, device=DEVICE):
    """Clipping, accumulation, a scheduler, parameter groups, Adam, mixed precision with an inf on one."""
    for name in names:
        case = CASES[name]
        torch.manual_seed(group.rank)
        model = Mixed().to(device)
        strides = [parameter.stride() for parameter in model.parameters()]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW([{"params": trained[:2], "lr": 1e-3}, {"params": trained[2:]}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        options = {"find_unused_parameters": True} if case.strategy == "ddp" else {}
        strategy = make(group, case, warmup_steps=3, global_average_every=3, **options)
        with strategy.attach(model, optimizer, stays=True):
            frozen = group_mean(group, model.frozen)
            assert torch.allclose(frozen, model.frozen.cpu(), rtol=1e-6)
            for step in range(6):
                optimizer.zero_grad()
                for part in range(2):
                    with contextlib.nullcontext() if part else strategy.accumulate():
                        with torch.autocast(device, torch.bfloat16):
                            loss = model(torch.randn(4, 3, 6, 6).to(device)).square().mean()
                        is_inf = step == 2 and part and group.rank == group.size - 1
                        scaler.scale(loss * torch.inf if is_inf else loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained, 0.5)
                scaler.step(optimizer)
                scaler.update()
                if step != 2:
                    scheduler.step()
            assert torch.isfinite(flat(model)).all(), name
            assert model.one.weight is model.two.weight
            assert [parameter.stride() for parameter in model.parameters()] == strides
            # all have met the inf in their gradients, or one has skipped the step and not the round
            assert strategy.rounds == strategy.steps == 6, name
            distance = strategy.consensus_distance()
            if case.are_replicas_equal:
                assert distance < 1e-5, (name, distance)
            else:
                assert distance < 2, (name, distance)
            if strategy.rounds % 3 == 0:
                statistics = model.norm.running_mean.cpu()
                assert torch.allclose(statistics, group_mean(group, statistics), atol=1e-6), name
        assert torch.equal(frozen, model.frozen.cpu())
        assert [parameter.stride() for parameter in model.parameters()] == strides


def copies(group, names):
    """A copy of an attached model is one's own: it computes with its own weights, and shares nothing."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(group.rank))
    for name in names:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=CASES[name].momentum)
        strategy = make(group, CASES[name])
        with strategy.attach(model, optimizer, stays=True):
            one_step_of(model, optimizer, x)
            if group.rank == 0:
                saved = io.BytesIO()
                torch.save(model, saved)
                loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
                averaged = AveragedModel(model)
                for copied in (copy.deepcopy(model), loaded, averaged.module):
                    assert torch.equal(flat(copied), flat(model)), name
                    for parameter in copied.parameters():
                        parameter.data.zero_()
                    one_step_of(copied, torch.optim.SGD(copied.parameters(), lr=0.1), x)
                    copied.eval()
                    assert not copied[3].weight.any()  # its input was zeros
                    assert flat(model).any()
                assert strategy.steps == 1
            one_step_of(model, optimizer, x)
            assert strategy.steps == 2, name


def one_step_of(model, optimizer, x):
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


def uneven(group, arguments):
    """A worker out of data leaves; the others go on, and average among themselves."""
    case = CASES[arguments["name"]]
    torch.manual_seed(0)
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=case.momentum)
    strategy = make(group, case)
    with strategy.attach(model, optimizer):
        for _ in range(3 + 3 * (group.rank > 0)):
            one_step(model, optimizer, torch.full((5,), float(group.rank)))
    assert not group.lost
    return model.x.mean().item()
