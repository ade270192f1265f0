"""A worker of `shoal bench collectives`: shows that a call's result is right, then times it beside others."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.bench.blocks import taking_turns
from shoal.bench.collective_calls import SHOAL, Call, Stage, difference
from shoal.bench.collectives import FOREIGN, GLOO, GROUP, LINK, MIB, TLS
from shoal.bench.gloo_calls import GLOO_CALLS
from shoal.bench.trainee import synchronize
from shoal.bench.workers import Answers, Place
from shoal.core import UsageError
from shoal.core.clock import ManualClock
from shoal.group import Group, Shaped, share
from shoal.group.operations import ClockSleeper

_ELEMENT_BYTES = 4
_MAX_WARMED_BYTES = MIB
"""Up to this a call finds in the caches what the one before has left there."""


def work(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Measure what is ordered."""
    place.set_up_process()
    stack.enter_context(place.gloo())
    device = place.device(arguments["device"])
    group = stack.enter_context(place.open_group("collectives"))
    return {"measure": Stopwatch(group, device).measure}


def work_between_machines(place: Place, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Answers:
    """Measure what is ordered, in groups whose machines have so many `workers` each."""
    place.set_up_process()
    device = place.device(arguments["device"])
    profile = arguments["profile"]
    opened = {
        via: stack.enter_context(_open_between(place, via, arguments["workers"])) for via in arguments["via"]
    }
    meeting = next(iter(opened.values()))
    sizes = Counter(meeting.machines).values()
    if [*sizes] != [arguments["workers"]] * arguments["machines"]:
        raise UsageError(
            f"The machines have {', '.join(map(str, sizes))} workers, and each is to have "
            f"{arguments['workers']}.",
            next_step="name hosts with as many workers each.",
        )
    contenders = {via: GroupContender(group) for via, group in opened.items()}
    if profile is not None:
        between: dict[str, Any] = {"between": "machines", "seed": arguments["seed"]}
        contenders = {via: GroupContender(Shaped(group, profile, **between)) for via, group in opened.items()}
        passing = PassingTime()
        alone = Shaped(meeting, profile, sleeper=passing, **between)
        contenders[LINK] = GroupContender(alone, now_s=passing.clock.now_s)
    else:  # no profile slows gloo down
        stack.enter_context(place.gloo())
    return {"measure": Stopwatch(meeting, device, contenders, has_gloo=profile is None).measure}


def _open_between(place: Place, via: str, workers: int) -> Group:
    return place.open_between_machines(f"collectives-{via}", workers, is_encrypted=via == TLS)


class PassingTime(ClockSleeper):
    """Has time pass at once, by a clock of its own: it shows how long a shaped group would hold back."""

    def __init__(self) -> None:
        self._manual = ManualClock()
        super().__init__(self._manual)

    def sleep(self, seconds: float) -> None:
        """Moves the clock by so many seconds."""
        self._manual.advance(seconds)


@dataclass(frozen=True, slots=True)
class GroupContender:
    """One of those that take turns: a group with one kind of memory, and the clock that times its calls."""

    group: Group
    has_own_memory: bool = True
    now_s: Callable[[], float] = time.perf_counter


class Stopwatch:
    """Makes the calls of all contenders in turn; workers meet in `group` before each sample."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        contenders: Mapping[str, GroupContender] | None = None,
        *,
        has_gloo: bool = True,
    ) -> None:
        self._group = group
        self._device = device
        self._contenders = contenders or {GROUP: GroupContender(group), FOREIGN: GroupContender(group, False)}
        self._has_gloo = has_gloo
        self._versions = itertools.count()

    def measure(
        self, op: str, size_bytes: int, num_rounds: int, samples_per_round: int, calls_per_sample: int
    ) -> dict[str, list[float] | str]:
        """By contender: seconds of this worker's calls, or what was wrong with somebody's result."""
        wrong: dict[str, list[float] | str] = {}
        calls: dict[str, Call] = {}
        with contextlib.ExitStack() as stack:
            for via, call in self._calls(op, size_bytes, stack):
                # told to all: who has the right result must not wait for who has not
                complaints = [text for text in share(self._group, self._complaint(call)) if text]
                if complaints:
                    wrong[via] = f"wrong result: {complaints[0]}"
                else:
                    calls[via] = call
            times: dict[str, list[float] | str] = {via: [] for via in calls}
            num_warm = 1 if size_bytes <= _MAX_WARMED_BYTES else 0
            for via in taking_turns(list(calls), num_rounds):
                now_s = self._contenders[via].now_s if via in self._contenders else time.perf_counter
                timed = self._time(calls[via], num_warm + samples_per_round, calls_per_sample, now_s)
                times[via] = [*times[via], *timed[num_warm:]]
            self._group.barrier().wait()  # somebody may still read what this worker gives back next
        return times | wrong

    def _calls(self, op: str, size_bytes: int, stack: contextlib.ExitStack) -> Iterator[tuple[str, Call]]:
        num_elements = size_bytes // _ELEMENT_BYTES
        for via, each in self._contenders.items():
            if size_bytes or each.has_own_memory:  # without a tensor its memory makes no difference
                stage = Stage(each.group, num_elements, each.has_own_memory, self._device, self._versions)
                stack.callback(stage.free)
                yield via, SHOAL[op](stage)
        if self._has_gloo and op in GLOO_CALLS:
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

    def _time(
        self,
        call: Call,
        num_samples: int,
        calls_per_sample: int,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> list[float]:
        """The seconds of a call in each sample: a GPU is waited for before its calls and after them alone."""
        times_s = []
        for _ in range(num_samples):
            synchronize(self._device)
            self._group.barrier().wait()
            began_s = now_s()
            for _ in range(calls_per_sample):
                results = call.run()
            synchronize(self._device)
            times_s.append((now_s() - began_s) / calls_per_sample)
            del results  # giving the last memory back is not part of it
        return times_s
