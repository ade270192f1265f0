"""What all strategies share: the way they attach to a user's own loop, and what they are asked for there.

A strategy sees the loop through public hooks alone, and all it does it does in the user's thread: inside
`backward()`, `optimizer.step()` and the model's forward. Which tensors travel, and when, is left to the
strategies; how they travel to the group. In a group of one none of the methods for subclasses is called, and
a step that was skipped is not noticed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import ShoalError, UsageError
from shoal.core.status import tell_launcher
from shoal.data import ShardedLoader
from shoal.group import Group
from shoal.strategies.at_exit import close_at_exit, forget
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import common_model
from shoal.strategies.beats import Beats
from shoal.strategies.buffers import average_buffers, copy_buffers
from shoal.strategies.checkpointing import Contents, RunCheckpoints
from shoal.strategies.consensus import consensus_distance
from shoal.strategies.foreign import refuse_foreign
from shoal.strategies.last_round import StepCounter
from shoal.strategies.monitors import Monitors
from shoal.strategies.nonfinite import Checked, FiniteCheck
from shoal.strategies.optimizers import start_optimizers
from shoal.strategies.options import CommonOptions, read_options
from shoal.strategies.schedule import rate_factor
from shoal.strategies.start import require_equal, require_same_count, take_values
from shoal.strategies.tenants import apply_survival, crew, move_in, move_out
from shoal.tensors.checkpoint import NUM_KEPT

log = logging.getLogger(__name__)


class Strategy:
    """How a group shares what its members learn; attached to one model and its optimizer at a time.

    Options are given by name (`NeighborAverage(group, topology="ring")`), as `options`, or both.
    """

    name: ClassVar[str]
    survives_loss: ClassVar[bool] = False
    """Whether the others train on when a peer is lost."""
    runs_on_devices: ClassVar[bool] = True
    """Whether the model may be on a device; otherwise on the CPU alone."""
    is_lockstep: ClassVar[bool] = True
    """Whether all members have done equally many steps, whenever they meet."""
    Options: ClassVar[type[CommonOptions]] = CommonOptions

    group: Group
    options: CommonOptions
    steps: int
    """Of the optimizer until now, skipped ones included."""
    rounds: int
    """Times that the group has shared what it learned, as this worker counts them."""

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        given = {} if options is None else msgspec.structs.asdict(options)
        self.group = group
        self.options = read_options(self.Options, {**given, **named}, self.name)
        self.steps = 0
        self.rounds = 0
        self._monitors = Monitors(self.options.batch_size) if self.options.monitor else None
        self._attachment: Attachment | None = None
        self._finite: FiniteCheck | None = None
        """While attached."""
        self._num_accumulating = 0
        self._has_stepped = False
        self._memory: list[torch.Tensor] = []
        self._counter: StepCounter | None = None
        self._equal_step = 0
        """The step after which all models were equal the last time."""
        self._checkpoints = RunCheckpoints(group)
        self._session: TrainingSession | None = None
        """While attached."""
        self._beats = Beats(group, self.name)

    @property
    def attachment(self) -> Attachment:
        """The model and optimizer that it works on; UsageError without."""
        if self._attachment is None:
            raise UsageError(
                f"{self.name} is not attached to a model.",
                next_step="call it inside `with strategy.attach(model, optimizer):`.",
            )
        return self._attachment

    @property
    def is_alone(self) -> bool:
        """Whether the group is one of one, so that there is nothing to share."""
        return self.group.size == 1

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward pass now is one of `accumulate`."""
        return self._num_accumulating > 0

    @property
    def is_round(self) -> bool:
        """Whether the step that comes next, or is under way, is one in which the group shares."""
        return (self.steps + 1) % self.options.local_steps == 0

    @property
    def shares_gradients(self) -> bool:
        """Whether gradients are equal on all members after backward, and so are parameters after a step."""
        return False

    @property
    def has_last_round(self) -> bool:
        """Whether the models of all members are made equal once more at the end of training."""
        return False

    @property
    def monitors(self) -> Mapping[str, float]:
        """`gradient_noise_scale` and `gradient_variance` when monitored and known; otherwise empty."""
        return {} if self._monitors is None else self._monitors.values()

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, stays: bool = False, should_start_equal: bool = True
    ) -> Attachment:
        """Take rank 0's parameters and buffers, and share from now on until the `with` block ends.

        Without `with`, until `close()`, or the end of the program.

        An optimizer that has state on rank 0 is taken from there too, lr and the like included. Where a
        checkpoint is to be taken up (`load`, `shoal run --checkpoint`), that comes before. Without
        `should_start_equal` each worker keeps its own values, to resume a run whose workers differed; only
        names and shapes are compared.

        At its end this worker leaves the group (see `join`), so that workers with more data go on; with
        `stays` it doesn't, and all members must do equally many steps. Where `has_last_round`, the models are
        made equal before that, if all end after the same step. Several strategies can be attached in one
        group, each to its own model and optimizer: the last one to end leaves. Collective.
        """
        if self._attachment is not None:
            raise UsageError(
                f"this {self.name} is attached already.", next_step="make one strategy for each model."
            )
        self._refuse_foreign(model)
        tell_launcher(survives_loss=self.survives_loss)
        attachment = Attachment(self, model, optimizer, stays=stays)
        self._open(attachment, should_start_equal=should_start_equal)
        return attachment

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Forward and backward passes inside add to the gradients of this worker, and share nothing.

        For all but the last of the passes before a step, and for those that no step of this optimizer
        follows: the generator's, through a discriminator that this strategy shares.
        """
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def close(self) -> None:
        """End training in order, as the end of the `with` block does; for a loop without one. Idempotent.

        Where it is forgotten, it is called at the end of a program that ends well. One that ends in an
        exception, or by `sys.exit` with another code than 0, does not leave in order: the others learn that
        this worker has failed.
        """
        if self._attachment is not None:
            self._attachment.close()

    def join(self) -> None:
        """Without data left, detach and leave the group; the others go on without this worker.

        While other strategies are attached in the group, the last of them leaves it.
        """
        if self._attachment is not None:
            self._attachment.stays = False
            self._attachment.close()
        else:
            self.group.leave()
            self._beats.tell("left")

    def settle(self) -> None:
        """Take part in rounds that a skipped step still owes; call it before collectives of your own.

        When a GradScaler skips a step on one worker alone, or your loop leaves one out there, that worker
        would do so at its next forward, and the others wait until then. Call it between two steps, never
        between `backward()` and `step()`: a step that has not come by then counts as left out, and one that
        comes nevertheless is a UsageError. Nearly free.
        """
        self.attachment.settle()

    def consensus_distance(self) -> float:
        """Root mean square, over members, of the distance of a member's parameters from the mean of all.

        Over all trainable parameters as one vector. Collective; settles first.
        """
        self.settle()
        return consensus_distance(self.group, self.attachment.parameters)

    def log(self, **values: Any) -> None:
        """Numbers that `shoal top` should show of this worker: `strategy.log(loss=loss)`.

        Of a tensor of one element a copy is kept, which is read about once a second and not before, so that
        no step waits for its device. Does nothing in a group that `shoal.init()` has not opened. UsageError
        for a tensor of several elements.
        """
        self._beats.log(values)

    def load(self, folder: Path | str, *, loaders: Sequence[ShardedLoader[Any]] | None = None) -> None:
        """Go on from the newest whole checkpoint in `folder`; before `attach`, which then takes it up.

        With as many workers as it was saved by, exactly there; with another number, from the common model.
        `loaders` are those that were saved first, in that order; other loaders of the group follow in the
        order in which they were divided, also those that are divided later. While attached it is collective.
        CheckpointError when there is none.
        """
        self._checkpoints.ask(Path(folder), loaders)
        attachment = self._attachment
        if attachment is not None:
            attachment.silence()
            self.detached(should_leave=False, is_failed=False)
            self._open(attachment, should_start_equal=True)

    def save(
        self,
        folder: Path | str,
        *,
        loaders: Sequence[ShardedLoader[Any]] | None = None,
        num_kept: int = NUM_KEPT,
    ) -> Path:
        """Write a checkpoint of the whole run to `folder/step-…`, and keep the newest `num_kept` of them.

        Model, optimizer, strategy, generators of random numbers, and how far the loaders are that were
        divided (`shoal.shard`) for this group, or those that are given. Between two steps, not inside of one.
        Collective; CheckpointError, on all members, when it cannot be written.
        """
        session = TrainingSession(self, self.attachment)
        return self._checkpoints.save(session, Path(folder), loaders=loaders, num_kept=num_kept)

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors from which a resumed run continues; settles first when attached."""
        if self._attachment is not None:
            self._attachment.settle()
        state: dict[str, Any] = {"strategy": self.name, "steps": self.steps, "rounds": self.rounds}
        if self._monitors is not None:
            state["monitors"] = self._monitors.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the run that gave `state` stopped."""
        if state.get("strategy") != self.name:
            raise UsageError(
                f"a state of {state.get('strategy')!r} does not fit {self.name}.",
                next_step="load it into the strategy that it was saved from.",
            )
        self.steps = int(state["steps"])
        self.rounds = int(state["rounds"])
        if self._monitors is not None and "monitors" in state:
            self._monitors.load_state_dict(state["monitors"])

    # For subclasses. All of them are called in the user's thread, none of them in a group of one.

    def _started(self, attachment: Attachment) -> None:
        """All members have equal parameters: allocate here (`_allocate`), and add hooks of one's own."""

    def _after_forward(self) -> None:
        """The whole forward is done, in training with gradients."""

    def _before_step(self) -> None:
        """The gradients are final. What is raised here leaves the step undone."""

    def _after_step(self) -> None:
        """The optimizer has stepped."""

    def _skipped_step(self) -> None:
        """The optimizer did not step (GradScaler met an inf): take part, with unchanged parameters."""

    @property
    def _is_equal_after_round(self) -> bool:
        """Whether a round leaves all members with equal models, where there is a last one."""
        return self.has_last_round

    def _last_round(self) -> None:
        """At the end of training, after the same step on all members: make their models equal."""

    def _average_all(self) -> None:
        """Average parameters over the whole group; the base averages buffers after it."""

    def _share_buffers(self) -> None:
        """Buffers become those of rank 0; called after each step when that is an option."""
        copy_buffers(self.group, self.attachment.model)

    def _stopped(self) -> None:
        """Detached: parameters and gradients go back to private memory. May not communicate."""

    def _allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the group, given back when the strategy is detached. Collective."""
        memory = self.group.empty(num_elements, dtype, device=self.attachment.device)
        self._memory.append(memory)
        return memory

    # Of checkpoints: called in a group of one too; unless said otherwise on all members at once, in the
    # user's thread, between two steps. What `state_dict` gives is kept for each worker. Where a run resumes,
    # `load_state_dict` comes before `_started`: keep its tensors until then.

    @property
    def has_own_replica(self) -> bool:
        """Whether each worker's own parameters and optimizer state are kept, beside the common ones."""
        return not self.shares_gradients

    def _before_saving(self) -> None:
        """Come to rest: afterwards nothing is under way that is neither in parameters nor in the state."""

    def _common_model(self) -> dict[str, torch.Tensor]:
        """The one model of the whole group, by the names of its `state_dict`; the first member's is written.

        By default the mean over the members of all that is in floating point and differs among them.
        """
        return common_model(crew(self.group), self.attachment.model, are_equal=not self.has_own_replica)

    def _common_optimizer(self) -> dict[str, Any]:
        """A `state_dict` of the optimizer from which all can go on; the first member's is written."""
        return self.attachment.optimizer.state_dict()

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        """Take up the first member's `state_dict` of a run that had another number of workers.

        It goes with the common model, on all workers: leave out what was one worker's alone.
        """
        self.load_state_dict(state)

    def _state_at_end(self) -> dict[str, Any]:
        """The `state_dict` that is kept where workers leave one by one, and nothing can come to rest."""
        return self.state_dict()

    def _completed(self, contents: Contents) -> Contents:
        """At the end, on the one worker that writes the common part; others may be gone, or not yet there."""
        return contents

    # What the attachment reports.

    def forward_ended(self) -> None:
        """A forward in training, with gradients."""
        self._after_forward()

    @property
    def hears_forward(self) -> bool:
        """Whether the strategy does anything when a forward is done."""
        return type(self)._after_forward is not Strategy._after_forward

    def gradient_accumulated(self) -> None:
        """Backward has added to the gradient of a parameter on a GPU; called for each of them."""

    def step_begins(self, num_missed: int) -> float:
        """Before the optimizer's step; `num_missed` steps were skipped since. The factor for its rates."""
        if not self.is_alone:
            if not self._has_stepped:
                self._refuse_foreign(self.attachment.model)  # it may have come after attach
                self._has_stepped = True
            for _ in range(num_missed):
                self.step_skipped()
            self._check.before_step(self.steps)
            self._monitor(is_skipped=self.attachment.is_left_out)
            self._before_step()
        return rate_factor(self.options, self.steps)

    def step_ended(self) -> None:
        """After the optimizer's step."""
        if not self.is_alone:
            self._check.after_optimizer()
            self._after_step()
        self._count_step()
        self._check.after_step(self.steps - 1)
        self._checkpoints.stepped(self._saved_session)
        self._beats.stepped(self.steps)

    def step_skipped(self) -> None:
        """Instead of both."""
        if not self.is_alone:
            self._check.skipped_step()
            self._monitor(is_skipped=True)
            self._skipped_step()
        self._count_step()
        self._check.after_step(self.steps - 1)
        self._checkpoints.stepped(self._saved_session)
        self._beats.stepped(self.steps)

    def ending(self, *, should_leave: bool) -> None:
        """The loop is over and nothing has failed; called before `detached`."""
        self._share_rest(should_leave=should_leave)
        lost = self.group.lost
        self._check.closed(speaks_for_all=all(rank in lost for rank in range(self.group.rank)))
        self._save_at_end(should_leave=should_leave)

    def detached(self, *, should_leave: bool, is_failed: bool) -> None:
        """The last: the hooks are gone."""
        memory, self._memory = self._memory, []
        forget(self._attachment)
        counter, self._counter = self._counter, None
        self._attachment = self._finite = self._session = None
        self._beats.closed()
        is_last = move_out(self.group, survives_loss=self.survives_loss)
        if not is_last:
            apply_survival(self.group)
        elif not is_failed:
            self._beats.tell("joined")
        if not self.is_alone:
            self._stopped()
        if is_failed:
            return
        if should_leave:
            # others may still read this one's memory, and are not waited for: it goes with the group's
            if is_last:
                self.group.leave()
                self._beats.tell("left")
            return
        if counter is not None:
            counter.close()
        for tensor in memory:
            self.group.free(tensor)

    def _refuse_foreign(self, model: nn.Module) -> None:
        if not self.is_alone:
            refuse_foreign(model, self.group)

    def _open(self, attachment: Attachment, *, should_start_equal: bool) -> None:
        self._attachment = attachment
        self._session = TrainingSession(self, attachment)
        self._has_stepped = False
        move_in(self.group, survives_loss=self.survives_loss)
        try:
            if self.is_alone:
                self._take_up()
            else:
                self._start(attachment, should_start_equal=should_start_equal)
            self._finite = FiniteCheck(self.options.on_nonfinite, self.group.rank, attachment, self._checked)
            if not self.is_alone:
                self._started(attachment)
                if self.has_last_round and self.group.size > 1 and not attachment.stays:
                    is_on_device = attachment.device.type != "cpu"
                    self._counter = StepCounter(self.group, self.steps, is_on_device=is_on_device)
                    self._memory.append(self._counter.memory)
            apply_survival(self.group)
            attachment.listen()
            if self.group.size > 1 or self._checkpoints.folder is not None:
                # who is alone, and keeps no checkpoints, owes nobody an end
                close_at_exit(attachment)
            self._checkpoints.restore_random()
            self._beats.opened(self.steps)
        except BaseException:
            attachment.close(is_failed=True)
            raise

    def _start(self, attachment: Attachment, *, should_start_equal: bool) -> None:
        require_equal(self.group, attachment.named_tensors)
        resumed = self._take_up()
        if resumed is not None:
            should_start_equal = resumed == "common"
        if self.is_lockstep:
            require_same_count(self.group, self.name, self.steps, self.rounds)
        if should_start_equal:
            take_values(self.group, list(attachment.named_tensors.values()))
        self._equal_step = self.steps - (0 if should_start_equal else self.steps % self.options.local_steps)
        start_optimizers(
            self.group,
            attachment.optimizer,
            attachment.named_tensors,
            should_take_state=should_start_equal,
            must_be_equal=self.shares_gradients,
            has_loaded=resumed is not None,
        )

    def _monitor(self, *, is_skipped: bool) -> None:
        if self._monitors is not None and not self.shares_gradients:
            self._monitors.observe_locally(self.group, self.attachment.parameters, is_skipped=is_skipped)

    def _share_rest(self, *, should_leave: bool) -> None:
        """Share the steps since the last round, if all members end after the same step; say so if not."""
        if not self.has_last_round or self.group.size == 1 or self.steps == self._equal_step:
            return
        members = self.group.members
        period, has_had_none = self.options.local_steps, self.rounds == 0
        num_steps = self.steps % period or period
        if should_leave:
            is_even = bool(members) and self._counter is not None and self._counter.meet(self.steps)
        else:
            is_even = len(members) > 1
        is_first = self.group.rank in members[:1]  # which may leave right after
        why = "other workers have ended before it, or go on"
        if is_even:
            try:
                self._last_round()
            except ShoalError as error:
                is_even, why = False, error.what
        if not is_even:
            log.warning(
                "%s: rank %d ends with a model of its own: %d step%s since the last round (%s).",
                self.name, self.group.rank, num_steps, "" if num_steps == 1 else "s", why,
            )  # fmt: skip
            return
        self.rounds += 1
        self._equal_step = self.steps
        if has_had_none and is_first:
            log.warning(
                "%s: this training had %d steps, and a round comes after every %d: the models were averaged "
                "only once, at the end. Set --local-steps to less.",
                self.name, self.steps, period,
            )  # fmt: skip

    @property
    def _checked(self) -> Checked:
        """When this worker looks for gradients that are not finite."""
        if self.is_alone or self.group.size == 1:
            return "never"
        return "in backward" if self.shares_gradients else "before the step"

    @property
    def _check(self) -> FiniteCheck:
        assert self._finite is not None, "not attached"
        return self._finite

    def _count_step(self) -> None:
        was_round = self.is_round
        self.steps += 1
        self.rounds += was_round
        if self._counter is not None:
            self._counter.publish(self.steps)
        if was_round and self._is_equal_after_round:
            self._equal_step = self.steps
        if self.is_alone:
            return
        every = self.options.global_average_every
        if was_round and every and self.rounds % every == 0:
            self._average_all()
            average_buffers(self.group, self.attachment.model)
        if self.options.should_broadcast_buffers:
            self._share_buffers()

    def _take_up(self) -> Literal["exact", "common"] | None:
        """A checkpoint, if there is one; rank 0's values are to be taken unless it is exact."""
        return self._checkpoints.resume(self._saved_session)

    def _save_at_end(self, *, should_leave: bool) -> None:
        """At a clean end, where the run keeps checkpoints by itself. Workers that leave do so one by one.

        So nothing in here may wait for another worker, unless all of them stay.
        """
        self._checkpoints.save_at_end(self._saved_session, should_leave=should_leave)

    @property
    def _saved_session(self) -> TrainingSession:
        assert self._session is not None, "not attached"
        return self._session


class TrainingSession:
    """A strategy's part and the model's, as `RunCheckpoints` asks for them."""

    def __init__(self, strategy: Strategy, attachment: Attachment) -> None:
        self.group = strategy.group
        self.model, self.optimizer = attachment.model, attachment.optimizer
        self.named_tensors = attachment.named_tensors
        self.settle = attachment.settle
        self.strategy = _SavedStrategy(strategy)
        self._counted = strategy

    @property
    def steps(self) -> int:
        """The steps of the optimizer until now."""
        return self._counted.steps


class _SavedStrategy:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.name = strategy.name
        self.state_dict = strategy.state_dict
        self.load_state_dict = strategy.load_state_dict
        self.load_common_state = strategy._load_common_state
        self.state_at_end = strategy._state_at_end
        self.completed = strategy._completed

    @property
    def has_own_replica(self) -> bool:
        return self._strategy.has_own_replica

    def before_saving(self, _: TrainingSession) -> None:
        self._strategy._before_saving()

    def common_model(self, _: TrainingSession) -> dict[str, torch.Tensor]:
        return self._strategy._common_model()

    def common_optimizer(self, _: TrainingSession) -> dict[str, Any]:
        return self._strategy._common_optimizer()

    def start_at(self, step: int) -> None:
        strategy = self._strategy
        strategy.steps, strategy.rounds = step, step // strategy.options.local_steps
