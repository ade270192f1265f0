"""A strategy: how a group shares what its members learn.

To write one, name it, say what it can be told (`Options`), and implement what the algorithm does at a few
places of the loop; docs/write-a-strategy.md shows how. Everything around it is the session's work.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.core.status import tell_launcher
from shoal.data import ShardedLoader
from shoal.group import Group
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import ShardReplicas
from shoal.strategies.averaging import common_model, consensus_distance
from shoal.strategies.checkpointing import RunCheckpoints
from shoal.strategies.elastic import ElasticSession, session_kind
from shoal.strategies.monitors import Monitors
from shoal.strategies.options import StrategyOptions, read_options, signature_of
from shoal.strategies.registry import warn_of_ignored_flags
from shoal.strategies.session import TrainingSession, still_there
from shoal.strategies.status import StatusReporter
from shoal.tensors import Flat
from shoal.tensors.checkpoint import NUM_KEPT, can_be_kept, kept_state, restored

_BASE = ("group", "options", "steps", "rounds", "gradient_monitors", "checkpoints", "status_reporter")
"""Attributes that every strategy has; they are kept elsewhere, or not at all."""


class Strategy:
    """An algorithm by which a group trains one model; attached to one model and its optimizer at a time.

    Options are given by name (`NeighborAverage(group, topology="ring")`), as `options`, or both. Without a
    group the strategy has a group of one.

    At a clean end come: rounds that skipped steps still owe, `last_round` (if all members end after the same
    step), the checkpoint of the end, `finish`, `stop`; after a failure `stop` alone. `settle_round` comes in
    between two steps, and training goes on.

    Public attributes of a strategy that are numbers, texts, `Flat` vectors, random generators, codecs and the
    like (what has a `state_dict`), or lists of these, are kept in checkpoints. Those whose names begin with
    an underscore are not. Make vectors in `start`, which are filled after it, and all others in `__init__`.
    """

    name: ClassVar[str]
    survives_loss: ClassVar[bool] = False
    """Whether the others train on when a peer is lost."""
    is_lockstep: ClassVar[bool] = True
    """Whether all members have done equally many steps, whenever they meet."""
    works_alone: ClassVar[bool] = False
    """Whether its methods are called in a group of one as well."""
    trains_shards: ClassVar[bool] = False
    """Whether it trains models that FSDP2 shards inside each machine: it works on the `local_part` of
    parameters, which stay where they lie, and shares them with the members of `session.group`."""
    checks_finite: ClassVar[bool] = True
    """Whether this worker looks at its gradients and parameters for values that are not finite."""
    common_state: ClassVar[Sequence[str]] = ()
    """Attributes that are equal on all members: they are taken up by a run with another number of workers.

    Each is there after `start`, or is annotated in the class if there are runs without it."""
    Options: ClassVar[type[StrategyOptions]] = StrategyOptions

    options: StrategyOptions
    steps: int
    """The optimizer's steps until now, skipped ones included."""
    rounds: int
    """The times that the group has shared what it learned, as this worker counts them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = signature_of(cls.Options)  # type: ignore[attr-defined]  # for help() and notebooks

    def __init__(
        self, group: Group | None = None, *, options: StrategyOptions | None = None, **named: Any
    ) -> None:
        given = {} if options is None else msgspec.structs.asdict(options)
        self.options = read_options(self.Options, {**given, **named}, self.name)
        self.steps = 0
        self.rounds = 0
        self.group: Group = SoloGroup() if group is None else group
        self.gradient_monitors = Monitors(self.options.batch_size) if self.options.monitor else None
        self.checkpoints = RunCheckpoints()
        self.status_reporter = StatusReporter(self.group, self.name)
        self._session: TrainingSession | None = None
        self._num_accumulating = 0
        self._loaded: dict[str, Any] = {}
        """What a state has, until `start` has made the attributes that it is for."""
        self._ended: dict[str, Any] = {}
        """The vectors as they were when the strategy was detached, for the same model."""
        self._last_model: weakref.ref[nn.Module] | None = None
        self.set_group(self.group)

    # The algorithm. All of it is called in the user's thread, and none of it in a group of one, unless the
    # strategy `works_alone`.

    def set_group(self, group: Group) -> None:
        """Takes a group: at first, and between two steps when the group has grown or shrunk."""
        self.group = group

    def begin(self, session: TrainingSession, *, should_start_equal: bool) -> None:
        """Makes all members alike, before `start`. Only strategies with servers do something else here."""
        session.start_equal(should_start_equal=should_start_equal)

    def start(self, session: TrainingSession) -> None:
        """Allocates what the algorithm needs; all members have equal parameters. Collective."""

    def after_forward(self, session: TrainingSession) -> None:
        """Is called after a whole forward, in training with gradients."""

    def gradient_ready(self, session: TrainingSession, parameter: torch.Tensor) -> None:
        """Is called in backward for each parameter when its `.grad` has got its new value."""

    def before_step(self, session: TrainingSession) -> None:
        """Is called when the gradients are final; by default looks for lost peers.

        What it raises leaves the step undone.
        """
        session.check_lost_peers()

    def after_step(self, session: TrainingSession) -> None:
        """Is called when the optimizer has stepped."""

    def skip_step(self, session: TrainingSession) -> None:
        """Takes part in the round of a step that the optimizer did not make (GradScaler met an inf)."""
        self.before_step(session)
        self.after_step(session)

    def average_all(self, session: TrainingSession) -> None:
        """Averages parameters over the whole group (`global_average_every`); buffers follow by themselves."""
        session.average_parameters()

    def last_round(self, session: TrainingSession) -> None:
        """Makes the models of all members equal at the end of training, after the same step on all."""
        self.average_all(session)
        session.average_buffers()

    def settle_round(self, session: TrainingSession) -> None:
        """Ends what is under way, so that parameters stay what they are until the next step."""

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Ends what is under way at a clean end; with `should_leave` the others may go on."""
        self.settle_round(session)

    def stop(self, session: TrainingSession) -> None:
        """Ends what is not the group's, when the strategy is detached; what `start` made goes by itself.

        May not communicate.
        """

    @property
    def shares_gradients(self) -> bool:
        """Whether gradients are equal on all members after backward, and so are parameters after a step."""
        return False

    @property
    def shares_buffers(self) -> bool:
        """Whether the session is to copy buffers of rank 0 after each step, when that is an option."""
        return True

    @property
    def has_last_round(self) -> bool:
        """Whether `last_round` makes the models of all members equal at the end of training.

        By default where rounds do, and some steps have no round of their own.
        """
        return self.is_equal_after_round and self.options.local_steps > 1

    @property
    def is_equal_after_round(self) -> bool:
        """Whether a round leaves all members with equal models, so that training may end with it."""
        return False

    @property
    def rate_divisor(self) -> float:
        """The number that the learning rate of the next step is divided by."""
        return 1.0

    # The user's side.

    @property
    def session(self) -> TrainingSession:
        """The model and optimizer that it works on; UsageError without."""
        if self._session is None:
            raise UsageError(
                f"{self.name} is not attached to a model.",
                next_step="call it inside `with strategy.attach(model, optimizer):`.",
            )
        return self._session

    @property
    def is_alone(self) -> bool:
        """Whether the group is one of one, and the strategy does nothing there."""
        return self.group.size == 1 and not self.works_alone

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward pass now is one of `accumulate`."""
        return self._num_accumulating > 0

    @property
    def monitors(self) -> Mapping[str, float]:
        """`gradient_noise_scale` and `gradient_variance` when monitored and known; otherwise empty."""
        return {} if self.gradient_monitors is None else self.gradient_monitors.values()

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, stays: bool = False, should_start_equal: bool = True
    ) -> TrainingSession:
        """Takes rank 0's parameters and buffers, and shares from now on until the `with` block ends.

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
        if self._session is not None:
            raise UsageError(
                f"this {self.name} is attached already.", next_step="make one strategy for each model."
            )
        session = session_kind(self, model)(self, model, optimizer, stays=stays)
        session.refuse_foreign()
        warn_of_ignored_flags(self)
        tell_launcher(survives_loss=self.survives_loss or isinstance(session, ElasticSession))
        session.open(should_start_equal=should_start_equal)
        return session

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Lets forward and backward passes inside add to the gradients of this worker, and share nothing.

        For all but the last of the passes before a step, and for those that no step of this optimizer
        follows: the generator's, through a discriminator that this strategy shares.
        """
        self._num_accumulating += 1
        try:
            yield
        finally:
            self._num_accumulating -= 1

    def close(self) -> None:
        """Ends training in order, as the end of the `with` block does; for a loop without one. Idempotent.

        Where it is forgotten, it is called at the end of a program that ends well. One that ends in an
        exception, or by `sys.exit` with another code than 0, does not leave in order: the others learn that
        this worker has failed.
        """
        if self._session is not None:
            self._session.close()

    def join(self) -> None:
        """Detaches and leaves the group, without data left; the others go on without this worker.

        While other strategies are attached in the group, the last of them leaves it.
        """
        if self._session is not None:
            self._session.stays = False
            self._session.close()
        else:
            self.group.leave()
            self.status_reporter.tell("left")

    def settle(self) -> None:
        """Takes part in rounds that a skipped step still owes; call it before collectives of your own.

        When a GradScaler skips a step on one worker alone, or your loop leaves one out there, that worker
        would do so at its next forward, and the others wait until then. Call it between two steps, never
        between `backward()` and `step()`: a step that has not come by then counts as left out, and one that
        comes nevertheless is a UsageError. Nearly free.
        """
        session = self.session
        session.settle()
        if not self.is_alone:
            self.settle_round(session)

    def consensus_distance(self) -> float:
        """Measures the root mean square of members' distances from their mean. Collective; settles first.

        It is logged, too.
        """
        self.settle()
        group, distance = self.group, consensus_distance(self.group, self.session.trainable)
        distance = group.norm(distance) if isinstance(group, ShardReplicas) else distance
        self.log(consensus_distance=distance)
        return distance

    def tracked_values(self) -> Mapping[str, float]:
        """Gives what `--track` shows, about once a second, beside what is logged; waits for no device."""
        return self.monitors

    def log(self, **values: Any) -> None:
        """Notes numbers that `shoal top` should show of this worker: `strategy.log(loss=loss)`.

        Of a tensor of one element a copy is kept, which is read about once a second and not before, so that
        no step waits for its device. Does nothing in a group that `shoal.init()` has not opened. UsageError
        for a tensor of several elements.
        """
        self.status_reporter.log(values)

    def save(
        self,
        folder: Path | str,
        *,
        loaders: Sequence[ShardedLoader[Any]] | None = None,
        num_kept: int = NUM_KEPT,
    ) -> Path:
        """Writes a checkpoint of the whole run to `folder/step-…`, and keeps the newest `num_kept` of them.

        Model, optimizer, strategy, generators of random numbers, and how far the loaders are that were
        divided (`shoal.shard`) for this group, or those that are given. Between two steps, not inside of one.
        Collective; CheckpointError, on all members, when it cannot be written.
        """
        return self.checkpoints.save(self.session, Path(folder), loaders=loaders, num_kept=num_kept)

    def load(self, folder: Path | str, *, loaders: Sequence[ShardedLoader[Any]] | None = None) -> None:
        """Goes on from the newest whole checkpoint in `folder`; before `attach`, which then takes it up.

        With as many workers as it was saved by, exactly there; with another number, from the common model.
        `loaders` are those that were saved first, in that order; other loaders of the group follow in the
        order in which they were divided, also those that are divided later. While attached it is collective.
        CheckpointError when there is none.
        """
        self.checkpoints.ask(Path(folder), loaders)
        if self._session is not None:
            self._session.restart()

    # What is kept.

    def state_dict(self) -> dict[str, Any]:
        """Gives numbers, texts and tensors from which a resumed run continues; settles first when attached.

        After the `with` block vectors are what they were at its end.
        """
        if self._session is not None:
            self._session.settle()
        state: dict[str, Any] = {"strategy": self.name, "steps": self.steps, "rounds": self.rounds}
        if self.gradient_monitors is not None:
            state["monitors"] = self.gradient_monitors.state_dict()
        vectors: dict[str, Any] = {}
        for name, value in vars(self).items():
            if _is_kept(name, value):
                (vectors if isinstance(value, Flat) else state)[name] = kept_state(value)
        if self._session is None:
            waiting = dict(self._loaded or self._ended)
            vectors = waiting.pop("kept", {})
            state = {**waiting, **state}
        return {**state, "kept": vectors} if vectors else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the run that gave `state` stopped. Before attach, vectors wait until then."""
        if state.get("strategy") != self.name:
            raise UsageError(
                f"a state of {state.get('strategy')!r} does not fit {self.name}.",
                next_step="load it into the strategy that it was saved from.",
            )
        self.steps = int(state["steps"])
        self.rounds = int(state["rounds"])
        if self.gradient_monitors is not None and "monitors" in state:
            self.gradient_monitors.load_state_dict(state["monitors"])
        known = ("strategy", "steps", "rounds", "monitors")
        self._loaded = {name: value for name, value in state.items() if name not in known}
        self._ended = {}
        self._take_loaded()
        if self._session is not None and self._session.has_started:
            self._loaded = {}  # nothing is to be made that it waits for

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Takes up the first member's `state_dict` of a run that had another number of workers.

        It goes with the common model, on all workers: what was one worker's alone is left out.
        """
        common = ("strategy", "steps", "rounds", "monitors", *self.common_state)
        vectors = {name: value for name, value in state.get("kept", {}).items() if name in common}
        shared = {name: state[name] for name in common if name in state}
        self.load_state_dict({**shared, "kept": vectors} if vectors else shared)

    # For checkpoints: called in a group of one too; unless said otherwise on all members at once, in the
    # user's thread, between two steps. What `state_dict` gives is kept for each worker.

    @property
    def has_own_replica(self) -> bool:
        """Whether each worker's own parameters and optimizer state are kept, beside the common ones."""
        return not self.shares_gradients

    def before_saving(self, session: TrainingSession) -> None:
        """Comes to rest: afterwards all that is under way is in the parameters or in the state."""
        if not session.is_alone:
            self.settle_round(session)

    def common_model(self, session: TrainingSession) -> dict[str, torch.Tensor]:
        """Gives the one model of the whole group, by the names of its `state_dict`; one member writes it.

        By default the mean over the members of all that is in floating point and differs among them.
        """
        return common_model(still_there(self.group), session.model, are_equal=not self.has_own_replica)

    def common_optimizer(self, session: TrainingSession) -> dict[str, Any]:
        """Gives a `state_dict` of the optimizer from which all can go on; on that alone which writes it."""
        return session.optimizer.state_dict()

    def state_at_end(self) -> dict[str, Any]:
        """Gives the state that is kept where workers leave one by one, and nothing can come to rest."""
        return self.state_dict()

    def start_at(self, step: int) -> None:
        """Counts on from a checkpoint of another strategy."""
        self.steps, self.rounds = step, step // self.options.local_steps

    # What the session calls.

    def restore(self, model: nn.Module) -> None:
        """Fills what `start` has made with what was loaded, or with what this model had at its last end.

        UsageError when `common_state` names what is not there.
        """
        annotated = {name for kind in type(self).__mro__ for name in inspect.get_annotations(kind)}
        for name in self.common_state:
            if not hasattr(self, name) and name not in annotated:
                raise UsageError(
                    f"{self.name} has no attribute {name!r}, which its common_state names.",
                    cause="the name is misspelt, or `start` does not make it.",
                    next_step="correct the name; annotate it in the class if some runs do not have it.",
                )
        if not self._loaded and self._last_model is not None and self._last_model() is model:
            self._loaded = self._ended
        self._ended = {}
        self._take_loaded()
        self._loaded = {}

    def take_session(self, session: TrainingSession) -> None:
        """Takes note of the session that begins."""
        self._session = session

    def release_session(self, model: nn.Module) -> None:
        """Ends the session, and remembers the vectors of its model."""
        self._session = None
        vectors = {name: value for name, value in vars(self).items() if isinstance(value, Flat)}
        for name in vectors:
            delattr(self, name)
        if vectors:
            kept = {name: vector for name, vector in vectors.items() if not name.startswith("_")}
            self._ended = {"kept": {name: vector.state_dict() for name, vector in kept.items()}}
            self._last_model = weakref.ref(model)

    def hears(self, method: str) -> bool:
        """Tells whether the strategy implements one of the algorithm's methods."""
        return getattr(type(self), method) is not getattr(Strategy, method)

    def _take_loaded(self) -> None:
        """Gives what was loaded to the attributes that are there; `restore` does so again, after `start`."""
        loaded = {**self._loaded, **self._loaded.get("kept", {})}
        for name, state in loaded.items():
            if name != "kept" and hasattr(self, name) and _is_kept(name, value := getattr(self, name)):
                setattr(self, name, restored(value, state, name))


def _is_kept(name: str, value: Any) -> bool:
    return not name.startswith("_") and name not in _BASE and can_be_kept(value)
