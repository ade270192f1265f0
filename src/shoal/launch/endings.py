"""How workers end, in words and exit codes, and which of several ends is the cause of the others."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.core import errors

TIMED_OUT = 124
"""The exit code of a run that took too long is that of timeout(1)."""
_CONSEQUENCES = (
    *(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PeerLost)
    ),
    "Connection closed by peer",
    "Connection reset by peer",
)
"""Errors that say that this worker and others have lost each other: Shoal's own, and gloo's under `ddp`."""
_LOST_RANK = re.compile(r"\brank (\d+) is lost")
_LOST_SERVER = re.compile(r"\bparameter server \d+ is lost")
_OWN_NUMBERS = re.compile(
    r"(\brank[ =]?|\bprocess |\bpid[ =]?|\bcuda:|\d\.\d+:)\d+|\b0x[0-9a-f]+\b", re.IGNORECASE
)
"""What differs between workers that fail alike: ranks, processes, devices, ports, and addresses in memory."""
_ECHOES = ("ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError", "EOFError")
"""What a child process says when the worker that it works for has gone."""
_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer; `dmesg` or the memory limit of the job tells",
    signal.SIGBUS: "often shared memory that ran out; `df -h /dev/shm` tells",
    signal.SIGSEGV: "a crash in native code; PYTHONFAULTHANDLER=1 shows where",
    signal.SIGABRT: "native code gave up; what it printed before is above",
}
_NO_TORCHRUN = re.compile(
    r"KeyError: '(LOCAL_RANK|RANK|LOCAL_WORLD_SIZE|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'$"
    r"|environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
)
"""How a program fails, itself or in torch.distributed, that takes its place from torchrun's variables."""


WorkerWord: TypeAlias = Literal["rank", "worker"]
"""What the lines of a launcher call a worker: by its rank, or where ranks change by its number."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that did not finish its work."""

    rank: int
    code: int
    """Exit code, or minus a signal's number."""
    at_s: float = 0.0
    """When it began to fail, which may be earlier than its end."""
    error: str = ""
    """The last line of its traceback."""
    stopped_s: float | None = None
    """For how long it had been stopped by that signal, when it was given up."""
    host: str = ""
    """The machine that was lost with it."""
    manner: Literal["", "early", "abrupt"] = ""
    """With code 0: told to exit inside of `attach`, or gone without a word (`os._exit`) out of its group."""
    step: int | None = None
    """The step at which it was then, or had been when it last told."""
    word: WorkerWord = "rank"

    @property
    def is_loss(self) -> bool:
        """Whether it was lost by what no program can help; all else is an error of the program."""
        return self.code < 0 or bool(self.host) or self.is_consequence

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another worker had gone."""
        return is_consequence(self.error)

    @property
    def hint(self) -> str:
        """Says what often lies behind it."""
        if self.stopped_s is not None:
            return "`kill -STOP`, a debugger or a batch system"
        if _NO_TORCHRUN.search(self.error):
            return (
                "the program reads torchrun's variables; use group.rank, group.local_rank and group.size of "
                "shoal.init(), or `shoal run --env torchrun` if it shares its work by itself"
            )
        return _HINTS.get(-self.code, "")

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher because of it."""
        if self.code < 0:
            return 128 - self.code
        return self.code if 1 <= self.code <= 125 else 1

    @property
    def has_lost_server(self) -> bool:
        """Whether it failed because a parameter server is lost, without which no worker can go on."""
        return self.is_consequence and _LOST_SERVER.search(self.error) is not None

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks that it has lost, as its error says."""
        return [int(rank) for rank in _LOST_RANK.findall(self.error)]

    @property
    def who(self) -> str:
        """Names the worker, as the run calls it."""
        return f"{self.word} {self.rank}"

    def __str__(self) -> str:
        if self.manner == "early":
            return f"{self.who} ended early with exit code 0, at step {self.step}, inside of attach"
        if self.manner == "abrupt":
            when = "" if self.step is None else f", at step {self.step} or later"
            return f"{self.who} ended with exit code 0 without leaving its group (os._exit?){when}"
        if self.host:
            return f"{self.who} was lost with {self.host}"
        if self.stopped_s is not None:
            return f"{self.who} was stopped by {name_signal(-self.code)}, {self.stopped_s:.0f} s ago"
        if self.code < 0:
            return f"{self.who} was killed by {name_signal(-self.code)}"
        return f"{self.who} failed with exit code {self.code}"


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why workers are being ended, and since when they are."""

    at_s: float
    reason: str
    exit_code: int
    cause: Death | None = None
    """The worker that is to blame, if one is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The way in which a run ended."""

    exit_code: int
    """0 when the work was done, even if workers were lost on the way that the others could do without."""
    reason: str = ""
    """Why it was not done."""
    deaths: tuple[Death, ...] = ()
    """Workers that failed, in that order; not those that were ended because of them."""
    traceback: str = ""
    """The traceback of the worker that failed first."""
    elapsed_s: float = 0.0
    cause: Death | None = None
    """The worker because of which the run ended, if it ended because of one."""


def name_signal(number: int) -> str:
    """Name a signal: 'signal 9 (SIGKILL)'."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def name_ranks(ranks: Sequence[int], word: WorkerWord = "rank") -> str:
    """Name ranks, which must be in order: 'rank 3', 'ranks 0, 1 and 3', 'workers 0-3 and 6'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    named = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{word}{'s' if len(ranks) > 1 else ''} {named}"


def describe(death: Death) -> str:
    """Say how it died, and what often lies behind that."""
    return f"{death}: {death.hint}" if death.hint else str(death)


def is_consequence(error: str) -> bool:
    """Whether the last line of a traceback says that another worker has gone."""
    name, _, message = error.partition(":")
    return any(name.endswith(sign) or sign in message for sign in _CONSEQUENCES)


def without_own_numbers(text: str) -> str:
    """Return a text that is the same for all workers that say the same of themselves."""
    return _OWN_NUMBERS.sub(lambda match: f"{match[1] or ''}#", text)


def is_echo(error: str) -> bool:
    """Whether the last line of a traceback is what a child says of a worker that has just been killed."""
    return error.partition(":")[0] in _ECHOES


def first_cause(deaths: Iterable[Death]) -> Death:
    """Return the death that the others follow from."""
    return min(deaths, key=lambda death: (death.is_consequence, death.at_s))


def summarise(deaths: Iterable[Death], cause: Death) -> list[str]:
    """Return a line for each of the others, and one for all that failed alike."""
    known = without_own_numbers(cause.error)
    same = [death for death in deaths if known and without_own_numbers(death.error) == known]
    others = [death for death in deaths if death.rank != cause.rank and death not in same]
    alike: dict[str, list[int]] = {}
    for death in others:
        if death.error:
            alike.setdefault(shorten(death.error), []).append(death.rank)
    told: list[str] = []
    if len(same) > 1:
        who = name_ranks(sorted({death.rank for death in same}), cause.word)
        told.append(f"{who} failed with the same error: {shorten(cause.error)}")
    # with an error, the code says nothing more: a worker may be ended while it is ending
    return [
        *told,
        *(
            f"{name_ranks(sorted(ranks), cause.word)} failed after that: {error}"
            for error, ranks in alike.items()
        ),
        *(f"{death} after that" for death in others if not death.error),
    ]


def shorten(error: str) -> str:
    """Return at most 200 characters of an error, its name without its module."""
    name, colon, message = error.partition(":")
    return f"{name.rpartition('.')[2]}{colon}{message}"[:200]
