"""Where workers pin up how far they are, for `shoal top` to read: one small file each, of this user alone.

The board is `$XDG_RUNTIME_DIR/shoal`, or a folder in shared memory or among the temporary files. Nothing here
stops training: a board that cannot be used is done without, silently. `SHOAL_TOP=0` turns it off. What is
noted when is `strategies.beats`' to say, how it is shown the command line's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from shoal.core.clock import SYSTEM_CLOCK, Clock
from shoal.core.processes import State, started, state_of

VARIABLE = "SHOAL_TOP"
NOTE_S = 1.0
"""From one note of a worker to the next, at least."""
_MAX_BYTES = 1 << 16
_ENDING = ".json"
_MEMORY = Path("/dev/shm")
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_ABANDONED_S = 60.0
"""A file that is so old and not whole yet belongs to a worker that was killed while it wrote."""
_PLAIN = re.compile(r"[\w.-]{1,40}", re.ASCII)


class Keeper(msgspec.Struct, frozen=True):
    """The process for as long as whose life a note counts, where that is not the worker itself."""

    pid: int
    started: str = ""


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far one strategy of one worker is; what is not known is None."""

    run: str
    rank: int
    """Among the workers, or among the servers."""
    size: int
    """Workers of the run."""
    pid: int
    host: str
    noted_s: float
    """By the wall clock of the machine whose board this is."""
    role: str = "worker"
    number: int = 0
    """Of the strategy in its process, which may have several."""
    place: int = 0
    """Its rank as the launcher counts, servers first."""
    started: str = ""
    """When the process began, as `processes.started` says it."""
    began_s: float = 0.0
    """By the wall clock, when the strategy was attached."""
    program: str = ""
    strategy: str = ""
    step: int = 0
    steps_per_s: float | None = None
    """Since the note before, as are all rates and shares here."""
    num_examples: int | None = None
    """That this worker has taken since it began."""
    examples_per_s: float | None = None
    values: dict[str, float] = {}
    """What the program has logged: `loss` and the like."""
    sent_bytes: int | None = None
    received_bytes: int | None = None
    waited_s: dict[int, float] = {}
    """In all, for each of the ranks that it waited for most."""
    wait_share: float | None = None
    """Of the time."""
    waits_for: int | None = None
    """The rank that it waited for most."""
    keeper: Keeper | None = None
    """For a note of another machine, the head of the run, which keeps a copy here."""
    state: State = "running"
    """Of the process, in such a copy."""

    @property
    def who(self) -> tuple[str, str, int, int]:
        """What tells it from other notes of this board."""
        return self.run, self.role, self.rank, self.number


class Sighting(msgspec.Struct, frozen=True):
    """A note, as whoever looks at the board finds it."""

    note: Note
    state: State
    age_s: float
    """Since it was noted."""


class Pin:
    """One worker's file on the board; without a board it does nothing."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"{name}{_ENDING}"

    def write(self, note: Note) -> None:
        """In one piece, in the place of what was there."""
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}")
        with contextlib.suppress(OSError):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o600)
            try:
                os.write(descriptor, msgspec.json.encode(note))
            finally:
                os.close(descriptor)
            temporary.replace(self._path)

    def remove(self) -> None:
        """Take it down; idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def pin(name: str) -> Pin:
    """A place on this user's board, which is made where there is none."""
    return Pin(_short(name), _make_folder())


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether workers should note anything."""
    return (os.environ if environ is None else environ).get(VARIABLE, "") != "0"


def name_of_run(key: str) -> str:
    """A word for people, of what tells a run from others on its machine."""
    return key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()[:12]


def own_keeper() -> Keeper:
    """The process that this is called in."""
    return Keeper(os.getpid(), started(os.getpid()))


def look(clock: Clock = SYSTEM_CLOCK) -> list[Sighting]:
    """Every note of this user's on this machine, in order; those of runs that are over are taken down.

    A worker that is gone is seen for as long as another one of its run is there.
    """
    now_s = clock.wall_s()
    found: dict[tuple[str, str, int, int], tuple[Sighting, Path]] = {}
    for path, note in _notes(now_s):
        if note.keeper is not None and state_of(note.keeper.pid, note.keeper.started) == "gone":
            _unlink(path)
            continue
        state = state_of(note.pid, note.started) if note.keeper is None else note.state
        sighting = Sighting(note, state, max(0.0, now_s - note.noted_s))
        known = found.get(note.who)
        if known is None or _rank(sighting) < _rank(known[0]):
            found[note.who] = sighting, path
    alive = {sighting.note.run for sighting, _ in found.values() if sighting.state != "gone"}
    for sighting, path in found.values():
        if sighting.note.run not in alive:
            _unlink(path)
    return sorted(
        (sighting for sighting, _ in found.values() if sighting.note.run in alive),
        key=lambda one: one.note.who,
    )


def folders() -> list[Path]:
    """Where boards may be, the preferred one first."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime) / "shoal"] if runtime and Path(runtime).is_dir() else []
    # on a disk a file that takes another one's place is written out at once: ten times as slow
    shared = [_MEMORY] if _MEMORY.is_dir() else []
    return [*own, *(folder / f"shoal-{user}" for folder in (*shared, Path(tempfile.gettempdir())))]


def _make_folder() -> Path | None:
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_own(folder):
                return folder
    return None


def _is_own(folder: Path) -> bool:
    """Whether nobody else can have put anything there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and is_private


def _notes(now_s: float) -> Iterable[tuple[Path, Note]]:
    for folder in folders():
        if not _is_own(folder):
            continue
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") and path.name.endswith(_ENDING):
                _drop_if_abandoned(path, now_s)
            elif path.name.endswith(_ENDING):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    if path.stat().st_size <= _MAX_BYTES:
                        yield path, msgspec.json.decode(path.read_bytes(), type=Note)


def _drop_if_abandoned(path: Path, now_s: float) -> None:
    with contextlib.suppress(OSError):
        if now_s - path.stat().st_mtime > _ABANDONED_S:
            path.unlink()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _rank(sighting: Sighting) -> tuple[bool, bool, float]:
    """Of several notes of one worker the first counts: of one that is there, its own, the newest."""
    return sighting.state == "gone", sighting.note.keeper is not None, -sighting.note.noted_s


def _short(name: str) -> str:
    """A file's name of it."""
    return name if _PLAIN.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:24]
