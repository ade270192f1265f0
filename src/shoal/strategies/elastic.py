"""A session in a run whose workers come and go (`shoal run --elastic`).

Between two steps the group becomes another one: after the step that the coordinator of the run names, or when
a lost peer has ended what this worker was doing. A step that could not be shared before the optimizer was
called is dropped as a whole: the optimizer finds no gradients, the step does not count, and its examples come
again. Where the loss ends a round after it, the step stays. Then all who are in the
next group start in it as at the beginning of training, with this difference: who has trained has the state,
and who has not takes it.

Where models are equal on all workers (`all-reduce`), each says by a hash what it holds. Most of those who are
furthest on are right, and all others take parameters, buffers, the optimizer's state and the strategy's from
them, from several at once. Elsewhere those who have trained go on from the mean of their models, new workers
too, and these take the rest from one of them.

Where the launcher ends all workers between two generations (`group.elastic`), each leaves what it has in
the memory of its machine. The next generation consists of new processes, which take that up when their
session starts; all else is the same.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core import Address, Deadline, LoopThread, Peer, PeerId, PeerLost, ShoalError
from shoal.core.elastic import LeavingRun, Progress
from shoal.core.status import tell_launcher
from shoal.data.course import merge, places_at, places_of
from shoal.data.kept import kept_loaders
from shoal.data.seeds import states_of_process
from shoal.group import share
from shoal.group.elastic import ElasticGroup, RestartedGroup, elastic_of
from shoal.group.functions import take_state
from shoal.strategies.averaging import has_mean
from shoal.strategies.registry import has_own_channel
from shoal.strategies.session import TrainingSession
from shoal.strategies.start import refuse_unfit
from shoal.tensors import is_sharded
from shoal.tensors.buckets import packed_on_devices
from shoal.tensors.transfer import HeldState, StateDonor, StateTaker
from shoal.transport import StreamTransport

if TYPE_CHECKING:
    from shoal.strategies.strategy import Strategy

log = logging.getLogger(__name__)
_TRANSFER_S = 3600.0
"""A state that is larger than the lines between workers carry in an hour is not taken."""
_OPENING_S = 10.0
_TELL_EVERY_S = 0.1
"""A worker that learns by itself between two rounds says about so often how far it is, or after each step."""
_MAX_LISTED = 20
"""So many lost examples are named in the log; the loader's `lost_items` has all of them."""

_sessions: WeakKeyDictionary[ElasticGroup, list[ElasticSession]] = WeakKeyDictionary()
"""What is attached in a group, in the order in which all workers attach it."""


class _Note(msgspec.Struct, array_like=True):
    """What the others shall know of a worker that has gone."""

    generation: int
    places: list[Any] = []
    """How far its loaders are."""
    num_since: int = 0
    """The steps since it last shared what it has learned."""
    num_ahead: int = 0
    """So many steps more it may do before it says how far it is again."""


class _Account(msgspec.Struct, array_like=True):
    """What one worker says of its session when a generation begins."""

    rank: int
    has_trained: bool
    steps: int
    rounds: int
    generation: int
    """The last one in which its session has started, and its rank and the number of workers there."""
    old_rank: int
    old_size: int
    places: list[Any]
    """How far its loaders are."""
    dropped: list[Any]
    """How far they were when it dropped a step, if it has just done so."""
    left: dict[int, _Note]
    """What ranks of that generation have said that have left in order."""
    lost: dict[int, _Note]
    """What those have said last that were lost."""


def session_kind(strategy: Strategy, model: nn.Module) -> type[TrainingSession]:
    """Gives the class of sessions for the group that this strategy is in."""
    group = elastic_of(strategy.group)
    if group is None:
        return TrainingSession
    tensors = itertools.chain(model.parameters(), model.buffers())
    if group.is_restarted and (has_own_channel(strategy) or any(map(is_sharded, tensors))):
        return TrainingSession  # what is torch's own knows of no other group
    return ElasticSession


class ElasticSession(TrainingSession):
    """A session in a group whose workers come and go."""

    def __init__(self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, *, stays: bool) -> None:
        super().__init__(strategy, model, optimizer, stays=stays)
        group = elastic_of(strategy.group)
        assert group is not None, "workers neither come nor go"
        self.error: PeerLost | None = None
        """Why this worker cannot go on in the present group."""
        self.has_trained = False
        """Whether the session has started in a group, and has a state."""
        self.is_whole = False
        """Whether the session has started in the present group; not so while it starts."""
        self.kept_state: dict[str, Any] = {}
        """The strategy's, as it was when the session was whole the last time."""
        self.is_between = False
        """Whether this worker is between two steps, and in nothing of the session's: it could stop here."""
        self._followers: list[Callable[[int, int], None]] = []
        """Are told the old and the new number of workers, when it has changed."""
        self._elastic = group
        self._restarted = group if isinstance(group, RestartedGroup) else None
        self._number = 0
        """Counts the sessions of a group whose workers are started anew."""
        self._waiting_states: list[Any] = []
        """How far loaders were, in the process before this one, that may be divided later."""
        self._loaders = kept_loaders(group)
        self._attached = _sessions.setdefault(group, [])
        self._generation, self._rank, self._size = 0, 0, 0
        self._change: tuple[int, int] | None = None
        """The old and the new number of workers, where this worker has come with the last change."""
        self._numbers: list[int] = []
        """The numbers of the workers of that generation, by rank."""
        self._dropped: list[Any] = []
        self._tell_step = 0
        """After which step this worker says again how far it is."""
        self._told_epochs: list[int] = []

    # From attach to the end.

    def _begin(self, *, should_start_equal: bool) -> None:
        group = self._elastic
        group.link.is_lockstep = self.strategy.is_lockstep
        self._attached.append(self)
        if self._restarted is not None:
            self._number = group.notes["num_restarted"] = group.notes.get("num_restarted", 0) + 1
            self._take_back(self._restarted)
            self._restarted.listen(lambda: _stop_between(group))
        if group.is_pending or (self._is_first and group.is_due(0)):
            _regroup(group, None)  # the next generation, since this one is over
            return
        try:
            self.enter(should_start_equal=should_start_equal)
            self._entered()
        except PeerLost as error:
            _regroup(group, error)

    def on_resize(self, follow: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Calls it after each change of the number of workers.

        At once for the change by which this worker has come: it has taken over the optimizer of before.
        """
        self._followers.append(follow)
        if self._change is not None:
            follow(*self._change)
        return follow

    def fail(self, error: object) -> None:
        """Leaves the state to the next process, where a loss has ended the loop between two steps."""
        can_stop = self._restarted is not None and self.is_whole and self.is_between
        if can_stop and (isinstance(error, PeerLost) or self._elastic.is_due(self.steps)):
            self.drop_step()
            _put_aside(self)

    def close(self, *, is_failed: bool = False) -> None:
        """Detaches; idempotent. After an end in order nothing is left of it for the next process."""
        if not self.is_open:
            return
        if self in self._attached:
            self._attached.remove(self)
        if self._restarted is not None and not is_failed:
            self._restarted.memory.discard(self._number)
            if not self._attached:
                self._restarted.stop_listening()
        if self.is_in_group:
            super().close(is_failed=is_failed)
        else:
            self.is_open = False
            self._hooks.remove()

    # What the hooks report. After a loss the step goes on, and is the last one in the present group.

    def forward_ended(self) -> None:
        """Lets the strategy act, if there is somebody to share with."""
        self._while_sharing(super().forward_ended)

    @property
    def gradient_listener(self) -> Callable[[torch.Tensor], None] | None:
        """Tells the strategy of a gradient, if there is somebody to share with."""
        listener = super().gradient_listener
        return None if listener is None else partial(self._while_sharing, listener)

    def _while_sharing(self, act: Callable[..., None], *args: Any) -> None:
        if not self.is_whole or self.error is not None or self.is_alone:
            return
        was_between, self.is_between = self.is_between, False
        try:
            act(*args)
        except PeerLost as error:
            self.go_on_without(error)
        self.is_between = was_between

    def go_on_without(self, error: PeerLost) -> None:
        """Ends the present generation for this worker, because of a loss."""
        if self.has_closure:
            raise error
        self.error = self.error or error

    def step_begins(self, num_missed: int) -> float:
        """Prepares the optimizer's step; one that cannot be shared is dropped as a whole, on all workers."""
        self.is_between = False
        if self.error is None:
            try:
                for _ in range(0 if self.is_alone else num_missed):
                    self.step_skipped()
                self.is_between = False
                return super().step_begins(0)
            except PeerLost as error:
                self.go_on_without(error)
        self.finite.hide_gradients()
        return 1.0

    def step_ended(self) -> None:
        """Looks after each step whether the group is to become another one.

        After a dropped step the loaders give its examples again, unless it turns out that others have done
        the step with what this worker gave to it.
        """
        steps = self.steps
        if self.error is not None:
            self.finite.after_optimizer()
            self._dropped = self._places()
            self._loaders.roll_back()
        else:
            try:
                super().step_ended()
            except PeerLost as error:
                self.go_on_without(error)
                if self.steps == steps:
                    self.strategy.steps += 1  # the optimizer has made the step, though nobody could share it
            self._loaders.mark()
        self._change_generation()

    @torch.no_grad()
    def step_skipped(self) -> None:
        """Takes part in the round of a step that was left out, then looks as after any other."""
        self.is_between = False
        if self.error is None:
            try:
                super().step_skipped()
            except PeerLost as error:
                self.go_on_without(error)
        self._loaders.mark()
        self._change_generation()

    @torch.no_grad()
    def _change_generation(self) -> None:
        """Forms the next group, between two steps, if it is time."""
        group, strategy = self._elastic, self.strategy
        self.is_between = True
        if self._restarted is not None and len(group.lost) > len(group.lost_notes):
            self._note_losses()
            if self._restarted.restart_link.has_restarts_left:
                # where the others could go on: only a new generation divides the data anew
                rank, loss = next(iter(group.lost.items()))
                self.error = self.error or loss.error(f" after step {strategy.steps}")
                log.info("rank %d ends because of the loss of rank %d", self._rank, rank)
        if self.error is not None:
            _regroup(group, self.error)
        elif self._is_first:
            if not strategy.shares_gradients:
                self._tell_progress()
            if group.is_due(strategy.steps):
                _regroup(group, None)

    def drop_step(self) -> None:
        """Ends the loop between two steps: what was taken for the next one comes again."""
        self._hooks.pause()
        self._dropped = self._places()
        self._loaders.roll_back()

    def take_up(self) -> Literal["taken over", "exact", "common"] | None:
        """Goes on from those who have trained, or from a checkpoint."""
        return "taken over" if self.take_over() else super().take_up()

    def take_over(self) -> bool:
        """Takes from those who have trained what this worker lacks; False if nobody has. Collective."""
        strategy, group = self.strategy, self.group
        own = _Account(
            group.rank,
            self.has_trained,
            strategy.steps,
            strategy.rounds,
            self._generation,
            self._rank,
            self._size,
            self._places(),
            self._dropped,
            self._told(self._elastic.left_notes),
            self._told(self._elastic.lost_notes),
        )
        accounts = [msgspec.convert(each, _Account, strict=False) for each in share(group, own)]
        if self._restarted is not None:
            # what is older was left by workers that the others have gone on without
            last = max((each.generation for each in accounts if each.has_trained), default=0)
            for each in accounts:
                each.has_trained = each.has_trained and each.generation == last
            self.has_trained = any(each.has_trained for each in accounts if each.rank == group.rank)
        trained = [each for each in accounts if each.has_trained]
        if not trained:
            self._loaders.place(group.rank, group.size)
            return False
        ahead = max(trained, key=lambda each: (each.steps, -each.rank))
        if strategy.shares_gradients:
            self._take_equal([each.rank for each in trained if each.steps == ahead.steps])
            self._take_buffers([each.rank for each in trained], ahead.rank)
        else:
            self._take_mean([each.rank for each in trained], ahead.rank)
        strategy.steps, strategy.rounds = ahead.steps, ahead.rounds
        if strategy.shares_gradients:
            for each in trained:
                if each.steps < ahead.steps and each.dropped:
                    each.places = each.dropped  # its gradients are in the step that is taken over
        self._divide_anew(trained, ahead.rank)
        if not self.has_trained:
            newest = max(trained, key=lambda each: each.generation)
            self._size = newest.old_size  # what it has taken over is of so many workers
        self._equal_step = strategy.steps
        if self._restarted is not None:
            strategy.checkpoints.find_folder(self)  # nothing is resumed from there, and more is saved
        if group.rank == ahead.rank:
            _tell(self._elastic, accounts, ahead.steps)
        return True

    # What a session has, and takes.

    def _common_state(self) -> dict[str, Any]:
        """Gives what a worker needs to go on as this one, but for what is averaged.

        Where gradients are shared there are no means, and buffers are each worker's own, and no part of it.
        """
        if self.strategy.shares_gradients:
            return self._state(self._model_buffers)
        return self._state([name for name, tensor in self.named_tensors.items() if has_mean(tensor)])

    def _state(self, left_out: Collection[str] = ()) -> dict[str, Any]:
        """Gives what this worker has learned, but for tensors of these names."""
        extra = self.model.state_dict()  # what modules keep beside tensors (`get_extra_state`)
        return {
            "tensors": {
                name: tensor.detach() for name, tensor in self.named_tensors.items() if name not in left_out
            },
            "model": {name: value for name, value in extra.items() if not isinstance(value, torch.Tensor)},
            "optimizer": self.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, value in state["tensors"].items():
                self.named_tensors[name].copy_(value)
        if state["model"]:
            self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_common_state(state["strategy"])

    def _take_equal(self, ahead: Sequence[int]) -> None:
        """Takes the state that most of those hold who are furthest on, unless this worker holds it."""
        group = self.group
        held = HeldState(self._common_state()) if group.rank in ahead else None
        names = share(group, "" if held is None else held.name)
        counted = collections.Counter(name for name in names if name)
        name = max(counted, key=lambda each: (counted[each], -names.index(each)))
        if group.rank in ahead and names[group.rank] != name:
            log.warning(
                "rank %d differs from most other workers after step %d, and takes their model.",
                group.rank, self.steps,
            )  # fmt: skip
        donors = [rank for rank, theirs in enumerate(names) if theirs == name]
        self._transfer(held, name, donors)

    def _take_mean(self, trained: Sequence[int], first: int) -> None:
        """Goes on from the mean of those who have trained; who has not takes the rest from the first."""
        group = self.group
        is_trained = group.rank in trained
        means = [tensor.detach() for tensor in self.named_tensors.values() if has_mean(tensor)]
        if len(trained) > 1 or len(trained) < group.size:
            with torch.no_grad():
                for bucket, members in packed_on_devices(means):
                    if not is_trained:
                        bucket.flat.zero_()
                    group.all_reduce(bucket.flat, "sum").wait()
                    bucket.flat.div_(len(trained))
                    bucket.store(members)
        if len(trained) == group.size:
            return
        held = HeldState(self._common_state()) if group.rank == first else None
        name = share(group, "" if held is None else held.name)[first]
        self._transfer(held, name, [first], [rank for rank in range(group.size) if rank not in trained])

    def _transfer(
        self, held: HeldState | None, name: str, donors: Sequence[int], takers: Sequence[int] | None = None
    ) -> None:
        """Moves a state from the donors to the takers, by default all others. Collective."""
        group = self.group
        takers = [rank for rank in range(group.size) if rank not in donors] if takers is None else takers
        if not takers or self._take_directly(held, name, donors, takers):
            return
        # over the group: there is no network beside it, or somebody could not use that
        state = take_state(group, self._common_state, donors[0])
        if group.rank in takers:
            self._load(state)

    def _take_directly(
        self, held: HeldState | None, name: str, donors: Sequence[int], takers: Sequence[int]
    ) -> bool:
        """Lets the takers ask the donors; says whether all of them have the state now. Collective."""
        group, make_transport = self.group, self._elastic.make_transport
        if make_transport is None:
            return False
        with contextlib.ExitStack() as stack:
            loop, address, peer_id = stack.enter_context(LoopThread("shoal-state")), "", ""
            transport: StreamTransport | None = None
            try:
                transport, host = make_transport()
                loop.run(transport.__aenter__(), Deadline.after(_OPENING_S))
                stack.callback(_close, loop, transport)
                peer_id = str(transport.peer_id or "")
                if held is not None and group.rank in donors:
                    StateDonor(transport).hold(held)
                    address = str(loop.run(transport.listen(Address(host, 0)), Deadline.after(_OPENING_S)))
            except (ShoalError, OSError) as error:
                log.warning("cannot open connections to give or take the model's state: %s", error)
            told, is_taken = share(group, [address, peer_id]), group.rank not in takers
            if not is_taken and transport is not None:
                peers = [_peer(*told[rank]) for rank in donors if told[rank][0]]
                taker, deadline = StateTaker(transport, name), Deadline.after(_TRANSFER_S)
                try:
                    self._load(loop.run(taker.take(peers, deadline), deadline))
                    is_taken = True
                except (ShoalError, OSError) as error:  # where donors are lost, the group says so
                    log.warning("%s", error)
            return all(share(group, is_taken))  # donors stay until then

    def _take_buffers(self, trained: Sequence[int], first: int) -> None:
        """Gives those who have not trained the first one's buffers; the others keep their own. Collective."""
        group, buffers = self.group, self._model_buffers
        if not buffers or len(trained) == group.size:
            return
        state = take_state(group, lambda: {name: buffer.detach() for name, buffer in buffers.items()}, first)
        if group.rank not in trained:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    buffer.copy_(state[name])

    @property
    def _model_buffers(self) -> dict[str, torch.Tensor]:
        """Finds the model's buffers, which differ from worker to worker where gradients are shared."""
        known = {id(buffer) for buffer in self.model.buffers()}
        return {name: one for name, one in self.named_tensors.items() if id(one) in known}

    def _divide_anew(self, trained: Sequence[_Account], first: int) -> None:
        """Divides what is left of the loaders' epochs among those who are there now."""
        group, loaders = self.group, self._loaders
        if not self._is_first:
            return  # the loaders are the group's: they have been divided with its first session
        newest = max(each.generation for each in trained)
        known = [each for each in trained if each.generation == newest]
        size = known[0].old_size
        left = {rank: note.places for each in known for rank, note in each.left.items()}
        # with equal gradients a step counts for all workers, or is done again by the others
        is_equal = self.strategy.shares_gradients
        lost = {} if is_equal else {rank: note for each in known for rank, note in each.lost.items()}
        states = take_state(group, self._loader_states, first)
        most_per_step = loaders.items_per_step
        loaders.add_lost(take_state(group, loaders.lost, first))
        merged: list[Mapping[str, Any] | None] = []
        for number, state in enumerate(states):
            others = places_at(number, {each.old_rank: each.places for each in known})
            if state is None or not others:
                merged.append(None)
                continue
            others |= places_at(number, left)
            nearest = min(others.values(), key=_order)
            gone = [rank for rank in range(size) if rank not in others]
            is_guessed = self._restarted is not None and not is_equal
            for rank in [rank for rank in gone if rank in lost or is_guessed]:
                note = lost.get(rank)
                if note is None:  # lost, and nobody has noticed
                    note = self._guess([*[None] * number, nearest])
                place = note.places[number] if number < len(note.places) else None
                others[rank] = place = [*nearest[:2], 0] if place is None else place
                per_step = most_per_step[number] if number < len(most_per_step) else 0
                num_more = (note.num_ahead + 1) * per_step if note.num_ahead else 0
                items = loaders.note_lost(number, place, (rank, size), note.num_since + 1, num_more)
                if items and group.rank == first:
                    _tell_lost(place[0], items)
            merged.append(merge(state, others, size, lost=gone))
        loaders.move(group.rank, group.size, merged)

    # What the others know of this worker when it has gone.

    def note(self, num_ahead: int = 0) -> bytes:
        """Says how far this worker is, and how many steps more it may do before it says so again."""
        strategy = self.strategy
        num_since = strategy.steps % strategy.options.local_steps
        return msgspec.msgpack.encode(_Note(self._generation, self._places(), num_since, num_ahead))

    def _tell_progress(self) -> None:
        """Tells the coordinator now and then how far this worker is, and may go before it says so again.

        Where gradients are equal the others know it: a step counts for all, or is done again.
        """
        steps, epochs = self.steps, self._loaders.epochs
        if steps >= self._tell_step or epochs != self._told_epochs:
            num_ahead = self._elastic.link.num_steps_in(_TELL_EVERY_S)
            self._tell_step, self._told_epochs = steps + num_ahead, epochs
            self._elastic.link.send(Progress(self.note(num_ahead)))

    def _told(self, notes: Mapping[int, bytes]) -> dict[int, _Note]:
        """Finds, by rank of the last generation, what those have said who have gone.

        Who has said nothing there, has done nothing there.
        """
        told: dict[int, _Note] = {}
        for number, note in notes.items():
            if number in self._numbers:
                said = msgspec.msgpack.decode(note, type=_Note) if note else _Note(0)
                is_new = said.generation == self._generation
                told[self._numbers.index(number)] = said if is_new else _Note(self._generation)
        return told

    def _places(self) -> list[Any]:
        return places_of(self._loader_states())

    def _loader_states(self) -> list[Any]:
        states = self._loaders.states()
        return [*states, *self._waiting_states[len(states) :]]

    # What is left to the process that is started in the place of this one.

    def _take_back(self, restarted: RestartedGroup) -> None:
        """Takes what was left to this session, as if it had been there in the generation before."""
        kept = restarted.memory.take(self._number)
        if kept is None:
            return
        with refuse_unfit(
            "what this worker has left before it was started anew",
            next_step="build them alike at each start; end torchrun and start it again to begin anew.",
        ):
            there = {name: tensor.shape for name, tensor in self.named_tensors.items()}
            if there != {name: tensor.shape for name, tensor in kept["tensors"].items()}:
                raise ValueError("its parameters and buffers have other names or shapes")
            self._load(kept)
        self.has_trained, self.kept_state = True, kept["strategy"]
        self._generation, self._rank, self._size = kept["place"]
        self._numbers = list(range(self._size))
        self._dropped = kept["dropped"]
        self.strategy.checkpoints.ask_random(kept["random"])
        self._elastic.lost_notes.update({int(rank): bytes.fromhex(note) for rank, note in kept["notes"]})
        if self._is_first:
            self._waiting_states = kept["loaders"]
            self._loaders.load(kept["loaders"])
            self._loaders.add_lost(kept["lost"])

    def keep(self) -> None:
        """Leaves what this session has to the process that is started in the place of this one.

        Nothing where torchrun starts none.
        """
        restarted = self._restarted
        if restarted is None:
            return
        link, strategy = restarted.restart_link, self.strategy
        if not link.is_stopping and not link.has_restarts_left:
            return
        self._note_losses()
        content = {
            **self._state(),
            "strategy": self.kept_state,
            "place": [self._generation, self._rank, self._size],
            "dropped": self._dropped,
            "loaders": self._loader_states(),
            "lost": self._loaders.lost(),
            "notes": [[rank, note.hex()] for rank, note in self._elastic.lost_notes.items()],
            "random": states_of_process(),
        }
        try:
            restarted.memory.keep(self._number, self._generation, strategy.name, strategy.steps, content)
        except (OSError, ShoalError) as error:
            log.error(
                "rank %d cannot leave its model to the worker that is started in its place: %s",
                self._rank, error,
            )  # fmt: skip
        else:
            log.warning("rank %d leaves step %d in the memory of its machine", self._rank, strategy.steps)

    def _note_losses(self) -> None:
        """Notes where workers may have been that are lost: nobody has heard it from themselves."""
        for rank in self._elastic.lost:
            if rank not in self._elastic.lost_notes:
                self._elastic.lost_notes[rank] = msgspec.msgpack.encode(self._guess(self._places()))

    def _guess(self, places: list[Any]) -> _Note:
        """Says where a worker may be that is lost: as far as those places, give or take a round."""
        period = self.options.local_steps
        num_since = self.steps % period or period
        return _Note(self._generation, places, num_since, period)

    @property
    def _is_first(self) -> bool:
        """Whether this session is the group's first, which speaks for the loaders, and for all others."""
        return self._attached[0] is self

    def _entered(self) -> None:
        """Takes note that the session has started in the present generation."""
        form, old_size = self._elastic.form, self._size
        assert form is not None, "no generation"
        is_new, self.has_trained, self.is_whole, self.error = not self.has_trained, True, True, None
        self._elastic.left_notes.clear()
        self._elastic.lost_notes.clear()
        self._generation, self._rank, self._size = form.generation, self._elastic.rank, self._elastic.size
        self._numbers = [place.number for place in form.places[self._elastic.num_servers :]]
        self._dropped, self._tell_step = [], 0
        self._waiting_states = []
        if self._restarted is not None:
            self._restarted.memory.discard(self._number)
        self.is_between = True
        if self._is_first:
            self._elastic.link.trains_on(self.strategy.steps)
            if not self.strategy.shares_gradients:
                self._tell_progress()
        has_changed = old_size and old_size != self._size
        is_new_process = is_new or self._restarted is not None
        self._change = (old_size, self._size) if is_new_process and has_changed else None
        for follow in self._followers if has_changed else ():
            follow(old_size, self._size)


def _regroup(group: ElasticGroup, error: PeerLost | None) -> None:
    """Forms the next generation, and starts all that is attached in it; SystemExit if this worker leaves."""
    while True:
        attached = _sessions[group]
        states = [_put_aside(each) for each in attached]
        steps = max((each.steps for each in attached), default=0)
        is_fresh = not any(each.has_trained for each in attached)
        try:
            note = attached[0].note() if attached else b""
            if group.is_restarted:
                _abandon(attached)
            group.regroup(steps, is_fresh=is_fresh, error=error, note=note)
        except LeavingRun as leaving:
            log.warning("this worker leaves: %s", leaving.what)
            _abandon(attached)
            tell_launcher(phase="left")
            raise SystemExit(0) from None
        if group.is_restarted:
            return
        try:
            for each, state in zip(attached, states, strict=True):
                each.take_group(each.group, state)
                each.enter(should_start_equal=True)
                each._entered()
        except PeerLost as failure:
            error = failure
        else:
            return


def _put_aside(session: ElasticSession) -> dict[str, Any]:
    """Takes a session out of the present group; gives the strategy's state."""
    strategy = session.strategy
    if not session.has_trained or session.is_whole:
        counts = {"steps": strategy.steps, "rounds": strategy.rounds}
        state: dict[str, Any] = {"strategy": strategy.name, **counts}
        with contextlib.suppress(PeerLost):  # what was under way cannot be waited for
            state = strategy.state_at_end()
        session.kept_state = state
    if session.is_whole:
        session.keep()
    session.is_whole = session.is_between = False
    if session.is_in_group:  # the optimizer's own hooks are running, and stay
        session._hooks.pause()
        session._detach(should_leave=False, is_failed=True)
    return session.kept_state


def _abandon(attached: Sequence[ElasticSession]) -> None:
    """Ends sessions without a word to the group, which this worker has left."""
    for each in list(attached):
        each.close(is_failed=True)


def _stop_between(group: ElasticGroup) -> None:
    """Ends training at once where that is between two steps; otherwise the end of the step finds it due."""
    attached = _sessions.get(group, [])
    if all(each.is_between for each in attached):
        for each in attached:
            each.drop_step()
        _regroup(group, None)


def _close(loop: LoopThread, transport: StreamTransport) -> None:
    with contextlib.suppress(ShoalError):
        loop.run(transport.__aexit__(None, None, None), Deadline.after(_OPENING_S))


def _order(place: Sequence[Any]) -> tuple[int, int, int]:
    """Orders places of a loader by how far they are."""
    return place[0], len(place[1]), place[2]


def _tell_lost(epoch: int, items: Sequence[Any]) -> None:
    """Names what a lost worker had taken since it last shared what it had learned."""
    shown = ", ".join(map(str, items[:_MAX_LISTED])) + (", ..." if len(items) > _MAX_LISTED else "")
    log.warning(
        "epoch %d: %d examples of a worker that has gone may be missing from the model, or come twice: %s",
        epoch + 1, len(items), shown,
    )  # fmt: skip


def _peer(address: str, peer_id: str) -> Peer:
    return Peer(Address.parse(address), PeerId.parse(peer_id) if peer_id else None)


def _tell(group: ElasticGroup, accounts: Sequence[_Account], steps: int) -> None:
    num_new = sum(not each.has_trained for each in accounts)
    form = group.form
    assert form is not None, "no generation"
    log.warning(
        "generation %d: %d worker%s from step %d on%s",
        form.generation, len(accounts), "" if len(accounts) == 1 else "s", steps,
        f", {num_new} of them new" if num_new else "",
    )  # fmt: skip
