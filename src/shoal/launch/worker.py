"""One worker as its launcher sees it, wherever its process runs: its state, its words, and how it ended.

Nothing here waits, and nothing decides: the launcher asks, and says what is to be done.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from msgspec import structs

from shoal.core import errors
from shoal.core.status import Status
from shoal.launch.output import LineSplitter, LogFiles, Output, Stream
from shoal.launch.protocol import (
    AgentChannel,
    Exited,
    LinkData,
    OfWorker,
    Signal,
    Started,
    Stopped,
    WorkerEnded,
    WorkerTold,
    Wrote,
)

WorkerWord: TypeAlias = Literal["rank", "worker"]
"""What the lines of a launcher call a worker: by its rank, or where ranks change by its number."""
_SLOW_END_S = 30.0
"""A traceback that is older than this has nothing to do with the end of its process."""
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGINT)
"""Signals by which a process ends itself, perhaps after a traceback: Python's is SIGINT."""
HOLD_S = 1.0
"""A worker that lives on for so long has only printed a traceback."""
LONG_HOLD_S = 5.0
"""One that has lost a peer hardly ever lives on, but its interpreter may take seconds to end."""
ENDING_HOLD_S = 20.0
"""One that has told that it is about to end: on a loaded machine the interpreter takes long for that."""
SAME_S = 30.0
"""A traceback that another worker has shown within this time is not shown again."""
MAX_HELD_BYTES = 1 << 18
_HEADER = b"Traceback (most recent call last):"
_SYNTAX_ERROR = b'  File "'
"""How the report of a syntax error in the program itself begins: it has no header."""
_RANK = re.compile(rb"^\[rank\d+\]:(?: |$)")
"""What torch puts before each line of a traceback once torch.distributed is up; the rank is told anyway."""
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


class Worker:
    """A running worker, or what is left of it."""

    def __init__(
        self,
        rank: int,
        channel: AgentChannel,
        output: Output,
        logs: LogFiles,
        local_rank: int = 0,
        word: WorkerWord = "rank",
    ) -> None:
        self.rank = rank
        """Its rank, or in an elastic run its number, which stays the same while ranks change."""
        self.word: WorkerWord = word
        """What that is called in lines for people."""
        self.local_rank = local_rank
        self.host = channel.host
        """Where it runs, when it is no child of this process."""
        self.pid = 0
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.ended_s = 0.0
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.stopped_s = 0.0
        self.given_up: Death | None = None
        """Why it counts as ended, if that was not by its own end."""
        self.told = Status()
        """What it has told last of each thing; None of what it has told nothing."""
        self._told_s: dict[str, float] = {}
        """When that was."""
        self.is_done = False
        """Whether the launcher has drawn its conclusions from its end."""
        self.is_silent = False
        """Whether all that it wrote has come, or nothing more of it will."""
        self.tracebacks = Tracebacks()
        self._lines: dict[Stream, LineSplitter] = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self._output, self._logs = output, logs
        self._channel = channel
        self._died = partial(Death, rank, word=word)
        self.signals: list[int] = []
        """Those that the launcher has sent to it."""

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.code is None

    @property
    def is_ending(self) -> bool:
        """Whether it is alive and has told that it is about to end before its work was done."""
        return self.is_alive and (self.told.phase == "failing" or self.told.early_step is not None)

    @property
    def left_s(self) -> float:
        """The time when it left its group in order, or ended; infinity before that."""
        if self.told.phase == "left":
            return self._told_s["phase"]
        return math.inf if self.is_alive else self.ended_s

    def take(self, message: OfWorker, now_s: float) -> None:
        """Take what its agent tells of it."""
        match message:
            case Started():
                self.pid = message.pid
            case Wrote():
                self._take_lines(message.stream, self._lines[message.stream].feed(message.data), now_s)
            case WorkerTold():
                news = {name: it for name, it in structs.asdict(message.status).items() if it is not None}
                self.told = structs.replace(self.told, **news)
                self._told_s |= dict.fromkeys(news, now_s)
            case Stopped():
                self.stop_signal = message.signal
                self.stopped_s = now_s if message.signal is not None else self.stopped_s
            case Exited():
                self._note_end(message.code, now_s)
            case WorkerEnded():
                self.finish_output(now_s)

    def answer(self, data: bytes) -> None:
        """Give it bytes of the coordinator of its run."""
        self._channel.send(LinkData(self.rank, data))

    def signal_group(self, number: int) -> None:
        """Send to the worker and all its children."""
        if self.is_alive:
            self.signals.append(number)
        self._channel.send(Signal([self.rank], number))

    def tick(self, now_s: float, shown: ShownTracebacks, *, should_hold: bool) -> None:
        """Show a bar that moved, and the traceback of a worker that goes on, unless it should be held."""
        for stream, lines in self._lines.items():
            self._show(stream, lines.bar(now_s), now_s)
        if not should_hold:
            due = self.tracebacks.release_due(now_s, is_ending=self.is_ending)
            self._print("stderr", shown.shorten(self, due, now_s))

    def show_held(self) -> None:
        """Show what is held of its stderr."""
        self._print("stderr", self.tracebacks.release())

    def finish_output(self, now_s: float) -> None:
        """Pass on a last line without an end: nothing more will come. Idempotent."""
        for stream, lines in self._lines.items():
            self._take_lines(stream, lines.take_rest(), now_s)
        self.is_silent = True

    def lose(self, now_s: float) -> None:
        """Count it as ended: its machine has gone, or nobody there tells of it any more."""
        if self.is_alive:
            self.given_up = self._died(1, now_s, host=self.host)
            self._note_end(1, now_s)
        self.finish_output(now_s)

    def give_up(self, now_s: float) -> Death:
        """Count it as dead because it is stopped; it will be killed for that."""
        assert self.stop_signal is not None
        self.given_up = self._died(-self.stop_signal, self.stopped_s, stopped_s=now_s - self.stopped_s)
        return self.given_up

    def death(self) -> Death:
        """Say how it ended; a Death with code 0 says that it finished."""
        assert self.code is not None
        if self.given_up is not None:
            return self.given_up
        if self.code == 0 and self.told.early_step is not None:
            return self._died(0, self._told_s["early_step"], manner="early", step=self.told.early_step)
        if self.code == 0 and self.told.phase in ("joined", "training"):
            return self._died(0, self.ended_s, manner="abrupt", step=self.told.step)
        since_s = self.tracebacks.since_s
        if since_s is None or self.ended_s > since_s + _SLOW_END_S or not self._may_have_raised(self.code):
            return self._died(self.code, self.ended_s)
        return self._died(self.code, since_s, error=self.tracebacks.error)

    def _note_end(self, code: int, now_s: float) -> None:
        self.code, self.ended_s, self.stop_signal = code, now_s, None

    def _may_have_raised(self, code: int) -> bool:
        """Whether a traceback can be its own: who is killed prints none, but its children may."""
        if code >= 0 or -code in self.signals:
            return True
        return -code in _OWN_SIGNALS and not is_echo(self.tracebacks.error)

    def _take_lines(self, stream: Stream, whole: bytes, now_s: float) -> None:
        if whole:
            self._logs.write(self.rank, whole)
            self._show(stream, self._lines[stream].shown(whole), now_s)

    def _show(self, stream: Stream, lines: list[bytes], now_s: float) -> None:
        """Print lines, but for the traceback that is held."""
        if lines:
            self._print(stream, self.tracebacks.sift(lines, now_s) if stream == "stderr" else lines)

    def _print(self, stream: Stream, lines: list[bytes]) -> None:
        if lines:
            self._output.lines(self.rank, stream, lines)


class Tracebacks:
    """Holds a worker's traceback, and all that follows it, until it is clear whether the worker ends with it.

    When one worker fails, the others soon fail because of it. Who reads the terminal wants the first
    traceback, once and whole; which one that is, is known when processes have ended.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        """When the last traceback began; None when something else has followed since it was let go."""
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._is_held = False

    def sift(self, lines: list[bytes], now_s: float) -> list[bytes]:
        """Take lines, and return those to show now."""
        passed: list[bytes] = []
        if not self._is_held:
            start = next((index for index, line in enumerate(lines) if _begins(line)), None)
            if start is None:
                self.since_s = None
                return lines
            passed, lines = lines[:start], lines[start:]
            self.since_s, self._lines, self._num_bytes, self._is_held = now_s, [], 0, True
        lines = [_bare(line) for line in lines]
        self._lines += lines
        self._num_bytes += sum(map(len, lines))
        if self._num_bytes > MAX_HELD_BYTES:
            passed += self.release()
        return passed

    def release_due(self, now_s: float, *, is_ending: bool = False) -> list[bytes]:
        """Return what has been held for too long; `is_ending` if its worker has told that it is."""
        if not self._is_held or self.since_s is None or now_s < self.since_s + HOLD_S:
            return []
        if now_s < self.since_s + LONG_HOLD_S and is_consequence(self.error):
            return []
        return [] if is_ending and now_s < self.since_s + ENDING_HOLD_S else self.release()

    def release(self) -> list[bytes]:
        """Return whatever is held, and hold it no more."""
        if not self._is_held:
            return []
        self._is_held = False
        return self._lines

    @property
    def lines(self) -> list[bytes]:
        """The last traceback and what followed it, held or not."""
        return [] if self.since_s is None else self._lines

    @property
    def error(self) -> str:
        """The line of it that names the error; '' when there is none."""
        return last_error(self.lines)


def last_error(lines: Sequence[bytes]) -> str:
    """Return 'ValueError: too large' of a traceback; of several that follow from each other, the last."""
    found = _find_error(lines)
    return _bare(lines[found.start]).decode(errors="replace") if found else ""


class ShownTracebacks:
    """Remembers what has been shown of all workers, so that workers that fail alike show it once."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, float]] = {}
        """By the text, without what is a worker's own: who showed it, and when."""

    def is_known(self, rank: int, lines: Sequence[bytes], now_s: float) -> bool:
        """Say whether another worker has shown this traceback within SAME_S; if not, it counts as shown."""
        found = _find_error(lines)
        if not found:
            return False
        text = without_own_numbers(b"\n".join(lines[: found.stop]).decode(errors="replace"))
        by, at_s = self._shown.get(text, (rank, now_s))
        if by != rank and now_s < at_s + SAME_S:
            return True
        self._shown[text] = rank, now_s
        return False

    def shorten(self, worker: Worker, lines: list[bytes], now_s: float) -> list[bytes]:
        """Return lines that begin with a traceback, with a line instead of it if another has shown it."""
        if not self.is_known(worker.rank, lines, now_s):
            return lines
        instead = f"{last_error(lines)} (another {worker.word} has shown this traceback)".encode()
        return [instead, *lines[_find_error(lines).stop :]]


def _find_error(lines: Sequence[bytes]) -> range:
    """Find the line that names the error, and those that it goes on in; empty without a whole traceback.

    Of several tracebacks that follow from each other it is the last one's.
    """
    start, is_inside = None, False
    for index, line in enumerate(map(_bare, lines)):
        if _begins(line):
            is_inside = True
        elif is_inside and line and not line[:1].isspace():
            start, is_inside = index, False
    if start is None:
        return range(0)
    stop = start + 1
    while stop < len(lines) and lines[stop][:1].isspace():
        stop += 1
    return range(start, stop)


def _begins(line: bytes) -> bool:
    return _HEADER in line or _bare(line).startswith(_SYNTAX_ERROR)


def _bare(line: bytes) -> bytes:
    return _RANK.sub(b"", line)


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
