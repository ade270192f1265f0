"""How far workers of other machines are: agents read it off their boards, the head pins it to its own.

By that `shoal top` on the head's machine shows all of a run. Whatever fails here is passed over: it must end
neither an agent nor the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from shoal.core import Clock, board
from shoal.core.board import Keeper, Pin, Sighting
from shoal.core.processes import namespace


def seen_here(run: str, ranks: Collection[int]) -> list[Sighting]:
    """What these ranks of a run have noted on this machine, as the launcher counts ranks."""
    if not run or not board.is_wanted():
        return []
    with contextlib.suppress(Exception):
        return [
            one
            for one in board.look()
            if one.note.run == run and one.note.place in ranks and one.note.keeper is None
        ]
    return []


def take_down() -> None:
    """What workers of runs that are over have left on this machine's board: those that were killed."""
    with contextlib.suppress(Exception):
        if board.is_wanted():
            board.look()


class Copies:
    """The notes of another machine's workers that a head keeps, for as long as its agent tells of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pins: dict[tuple[str, str, int, int], Pin] = {}
        self._keeper: Keeper | None = None

    def take(self, sightings: Sequence[Sighting], hosts: Mapping[int, str]) -> None:
        """Pin up all that an agent sees now, and take down what it sees no more.

        `hosts` are the names of machines by rank, as the user gave them.
        """
        with contextlib.suppress(Exception):
            self._take(sightings, hosts)

    def close(self) -> None:
        """Take them all down; idempotent."""
        for pin in self._pins.values():
            pin.remove()
        self._pins.clear()

    def _take(self, sightings: Sequence[Sighting], hosts: Mapping[int, str]) -> None:
        if self._keeper is None:
            self._keeper = board.own_keeper()
        now_s, here = self._clock.wall_s(), namespace()
        told = {one.note.who for one in sightings}
        for who in [who for who in self._pins if who not in told]:
            self._pins.pop(who).remove()
        for one in sightings:
            who = one.note.who
            if who not in self._pins:
                self._pins[who] = board.pin(".".join(map(str, (*who, "copy"))))
            note = msgspec.structs.replace(
                one.note,
                host=hosts.get(one.note.place, one.note.host),
                # clocks of machines differ: what counts is how old it was there
                noted_s=now_s - one.age_s,
                began_s=now_s - one.age_s - (one.note.noted_s - one.note.began_s),
                namespace=here,
                keeper=self._keeper,
                state=one.state,
            )
            self._pins[who].write(note)
