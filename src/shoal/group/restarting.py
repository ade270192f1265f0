"""A group whose launcher ends all workers and starts them anew when one is lost or others come: torchrun's.

torchrun tells its workers nothing of that: they get SIGTERM, and SIGKILL half a minute later. The machines
stay. So a worker that has to end leaves its state in the memory of its machine, and the one that is started
in its place finds it there. Together those that have found something go on as the next generation of an
elastic run does (`group.elastic`); who sends what to whom then is the session's business.

The memory is a folder in /dev/shm, or the temporary folder where that is full or missing. Its name says whose
it is: the torchrun agent, which lives as long as the run on this machine, and the worker's local rank. This
user alone can read it. What an agent that has gone has left is removed by the next worker that starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.core import Deadline, PeerLost, Placement
from shoal.core.elastic import DownMessage, Form, UpMessage, WorkerPlace
from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.core.processes import namespace, started, stat_fields, state_of
from shoal.core.run_options import TORCHRUN_ID_VARIABLE
from shoal.group.base import Group
from shoal.group.elastic import CoordinatorLink, ElasticGroup
from shoal.group.functions import share
from shoal.tensors.checkpoint import Checkpoint, CheckpointWriter, checkpoint_paths

log = logging.getLogger(__name__)
_MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"
_SHARED_MEMORY = Path("/dev/shm")
_FOLDER = re.compile(r"shoal-restart-([0-9a-f]{8})\.(\d+)\.(\d*)-[0-9a-f]{8}-\d+")
_STATE, _ABOUT = "worker", "generation"
_OWN_ALONE = 0o700


class RestartMemory:
    """What one worker leaves in the memory of its machine for the one that is started in its place.

    Each session has a state, by its number. A state counts once it is whole.
    """

    def __init__(self, name: str, places: list[Path] | None = None) -> None:
        temporary = Path(tempfile.gettempdir())
        found = [_SHARED_MEMORY] if _SHARED_MEMORY.is_dir() else []
        self._folders = [place / name for place in places or list(dict.fromkeys([*found, temporary]))]

    @classmethod
    def of_torchrun(cls, environ: Mapping[str, str], local_rank: int) -> RestartMemory:
        """Finds that of this worker, and removes what runs that are over have left on this machine."""
        agent = _agent_pid()
        run = hashlib.sha256(environ.get(TORCHRUN_ID_VARIABLE, "").encode()).hexdigest()[:8]
        memory = cls(f"shoal-restart-{_machine()}.{agent}.{started(agent)}-{run}-{local_rank}")
        for folder in memory._folders:
            _sweep(folder.parent)
        return memory

    @property
    def generation(self) -> int:
        """The newest generation that a state is of; 0 without any."""
        numbers = [int(path.name) for folder in self._own for path in folder.iterdir() if path.name.isdigit()]
        found = [generation for number in numbers for generation, _ in self._find(number)]
        return max(found, default=0)

    def keep(self, number: int, generation: int, owner: str, step: int, state: Mapping[str, Any]) -> None:
        """Writes the state of a session; UsageError for one that cannot be written, OSError without room."""
        problem: OSError | None = None
        for folder in self._folders:
            try:
                folder.mkdir(mode=_OWN_ALONE, exist_ok=True)
                if not _is_own(folder):
                    raise PermissionError(f"{folder} belongs to somebody else")
                with CheckpointWriter.begin(folder / str(number), step) as writer:
                    writer.write_state(_STATE, state)
                    writer.write_state(_ABOUT, generation)
                    writer.seal(owner, step, num_kept=1)
            except OSError as error:
                problem = error
            else:
                for other in self._folders:
                    if other != folder:
                        _remove(other / str(number))
                return
        raise problem or OSError("there is no folder for it")

    def take(self, number: int) -> dict[str, Any] | None:
        """Reads the state that was left for the session with this number; None where there is none."""
        for _, checkpoint in sorted(self._find(number), key=lambda found: found[0], reverse=True):
            try:
                checkpoint.check_state(_STATE)
                state: dict[str, Any] = checkpoint.state(_STATE)
            except CheckpointError as error:
                log.warning("%s", error)
            else:
                return state
        return None

    def discard(self, number: int | None = None) -> None:
        """Removes what was left for one session, or for all. Idempotent."""
        for folder in self._folders:
            _remove(folder if number is None else folder / str(number))
            with contextlib.suppress(OSError):
                folder.rmdir()  # unless there is another session's

    def _find(self, number: int) -> list[tuple[int, Checkpoint]]:
        """Lists the states that were left for one session, each with the generation that it is of."""
        found = []
        for path in (path for folder in self._own for path in checkpoint_paths(folder / str(number))):
            with contextlib.suppress(CheckpointError):
                checkpoint = Checkpoint.open(path)
                found.append((int(checkpoint.state(_ABOUT)), checkpoint))
        return found

    @property
    def _own(self) -> list[Path]:
        return [folder for folder in self._folders if _is_own(folder)]


class RestartedGroup(ElasticGroup):
    """One generation of a run whose workers are ended between two generations.

    It forms before any session is there, and `regroup` ends this worker's part in the run.
    """

    is_restarted = True

    def __init__(self, inner: Group, memory: RestartMemory) -> None:
        self.memory = memory
        self._previous: Any = None
        """What was to be done at SIGTERM before; None while that is as it was."""
        self._pid = os.getpid()
        link = RestartLink(inner.rank, has_restarts_left())
        super().__init__(link, inner, _open_nothing)
        self.restart_link = link
        generation = 1 + max(share(inner, memory.generation))
        places = (WorkerPlace(rank, inner.machines[rank]) for rank in range(inner.size))
        self.form = Form(generation, tuple(places))

    def listen(self, end: Callable[[], None]) -> None:
        """Has SIGTERM end this worker between two steps, once. Only in the main thread; idempotent.

        Where that is now, `end` does it at once; otherwise `is_due` tells of it.
        """
        previous = signal.getsignal(signal.SIGTERM)
        is_heard = previous not in (signal.SIG_IGN, None)
        if threading.current_thread() is not threading.main_thread() or not is_heard or self._previous:
            return
        self._previous = previous

        def stop(number: int, frame: FrameType | None) -> None:
            if os.getpid() != self._pid:  # a process that loads data has inherited this
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
                return
            self.restart_link.stop()
            end()

        signal.signal(signal.SIGTERM, stop)

    def stop_listening(self) -> None:
        """Has SIGTERM do again what it did before. Idempotent."""
        previous, self._previous = self._previous, None
        if previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)

    def regroup(
        self, steps: int, *, is_fresh: bool, error: BaseException | None = None, note: bytes = b""
    ) -> None:
        """Leaves this generation for good. Raises the error; after SIGTERM does what was to be done then.

        Returns where a handler of the user's returns: then the program goes on alone until it ends.
        """
        ended = error or PeerLost("torchrun ends this worker, to start it anew.")
        with contextlib.suppress(ShoalError):
            self.inner.close(ended)  # the others hear of it at once
        has_heard = self._previous is not None and self.restart_link.is_stopping
        self.stop_listening()
        if has_heard:
            signal.raise_signal(signal.SIGTERM)
        if error is not None or not has_heard:
            raise ended


class RestartLink(CoordinatorLink):
    """Stands in for a coordinator, which torchrun has none of: all that is heard is the signal to end."""

    def __init__(self, number: int, has_restarts_left: bool) -> None:
        super().__init__(number)
        self.has_restarts_left = has_restarts_left
        """Whether torchrun starts the workers anew when one of them fails."""
        self.is_stopping = False
        """Whether this worker was told to end."""

    def stop(self) -> None:
        """Takes note of the signal: this worker stops after the step that it is in."""
        self.is_stopping = True
        self.last_step = self.due_step = 0

    def send(self, message: UpMessage) -> None:
        """Does nothing: nobody listens."""

    def receive(self, deadline: Deadline | None = None) -> DownMessage | None:
        """Gives nothing: nobody speaks."""

    def wait_until_due(self) -> None:
        """Does not wait: what is due is known at once."""


def open_restarted(group: Group, placement: Placement, environ: Mapping[str, str] = os.environ) -> Group:
    """Puts a group that torchrun may start anew into one that goes on then; others stay what they are."""
    max_restarts = environ.get(_MAX_RESTARTS_VARIABLE, "")
    if placement.source != "torchrun" or not max_restarts.isdecimal() or int(max_restarts) < 1:
        return group
    if not environ.get(TORCHRUN_ID_VARIABLE) or os.name != "posix":
        return group
    return RestartedGroup(group, RestartMemory.of_torchrun(environ, placement.local_rank))


def has_restarts_left(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether torchrun starts all workers anew when one of this machine's fails."""
    count, most = (environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def _open_nothing(form: Form, group: ElasticGroup, deadline: Deadline) -> Group:
    raise UsageError("a group that is started anew by its launcher forms once.")


def _agent_pid() -> int:
    """Finds the process that starts this worker again and again.

    It starts each in a session of its own, and there may be a shell script between the two.
    """
    leader = os.getsid(0)
    fields = stat_fields(leader) if leader != os.getpid() else []
    return int(fields[1]) if len(fields) > 1 else os.getppid()


def _machine() -> str:
    """A word for this machine since it was started; a container counts for itself."""
    return hashlib.sha256(namespace().encode()).hexdigest()[:8]


def _is_own(folder: Path) -> bool:
    """Whether it is a folder that this user alone can read and write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and is_private


def _sweep(place: Path) -> None:
    """Removes what agents of this machine have left that have gone."""
    with contextlib.suppress(OSError):
        for folder in sorted(place.iterdir()):
            named = _FOLDER.fullmatch(folder.name)
            if named is None or named[1] != _machine() or not _is_own(folder):
                continue
            if state_of(int(named[2]), named[3]) == "gone":
                _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
