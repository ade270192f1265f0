"""The status of an attached strategy: a note on the board for `shoal top`, and what its launcher is told.

Notes are written about once a second. Between two of them a step costs a look at the clock, 0.3 µs; a note
took 0.06 ms where it was measured. Only strategies of a group that `shoal.init()` has opened report anything,
in the user's thread, so that a worker which hangs is seen by how old its note is. Whatever fails here is
passed over. With `--track` what was logged in every step goes to a tracker too, about once a second.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.core import SYSTEM_CLOCK, Clock, UsageError, board
from shoal.core.processes import namespace, started
from shoal.core.run_options import RunOptions
from shoal.core.status import Phase, tell_launcher
from shoal.data.kept import kept_loaders
from shoal.group import Group, GroupStats
from shoal.group.base import WaitListener
from shoal.group.elastic import elastic_of

log = logging.getLogger(__name__)

_MAX_AWAITED = 8
_MAX_PEERS = 64
_MAX_VALUES = 32
_MAX_NAME = 60
_SHORTEST_WAIT_S = 1e-3


class StatusReporter:
    """Reports how far one strategy is; silent unless `opened` finds a run that it is part of."""

    def __init__(self, group: Group, strategy: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._group = group
        self._strategy = strategy
        self._clock = clock
        self._values: dict[str, Any] = {}
        self._pin: board.Pin | None = None
        self._note: board.Note | None = None
        self._number: int | None = None
        self._began_s: float | None = None
        self._noted_s = 0.0
        self._due_s = 0.0
        self._opened_s = 0.0
        self._tell_s: float | None = None
        """When the launcher is told the step again; None when nobody is."""
        self._waited_s: Sequence[float] = ()
        self._places: Sequence[int] = ()
        """Of an elastic run: the numbers of all by rank; elsewhere ranks are places."""
        self._listening: list[tuple[list[WaitListener], WaitListener]] = []
        """Where it hears of waits, and by what."""
        self._step = 0
        self._tracker: Any = None
        """A `shoal.integrations.trackers.Tracker`; None when the run is not tracked."""
        self._tracked: list[tuple[int, str, Any]] = []
        """What was logged since the last note: step, name and value."""
        self._tracked_values: Callable[[], Mapping[str, float]] = dict

    def moved(self, group: Group) -> StatusReporter:
        """Gives the reporter of the same strategy in another group, which is to be opened."""
        other = StatusReporter(group, self._strategy, self._clock)
        other._number, other._began_s = self._number, self._began_s
        return other

    @property
    def is_open(self) -> bool:
        """Whether there is anybody to report to."""
        return self._tell_s is not None

    def opened(self, step: int, tracked_values: Callable[[], Mapping[str, float]] = dict) -> None:
        """Begins, when the strategy is attached; a tracker gets its `tracked_values` too."""
        if not self._group.run:
            return
        self._opened_s = self._tell_s = self._clock.now_s()
        tell_launcher(phase="training", step=step)
        self._step, self._tracked_values = step, tracked_values
        self._open_tracker()
        if not board.is_wanted() and self._tracker is None:
            return
        with contextlib.suppress(Exception):
            self._note = self._first(step)
            self._waited_s = list(self._group.stats.waited_s)
            self._noted_s = self._clock.now_s()
            self._due_s = self._noted_s + board.NOTE_S
            if board.is_wanted():
                self._open_board(self._note)

    def _open_board(self, note: board.Note) -> None:
        """Pins the first note up, and hears of waits from then on."""
        if note.place == 0:
            with contextlib.suppress(Exception):
                board.look(self._clock)  # what killed workers have left there goes
        self._pin = board.pin(".".join(map(str, (*note.who, os.getpid()))))
        self._pin.write(note)
        self._listen()

    def stepped(self, step: int) -> None:
        """Reports after a step, if it is time."""
        if self._tell_s is None:
            return
        self._step = step
        now_s = self._clock.now_s()
        if now_s >= self._tell_s:
            # often at first, so that the step of a worker that ends within a second is known too
            self._tell_s = now_s + min(board.NOTE_S, now_s - self._opened_s)
            tell_launcher(step=step)
        if self._note is not None and now_s >= self._due_s:
            self._due_s = now_s + board.NOTE_S
            # a full disk, a device that fails, a value that is no number: nothing of it may end the training
            with contextlib.suppress(Exception):
                self._note = self._next(self._note, step, now_s)
                if self._pin is not None:
                    self._pin.write(self._note)
            if self._tracker is not None:
                with contextlib.suppress(Exception):
                    self._track()

    def doing(self, phase: board.Phase, waits_for: int | None = None, *, is_rare: bool = False) -> None:
        """Notes what this worker does instead of steps, if it is time for a note, or `is_rare`."""
        if self._pin is None or self._note is None:
            return
        now_s = self._clock.now_s()
        with contextlib.suppress(Exception):
            if now_s >= self._due_s:
                self._due_s = now_s + board.NOTE_S
                self._note = self._next(self._note, self._step, now_s, phase, waits_for)
                self._pin.write(self._note)
            elif is_rare:  # too soon for new rates
                self._note = msgspec.structs.replace(self._note, phase=phase, noted_s=self._clock.wall_s())
                self._pin.write(self._note)

    def _listen(self) -> None:
        """Hears of waits from now on, which may last."""
        group, num_servers = self._group, self._group.num_servers

        def waiting_for_anybody(rank: int | None) -> None:
            self.doing("waits", None if rank is None or rank < num_servers else rank - num_servers)

        self._listening = [(group.on_wait, partial(self.doing, "waits"))]
        if group.everybody is not None:
            self._listening.append((group.everybody.on_wait, waiting_for_anybody))
        for listeners, listener in self._listening:
            listeners.append(listener)

    def closed(self) -> None:
        """Takes the note back, when the strategy is detached."""
        for listeners, listener in self._listening:
            listeners.remove(listener)
        self._listening = []
        if self._tracker is not None:
            with contextlib.suppress(Exception):
                self._track()
                self._tracker.close()
            self._tracker = None
        if self._pin is not None:
            self._pin.remove()
        self._pin = self._note = self._tell_s = None
        self._values.clear()

    def tell(self, phase: Phase) -> None:
        """Tells the launcher where this worker is on its way, if the group is that of its run."""
        if self._group.run:
            tell_launcher(phase=phase)

    def log(self, values: dict[str, Any]) -> None:
        """Keeps what is to be noted next; tensors are read then, and not before."""
        for given, value in values.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.numel() != 1:
                raise UsageError(
                    f"{given} has {value.numel()} elements; a number is logged.",
                    next_step=f"log its mean: strategy.log({given}={given}.mean()).",
                )
            name = _plain(given)
            if self._tracker is not None:
                with contextlib.suppress(Exception):
                    kept = value.detach().clone() if is_tensor else float(value)
                    self._tracked.append((self._step, name, kept))
            if self._pin is None or (name not in self._values and len(self._values) >= _MAX_VALUES):
                continue
            with contextlib.suppress(Exception):
                # a copy: the tensor may be changed in place later, or a view that keeps a large one alive
                self._values[name] = value.detach().clone() if is_tensor else float(value)

    def _open_tracker(self) -> None:
        """Opens the tracker that the run names; says so, once, where it cannot be."""
        asked = RunOptions.from_environment().track
        if asked is None or self._tracker is not None or self._group.role == "server":
            return
        trackers = importlib.import_module("shoal.integrations.trackers")
        try:
            self._tracker = trackers.make_tracker(asked, self._group.run, self._group.rank)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the training goes on
            if self._group.rank == 0:
                log.warning("this run is not tracked: %s", error)

    def _track(self) -> None:
        """Passes on what was logged since the last time; tensors of a device are read all at once."""
        tracked, self._tracked = self._tracked, []
        tensors = [value.float().reshape(()) for _, _, value in tracked if isinstance(value, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else ())
        steps: dict[int, dict[str, float]] = {}
        for step, name, value in tracked:
            steps.setdefault(step, {})[name] = next(read) if isinstance(value, torch.Tensor) else value
        for step, values in steps.items():
            self._tracker.log(step, values)
        note, stats = self._note, self._group.stats
        counted: dict[str, float | None] = {
            "steps_per_s": None if note is None else note.steps_per_s,
            "examples_per_s": None if note is None else note.examples_per_s,
            "wait_share": None if note is None else note.wait_share,
            "sent_bytes": stats.sent_bytes,
            "received_bytes": stats.received_bytes,
            "lost_peers": len(self._group.lost),
            **self._tracked_values(),
        }
        known = {f"shoal_{name}": float(value) for name, value in counted.items() if value is not None}
        self._tracker.log(self._step, known)
        self._tracker.flush()

    def _first(self, step: int) -> board.Note:
        group, everybody, pid = self._group, self._group.everybody, os.getpid()
        if self._number is None:
            self._number = group.notes.get("num_reporters", 0)
            group.notes["num_reporters"] = self._number + 1
        if self._began_s is None:
            self._began_s = self._clock.wall_s()
        place = group.rank if everybody is None else everybody.rank
        generation = 0
        elastic = elastic_of(group)
        if elastic is not None and elastic.form is not None:
            # ranks change from one generation to the next, and the launcher counts by numbers
            place, generation = elastic.link.number, elastic.form.generation
            self._places = [each.number for each in elastic.form.places]
        program = sys.argv[0] if sys.argv else ""
        return board.Note(
            run=group.run,
            rank=place if group.role == "server" else group.rank,
            size=group.size if everybody is None else everybody.size - group.num_servers,
            pid=pid,
            host=socket.gethostname(),
            role=group.role,
            number=self._number,
            place=place,
            generation=generation,
            started=started(pid),
            namespace=namespace(),
            began_s=self._began_s,
            program=_plain(Path(program if program not in ("", "-c") else "python").name),
            strategy=self._strategy,
            phase="starts",
            **self._counted(step, group.stats),
        )

    def _next(
        self,
        before: board.Note,
        step: int,
        now_s: float,
        phase: board.Phase | None = None,
        waits_for: int | None = None,
    ) -> board.Note:
        """The note after this one."""
        stats, passed_s = self._group.stats, now_s - self._noted_s
        gained = [now_s - then_s for now_s, then_s in zip(stats.waited_s, self._waited_s, strict=False)]
        most = max(range(len(gained)), key=gained.__getitem__, default=None)
        waited_s = {rank: each_s for rank, each_s in enumerate(stats.waited_s) if each_s >= _SHORTEST_WAIT_S}
        longest = sorted(waited_s, key=waited_s.__getitem__, reverse=True)[:_MAX_AWAITED]
        counted = self._counted(step, stats)
        num_examples = counted["num_examples"]
        if phase is None and most is not None and gained[most] >= _SHORTEST_WAIT_S:
            waits_for = most
        num_new = None if num_examples is None else max(0, num_examples - (before.num_examples or 0))
        note = msgspec.structs.replace(
            before,
            **counted,
            steps_per_s=(step - before.step) / passed_s,
            examples_per_s=None if num_new is None else num_new / passed_s,
            # while a device waits for other workers, to read its memory would be to wait with it
            values=before.values if phase else _numbers_of(self._values) or before.values,
            waited_s={rank: round(waited_s[rank], 6) for rank in sorted(longest)},
            # a wait is counted when it is over
            wait_share=1.0 if phase == "waits" else min(1.0, sum(gained) / passed_s) if gained else None,
            waits_for=waits_for,
            phase=phase or "",
        )
        self._noted_s, self._waited_s = now_s, list(stats.waited_s)
        return note

    def _counted(self, step: int, stats: GroupStats) -> dict[str, Any]:
        """What a note says of now; a server takes no examples."""
        is_worker = self._group.role == "worker"
        return {
            "noted_s": self._clock.wall_s(),
            "step": step,
            "num_examples": kept_loaders(self._group).num_examples if is_worker else None,
            "sent_bytes": stats.sent_bytes,
            "received_bytes": stats.received_bytes,
            "sent_to": self._by_place(stats.sent_to),
            "received_from": self._by_place(stats.received_from),
        }

    def _by_place(self, by_rank: Sequence[int]) -> dict[int, int]:
        most = heapq.nlargest(_MAX_PEERS, range(len(by_rank)), key=by_rank.__getitem__)
        return {
            self._places[rank] if self._places else rank: by_rank[rank]
            for rank in sorted(most)
            if by_rank[rank]
        }


def _numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """Those that can be read now; a device that records a graph must not be asked."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.is_cuda and torch.cuda.is_current_stream_capturing():
            continue
        with contextlib.suppress(Exception):
            found[name] = float(value)
    return found


def _plain(name: str) -> str:
    """Short, and text that can be encoded."""
    return name[:_MAX_NAME].encode(errors="replace").decode()
