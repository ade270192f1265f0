"""A group around another, that forwards everything: what counts, delays or disturbs operations begins here.

A subclass overrides `_issue` and `_call`, through which all operations pass, or single methods.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from shoal.core import Clock, Deadline, DeadlineExceeded
from shoal.group import operations
from shoal.group.base import Group, Handle, Loss, Reduction, Snapshot, Window
from shoal.group.operations import Operation
from shoal.group.wrapped_window import WrappedWindow
from shoal.topology import Weights

T = TypeVar("T")


class GroupWrapper(Group):
    """Does what `inner` does."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.local_rank = inner.local_rank
        self.size = inner.size
        self.machine = inner.machine
        self.num_machines = inner.num_machines
        self.patience = inner.patience
        self.everybody = inner.everybody
        self.num_servers = inner.num_servers
        self.role = inner.role

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Every operation that has a handle; `start` begins it in the inner group."""
        return start()

    def _call(self, operation: Operation, act: Callable[[], T]) -> T:
        """Every operation that is over when it returns."""
        return act()

    @cached_property
    def notes(self) -> dict[str, Any]:
        """The inner group's."""
        return self.inner.notes

    # --- who is there ---

    @property
    def should_survive(self) -> bool:
        """As the inner group's."""
        return self.inner.should_survive

    @should_survive.setter
    def should_survive(self, value: bool) -> None:
        self.inner.should_survive = value

    @property
    def members(self) -> Sequence[int]:
        """As the inner group's."""
        return self.inner.members

    @property
    def lost(self) -> Mapping[int, Loss]:
        """As the inner group's."""
        return self.inner.lost

    @property
    def waited_s(self) -> Sequence[float]:
        """As the inner group's."""
        return self.inner.waited_s

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """As the inner group's."""
        return self.inner.traffic_bytes

    def blame(self, error: BaseException | None) -> None:
        """The inner group tells."""
        self.inner.blame(error)

    def check_split(self) -> None:
        """As the inner group's."""
        self.inner.check_split()

    def machine_of(self, rank: int) -> int:
        """As the inner group's."""
        return self.inner.machine_of(rank)

    # --- operations; `share` goes through `all_gather` ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Memory of the inner group."""
        operation = Operation("empty", num_elements * dtype.itemsize)
        return self._call(operation, partial(self.inner.empty, num_elements, dtype, device=device))

    def free(self, tensor: torch.Tensor) -> None:
        """Give memory of the inner group back."""
        self._call(Operation("free", tensor.nbytes), partial(self.inner.free, tensor))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = operations.all_reduce(self.inner, tensor)
        return self._issue(operation, partial(self.inner.all_reduce, tensor, op))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = operations.broadcast(self.inner, tensor, root)
        return self._issue(operation, partial(self.inner.broadcast, tensor, root))

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Through the inner group."""
        operation = operations.all_gather(self.inner, tensor)
        return self._issue(operation, partial(self.inner.all_gather, tensor))

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Through the inner group."""
        operation = operations.exchange(self.inner, tensor, weights)
        return self._issue(operation, partial(self.inner.exchange, tensor, weights, out=out))

    def exchange_machines(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Through the inner group, which may know a shorter way than an exchange of all."""
        operation = operations.exchange_machines(self.inner, tensor, weights)
        return self._issue(operation, partial(self.inner.exchange_machines, tensor, weights, out=out))

    def pair_gossip(self, tensor: torch.Tensor, peer: int, weight: float = 0.5) -> Handle[torch.Tensor]:
        """Through the inner group."""
        weights = Weights(1 - weight, {peer: weight})
        operation = operations.exchange(self.inner, tensor, weights, "pair_gossip")
        return self._issue(operation, partial(self.inner.pair_gossip, tensor, peer, weight))

    def settle(self, tensor: torch.Tensor) -> None:
        """Through the inner group."""
        self._call(Operation("settle"), partial(self.inner.settle, tensor))

    def barrier(self) -> Handle[None]:
        """Through the inner group."""
        return self._issue(operations.barrier(self.inner), self.inner.barrier)

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Through the inner group."""
        operation = Operation("publish", tensor.nbytes)
        self._call(operation, partial(self.inner.publish, name, tensor, version))

    def reclaim(self, name: str, version: int) -> None:
        """Through the inner group."""
        self.inner.reclaim(name, version)

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """Through the inner group."""
        return self._issue(operations.fetch(self.inner, peer), partial(self.inner.fetch, name, peer))

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Through the inner group."""
        with contextlib.ExitStack() as stack:
            change = self.inner.changing(name, version)
            self._call(Operation("changing"), partial(stack.enter_context, change))
            yield

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Through the inner group."""
        operation = operations.read(self.inner, peer, into)
        return self._issue(operation, partial(self.inner.read, name, peer, into, version=version))

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> Window:
        """One of the inner group, around which this one counts, delays or disturbs writes."""
        make = partial(self.inner.window, name, num_elements, dtype, sources=sources)
        inner = self._call(Operation("window", num_elements * dtype.itemsize), make)
        return WrappedWindow(inner, self.inner, self._issue, self._call)

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Through the inner group."""
        with contextlib.ExitStack() as stack:
            mutex = self.inner.mutex(name, owner)
            self._call(Operation("mutex"), partial(stack.enter_context, mutex))
            yield

    # --- its life ---

    def progress(self) -> None:
        """Of the inner group's operations."""
        self.inner.progress()

    def leave(self) -> None:
        """Leave the inner group."""
        self.inner.leave()

    def close(self) -> None:
        """Close the inner group."""
        self.inner.close()

    def abandon(self) -> None:
        """Abandon the inner group."""
        self.inner.abandon()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """For the timeline of a group inside."""
        with self.inner.span(name):
            yield


class ObservedHandle(Handle[T]):
    """A handle that sees when it is waited for, when its operation is found to be over, and the result.

    Nobody tells a worker that an operation is over while it does not look: the end is when it is noticed.
    A wait that ran into its deadline is no end.
    """

    def __init__(self, inner: Handle[T], clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._is_over = False
        self._has_result = False

    @abc.abstractmethod
    def _waited(self, began_s: float, ended_s: float) -> None:
        """Somebody has waited."""

    @abc.abstractmethod
    def _ended(self, at_s: float) -> None:
        """It is over, well or not; once."""

    def _brought(self, result: T) -> None:
        """It has a result; once."""

    def wait(self, deadline: Deadline | None = None) -> T:
        """As the inner handle's."""
        began_s = self._clock.now_s()
        is_over = True
        try:
            result = self._inner.wait(deadline)
        except DeadlineExceeded:
            is_over = False
            raise
        finally:
            ended_s = self._clock.now_s()
            self._waited(began_s, ended_s)
            if is_over:
                self._notice(ended_s)
        if not self._has_result:
            self._has_result = True
            self._brought(result)
        return result

    def is_done(self) -> bool:
        """As the inner handle's."""
        is_done = self._inner.is_done()
        if is_done:
            self._notice(self._clock.now_s())
        return is_done

    def _notice(self, at_s: float) -> None:
        if not self._is_over:
            self._is_over = True
            self._ended(at_s)
