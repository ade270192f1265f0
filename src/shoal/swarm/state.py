"""What all members of a run hold equal to the bit, and the chain of names that says so.

A state is named by the hash of its predecessor's name and of the commit that made it: who holds the same name
has applied the same commits in the same order. `HeldState` (see `shoal.tensors.transfer`) hashes the bytes
themselves in leaves, which only those need who join.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import msgspec
import torch

from shoal.core import ProtocolError
from shoal.swarm.optimizers import CommittedOptimizer
from shoal.swarm.wire import STEP, Commit

_ALIGNMENT = 16  # elements: fragments begin on 64-byte boundaries


class CommittedState:
    """Parameters, what the optimizer keeps, the round that comes next, and the samples that went in."""

    def __init__(self, parameters: torch.Tensor, optimizer: CommittedOptimizer, fork: bytes) -> None:
        self.parameters = parameters.detach().to(torch.float32).reshape(-1).clone()
        self.optimizer = optimizer
        self.kept = optimizer.start(self.parameters.numel())
        self.fork = fork
        self.round = 0
        self.num_samples = 0
        self.num_steps = 0
        self.name = hashlib.sha256(fork).digest()
        self.has_values = True
        """False for a member that only averages: it follows the names, and has no parameters."""
        self.ancestry: list[tuple[bytes, int]] = []
        """The forks that this one descends from, and the rounds in which they were left."""

    @property
    def num_elements(self) -> int:
        """How many parameters there are."""
        return self.parameters.numel()

    def fragment(self, num_fragments: int) -> tuple[int, int]:
        """Gives the elements that the next step moves, where steps move one of so many fragments in turn.

        It follows from the number of steps: a round that comes to nothing leaves the turn where it was.
        """
        size = self.num_elements
        num_fragments = max(1, min(num_fragments, size // _ALIGNMENT))
        number = self.num_steps % num_fragments
        begin, end = (size * one // num_fragments // _ALIGNMENT * _ALIGNMENT for one in (number, number + 1))
        return begin, size if number + 1 == num_fragments else end

    def apply(self, commit: Commit, average: torch.Tensor | None) -> None:
        """Makes the step that a commit has decided; an abort and an end only raise the round.

        ProtocolError, with nothing done, for a commit that does not follow this state.
        """
        if (commit.fork, commit.round, commit.previous) != (self.fork, self.round, self.name):
            raise ProtocolError(
                f"A commit of round {commit.round} does not follow the state of {self.round}."
            )
        if commit.kind == STEP:
            if self.has_values:
                assert average is not None
                assert commit.plan is not None
                self.optimizer.step(self.parameters, average, self.kept, commit.plan.bounds[0])
            self.num_samples += sum(credited_samples(commit))
            self.num_steps += 1
        self.round += 1
        self.name = commit.state_name

    def found(self, fork: bytes) -> None:
        """Begins a run under this name, before any commit."""
        self.fork, self.name = fork, hashlib.sha256(fork).digest()

    def branch(self, fork: bytes) -> None:
        """Goes on under another name, with the same bits."""
        self.ancestry.append((self.fork, self.round))
        self.fork = fork
        self.name = hashlib.sha256(self.name + fork).digest()

    def follow(self, fork: bytes, number: int, name: bytes) -> None:
        """Takes another member's word for where the run is: for who has no parameters."""
        self.fork, self.round, self.name, self.ancestry = fork, number, name, []

    def descends_from(self, fork: bytes, number: int) -> bool:
        """Tells whether the commit of a fork's round is in this state."""
        ends = [*self.ancestry, (self.fork, self.round)]
        return any(fork == name and number < end for name, end in ends)

    def snapshot(self) -> dict[str, Any]:
        """Gives a copy that a donor may hold while this one goes on."""
        return {
            "parameters": self.parameters.clone(),
            "kept": copy.deepcopy(self.kept),
            "fork": self.fork.hex(),
            "round": self.round,
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "name": self.name.hex(),
            "ancestry": [[fork.hex(), number] for fork, number in self.ancestry],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `snapshot` gave; ProtocolError where it is of another model or optimizer."""
        parameters, kept = state["parameters"], state["kept"]
        if parameters.shape != self.parameters.shape or sorted(kept) != sorted(self.kept):
            raise ProtocolError(
                "The run's state is of another model or optimizer.",
                next_step="start with the same model and optimizer as the other members.",
            )
        self.parameters.copy_(parameters)
        self.kept = dict(kept)
        self.fork = bytes.fromhex(state["fork"])
        self.round = state["round"]
        self.num_samples = state["num_samples"]
        self.num_steps = state["num_steps"]
        self.name = bytes.fromhex(state["name"])
        self.ancestry = [(bytes.fromhex(fork), number) for fork, number in state["ancestry"]]

    def fingerprint(self) -> str:
        """Hashes every bit; for tests and for comparing by eye."""
        found = hashlib.sha256(self.parameters.numpy().data)
        for key in sorted(self.kept):
            value = self.kept[key]
            is_tensor = isinstance(value, torch.Tensor)
            found.update(value.numpy().data if is_tensor else msgspec.msgpack.encode(value))
        return found.hexdigest()


def credited_samples(commit: Commit) -> list[int]:
    """Says how many samples of each contributor are in a commit, by its share of the elements."""
    plan = commit.plan
    if commit.kind != STEP or plan is None:
        return []
    sizes: dict[bytes, int] = {}  # most parts have the same contributors
    for part, result in enumerate(commit.parts):
        sizes[result.bitmap] = sizes.get(result.bitmap, 0) + plan.size(part)
    elements = [0] * len(plan.contributors)
    for bitmap, size in sizes.items():
        for place in places_in(bitmap, len(elements)):
            elements[place] += size
    total = plan.num_elements
    return [samples * num // total for samples, num in zip(plan.samples, elements, strict=True)]


def places_in(bitmap: bytes, num: int) -> list[int]:
    """Lists the contributors whose bits are set, of so many."""
    value = int.from_bytes(bitmap, "little")
    return [place for place in range(num) if value >> place & 1]
