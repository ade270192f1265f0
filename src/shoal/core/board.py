"""Where workers pin up how far they are, for `shoal top` to read: one small file each, of this user alone.

The board is a folder of this user in a place that nobody else can move it from: `$XDG_RUNTIME_DIR/shoal`, or
one in shared memory or among the temporary files. Nothing here stops training: a board that cannot be used is
done without, silently. `SHOAL_TOP=0` turns it off. What is noted when is `strategies.status`' to say, how it
is shown the command line's.
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
from typing import Literal

import msgspec

from shoal.core.clock import SYSTEM_CLOCK, Clock
from shoal.core.processes import State, namespace, started, state_of

VARIABLE = "SHOAL_TOP"
NOTE_S = 1.0
"""From one note of a worker to the next, at least."""
STALE_S = 3 * NOTE_S
"""A note that is older, and older than three steps take, says nothing of how fast its worker is now."""
_MEMORY = Path("/dev/shm")
_SESSIONS = Path("/run/user")
_MAX_BYTES = 1 << 16
_ENDING = ".note"
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_ABANDONED_S = 60.0
"""A file that is so old and not whole yet belongs to a worker that was killed while it wrote."""
_FORGOTTEN_S = 3600.0
"""A note of a process that cannot be looked up from here counts for so long."""
_PLAIN = re.compile(r"[\w.-]{1,40}", re.ASCII)


Phase = Literal["starts", "waits", "evaluates", "saves"]
"""What a worker may be found at: it has not made a step yet, it has waited for another worker for a second or
longer, its model runs outside of training, it writes a checkpoint."""


class KeeperProcess(msgspec.Struct, frozen=True):
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
    """Its rank as the launcher counts, servers first; in an elastic run its number, which stays."""
    generation: int = 0
    """Of an elastic run: the group that it is in; 0 in other runs."""
    started: str = ""
    """When the process began, as `processes.started` says it."""
    namespace: str = ""
    """Whose numbers pid and keeper are, as `processes.namespace` says it."""
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
    sent_to: dict[int, int] = {}
    """Bytes by the place of the other one, the most; what others take without asking, only they count."""
    received_from: dict[int, int] = {}
    """Likewise; what others put there without asking, only they count."""
    waited_s: dict[int, float] = {}
    """In all, for each of the ranks that it waited for most."""
    wait_share: float | None = None
    """Of the time."""
    waits_for: int | None = None
    """The rank that it waited for most."""
    phase: str = ""
    """What it does instead of steps, as `Phase` has it; empty while it trains. Other versions have others."""
    keeper: KeeperProcess | None = None
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

    @property
    def is_fresh(self) -> bool:
        """Whether its rates and shares are those of now; steps may take longer than notes."""
        step_s = 1 / self.note.steps_per_s if self.note.steps_per_s else 0.0
        return self.state == "running" and self.age_s <= max(STALE_S, 3 * step_s)

    def now(self) -> Sighting:
        """With the rates of now: none of a worker that has long noted nothing, is stopped or gone."""
        if self.is_fresh:
            return self
        note, is_gone = self.note, self.state == "gone"
        stalled = msgspec.structs.replace(
            note,
            steps_per_s=None if is_gone or note.steps_per_s is None else 0.0,
            examples_per_s=None if is_gone or note.examples_per_s is None else 0.0,
            wait_share=None,
            waits_for=None,
        )
        return Sighting(stalled, self.state, self.age_s)


class Pin:
    """One worker's file on the board; while there is no board it does nothing."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self._name = f"{name}{_ENDING}"
        self._folder = folder

    def write(self, note: Note) -> None:
        """In one piece, in the place of what was there; a board that has been removed is made anew."""
        # MessagePack, for JSON has no word for a loss that is no number
        data = msgspec.msgpack.encode(note)
        with contextlib.suppress(OSError):
            if self._folder is None or not is_own(self._folder):
                self._folder = make_folder()
            if self._folder is not None:
                _replace(self._folder / self._name, data)

    def remove(self) -> None:
        """Take it down; idempotent."""
        if self._folder is not None:
            _unlink(self._folder / self._name)


def pin(name: str) -> Pin:
    """A place on this user's board, which is made where there is none."""
    return Pin(_short(name), make_folder())


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether workers should note anything."""
    return (os.environ if environ is None else environ).get(VARIABLE, "") != "0"


def name_of_run(key: str) -> str:
    """A word for people, of what tells a run from others on its machine."""
    return key if _PLAIN.fullmatch(key) else hashlib.sha256(key.encode()).hexdigest()[:12]


def own_keeper() -> KeeperProcess:
    """The process that this is called in."""
    return KeeperProcess(os.getpid(), started(os.getpid()))


def look(clock: Clock = SYSTEM_CLOCK) -> list[Sighting]:
    """Every note of this user's on this machine, in order; those of runs that are over are taken down.

    A worker that is gone is seen for as long as another one of its run is there. Processes whose numbers mean
    nothing here, as those of another container, are taken for running until their notes are old.
    """
    now_s, here = clock.wall_s(), namespace()
    found: dict[tuple[str, str, int, int], tuple[Sighting, Path]] = {}
    for path, note in _notes(now_s):
        age_s = max(0.0, now_s - note.noted_s)
        is_known = not note.namespace or not here or note.namespace == here
        if _is_over(note, age_s, is_known=is_known):
            _unlink(path)
            continue
        is_own_number = is_known and note.keeper is None
        state = state_of(note.pid, note.started) if is_own_number else note.state
        sighting = Sighting(note, state, age_s)
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


def _is_over(note: Note, age_s: float, *, is_known: bool) -> bool:
    """Whether it counts no more, whatever others of its run do."""
    if not is_known:
        return age_s > _FORGOTTEN_S
    return note.keeper is not None and state_of(note.keeper.pid, note.keeper.started) == "gone"


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o600)
    try:
        num_written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if num_written == len(data):
        temporary.replace(path)
    else:  # the disk is full
        _unlink(temporary)


def _notes(now_s: float) -> Iterable[tuple[Path, Note]]:
    for folder in folders_to_read():
        for path in _files(folder):
            if path.name.startswith(".") and path.name.endswith(_ENDING):
                _drop_if_abandoned(path, now_s)
            elif path.name.endswith(_ENDING):
                with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
                    if path.stat().st_size <= _MAX_BYTES:
                        yield path, msgspec.msgpack.decode(path.read_bytes(), type=Note)


def _files(folder: Path) -> list[Path]:
    """None of a folder that is not this user's, or goes meanwhile."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir()) if is_own(folder) else []
    return []


def _drop_if_abandoned(path: Path, now_s: float) -> None:
    with contextlib.suppress(OSError):
        if now_s - path.stat().st_mtime > _ABANDONED_S:
            path.unlink()


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _rank(sighting: Sighting) -> tuple[bool, bool, float]:
    """Of several notes of one worker the first counts: of one that is there, its own, the newest."""
    return sighting.state == "gone", sighting.note.keeper is not None, -sighting.note.noted_s


def _short(name: str) -> str:
    """A file's name of it."""
    return name if _PLAIN.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:24]


# --- where the board may be ---


def folders() -> list[Path]:
    """Where boards may be made, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime) / "shoal"] if runtime and _is_private(Path(runtime)) else []
    # on a disk a file that takes another one's place is written out at once: ten times as slow
    shared = [place for place in (_MEMORY, Path(tempfile.gettempdir())) if _is_orderly(place)]
    return [*own, *(place / f"shoal-{_user()}" for place in shared)]


def folders_to_read() -> list[Path]:
    """Those, and without XDG_RUNTIME_DIR the one that others of this user's sessions have it name."""
    usual = _SESSIONS / str(_user())
    if os.environ.get("XDG_RUNTIME_DIR") or not _is_private(usual):
        return folders()
    return [usual / "shoal", *folders()]


def make_folder() -> Path | None:
    """The first that can be used, made where there is none."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_own(folder):
                return folder
    return None


def is_own(folder: Path) -> bool:
    """Whether nobody else can have put anything there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and is_private


def _is_private(place: Path) -> bool:
    """Whether it is this user's, and others can change nothing in it."""
    try:
        found = place.stat()
    except OSError:
        return False
    is_safe = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return stat.S_ISDIR(found.st_mode) and is_safe


def _is_orderly(place: Path) -> bool:
    """Whether others, if they can write there, can move and remove only what is theirs."""
    try:
        is_sticky = bool(place.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return False
    return _is_private(place) or (is_sticky and place.is_dir())


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
