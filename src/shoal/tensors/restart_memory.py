"""States that a process leaves in the memory of its machine for the one that is started in its place.

They have the format of checkpoints, and lie in a folder in /dev/shm, or in the temporary folder where that is
full or missing, which this user alone can read.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointError
from shoal.core.processes import namespace, started, stat_fields, state_of
from shoal.core.run_options import TORCHRUN_ID_VARIABLE
from shoal.tensors.checkpoint import Checkpoint, CheckpointWriter, checkpoint_paths

log = logging.getLogger(__name__)
_SHARED_MEMORY = Path("/dev/shm")
_FOLDER = re.compile(r"shoal-restart-([0-9a-f]{8})\.(\d+)\.(\d*)-[0-9a-f]{8}-\d+")
_STATE, _ABOUT = "worker", "generation"
_OWN_ALONE = 0o700


class RestartMemory:
    """What one worker leaves in the memory of its machine for the one that is started in its place.

    The folder's name says whose it is: the torchrun agent, which lives as long as the run on this machine,
    and the worker's local rank. What an agent that has gone has left is removed by the next worker that
    starts. Each session has a state, by its number. A state counts once it is whole.
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
