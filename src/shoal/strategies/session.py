"""Everything between a strategy and the user's loop, for one model and optimizer, from `attach` to the end.

What is shared, and when, is left to the strategy, which sees the session's flat parameters and its group. All
of it happens in the user's thread, inside `backward()`, `optimizer.step()` and the model's forward.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import PeerLost, ShoalError, UsageError
from shoal.core.status import tell_launcher
from shoal.group import Group, Handle, Window, next_number
from shoal.group.elastic import elastic_of
from shoal.group.functions import StepCounter, others, take_values
from shoal.group.opening import has_failed
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import ShardReplicas, lost_mate
from shoal.strategies.averaging import average, average_buffers, copy_buffers
from shoal.strategies.hooks import LoopHooks
from shoal.strategies.nonfinite import FiniteCheck
from shoal.strategies.start import (
    device_of,
    named_tensors,
    note_attached,
    refuse_foreign,
    refuse_sharded,
    require_equal,
    require_equal_layouts,
    require_same_count,
    shared_of,
    start_optimizers,
    warn_of_unshared,
)
from shoal.tensors import BucketLayout, Flat, ParameterBuffers, is_sharded
from shoal.topology import Weights

if TYPE_CHECKING:
    from shoal.strategies.options import StrategyOptions
    from shoal.strategies.strategy import Strategy

log = logging.getLogger(__name__)


class TrainingSession:
    """A strategy at work on one model; a context manager.

    On a clean end this worker leaves the group in order, on an exception it doesn't. Strategies read the
    attributes and call the methods of the first half; the user's loop needs none of them.
    """

    named_parameters: dict[str, nn.Parameter]
    """The trainable ones that are shared, each once, in the order of the model; then the optimizer's own.

    Of the model those that the optimizer has: others may have another optimizer, and are between its steps.
    Where gradients are shared instead, all, but for those that a strategy on this model shares already.
    """
    named_tensors: dict[str, torch.Tensor]
    """All that must be equal at the start: parameters, each once, and buffers."""
    finite: FiniteCheck
    """The check for values that are not finite; there while the session is in its group."""

    def __init__(self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, *, stays: bool) -> None:
        self.strategy = strategy
        self.group: Group = strategy.group
        self.model = model
        self.optimizer = optimizer
        self.stays = stays
        self.is_open = True
        self.has_started = False
        self.is_in_group = False
        """Whether it has begun to start in its group, and has not been detached since."""
        self.is_skipped = False
        """Whether the round under way is one of a step that the optimizer was not called for."""
        self.is_left_out = False
        """Whether the optimizer is called, and finds no gradients, since some are not finite."""
        self.is_alone = strategy.is_alone
        """Whether there is nothing to share: the group is one of one, and the strategy does nothing there."""
        self.named_tensors = named_tensors(model, optimizer)
        trainable = {
            name: tensor
            for name, tensor in self.named_tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }
        known = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        taken = shared_of(model, by_gradients=True)
        self.named_parameters = {
            name: tensor
            for name, tensor in trainable.items()
            if (id(tensor) not in taken if strategy.shares_gradients else id(tensor) in known)
        }
        self.trainable = list(self.named_parameters.values())
        self.device = device_of(self.trainable)
        self.is_sharded = any(map(is_sharded, self.named_tensors.values()))
        """Whether the workers of a machine hold one model together: parameters are DTensors, whose
        `local_part` is this worker's, and the group's members are those that hold the same parts."""
        self._not_shared: dict[str, nn.Parameter] | None = {
            name: tensor for name, tensor in trainable.items() if name not in self.named_parameters
        }
        """What is trainable otherwise, until the first step."""
        self._frozen = {
            name: tensor
            for name, tensor in self.named_tensors.items()
            if isinstance(tensor, nn.Parameter) and name not in trainable
        }
        self._num_optimized = sum(len(group["params"]) for group in optimizer.param_groups)
        options = strategy.options
        # what a step has to do is decided here: to ask for it in every step takes longer than to do it
        self._has_own_rates = bool(options.warmup_steps or options.decay_every)
        self._divides_rates = strategy.hears("rate_divisor")
        self._acts_before_step = strategy.hears("before_step")
        self._is_followed = False
        """Whether steps are noted for `shoal top` or the launcher, or checkpoints are kept."""
        self._monitors = None if strategy.shares_gradients else strategy.gradient_monitors
        self._has_buffers = any(True for _ in model.buffers())
        self._should_copy_buffers = False
        """Whether buffers become those of rank 0 after each step; known once the strategy has started."""
        self._buffers: ParameterBuffers | None = None
        self._made: list[str] = []
        """The attributes that the strategy's `start` has made, which go at the end."""
        self._closings: list[Callable[[], None]] = []
        self._window_names: Iterator[str] | None = None
        self._counter: StepCounter | None = None
        self._equal_step = 0
        """The step after which all models were equal the last time."""
        self._announced: list[int] = []
        """Lost peers that were announced."""
        self._hooks = LoopHooks(self)

    # What a strategy works with.

    @property
    def options(self) -> StrategyOptions:
        """The options of the session's strategy."""
        return self.strategy.options

    @property
    def steps(self) -> int:
        """The optimizer's steps until now, skipped ones included."""
        return self.strategy.steps

    @property
    def is_round(self) -> bool:
        """Whether the step that comes next, or is under way, is one in which the group shares."""
        return (self.strategy.steps + 1) % self.strategy.options.local_steps == 0

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward pass now shares nothing, and no step follows it."""
        return self.strategy.is_accumulating

    @property
    def is_void(self) -> bool:
        """Whether the optimizer is called, and moves nothing: left out, or GradScaler found an inf for it."""
        if self.is_left_out:
            return True
        found_inf = getattr(self.optimizer, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    @property
    def has_closure(self) -> bool:
        """Whether the step under way computes its gradients itself (LBFGS)."""
        return self._hooks.has_closure

    @property
    def others(self) -> list[int]:
        """The other members that are there."""
        return others(self.group)

    @property
    def parameters(self) -> Flat:
        """The trainable parameters as one vector, whose views they are from the first use on.

        The first use is collective: let it be in `Strategy.start`.
        """
        buffers = self._buffers or self.hold_parameters()
        buffers.adopt()
        return buffers.live

    def hold_parameters(self, num_buffers: int = 1) -> ParameterBuffers:
        """Moves parameters into flat memory until the end, several buffers into the group's. Collective."""
        if self._buffers is not None:
            raise UsageError(
                "the parameters are held already.",
                next_step="call hold_parameters() once, in start(), before the first use of parameters.",
            )
        require_equal_layouts(self.group, BucketLayout.plan(self.trainable, max_bytes=sys.maxsize))
        allocate = self.empty if num_buffers > 1 else None
        self._buffers = ParameterBuffers(self.named_parameters, allocate, num_buffers=num_buffers)
        return self._buffers

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Gives memory of the group on the model's device, until the end. Collective."""
        memory = self.group.empty(num_elements, dtype, device=self.device)
        self.close_later(partial(self.group.free, memory))
        return memory

    def window(
        self, like: torch.Tensor, dtype: torch.dtype | None = None, *, sources: Sequence[int] | None
    ) -> Window:
        """Opens a window for tensors like this one, which `sources` write to, until the end. Collective."""
        if self._window_names is None:
            # no name is used twice, not even for a model after one that was detached
            number = next_number(self.group, "windows of models")
            self._window_names = (f"{self.strategy.name} {number}.{place}" for place in itertools.count())
        name, dtype = next(self._window_names), dtype or like.dtype
        window = self.group.window(name, like.numel(), dtype, sources=sources, device=like.device)
        self.close_later(window.close)
        return window

    def close_later(self, close: Callable[[], None]) -> None:
        """Calls this at the end, with what gives memory back, if all members stay in the group."""
        self._closings.append(close)

    def on_gradient(self, parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
        """Calls a hook, inside backward, each time that a parameter's `.grad` has got its new value."""
        self._hooks.on_accumulated(parameter, hook)

    def exchange(self, flat: Flat, weights: Weights) -> Flat:
        """Mixes with neighbours, `own·flat + Σ weight·theirs`, into private memory. Collective.

        The weight of a peer that is lost or has left goes to one's own values.
        """
        mixed = flat.clone()
        self.wait_for([self.group.exchange(each, weights) for each in mixed.flats])
        return mixed

    def wait_for(self, handles: Sequence[Handle[torch.Tensor]]) -> None:
        """Waits for operations of the group, then looks for lost peers as `check_lost_peers` does."""
        for handle in handles:
            handle.wait()
        self.check_lost_peers()

    @property
    def learning_rates(self) -> dict[str, float]:
        """The learning rate of each parameter in the step under way, with warm-up and decay."""
        factor = self.strategy.options.rate_factor(self.steps) / self.strategy.rate_divisor
        groups = zip(self.optimizer.param_groups, self._hooks.user_rates, strict=True)
        rates = {id(tensor): float(rate) for group, rate in groups for tensor in group["params"]}
        return {name: factor * rates.get(id(tensor), 0.0) for name, tensor in self.named_parameters.items()}

    def average(self, flat: Flat, with_peers: Sequence[int] | None = None) -> Flat:
        """Gives the mean of own values and those of some peers, who name this one; of all by default.

        The mean of all is the same for all, also while a worker leaves. Collective: who has no peers in this
        round gives an empty list.
        """
        if with_peers is not None:
            return self.exchange(flat, Weights.uniform(with_peers, with_peers))
        mean = flat.clone()
        self.wait_for([self.group.all_reduce(each) for each in mean.flats])
        return mean

    def random_partner(self, seed: int = 0) -> int | None:
        """Draws a partner for this round, the same on both sides; None for who is left over, or alone.

        One that is lost is drawn like any other, since not all learn of a loss at once: then `average` gives
        one's own values.
        """
        order = torch.Generator().manual_seed((seed << 32) + self.strategy.rounds)
        ranks = torch.randperm(self.group.size, generator=order).tolist()
        place = ranks.index(self.group.rank) ^ 1
        return ranks[place] if place < len(ranks) else None

    def finish_exchange(self, handles: Sequence[Handle[torch.Tensor]], *, should_keep: bool = False) -> None:
        """Waits for exchanges into the spare buffer, and makes that the live one; a failure changes nothing.

        With `should_keep` what came is left out, and the parameters stay what they are.
        """
        assert self._buffers is not None, "hold_parameters(2) comes first"
        self.wait_for(handles)
        if should_keep:
            self._buffers.keep()
        self._buffers.swap()

    def average_parameters(self) -> None:
        """Makes all parameters the mean over the group; outlives a lost peer. Collective.

        It is one mean for all, as `average` is; where parameters lie in several buffers, which are exchanged
        without a copy, members may differ in a round in which one leaves.
        """
        buffers = self._buffers
        if buffers is None:
            average(self.group, [parameter.detach() for parameter in self.trainable])
            return
        buffers.adopt()
        if buffers.num_buffers == 1:
            buffers.live.copy_(self.average(buffers.live))
            return
        if self.group.num_machines > 1:  # an exchange would send from each worker to each one elsewhere
            for live, out in buffers.pairs:
                self.group.settle(out)
                out.copy_(live)
            handles = [self.group.all_reduce(out) for _, out in buffers.pairs]
        else:
            weights = Weights.uniform(self.others, self.others)
            handles = [self.group.exchange(live, weights, out=out) for live, out in buffers.pairs]
        self.finish_exchange(handles)

    def average_buffers(self) -> None:
        """Makes BatchNorm's statistics and the like the mean over the group. Collective."""
        if self._has_buffers:
            average_buffers(self.group, self.model)

    def check_lost_peers(self) -> None:
        """Goes on without lost peers, noting each once; PeerLost where the strategy needs everybody.

        PeerLost, too, when a peer of this machine is lost which held a part of a sharded model. NetworkSplit
        on the side of a cut network that stops.
        """
        if self.group.split is not None:
            raise self.group.split
        if len(self.group.lost) == len(self._announced):
            return
        strategy = self.strategy
        for rank, loss in list(self.group.lost.items()):
            if not strategy.survives_loss:
                raise loss.error(f" in round {strategy.rounds}")
            if isinstance(self.group, ShardReplicas) and rank in self.group.mates:
                raise lost_mate(loss)
            if rank not in self._announced:
                self._announced.append(rank)
                # the group has warned of the loss and its reason
                log.info(
                    "%s on rank %d goes on without rank %d, lost in round %d: %s",
                    strategy.name, self.group.rank, rank, strategy.rounds, loss.reason,
                )  # fmt: skip

    # From attach to the end.

    def open(self, *, should_start_equal: bool) -> None:
        """Starts all workers alike, and listens to the loop from now on. Collective."""
        try:
            self._begin(should_start_equal=should_start_equal)
        except BaseException:
            self.close(is_failed=True)
            raise

    def _begin(self, *, should_start_equal: bool) -> None:
        """Starts for the first time, or from a checkpoint. Collective."""
        self.enter(should_start_equal=should_start_equal)

    def enter(self, *, should_start_equal: bool) -> None:
        """Starts in the group as it is now. Collective; who fails here is to detach."""
        strategy = self.strategy
        strategy.take_session(self)
        self._announced = []
        survivals_of(self.group).append(strategy.survives_loss)
        self.is_in_group = True
        if self.is_alone:
            self.take_up()
        else:
            if self.is_sharded:  # it shares with those alone that hold the same parts of the model
                refuse_sharded(self)
                require_equal(self.group, self.named_tensors)
                sharded = list(filter(is_sharded, self.named_tensors.values()))
                self.group = ShardReplicas.find(self.group, sharded)
                strategy.set_group(self.group)
            strategy.begin(self, should_start_equal=should_start_equal)
        self.finite = FiniteCheck(self)
        if not self.is_alone:
            before = list(vars(strategy))
            try:
                strategy.start(self)
            finally:
                self._made = [name for name in vars(strategy) if name not in before]
            strategy.restore(self.model)
            self.has_started = True
            wants_copies = self._has_buffers and strategy.options.should_broadcast_buffers
            self._should_copy_buffers = wants_copies and strategy.shares_buffers
            if strategy.has_last_round and self.group.size > 1 and not self.stays:
                is_on_device = self.device.type != "cpu"
                self._counter = StepCounter(self.group, strategy.steps, is_on_device=is_on_device)
                self.close_later(self._counter.close)
            note_attached(self)
        self.group.should_survive = all(survivals_of(self.group))
        self._hooks.listen()
        is_alone_for_good = self.group.size == 1 and elastic_of(self.group) is None
        if not is_alone_for_good or strategy.checkpoints.folder is not None:
            # who is alone, and keeps no checkpoints, owes nobody an end
            atexit.register(self._close_at_exit, os.getpid(), getattr(sys, "last_value", None))
        strategy.checkpoints.restore_random()
        strategy.status_reporter.opened(strategy.steps, strategy.tracked_values)
        self._is_followed = strategy.checkpoints.folder is not None or strategy.status_reporter.is_open

    def restart(self) -> None:
        """Starts anew from a checkpoint that the strategy was told to load. Collective."""
        self._hooks.remove()
        if not self.is_alone:
            self.strategy.finish(self, should_leave=False)
        self._detach(should_leave=False, is_failed=False)
        self.open(should_start_equal=True)

    def change_group(self, group: Group) -> None:
        """Goes on in another group, between two steps: what the strategy keeps moves along. Collective there.

        All members of the new group call it after the same step; the old one is left to the caller.
        """
        self.settle()
        state = self.strategy.state_dict()
        self._hooks.remove()
        self._detach(should_leave=False, is_failed=True)
        self.take_group(group, state)
        self.open(should_start_equal=True)

    def take_group(self, group: Group, state: Mapping[str, Any]) -> None:
        """Belongs to another group, or to one that has become another, from now on; with the common state."""
        strategy = self.strategy
        self.group = group
        strategy.set_group(group)
        self.is_alone = strategy.is_alone
        strategy.status_reporter = strategy.status_reporter.moved(group)
        strategy.load_common_state(state)

    def on_resize(self, follow: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Calls `follow(old_size, new_size)` whenever the group has grown or shrunk, between two steps.

        For learning rates that depend on the number of workers; under `shoal run --elastic`, and where
        torchrun has restarted the workers. One that has come to a run, or was started anew, has the learning
        rate of before, so that there it is called at once.
        """
        return follow

    def settle(self) -> None:
        """Makes up for steps that were skipped: no step will follow the last backward pass any more."""
        self._hooks.settle()

    def close(self, *, is_failed: bool = False) -> None:
        """Detaches; idempotent. With `is_failed` nothing is said to the group."""
        if not self.is_open:
            return
        self.is_open = False
        num_missed = self._hooks.remove()
        should_leave = not self.stays
        if not is_failed:
            try:
                for _ in range(num_missed):
                    self.step_skipped()
                self._share_rest(should_leave=should_leave)
                lost = self.group.lost
                self.finite.closed(speaks_for_all=all(rank in lost for rank in range(self.group.rank)))
                self.strategy.checkpoints.save_at_end(self, should_leave=should_leave)
                if not self.is_alone:
                    self.strategy.finish(self, should_leave=should_leave)
            except BaseException:
                self._detach(should_leave=False, is_failed=True)
                raise
        self._detach(should_leave=should_leave, is_failed=is_failed)

    def _close_at_exit(self, pid: int, earlier_error: object) -> None:
        """Closes what nobody has closed when the program ends: a loop without `with` may forget it.

        It comes before the group's own end, which was registered earlier. In a program that fails it is only
        detached, so that the others learn of it (`group.opening`). A forked child inherits the call, and is
        no worker.
        """
        if pid != os.getpid():
            return
        try:
            is_failed = has_failed(earlier_error)
            if is_failed:
                self.fail(getattr(sys, "last_value", None))
            self.close(is_failed=is_failed)
        except BaseException as error:  # noqa: BLE001 - shown as any other, and the group ends as failed
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and not error.code and self.is_open:
            tell_launcher(early_step=self.strategy.steps)
        loss = None
        if isinstance(self.group, ShardReplicas) and isinstance(error, RuntimeError):
            loss = self.group.find_lost_mate()  # which torch's collectives do not name
        if error is not None:
            self.fail(error)
        self.close(is_failed=error is not None)
        if loss is not None:
            raise lost_mate(loss) from error

    def fail(self, error: object) -> None:
        """Takes note of what has ended the loop, before `close`; there is nothing to do for it here."""

    def take_up(self) -> Literal["taken over", "exact", "common"] | None:
        """Goes on from a checkpoint, or from those who have trained where workers come and go. Collective.

        Tells which it was, and of a checkpoint what `RunCheckpoints.resume` does; None for a fresh start.
        """
        return self.strategy.checkpoints.resume(self)

    def start_equal(self, *, should_start_equal: bool) -> None:
        """Takes up a checkpoint, or rank 0's values; compares what cannot be taken. Collective."""
        strategy = self.strategy
        require_equal(self.group, self.named_tensors)
        resumed = self.take_up()
        if resumed == "taken over":
            return
        if resumed is not None:
            should_start_equal = resumed == "common"
        if strategy.is_lockstep:
            require_same_count(self.group, strategy)
        if should_start_equal:
            take_values(self.group, list(self.named_tensors.values()), self.group.members[0])
        num_since = 0 if should_start_equal else strategy.steps % strategy.options.local_steps
        self._equal_step = strategy.steps - num_since
        start_optimizers(self, should_take_state=should_start_equal, has_loaded=resumed is not None)

    @torch.no_grad()
    def _share_rest(self, *, should_leave: bool) -> None:
        """Shares the steps since the last round, if all members end after the same step; says so if not."""
        strategy = self.strategy
        if not strategy.has_last_round or self.group.size == 1 or strategy.steps == self._equal_step:
            return
        members = self.group.members
        period, has_had_none = strategy.options.local_steps, strategy.rounds == 0
        num_steps = strategy.steps % period or period
        is_even = len(members) > 1
        if should_leave:
            is_even = bool(members) and self._counter is not None and self._counter.meet(strategy.steps)
        is_first = self.group.rank in members[:1]  # which may leave right after
        why = "other workers have ended before it, or go on"
        if is_even:
            try:
                strategy.last_round(self)
            except ShoalError as error:
                is_even, why = False, error.what
        if not is_even:
            log.warning(
                "%s: rank %d ends with a model of its own: %d step%s since the last round (%s).",
                strategy.name, self.group.rank, num_steps, "" if num_steps == 1 else "s", why,
            )  # fmt: skip
            return
        strategy.rounds += 1
        self._equal_step = strategy.steps
        if has_had_none and is_first:
            log.warning(
                "%s: this training had %d steps, and a round comes after every %d: the models were averaged "
                "only once, at the end. Set --local-steps to less.",
                strategy.name, strategy.steps, period,
            )  # fmt: skip

    def _detach(self, *, should_leave: bool, is_failed: bool) -> None:
        """Gives the model back, and leaves the group or gives its memory back."""
        strategy, closings = self.strategy, self._closings
        self._closings, self._counter, self._window_names = [], None, None
        atexit.unregister(self._close_at_exit)
        if isinstance(self.group, ShardReplicas):
            self.group = self.group.inner
            strategy.set_group(self.group)
        strategy.release_session(self.model)
        self.has_started = self.is_in_group = False
        if "finite" in vars(self):  # else it has failed before
            self.finite.after_optimizer()
            del self.finite
        strategy.status_reporter.closed()
        survivals = survivals_of(self.group)
        survivals.remove(strategy.survives_loss)
        is_last = not survivals
        if not is_last:
            self.group.should_survive = all(survivals)
        elif not is_failed:
            strategy.status_reporter.tell("joined")
        if not self.is_alone:
            strategy.stop(self)
        for name in self._made:
            vars(strategy).pop(name, None)
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        if is_failed:
            return
        if should_leave:
            # others may still read this one's memory, and are not waited for: it goes with the group's
            if is_last:
                self.group.leave()
                strategy.status_reporter.tell("left")
            return
        for close in closings:
            close()

    # What the hooks report.

    def forward_ended(self) -> None:
        """Is called after a whole forward, in training with gradients."""
        self.strategy.after_forward(self)

    @property
    def gradient_listener(self) -> Callable[[torch.Tensor], None] | None:
        """Is called in backward for each parameter whose `.grad` has got its new value; None: nobody listens.

        It is the strategy's own method: to pass through one of the session would cost a call a parameter.
        """
        return partial(self.strategy.gradient_ready, self) if self.strategy.hears("gradient_ready") else None

    def go_on_without(self, error: PeerLost) -> None:
        """Raises the error, but where a session can go on in another group."""
        raise error

    # Autograd sees nothing of what strategies do around a step: a vector that it tracked would only grow.
    # `set_grad_enabled` in a block takes 1.4 µs, `no_grad` as a decorator 3.5.

    def step_begins(self, num_missed: int) -> float:
        """Prepares the optimizer's step, after `num_missed` skipped ones; returns the factor on its rates."""
        strategy = self.strategy
        if not self.is_alone:
            if self._not_shared is not None:
                self.refuse_foreign()  # it may have come after attach
                warn_of_unshared(self, self._not_shared)
                self._not_shared = None
            for _ in range(num_missed):
                self.step_skipped()
            if self._counter is not None:
                self._publish_step(self._counter)
            if self.finite.is_hiding:  # the step before has raised
                self.finite.after_optimizer()
            if self.finite.looks_before_step:
                self.finite.before_step(strategy.steps)
            if self._monitors is not None:
                self._monitors.observe_locally(self.group, self.trainable, is_skipped=self.is_left_out)
            if self._acts_before_step:
                with torch.set_grad_enabled(False):
                    strategy.before_step(self)
            else:
                self.check_lost_peers()
        factor = strategy.options.rate_factor(strategy.steps) if self._has_own_rates else 1.0
        return factor / strategy.rate_divisor if self._divides_rates else factor

    def step_ended(self) -> None:
        """Is called after the optimizer's step."""
        if self.finite.is_hiding:
            self.finite.after_optimizer()
        with torch.set_grad_enabled(False):
            if not self.is_alone:
                self.strategy.after_step(self)
            self._count_step()

    @torch.no_grad()
    def step_skipped(self) -> None:
        """Is called instead of both, when the optimizer did not step after a backward pass."""
        if not self.is_alone:
            if self._counter is not None:
                self._publish_step(self._counter)
            self.finite.skipped_step()
            if self._monitors is not None:
                self._monitors.observe_locally(self.group, self.trainable, is_skipped=True)
            self.is_skipped = True
            try:
                self.strategy.skip_step(self)
            finally:
                self.is_skipped = False
        self._count_step()

    def require_unchanged(self) -> None:
        """UsageError when a parameter came to training after attach."""
        num_optimized = 0
        for group in self.optimizer.param_groups:
            num_optimized += len(group["params"])
        if num_optimized != self._num_optimized or (self._frozen and self._thawed):
            thawed = self._thawed
            raise UsageError(
                f"{', '.join(thawed) or 'a parameter of the optimizer'} came to training after attach, "
                "and is not shared.",
                next_step="end the `with` block (attach with stays=True), and attach again.",
            )

    @property
    def _thawed(self) -> list[str]:
        """The parameters that were frozen at attach, and are not any more."""
        return [name for name, tensor in self._frozen.items() if tensor.requires_grad]

    def _publish_step(self, counter: StepCounter) -> None:
        """Shows that this worker goes on, before a round in which it may wait for one that has ended."""
        counter.publish(self.strategy.steps + 1, is_urgent=self.is_round)

    def _count_step(self) -> None:
        strategy, was_round = self.strategy, self.is_round
        strategy.steps += 1
        if was_round:
            strategy.rounds += 1
            if strategy.is_equal_after_round:
                self._equal_step = strategy.steps
            every = strategy.options.global_average_every
            if every and strategy.rounds % every == 0 and not self.is_alone:
                strategy.average_all(self)
                self.average_buffers()
        if self._should_copy_buffers and not self.is_alone:
            copy_buffers(self.group, self.model)
        self.finite.after_step(strategy.steps - 1)
        if self._is_followed:
            strategy.checkpoints.stepped(self)
            strategy.status_reporter.stepped(strategy.steps)

    def refuse_foreign(self) -> None:
        """UsageError when something else shares this model among the same workers."""
        if not self.is_alone:
            refuse_foreign(self.model, self.group)


# Several strategies may be attached in one group: a GAN has two models, two optimizers, two strategies. The
# group is left when the last of them is detached, and goes on without lost peers when all of them do.


def survivals_of(group: Group) -> list[bool]:
    """Gives the list, to be changed, of whether the strategies that are attached there survive losses."""
    survivals: list[bool] = group.notes.setdefault("survivals", [])
    return survivals


def still_there(group: Group) -> Group:
    """Gives the group; for one worker alone also after it has left, since nobody is there to miss it."""
    return SoloGroup() if group.size == 1 else group
