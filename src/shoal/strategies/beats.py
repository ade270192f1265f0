"""What an attached strategy notes on the board about once a second, for `shoal top`, and tells its launcher.

Between two notes a step costs a look at the clock, 0.3 µs; a note took 0.06 ms where it was measured. Only
strategies of a group that `shoal.init()` has opened note anything, in the user's thread, so that a worker
which hangs is seen by how old its note is. Whatever fails here is passed over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shoal.core import SYSTEM_CLOCK, Clock, UsageError, board
from shoal.core.processes import namespace, started
from shoal.core.status import Phase, tell_launcher
from shoal.data.kept import kept_loaders
from shoal.group import Group, GroupStats
from shoal.strategies.session import innermost

_MAX_AWAITED = 8
_MAX_VALUES = 32
_MAX_NAME = 60
_SHORTEST_WAIT_S = 1e-3
_numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
"""How many strategies of a group have been seen."""


class Beats:
    """One strategy's notes; silent unless `opened` finds a run that it is part of."""

    def __init__(self, group: Group, strategy: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._group = group
        self._strategy = strategy
        self._clock = clock
        self._values: dict[str, Any] = {}
        self._pin: board.Pin | None = None
        self._note: board.Note | None = None
        self._number: int | None = None
        self._noted_s = 0.0
        self._due_s = 0.0
        self._opened_s = 0.0
        self._tell_s: float | None = None
        """When the launcher is told the step again; None when nobody is."""
        self._waited_s: Sequence[float] = ()

    @property
    def is_open(self) -> bool:
        """Whether anything is noted."""
        return self._pin is not None

    def opened(self, step: int) -> None:
        """The strategy is attached."""
        run = run_of(self._group)
        if not run:
            return
        self._opened_s = self._tell_s = self._clock.now_s()
        tell_launcher(phase="training", step=step)
        if not board.is_wanted():
            return
        with contextlib.suppress(Exception):
            self._note = self._first(run, step)
            if self._note.place == 0:
                with contextlib.suppress(Exception):
                    board.look(self._clock)  # what killed workers have left there goes
            self._waited_s = list(self._group.stats.waited_s)
            self._noted_s = self._clock.now_s()
            self._due_s = self._noted_s + board.NOTE_S
            self._pin = board.pin(".".join(map(str, (*self._note.who, os.getpid()))))
            self._pin.write(self._note)

    def stepped(self, step: int) -> None:
        """After each step."""
        if self._tell_s is None:
            return
        now_s = self._clock.now_s()
        if now_s >= self._tell_s:
            # often at first, so that the step of a worker that ends within a second is known too
            self._tell_s = now_s + min(board.NOTE_S, now_s - self._opened_s)
            tell_launcher(step=step)
        if self._pin is not None and now_s >= self._due_s:
            self._due_s = now_s + board.NOTE_S
            self._write(step, now_s)

    def closed(self) -> None:
        """The strategy is detached."""
        if self._pin is not None:
            self._pin.remove()
        self._pin = self._note = self._tell_s = None
        self._values.clear()

    def tell(self, phase: Phase) -> None:
        """Tell the launcher where this worker is on its way, if the group is that of its run."""
        if run_of(self._group):
            tell_launcher(phase=phase)

    def log(self, values: dict[str, Any]) -> None:
        """Keep what is to be noted next; tensors are read then, and not before."""
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(
                    f"{name} has {value.numel()} elements; a number is logged.",
                    next_step=f"log its mean: strategy.log({name}={name}.mean()).",
                )
            if self._pin is not None:
                self._keep(_plain(name), value)

    def _keep(self, name: str, value: Any) -> None:
        if name not in self._values and len(self._values) >= _MAX_VALUES:
            return
        with contextlib.suppress(Exception):
            # a copy: the tensor may be changed in place later, or a view that keeps a large one alive
            self._values[name] = value.detach().clone() if isinstance(value, torch.Tensor) else float(value)

    @property
    def _num_examples(self) -> int | None:
        """A server takes none."""
        return kept_loaders(self._group).num_examples if self._group.role == "worker" else None

    def _first(self, run: str, step: int) -> board.Note:
        group, everybody, pid = self._group, self._group.everybody, os.getpid()
        if self._number is None:
            known = innermost(group)
            self._number = _numbers.get(known, 0)
            _numbers[known] = self._number + 1
        place = group.rank if everybody is None else everybody.rank
        size = group.size if everybody is None else everybody.size - group.num_servers
        stats = group.stats
        return board.Note(
            run=run,
            rank=place if group.role == "server" else group.rank,
            size=size,
            pid=pid,
            host=socket.gethostname(),
            noted_s=self._clock.wall_s(),
            role=group.role,
            number=self._number,
            place=place,
            started=started(pid),
            namespace=namespace(),
            began_s=self._clock.wall_s(),
            program=_program(),
            strategy=self._strategy,
            step=step,
            num_examples=self._num_examples,
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
        )

    def _write(self, step: int, now_s: float) -> None:
        # a full disk, a device that fails, a value that is no number: nothing of it may end the training
        with contextlib.suppress(Exception):
            assert self._note is not None
            assert self._pin is not None
            stats = self._group.stats
            self._note = self._next(self._note, step, now_s - self._noted_s, stats)
            self._noted_s, self._waited_s = now_s, list(stats.waited_s)
            self._pin.write(self._note)

    def _next(self, before: board.Note, step: int, passed_s: float, stats: GroupStats) -> board.Note:
        gained = [now_s - then_s for now_s, then_s in zip(stats.waited_s, self._waited_s, strict=False)]
        most = max(range(len(gained)), key=gained.__getitem__, default=None)
        num_examples = self._num_examples
        fields = {name: getattr(before, name) for name in before.__struct_fields__}
        fields |= {
            "noted_s": self._clock.wall_s(),
            "step": step,
            "steps_per_s": (step - before.step) / passed_s,
            "num_examples": num_examples,
            "examples_per_s": _rate(num_examples, before.num_examples, passed_s),
            "values": _numbers_of(self._values) or before.values,
            "sent_bytes": stats.sent_bytes,
            "received_bytes": stats.received_bytes,
            "waited_s": _longest(stats.waited_s),
            "wait_share": min(1.0, sum(gained) / passed_s) if gained else None,
            "waits_for": most if most is not None and gained[most] >= _SHORTEST_WAIT_S else None,
        }
        return board.Note(**fields)


def run_of(group: Group) -> str:
    """The run that a group, or one inside of it, was opened for; empty for a group of one's own making."""
    while True:
        if group.run:
            return group.run
        inner = getattr(group, "inner", None)
        if not isinstance(inner, Group):
            return ""
        group = inner


def _rate(now: int | None, before: int | None, passed_s: float) -> float | None:
    return None if now is None else max(0, now - (before or 0)) / passed_s


def _numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """Those that can be read now; a device that records a graph must not be asked."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing():
            continue
        with contextlib.suppress(Exception):
            found[name] = float(value)
    return found


def _longest(waited_s: Sequence[float]) -> dict[int, float]:
    longest = sorted(range(len(waited_s)), key=waited_s.__getitem__, reverse=True)[:_MAX_AWAITED]
    return {rank: round(waited_s[rank], 6) for rank in sorted(longest) if waited_s[rank] >= _SHORTEST_WAIT_S}


def _program() -> str:
    name = Path(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "python").name
    return _plain(name)


def _plain(name: str) -> str:
    """Short, and text that can be encoded."""
    return name[:_MAX_NAME].encode(errors="replace").decode()
