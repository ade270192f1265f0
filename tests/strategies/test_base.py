"""How a strategy attaches to a loop, seen by a strategy that writes down what it is told."""

import contextlib
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from shoal.core import PeerLost, UsageError
from shoal.group import Loss
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Metered
from shoal.strategies import all_strategies, load_class
from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.ddp import TorchDDP
from shoal.strategies.strategy import Strategy
from strategies.fakes import Mirror

MAX_LEVELS = 3
X = torch.arange(12.0).view(4, 3) / 10


class Recorder(Strategy):
    name = "recorder"

    def __init__(self, group, **options):
        super().__init__(group, **options)
        self.heard = []

    def start(self, session):
        session.empty(4, torch.float32)
        self.heard.append("started")

    def after_forward(self, session):
        self.heard.append("forward")

    def before_step(self, session):
        self.heard.append("before")

    def after_step(self, session):
        self.heard.append("after round" if session.is_round else "after")

    def skip_step(self, session):
        self.heard.append("skipped")

    def average_all(self, session):
        self.heard.append("average")

    def stop(self, session):
        self.heard.append("stopped")

    def take(self):
        heard, self.heard = self.heard, []
        return heard


def setup(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, Recorder(Mirror(), **options)


def backward(model, scale=1.0):
    (model(X).square().mean() * scale).backward()


@pytest.mark.parametrize("kind", [GradientAllReduce, TorchDDP, Recorder])
def test_a_group_of_one_is_plain_training_bit_for_bit(kind):
    results = []
    for is_attached in (False, True):
        model, optimizer, _ = setup()
        strategy = kind(SoloGroup(), local_steps=2, global_average_every=1)
        if is_attached:
            strategy.attach(model, optimizer)
            assert not any(parameter._backward_hooks for parameter in model.parameters())
            assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
            assert not model._forward_pre_hooks
            assert not model._forward_hooks
        for _ in range(5):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        results.append([*model.parameters(), *model.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert (strategy.steps, strategy.rounds) == (5, 2)


def test_a_loop_and_its_end():
    model, optimizer, strategy = setup(local_steps=2, global_average_every=2)
    with strategy.attach(model, optimizer) as attachment:
        assert attachment.trainable == list(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        model.eval()(X)
    step, shared = ["forward", "before", "after"], ["forward", "before", "after round"]
    assert strategy.take() == ["started", *step, *shared, *step, *shared, "average", "stopped"]
    assert strategy.group.members == ()
    backward(model.train())
    optimizer.step()
    assert not strategy.take()


def test_staying_gives_the_memory_back_instead_of_leaving():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer, stays=True):
        pass
    assert strategy.group.calls.count("free") == 1
    assert strategy.group.members == (0, 1)
    with strategy.attach(model, optimizer), pytest.raises(UsageError, match="attached already"):
        strategy.attach(model, optimizer)


def test_an_exception_in_the_loop_takes_the_hooks_off_and_leaves_nobody():
    model, optimizer, strategy = setup()

    def loop():
        with strategy.attach(model, optimizer):
            backward(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert strategy.take() == ["started", "forward", "stopped"]
    assert strategy.group.members == (0, 1)
    assert "free" not in strategy.group.calls
    optimizer.step()
    assert not strategy.take()


def test_close_ends_a_loop_without_with():
    model, optimizer, strategy = setup()
    strategy.close()
    strategy.attach(model, optimizer)
    backward(model)
    optimizer.step()
    strategy.close()
    strategy.close()
    assert strategy.take() == ["started", "forward", "before", "after round", "stopped"]
    assert strategy.group.members == ()


def test_join_detaches_and_leaves():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer, stays=True):
        strategy.join()
        backward(model)
        optimizer.step()
    assert strategy.take() == ["started", "stopped"]
    assert strategy.group.members == ()


@pytest.mark.parametrize("zero_at", ["before forward", "after forward", "after step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_the_scaler_skips(zero_at, set_to_none):
    model, optimizer, strategy = setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with strategy.attach(model, optimizer):
        for scale in (1.0, torch.inf, 1.0, torch.nan):
            if zero_at == "before forward":
                optimizer.zero_grad(set_to_none)
            loss = model(X).square().mean() * scale
            if zero_at == "after forward":
                optimizer.zero_grad(set_to_none)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if zero_at == "after step":
                optimizer.zero_grad(set_to_none)
    heard = [word for word in strategy.take() if word != "forward"]
    step = ["before", "after round"]
    assert heard == ["started", *step, "skipped", *step, "skipped", "stopped"]
    assert (strategy.steps, strategy.rounds) == (4, 4)


def test_accumulation_is_no_skipped_step():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                with strategy.accumulate():
                    backward(model)
            with strategy.accumulate():
                backward(model, 0.0)
            backward(model)
            optimizer.step()
        with strategy.accumulate():
            backward(model)
    assert strategy.steps == 2
    assert "skipped" not in strategy.take()


def test_passes_that_add_up_in_every_step_are_no_skipped_steps():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                backward(model)
            optimizer.step()
    assert strategy.steps == 2
    assert "skipped" not in strategy.take()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_step_that_the_loop_leaves_out_counts_at_the_next_forward(keeps, caplog):
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for number in range(4):
            backward(model)
            if number == 2:  # a loss that is too high, say
                if not keeps:
                    optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        assert strategy.steps == 4
    step = ["forward", "before", "after round"]
    assert strategy.take() == ["started", *step, *step, "forward", "skipped", *step, "stopped"]
    assert ("accumulate()" in caplog.text) == keeps


def test_a_look_at_the_model_between_backward_and_step_skips_none():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            model(X)
            optimizer.step()
    assert strategy.steps == 3
    assert "skipped" not in strategy.take()


def test_gradients_that_are_not_for_a_step_skip_none():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for _ in range(2):
            torch.autograd.grad(model(X).sum(), list(model.parameters()))
            backward(model.eval())
            optimizer.zero_grad()
            backward(model.train())
            optimizer.step()
            optimizer.zero_grad()
    assert strategy.steps == 2
    assert "skipped" not in strategy.take()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_what_a_step_computes_itself_is_part_of_it(has_zeros):
    model, _, strategy = setup()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad(set_to_none=not has_zeros)
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with strategy.attach(model, optimizer):
        for _ in range(2):
            optimizer.step(closure)
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 // 0)
        optimizer.zero_grad()
        optimizer.step(closure)
        backward(model)
    step = ["before", "after round"]
    assert strategy.take() == ["started", *step, *step, "before", *step, "forward", "skipped", "stopped"]


def test_shared_inside_of_a_step():
    model, _, _ = setup()
    strategy = GradientAllReduce(Mirror())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with strategy.attach(model, optimizer):
        first = optimizer.step(closure)
        assert optimizer.step(closure) < first
        assert strategy.steps == 2
        assert strategy.group.calls.count("all_reduce") >= 4


@pytest.mark.parametrize("gradients", ["kept", "cleared", "not finite"])
def test_a_step_that_has_not_come_is_settled_before_collectives(gradients):
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        for ask in (strategy.settle, strategy.consensus_distance, strategy.state_dict):
            backward(model)
            if gradients == "cleared":
                optimizer.zero_grad()
            elif gradients == "not finite":
                model[0].bias.grad[0] = torch.nan
            strategy.take()
            ask()
            ask()
            assert strategy.take() == ["skipped"]
            optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert strategy.steps == strategy.state_dict()["steps"] == 4
    assert "skipped" not in strategy.take()


def test_a_step_that_comes_after_it_was_settled_is_refused():
    model, optimizer, strategy = setup()
    with strategy.attach(model, optimizer):
        backward(model)
        strategy.settle()
        with pytest.raises(UsageError, match=r"between backward\(\) and step\(\)(.|\n)*after step\(\)"):
            optimizer.step()
        backward(model)
        optimizer.step()
        strategy.settle()
        assert strategy.steps == 2


@pytest.mark.parametrize("kind", [GradientAllReduce, Recorder])
@pytest.mark.parametrize("zero_at", ["before forward", "after forward"])
def test_skipped_steps_count(kind, zero_at):
    model, optimizer, _ = setup()
    strategy = kind(Mirror())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with strategy.attach(model, optimizer):
        for scale in (1.0, torch.inf, 1.0):
            if zero_at == "before forward":
                optimizer.zero_grad()
            loss = model(X).square().mean() * scale
            if zero_at == "after forward":
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert strategy.steps == 3


def test_two_strategies_in_one_group():
    """A GAN: the generator's backward goes through the discriminator, whose step does not follow."""
    generator, generator_optimizer, one = setup()
    _, _, other = setup()
    other.group = one.group
    discriminator = nn.Linear(1, 1)
    discriminator_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    with one.attach(generator, generator_optimizer):
        with other.attach(discriminator, discriminator_optimizer):
            for _ in range(2):
                discriminator_optimizer.zero_grad()
                discriminator(generator(X).detach()).mean().backward()
                discriminator_optimizer.step()
                generator_optimizer.zero_grad()
                with other.accumulate():
                    discriminator(generator(X)).mean().backward()
                generator_optimizer.step()
        assert one.group.members == (0, 1)
        backward(generator)
        generator_optimizer.step()
    assert one.group.members == ()
    assert (one.steps, other.steps) == (3, 2)
    assert "skipped" not in one.take() + other.take()


def test_a_group_outlives_losses_when_all_in_it_do():
    class Survivor(Recorder):
        survives_loss = True

    group = Mirror()
    first, second = Survivor(group), Recorder(Metered(group))
    with first.attach(*setup()[:2], stays=True):
        assert group.should_survive
        with second.attach(*setup()[:2], stays=True):
            assert not group.should_survive
        assert group.should_survive


def test_a_lazy_module_is_refused():
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"0\.weight has no shape yet(.|\n)*one forward before attach"):
        Recorder(Mirror()).attach(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("is_tensor", [False, True])
def test_rates_are_scaled_for_the_step_alone(is_tensor):
    model, optimizer, strategy = setup(warmup_steps=2, warmup_factor=0.5, decay_every=3, decay_factor=0.1)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.5) if is_tensor else 0.5
    seen = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with strategy.attach(model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: seen.append(float(optimizer.param_groups[0]["lr"])))
        for _ in range(4):
            backward(model)
            optimizer.step()
            scheduler.step()
    assert seen == pytest.approx([0.5 * 0.5, 0.25 * 0.75, 0.125, 0.0625 * 0.1])
    assert float(optimizer.param_groups[0]["lr"]) == 0.5 / 16


def test_a_strategy_reads_the_rate_of_the_step_under_way():
    model, _, _ = setup()
    first, *others = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.4)
    seen = []

    class Reader(Recorder):
        def before_step(self, session):
            seen.append(session.learning_rates)

        def after_step(self, session):
            seen.append(session.learning_rates)

    options = {"warmup_steps": 1, "warmup_factor": 0.5, "decay_every": 2, "decay_factor": 0.1}
    with Reader(Mirror(), **options).attach(model, optimizer):
        for _ in range(3):
            backward(model)
            optimizer.step()
    assert seen[::2] == seen[1::2]
    assert [list(rates) for rates in seen] == [[name for name, _ in model.named_parameters()]] * 6
    assert [rates["0.weight"] for rates in seen[::2]] == pytest.approx([0.1, 0.2, 0.02])
    assert [rates["2.bias"] for rates in seen[::2]] == pytest.approx([0.2, 0.4, 0.04])


def test_autograd_sees_nothing_of_what_a_strategy_does_around_a_step():
    class Adder(Recorder):
        is_equal_after_round = False
        has_last_round = True

        def start(self, session):
            self.sum = session.parameters.zeros_like()

        def before_step(self, session):
            for name, tensor in self.sum.items():
                tensor += session.named_parameters[name]
            for parameter in session.trainable:
                parameter *= 0.5

        def average_all(self, session):
            self.before_step(session)

        last_round = average_all

    model, optimizer, _ = setup()
    strategy = Adder(Mirror(), global_average_every=1)
    with strategy.attach(model, optimizer, stays=True):
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        backward(model)
        strategy.settle()  # the step is skipped
        vector = strategy.sum
    assert not any(tensor.requires_grad for tensor in (*vector.flats, *vector.views))
    assert all(parameter.grad_fn is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_a_common_state_that_is_not_there_is_refused():
    class Common(Recorder):
        common_state = ("slow", "seldom")
        seldom: float

        def start(self, session):
            setattr(self, self.made, session.parameters.clone())

    model, optimizer, _ = setup()
    strategy = Common(Mirror())
    strategy.made = "slo"
    with pytest.raises(UsageError, match="no attribute 'slow', which its common_state names"):
        strategy.attach(model, optimizer)
    strategy.made = "slow"
    strategy.attach(model, optimizer).close()


def test_rates_come_back_after_a_step_that_raised():
    model, optimizer, strategy = setup(warmup_steps=10)

    def closure():
        raise ZeroDivisionError

    with strategy.attach(model, optimizer):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_continues():
    model, optimizer, first = setup(local_steps=2, monitor=True, batch_size=4)
    with first.attach(model, optimizer):
        for _ in range(3):
            backward(model)
            optimizer.step()
    *_, second = setup(local_steps=2, monitor=True, batch_size=4)
    state = first.state_dict()
    second.load_state_dict(state)
    assert (second.steps, second.rounds, second.monitors) == (3, 1, first.monitors)
    assert second.state_dict() == state
    with pytest.raises(UsageError, match="'recorder' does not fit all-reduce"):
        GradientAllReduce(SoloGroup()).load_state_dict(state)


def test_parameters_that_only_the_optimizer_has_count():
    model, _, strategy = setup()
    extra = nn.Parameter(torch.zeros(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with strategy.attach(model, optimizer) as attachment:
        assert list(attachment.named_parameters) == [
            "0.weight",
            "1.weight",
            "1.bias",
            "2.weight",
            "2.bias",
            "optimizer.0.6",
        ]


def test_a_lost_peer_ends_backward_and_the_step_is_refused():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())
    with strategy.attach(model, optimizer):
        backward(model)
        optimizer.step()
        before = [parameter.clone() for parameter in model.parameters()]
        momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
        strategy.group.is_peer_lost = True
        optimizer.zero_grad()
        with pytest.raises(PeerLost, match="rank 1"):
            backward(model)
        with pytest.raises(PeerLost, match="rank 1"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        assert torch.equal(momentum, optimizer.state_dict()["state"][0]["momentum_buffer"])
        strategy.group.is_peer_lost = False
        backward(model)
        optimizer.step()
        assert strategy.steps == 2


def test_a_loss_since_backward_ends_the_step_where_gradients_come_later():
    """On a GPU, whose work is only under way when `backward()` returns."""

    class Losing(Mirror):
        losses: ClassVar[dict] = {}

        @property
        def lost(self):
            return self.losses

    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Losing())
    with strategy.attach(model, optimizer) as attachment:
        for device, is_refused in (("cpu", False), ("cuda", True)):
            attachment.device = torch.device(device)
            backward(model)
            before = [parameter.clone() for parameter in model.parameters()]
            strategy.group.losses = {1: Loss(1, "its process 4711 ended")}
            with pytest.raises(PeerLost, match="rank 1") if is_refused else contextlib.nullcontext():
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters())) == is_refused
            strategy.group.losses = {}
        optimizer.step()


def test_a_loss_that_is_noticed_between_two_gradients():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror(), bucket_mib=1e-4)

    def progress():
        raise PeerLost("rank 1 is lost: its process ended.", peer=1)

    with strategy.attach(model, optimizer):
        strategy.group.progress = progress
        with pytest.raises(PeerLost, match="rank 1"):
            backward(model)
        with pytest.raises(PeerLost, match="rank 1"):
            optimizer.step()


def test_a_backward_pass_that_raises():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())

    def fail(gradient):
        raise ZeroDivisionError

    with strategy.attach(model, optimizer):
        hook = model[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(model)
        with pytest.raises(UsageError, match="did not come to its end"):
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        backward(model)  # nothing had been shared yet: the round begins again
        optimizer.step()
        assert strategy.steps == 2  # the one before is one that was skipped


def test_what_comes_to_training_after_attach_is_refused():
    model, optimizer, strategy = setup()
    model[0].bias.requires_grad_(False)
    with strategy.attach(model, optimizer):
        model[0].bias.requires_grad_(True)
        with pytest.raises(UsageError, match=r"0\.bias came to training"):
            optimizer.step()
        model[0].bias.requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="parameter of the optimizer"):
            optimizer.step()


def test_gradients_are_private_after_the_end():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())
    with strategy.attach(model, optimizer):
        backward(model)
        shared = model[0].weight.grad
    assert torch.equal(model[0].weight.grad, shared)
    assert model[0].weight.grad.data_ptr() != shared.data_ptr()


def test_a_step_of_gradients_that_were_not_shared_is_refused():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())
    with strategy.attach(model, optimizer):
        with strategy.accumulate():
            backward(model)
        with pytest.raises(UsageError, match="accumulate"):
            optimizer.step()


@pytest.mark.parametrize("way", ["assigned", "before attach"])
def test_a_step_of_gradients_that_no_round_has_seen_is_refused(way):
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())
    if way == "before attach":
        backward(model)
    with strategy.attach(model, optimizer):
        if way == "assigned":
            backward(model)
            optimizer.step()
            gradients = torch.autograd.grad(model(X).sum(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        with pytest.raises(UsageError, match="gradients that were not shared"):
            optimizer.step()
        backward(model)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()


def test_nothing_keeps_the_model_alive():
    model, optimizer, _ = setup()
    strategy = GradientAllReduce(Mirror())
    with strategy.attach(model, optimizer):
        backward(model)
        optimizer.step()
    is_there = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert is_there() is None


@pytest.mark.parametrize("row", all_strategies(), ids=lambda row: row.name)
def test_a_strategy_inherits_from_few(row):
    bases = [base for base in load_class(row).__mro__[1:] if base is not object]
    assert len(bases) <= MAX_LEVELS
    assert bases[-1] is Strategy
