"""A worker of `shoal bench collectives`: shows that a call's result is right, then times it beside others."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from shoal.bench.blocks import taking_turns
from shoal.bench.collective_calls import SHOAL, Call, Stage, difference
from shoal.bench.collectives import FOREIGN, GLOO, GROUP, MIB
from shoal.bench.crew import Answers, Place
from shoal.bench.gloo_calls import GLOO_CALLS
from shoal.bench.seat import HostSeat, synchronize
from shoal.group import Group, share

_ELEMENT_BYTES = 4
_MAX_WARMED_BYTES = MIB
"""Up to this a call finds in the caches what the one before has left there."""


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Measure what is ordered."""
    seat = HostSeat(place)
    seat.take()
    stack.enter_context(seat.gloo())
    device = seat.device(arguments["device"])
    group = stack.enter_context(seat.open_group("collectives"))
    return {"measure": Stopwatch(group, device).measure}


class Stopwatch:
    """Makes the calls of all contenders in turn."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._versions = itertools.count()

    def measure(
        self, op: str, size_bytes: int, num_rounds: int, samples_per_round: int, calls_per_sample: int
    ) -> dict[str, list[float] | str]:
        """By contender: seconds of this worker's calls, or what was wrong with somebody's result."""
        wrong: dict[str, list[float] | str] = {}
        calls: dict[str, Call] = {}
        with contextlib.ExitStack() as stack:
            for via, call in self._contenders(op, size_bytes, stack):
                # told to all: who has the right result must not wait for who has not
                complaints = [text for text in share(self._group, self._complaint(call)) if text]
                if complaints:
                    wrong[via] = f"wrong result: {complaints[0]}"
                else:
                    calls[via] = call
            times: dict[str, list[float] | str] = {via: [] for via in calls}
            num_warm = 1 if size_bytes <= _MAX_WARMED_BYTES else 0
            for via in taking_turns(list(calls), num_rounds):
                timed = self._time(calls[via], num_warm + samples_per_round, calls_per_sample)
                times[via] = [*times[via], *timed[num_warm:]]
        return times | wrong

    def _contenders(
        self, op: str, size_bytes: int, stack: contextlib.ExitStack
    ) -> Iterator[tuple[str, Call]]:
        num_elements = size_bytes // _ELEMENT_BYTES
        for via in (GROUP, FOREIGN) if size_bytes else (GROUP,):
            stage = Stage(self._group, num_elements, via == GROUP, self._device, self._versions)
            stack.callback(stage.free)
            yield via, SHOAL[op](stage)
        if op in GLOO_CALLS:
            yield GLOO, GLOO_CALLS[op](Stage(self._group, num_elements, device=self._device))

    def _complaint(self, call: Call) -> str:
        """What is wrong with the first result of a call; nothing where it is right."""
        self._group.barrier().wait()
        complaint = ""
        for number, (result, expected) in enumerate(zip(call.run(), call.expected, strict=True)):
            differs = difference(result.view(-1), expected)
            if differs:
                complaint = f"rank {self._group.rank}, tensor {number}: {differs}"
                break
        self._group.barrier().wait()
        call.reset()
        return complaint

    def _time(self, call: Call, num_samples: int, calls_per_sample: int) -> list[float]:
        """The seconds of a call in each sample: a GPU is waited for before its calls and after them alone."""
        times_s = []
        for _ in range(num_samples):
            synchronize(self._device)
            self._group.barrier().wait()
            began_s = time.perf_counter()
            for _ in range(calls_per_sample):
                results = call.run()
            synchronize(self._device)
            times_s.append((time.perf_counter() - began_s) / calls_per_sample)
            del results  # giving the last memory back is not part of it
        return times_s
