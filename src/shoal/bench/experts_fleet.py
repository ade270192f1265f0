"""The client processes of `shoal bench experts` as the process sees them that gives the orders.

Processes that die or hang are counted with their clients, and the others go on.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from shoal.bench.experts_config import ExpertsConfig
from shoal.bench.experts_tally import Tally
from shoal.bench.workers import Child, child
from shoal.core import BenchmarkError

_TICK_S = 0.1
_ANSWER_S = 600.0
_CALL_S = 2.0  # more of patience for each batch: calls have deadlines, so that only a bug takes longer
_ATTEND = "shoal.bench.experts_clients:attend"
LOST = "LostClient"
"""What calls count as whose client died before it could tell of them."""


class ClientFleet:
    """All clients, spread over processes that are started at once; a context manager."""

    def __init__(self, config: ExpertsConfig, seed: int, server: Mapping[str, Any]) -> None:
        self._config = config
        self._arguments = {
            "config": msgspec.to_builtins(config),
            "seed": seed,
            "port": server["port"],
            "uids": server["uids"],
        }
        self._sizes: dict[Child, int] = {}
        """Clients of each process that has not been lost."""
        self._stack = contextlib.ExitStack()
        self.num_lost = 0
        """Clients whose process died or hung."""
        self.complaint = ""
        """Why the last of them was lost."""

    def __enter__(self) -> Self:
        num_processes = self._config.client_processes
        with contextlib.ExitStack() as stack:
            for rank in range(num_processes):
                numbers = list(range(rank, self._config.num_clients, num_processes))
                attending = child(
                    _ATTEND,
                    {**self._arguments, "numbers": numbers},
                    name=f"Client process {rank + 1} of {num_processes}",
                    variables={"OMP_NUM_THREADS": "1"},
                )
                self._sizes[stack.enter_context(attending)] = len(numbers)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._sizes:  # all of them, before one is waited for
            process.end() if error is None else process.kill()
        self._stack.__exit__(kind, error, trace)

    def connect(self) -> None:
        """Wait until every client has its connection."""
        self._ask("connect")

    def phase(self, order: str, on_tick: Callable[[], None] | None = None) -> tuple[Tally, float]:
        """Have all clients do something at once; what came of it, and seconds until the last was done."""
        began_s = time.monotonic()
        answers = self._ask(order, on_tick)
        total = Tally()
        for answer in answers:
            total.add(msgspec.convert(answer, Tally))
        if self.num_lost:
            num_calls = self._config.num_calls // self._config.num_clients
            total.fail(LOST, self.num_lost * num_calls)
        return total, total.ended_s - began_s

    def _ask(self, order: str, on_tick: Callable[[], None] | None = None) -> list[Any]:
        for process in self._sizes:
            process.order(order=order, details={})
        answers = []
        patience_s = _ANSWER_S + _CALL_S * self._config.num_batches_per_client
        until_s = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            for process in self._sizes:
                selector.register(process, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(_TICK_S):
                    selector.unregister(key.fileobj)
                    try:
                        answers.append(key.data.expect()["answer"])
                    except BenchmarkError as error:
                        self._lose(key.data, error)
                if on_tick is not None:
                    on_tick()
                if time.monotonic() > until_s:
                    for key in list(selector.get_map().values()):
                        selector.unregister(key.fileobj)
                        self._lose(key.data, _stuck(order, patience_s))
        return answers

    def _lose(self, process: Child, error: BenchmarkError) -> None:
        """Go on without these clients; BenchmarkError when nobody is left."""
        process.kill()
        self.num_lost += self._sizes.pop(process)
        self.complaint = " ".join(error.what.split())
        if not self._sizes:
            raise error


def _stuck(order: str, patience_s: float) -> BenchmarkError:
    return BenchmarkError(
        f"A client process did not answer '{order}' within {patience_s:g} s.",
        cause="the machine is overloaded, or out of memory.",
        next_step="run it with fewer clients, or smaller batches.",
    )
