"""Ends the workers of a launcher that was itself killed.

A process that gets SIGKILL can clean up nothing, and PR_SET_PDEATHSIG would have to be asked for between fork
and exec, is Linux's alone, and forgets the children of workers. So a shell waits at the other end of a pipe:
it is told the process groups there are, and kills those that are left when the pipe ends.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from typing import Self

_SCRIPT = """
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""
_ENDING_S = 5.0


class Guard:
    """One for each launcher; a context manager, which must be told that no group is left before it closes."""

    def __enter__(self) -> Self:
        # a session of its own: Ctrl-C, a closed terminal or a kill of the launcher's group do not reach it
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={},
        )
        return self

    def watch(self, groups: Iterable[int]) -> None:
        """Exactly these are to be killed if the launcher dies now."""
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            self._shell.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        try:
            self._shell.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()
