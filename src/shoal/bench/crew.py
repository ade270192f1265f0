"""Workers of a benchmark that take part in one group: started together, and told what to do in lock-step.

A worker is a function `module:name`, called with its place, its arguments and a stack for what it opens; it
returns what it does for each order. `Crew` starts workers as children of this process; `ranks.RankCrew` is
made of processes that a launcher has started.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import selectors
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

import msgspec

from shoal.bench.children import Child, Parent, child, end_with_parent
from shoal.core import BenchmarkError
from shoal.launch.settings import TUNING

T = TypeVar("T")
_BESIDE = -1  # the rank of a helper
Answers = Mapping[str, Callable[..., Any]]
"""By order: what a worker does, called with the order's details."""


class Place(msgspec.Struct, frozen=True):
    """Where a worker is in its crew; `seat.seat_of` makes of it what opens groups."""

    rank: int
    """-1 for a helper, which is beside the workers."""
    size: int
    key: str
    """Of this crew."""
    folder: str = ""
    """For files that the crew shares; it goes with the crew. Empty where a launcher has started the
    workers."""
    machines: tuple[int, ...] = ()
    """The machine of each rank, where a launcher has started them."""


class CrewSettings(msgspec.Struct, frozen=True):
    """Who the workers are."""

    function: str
    """`module:name`, called with a Place, `arguments` and an ExitStack; returns Answers."""
    size: int
    arguments: dict[str, Any] = {}
    answer_s: float = 180.0
    """Whoever has not answered an order after this is taken for stuck."""


class Helper(msgspec.Struct, frozen=True):
    """A process beside the workers, which takes no orders and ends when they do: a parameter server."""

    function: str
    """`module:name`, called as any child's, with `place` and `arguments` among its arguments."""
    name: str
    """What errors call it."""
    arguments: dict[str, Any] = {}


class Workers(Protocol):
    """A crew, as scenarios see it."""

    @property
    def is_running(self) -> bool:
        """Whether workers are there that have followed all orders so far."""

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers of the first `among` workers, or of all, by rank."""

    def hire(self, helper: Helper) -> None:
        """Start a process beside the workers."""


class OpenCrew(Protocol):
    """How a scenario gets its crew: `Crew` itself, or what `ranks` puts in its place."""

    def __call__(self, settings: CrewSettings) -> contextlib.AbstractContextManager[Workers]:
        """The crew, for as long as a block lasts."""


class Crew:
    """The workers, as the process sees them that gives the orders; a context manager.

    They are started by the first order. Once one of them has failed all are ended, and the next order starts
    them afresh: `is_running` tells whether they still know what they were told.
    """

    def __init__(self, settings: CrewSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._helpers: list[Child] = []
        self._place: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether workers are there that have followed all orders so far."""
        return bool(self._children)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._children:
            self._end()
        else:
            self._abandon()

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers by rank; BenchmarkError names the rank that failed, and ends all of them."""
        if not self._children:
            self._start()
        asked = self._children[:among]
        for worker in asked:
            worker.order(order=order, details=details)
        return self._gather(lambda worker: worker.expect()["answer"], f"'{order}'", len(asked))

    def hire(self, helper: Helper) -> None:
        """Start a process for as long as the workers are there; it is killed with them when one fails.

        Its failure is one of the order that is under way then, or of the next.
        """
        if not self._children:
            self._start()
        arguments = {
            "function": helper.function,
            "place": {"rank": -1, **self._place},
            "arguments": helper.arguments,
        }
        hired = child("shoal.bench.crew:run_helper", arguments, name=helper.name, variables=TUNING)
        self._helpers.append(self._stack.enter_context(hired))

    def _start(self) -> None:
        settings = self._settings
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-crew-"))
        key = f"bench-{secrets.token_hex(8)}"
        self._place = {"size": settings.size, "key": key, "folder": folder}
        for rank in range(settings.size):
            arguments = {
                "function": settings.function,
                "place": {"rank": rank, **self._place},
                "arguments": settings.arguments,
            }
            worker = child(
                "shoal.bench.crew:run_worker",
                arguments,
                name=f"rank {rank} of {settings.size}",
                variables=TUNING,
            )
            self._children.append(self._stack.enter_context(worker))

    def _end(self) -> None:
        """All at once: they may have to say goodbye to each other."""
        for worker in (*self._children, *self._helpers):
            worker.end()
        self._gather(lambda worker: worker.receive(), "the end", len(self._children))
        for helper in self._helpers:
            self._see_off(helper)
        self._children, self._helpers = [], []
        self._stack.close()

    def _see_off(self, helper: Child) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(helper, selectors.EVENT_READ)
            while selector.select(self._settings.answer_s):
                if helper.receive() is None:
                    return
        helper.kill()
        raise BenchmarkError(
            f"a process beside the workers goes on {self._settings.answer_s:g} s after them."
        )

    def _abandon(self) -> None:
        for worker in (*self._children, *self._helpers):
            worker.kill()
        self._children, self._helpers = [], []
        self._stack.close()

    def _gather(self, take: Callable[[Child], T], what: str, num_asked: int) -> list[T]:
        answers: dict[int, T] = {}
        failures: dict[int, BenchmarkError] = {}
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._children[:num_asked]):
                selector.register(worker, selectors.EVENT_READ, rank)
            for helper in self._helpers:
                selector.register(helper, selectors.EVENT_READ, _BESIDE)
            while len(answers) < num_asked and not failures:
                ready = selector.select(self._settings.answer_s)
                if not ready:
                    stuck = [rank for rank in range(num_asked) if rank not in answers]
                    failures[stuck[0]] = self._stuck(stuck, what)
                for key, _ in ready:
                    rank = key.data
                    selector.unregister(key.fileobj)
                    try:
                        if rank == _BESIDE:
                            cast(Child, key.fileobj).receive()
                        else:
                            answers[rank] = take(self._children[rank])
                    except BenchmarkError as error:
                        failures[rank] = error
            if failures:
                raise self._failure(failures, selector)
        return [answers[rank] for rank in range(num_asked)]

    def _failure(
        self, failures: dict[int, BenchmarkError], selector: selectors.BaseSelector
    ) -> BenchmarkError:
        """The first failure; but who missed a process that has gone is not the one to name."""
        for key, _ in selector.select(0):
            try:
                cast(Child, key.fileobj).receive()
            except BenchmarkError as error:
                failures[key.data] = error
        killed = [rank for rank in failures if rank == _BESIDE or (self._children[rank].exit_code or 0) < 0]
        self._abandon()
        return failures[killed[0] if killed else next(iter(failures))]

    def _stuck(self, ranks: list[int], what: str) -> BenchmarkError:
        names = ", ".join(map(str, ranks))
        return BenchmarkError(
            f"rank {names} of {len(self._children)} did not answer {what} within "
            f"{self._settings.answer_s:g} s.",
            cause="workers wait for each other in a different order, or the machine is overloaded.",
            next_step="run it with fewer workers, or smaller sizes.",
        )


def one_line(error: BenchmarkError) -> str:
    """What happened, as a row or a line of progress says it."""
    return " ".join(error.what.split())


def run_worker(arguments: dict[str, Any], parent: Parent) -> None:
    """What the process of a worker does; all is closed in the end, so that the interpreter need not be."""
    end_with_parent()
    with contextlib.ExitStack() as stack:
        place = msgspec.convert(arguments["place"], Place)
        serve(parent, open_worker(arguments["function"], place, arguments["arguments"], stack))
    parent.leave()


def run_helper(arguments: dict[str, Any], parent: Parent) -> None:
    """What the process of a helper does."""
    end_with_parent()
    _named(arguments["function"])(arguments, parent)


def serve(parent: Parent, answers: Answers) -> None:
    """Answer orders until there are no more; what an answer raises is told before anything is closed."""
    while (order := parent.receive()) is not None:
        try:
            answer = answers[order["order"]](**order["details"])
        except Exception as error:
            parent.fail(error)
            raise
        parent.tell(answer=answer)


def open_worker(
    function: str, place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack
) -> Answers:
    """Make this process the worker that `function` says."""
    answers: Answers = _named(function)(place, arguments, stack)
    return answers


def _named(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
