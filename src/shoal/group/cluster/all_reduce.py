"""An all-reduce of one tensor of each machine, in pieces that are reduced as they come, in one of two ways.

*direct*: each machine reduces one share. It gets that share from all others, and sends them the result: two
delays, and every machine speaks with every other. *ring* (Patarasuk and Yuan 2009, section 3): a share goes
around the machines twice, once to be summed up, once as the result: as many bytes, and each machine speaks
with two others alone, but 2·(n − 1) delays. Of two machines both are the same.

Pieces are reduced and passed on by the threads that receive them, while the caller computes or waits. Both
ways add in the same order, so that all machines end with equal bits, run after run.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import torch

from shoal.group.base import Reduction
from shoal.group.kernels import reduce_into, share_bounds

Algorithm = Literal["ring", "direct"]
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 512 << 10, 16 << 20
_NUM_PIECES = 4
"""Under way at once, within the bounds above: receiving, reducing and sending overlap, and Python does not
count. Shares of several machines are under way at once anyway."""
_CACHED_ELEMENTS = 1 << 18
"""So many the processor's cache holds from one operation to the next."""
_SERIAL_ELEMENTS = 1 << 15
"""Up to so many elements torch computes in the thread that asks, also where it has several."""
_MIN_RING_BYTES = 4 << 20
_NUM_TRIALS = 4
_HALF = (torch.float16, torch.bfloat16)


class Speaker(Protocol):
    """How a reduction talks with other machines."""

    machine: int

    def say(self, machine: int, topic: str, tensor: torch.Tensor) -> None:
        """Sends a tensor, which must not be written until it has left."""

    def listen(
        self,
        machine: int,
        topic: str,
        into: torch.Tensor | None,
        on_arrival: Callable[[torch.Tensor], None],
    ) -> None:
        """Has `on_arrival` called, in any thread, with what a machine says about a topic."""

    def wake(self) -> None:
        """Lets whoever waits for this operation look again."""


class MachineReduction:
    """Reduces one flat tensor of each of several machines, into `out`, which may be the tensor itself.

    `name` tells it from others of the same operation. A ring works in place alone.
    """

    def __init__(
        self,
        speaker: Speaker,
        flat: torch.Tensor,
        machines: Sequence[int],
        op: Reduction,
        name: str,
        out: torch.Tensor | None = None,
    ) -> None:
        self._speaker = speaker
        self._machines = machines
        self._op = op
        self._name = name
        self._place = list(machines).index(speaker.machine)
        self._pieces = [_pieces(flat, place, len(machines)) for place in range(len(machines))]
        """Of each machine's share, by the machine's place among them."""
        self._results = (
            self._pieces
            if out is None
            else [_pieces(out, place, len(machines)) for place in range(len(machines))]
        )
        self._num_missing = 1
        """What has been asked for and has not come, and one more until all has been asked for."""
        self._parts: dict[int, dict[int, torch.Tensor]] = {}
        """What has come for each piece of this machine's share, by machine."""
        self._has_started = False
        self._waiting: list[Callable[[], None]] = []
        """What has come before it was started."""
        self._error: Exception | None = None
        self._lock = threading.Lock()  # law: between the threads that receive from several machines

    @property
    def is_over(self) -> bool:
        """Whether all pieces have come; some may not have left yet."""
        return self._num_missing == 0 or self._error is not None

    def check(self) -> None:
        """Raises what went wrong in another thread."""
        if self._error is not None:
            raise self._error

    def listen(self, algorithm: Algorithm) -> None:
        """Asks for all that is to come; what others send from now on comes into its place."""
        if algorithm == "ring":
            self._listen_in_ring()
        else:
            self._listen_directly()

    def start(self, algorithm: Algorithm) -> None:
        """Sends what is here; what comes is reduced from now on."""
        with self._lock:
            self._has_started = True
            waiting, self._waiting = self._waiting, []
        if algorithm == "ring":
            for number, piece in enumerate(self._pieces[self._place]):
                self._say(self._at(self._place + 1), f"sum {self._place} {number}", piece)
        else:
            others = [self._at(self._place + step) for step in range(1, len(self._machines))]
            for number in range(len(self._pieces[0])):
                for place in others:
                    if number < len(self._pieces[place]):
                        self._say(place, f"part {number}", self._pieces[place][number])
        for act in waiting:
            act()
        self._count(-1)

    # --- direct ---

    def _listen_directly(self) -> None:
        # each begins with another one, so that not all send to one at once
        others = [self._at(self._place + step) for step in range(1, len(self._machines))]
        for place in others:
            for number, piece in enumerate(self._results[place]):
                self._listen(place, f"share {number}", piece, lambda piece: None)
        for number in range(len(self._pieces[self._place])):
            for place in others:
                self._listen(place, f"part {number}", None, partial(self._add_part, place, number))

    def _add_part(self, place: int, number: int, came: torch.Tensor) -> None:
        mine, result = self._pieces[self._place][number], self._results[self._place][number]
        with self._lock:
            parts = self._parts.setdefault(number, {})
            parts[place] = came.view(mine.dtype)
            if len(parts) < len(self._machines) - 1:
                return
            del self._parts[number]
        # in the order of a ring, so that both ways give the same bits; `result` may be `mine`
        others = [self._at(self._place + step) for step in range(1, len(self._machines))]
        _reduce(result, [mine, *(parts[place] for place in others)], self._op)
        for other in others:
            self._say(other, f"share {number}", result)

    # --- ring ---

    def _listen_in_ring(self) -> None:
        previous, last = self._at(self._place - 1), len(self._machines) - 2
        for step in range(last + 1):
            summed, whole = self._at(self._place - step - 1), self._at(self._place - step)
            for number in range(len(self._pieces[summed])):
                add = partial(self._add_to_ring, summed, number, is_last=step == last)
                self._listen(previous, f"sum {summed} {number}", None, add)
            for number, piece in enumerate(self._pieces[whole]):
                take = partial(self._pass_on, whole, number, is_last=step == last)
                self._listen(previous, f"whole {whole} {number}", piece, take)

    def _add_to_ring(self, place: int, number: int, came: torch.Tensor, *, is_last: bool) -> None:
        piece = self._pieces[place][number]
        _reduce(piece, [piece, came.view(piece.dtype)], "sum" if self._op == "mean" else self._op)
        if is_last and self._op == "mean":
            for start in range(0, piece.numel(), _num_at_once()):
                piece[start : start + _num_at_once()].mul_(1 / len(self._machines))
        self._say(self._at(self._place + 1), f"{'whole' if is_last else 'sum'} {place} {number}", piece)

    def _pass_on(self, place: int, number: int, piece: torch.Tensor, *, is_last: bool) -> None:
        if not is_last:
            self._say(self._at(self._place + 1), f"whole {place} {number}", piece)

    # --- both ---

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_missing += change

    def _at(self, place: int) -> int:
        return place % len(self._machines)

    def _say(self, place: int, topic: str, piece: torch.Tensor) -> None:
        self._speaker.say(self._machines[place], f"{self._name} {topic}", piece)

    def _listen(
        self, place: int, topic: str, into: torch.Tensor | None, act: Callable[[torch.Tensor], None]
    ) -> None:
        self._count(1)

        def on_arrival(came: torch.Tensor) -> None:
            with self._lock:
                # others may have begun: nothing is changed here before it is known that all do the same
                if not self._has_started:
                    self._waiting.append(partial(on_arrival, came))
                    return
            try:
                act(came)
            except Exception as error:  # noqa: BLE001 - of another thread; `check` raises it
                self._error = error
            self._count(-1)
            if self.is_over:
                self._speaker.wake()

        self._speaker.listen(self._machines[place], f"{self._name} {topic}", into, on_arrival)


class AlgorithmChoice:
    """The way of each all-reduce: as it was told, or what was faster until now.

    The first machine measures, and says in each operation which way the next one of that size goes, so that
    all know it before that one begins.
    """

    def __init__(self, asked: Literal["auto", "ring", "direct"]) -> None:
        self._asked = asked
        self._taken_s: dict[int, dict[Algorithm, list[float]]] = {}
        self._told: dict[int, Algorithm] = {}

    def of(self, flat: torch.Tensor, num_machines: int) -> Algorithm:
        """Gives the way of an operation that begins."""
        if not _may_be_ring(flat, num_machines):
            return "direct"
        return self._told.get(_size_class(flat), "direct") if self._asked == "auto" else self._asked

    def next(self, flat: torch.Tensor, num_machines: int) -> Algorithm:
        """Gives the way of the operation after this one, by what is known here: each in turn at first."""
        if not _may_be_ring(flat, num_machines) or self._asked != "auto":
            return self.of(flat, num_machines)
        taken_s = self._known(flat)
        if min(map(len, taken_s.values())) < _NUM_TRIALS:
            others: dict[Algorithm, Algorithm] = {"direct": "ring", "ring": "direct"}
            return others[self.of(flat, num_machines)]
        # the first of each has made connections and memory
        return min(taken_s, key=lambda algorithm: statistics.median(taken_s[algorithm][1:]))

    def tell(self, flat: torch.Tensor, algorithm: Algorithm) -> None:
        """Takes note of what the first machine says of the operation after this one."""
        self._told[_size_class(flat)] = algorithm

    def note(self, flat: torch.Tensor, algorithm: Algorithm, seconds: float) -> None:
        """Takes note of how long one has taken; the first few of each kind count."""
        taken_s = self._known(flat)[algorithm]
        if len(taken_s) < _NUM_TRIALS:
            taken_s.append(seconds)

    def _known(self, flat: torch.Tensor) -> dict[Algorithm, list[float]]:
        return self._taken_s.setdefault(_size_class(flat), {"direct": [], "ring": []})


def _may_be_ring(flat: torch.Tensor, num_machines: int) -> bool:
    # a ring adds one after the other, and halves would lose bits each time
    return num_machines > 2 and flat.nbytes >= _MIN_RING_BYTES and flat.dtype not in _HALF


def _size_class(flat: torch.Tensor) -> int:
    """Sizes within a factor of four go alike."""
    return flat.nbytes.bit_length() // 2


def _pieces(flat: torch.Tensor, place: int, num_shares: int) -> Sequence[torch.Tensor]:
    """Cuts one share of a tensor into pieces, alike on all machines."""
    low, high = share_bounds(place, num_shares, flat.numel(), flat.element_size())
    if low == high:
        return ()
    largest = share_bounds(0, num_shares, flat.numel(), flat.element_size())[1] * flat.element_size()
    num_pieces = max(1, _NUM_PIECES // (num_shares - 1))
    piece_bytes = min(max(-(-largest // num_pieces), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES) + 63 & ~63
    step = piece_bytes // flat.element_size()
    return [flat[start : min(start + step, high)] for start in range(low, high, step)]


def _reduce(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Reduces parts in their order; `out` may be the first of them."""
    step = _num_at_once()
    for start in range(0, out.numel(), step):
        piece = slice(start, start + step)
        reduce_into(out[piece], [part[piece] for part in parts], op)


def _num_at_once() -> int:
    """Gives how many elements are computed at once: a thread of ours shall not start others of torch."""
    return _CACHED_ELEMENTS if torch.get_num_threads() == 1 else _SERIAL_ELEMENTS
