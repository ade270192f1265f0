"""What a strategy writes into a checkpoint, and the methods for those that have more to say there."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from shoal.data import ShardedLoader
from shoal.group import Group
from shoal.strategies.checkpoints import NUM_KEPT
from shoal.strategies.ending import save_at_end, save_first_at_end
from shoal.strategies.keeping import Keeper, keep
from shoal.strategies.replicas import common_model, own_model
from shoal.strategies.resuming import extra_state, random_states
from shoal.strategies.saving import Contents, save
from shoal.strategies.session import TrainingSession, still_there


class Checkpointed(abc.ABC):
    """The part of `Strategy` that is saved; `Strategy.load` takes it up."""

    name: ClassVar[str]
    group: Group
    steps: int
    keeper: Keeper

    @property
    @abc.abstractmethod
    def session(self) -> TrainingSession:
        """The model and optimizer that it works on."""

    @property
    @abc.abstractmethod
    def shares_gradients(self) -> bool:
        """Whether parameters are equal on all members after a step."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors of this worker from which a resumed run continues."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""

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
        session = self.session
        session.settle()
        self.before_saving(session)
        contents = self._contents(loaders, self.common_model(session), self.common_optimizer(session))
        return save(still_there(self.group), Path(folder), contents, num_kept)

    # For subclasses. Called in a group of one too; unless said otherwise on all members at once, in the
    # user's thread, between two steps. What `state_dict` gives is kept for each worker. Where a run resumes,
    # `load_state_dict` comes before `_started`: keep its tensors until then.

    @property
    def has_own_replica(self) -> bool:
        """Whether each worker's own parameters and optimizer state are kept, beside the common ones."""
        return not self.shares_gradients

    def before_saving(self, session: TrainingSession) -> None:  # noqa: B027 - most have nothing to do
        """Come to rest: afterwards nothing is under way that is neither in parameters nor in the state."""

    def common_model(self, session: TrainingSession) -> dict[str, torch.Tensor]:
        """The one model of the whole group, by the names of its `state_dict`; the first member's is written.

        By default the mean over the members of all that is in floating point and differs among them.
        """
        return common_model(still_there(self.group), session.model, are_equal=not self.has_own_replica)

    def common_optimizer(self, session: TrainingSession) -> dict[str, Any]:
        """A `state_dict` of the optimizer from which all can go on; the first member's is written."""
        return session.optimizer.state_dict()

    def state_at_end(self) -> dict[str, Any]:
        """The `state_dict` that is kept where workers leave one by one, and nothing can come to rest."""
        return self.state_dict()

    def completed(self, contents: Contents) -> Contents:
        """At the end, on the one worker that writes the common part; others may be gone, or not yet there."""
        return contents

    def save_at_end(self, *, should_leave: bool) -> None:
        """At a clean end, where the run keeps checkpoints by itself. Workers that leave do so one by one.

        So nothing in here may wait for another worker, unless all of them stay.
        """
        if not should_leave or self.group.size == 1:
            self.keeper.save(self.steps)
            return
        attachment = self.session

        def save_last(staging: Path) -> Path | None:
            optimizer = attachment.optimizer.state_dict()
            model, state = own_model(attachment.model), self.state_at_end()
            contents = replace(self._contents(None, model, optimizer, state), complete=self.completed)
            if not self.keeper.is_common:
                return save_first_at_end(self.group, staging, contents)
            replica = attachment if self.has_own_replica else None
            return save_at_end(self.group, staging, self.keeper.writers, contents, replica)

        self.keeper.end(self.steps, save_last)

    def _contents(
        self,
        loaders: Sequence[ShardedLoader[Any]] | None,
        model: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ) -> Contents:
        attachment, places = self.session, keep(self.group, loaders).states()
        state = self.state_dict() if state is None else state
        named = attachment.named_tensors
        unnamed = {name: tensor for name, tensor in named.items() if name not in model}
        own: dict[str, Any] = {"strategy": state, "random": random_states(), "loaders": places}
        is_alone = self.group.size == 1
        own["tensors"] = {
            name: tensor
            for name, tensor in named.items()
            if not is_alone and (self.has_own_replica or not isinstance(tensor, torch.nn.Parameter))
        }
        if self.has_own_replica and not is_alone:
            own["optimizer"] = attachment.optimizer.state_dict()
        common = {"strategy": state, "tensors": unnamed, "model": extra_state(attachment.model)}
        return Contents(self.name, self.steps, model, optimizer, common, own, places)
