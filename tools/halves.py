"""Runs the tests as two halves at once, one for each of two cores.

    python tools/halves.py [--fast | --slow] [--record] [options of pytest]

Files are dealt by the seconds that each takes (tests/seconds.json), so that both halves end together.
`--fast` runs the files with the most tests in a second, as many as fit into a minute; `--slow` runs the tests
that are marked so, and deals files by what these take (tests/slow_seconds.json); `--record` writes the
seconds anew.

Output comes half by half, the exit code is 0 when all passed and nothing is left behind: no process, no
temporary file, no shared memory. What is left is named, and removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SECONDS = TESTS / "seconds.json"
"""What each file took, beside another half; one that is not there is taken for a second."""
SLOW_SECONDS = TESTS / "slow_seconds.json"
"""The same of the slow tests in each file."""
OWN_OPTIONS = ("--fast", "--slow", "--record")
FAST_S = 45.0
"""Of each half, with `--fast`; pytest itself needs some more."""
NO_TESTS = 5  # pytest's exit code when nothing was selected
MARK = "SHOAL_TESTS_RUN"
"""The environment variable by which all descendants of a run are known, whoever their parent is by now."""
PATIENCE_S = 10.0
"""How long what is about to end may take to do so."""
SHARED_MEMORY = Path("/dev/shm")
BOARD = f"shoal-{os.getuid()}"
"""The folder of `shoal top`, which stays."""


def halves(*, is_fast: bool = False, is_slow: bool = False) -> list[list[str]]:
    """The files of each half, in the order of their names; with `is_fast` those that take the least alone."""
    source = SLOW_SECONDS if is_slow else SECONDS
    recorded: dict[str, float] = json.loads(source.read_text()) if source.exists() else {}
    files = {
        path: recorded.get(path.relative_to(TESTS).as_posix(), 1.0)
        for path in sorted(TESTS.rglob("test_*.py"))
    }
    if is_fast:
        size = {path: path.stat().st_size for path in files}  # as many tests as it has lines, more or less
        files = _first_seconds(sorted(files, key=lambda path: files[path] / size[path]), files)
    dealt: list[list[Path]] = [[], []]
    taken_s = [0.0, 0.0]
    for path in sorted(files, key=lambda path: -files[path]):
        half = taken_s.index(min(taken_s))
        dealt[half].append(path)
        taken_s[half] += files[path]
    return [[str(path) for path in sorted(paths)] for paths in dealt]


def _first_seconds(order: Iterable[Path], files: dict[Path, float]) -> dict[Path, float]:
    """The first files of an order, up to what both halves may take."""
    chosen: dict[Path, float] = {}
    for path in order:
        if sum(chosen.values()) + files[path] <= 2 * FAST_S:
            chosen[path] = files[path]
    return chosen


def main(options: list[str]) -> int:
    """Run both halves, then look for what is left; the exit code."""
    is_fast, is_slow, is_recorded = (name in options for name in OWN_OPTIONS)
    options = [option for option in options if option not in OWN_OPTIONS]
    if is_slow:
        options = ["-m", "slow", *options]
    mark = secrets.token_hex(8)
    shared = shared_memory()
    # a short path: sockets of the tests have names of at most a hundred characters
    with tempfile.TemporaryDirectory(prefix="s", ignore_cleanup_errors=True) as folder:
        print(f"What the halves print until they end: tail -f {folder}/*.log", flush=True)
        code = _run(Path(folder), mark, halves(is_fast=is_fast, is_slow=is_slow), options)
        if is_recorded:
            _record(Path(folder), SLOW_SECONDS if is_slow else SECONDS)
        left = [*end_processes(mark), *temporary_files(Path(folder)), *remove_shared_memory(shared)]
    for line in left:
        print(f"Left behind by the tests: {line}", flush=True)
    return max(code, 1 if left else 0)


def _record(folder: Path, target: Path) -> None:
    """Write what each file took, in seconds, from the halves' reports."""
    seconds: dict[str, float] = {}
    for report in folder.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            parts = case.attrib["classname"].removeprefix(f"{TESTS.name}.").split(".")
            while not (TESTS / "/".join(parts)).with_suffix(".py").exists():
                parts.pop()  # a class inside the file
            name = "/".join(parts) + ".py"
            seconds[name] = seconds.get(name, 0.0) + float(case.attrib["time"])
    rounded = {name: max(0.1, round(took_s, 1)) for name, took_s in sorted(seconds.items())}
    target.write_text(json.dumps(rounded, indent=1) + "\n")


def _run(folder: Path, mark: str, parts: list[list[str]], options: list[str]) -> int:
    """Run both halves, each with a folder for its temporary files; the exit code."""
    with contextlib.ExitStack() as stack:
        running = []
        for number, places in enumerate(filter(None, parts)):
            temporary = folder / str(number)
            temporary.mkdir()
            environment = {
                # what torch compiles is kept for the next run, and is no temporary file
                "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".pytest_cache" / "torchinductor"),
                **os.environ,
                MARK: f"{os.environ.get(MARK, '')}/{mark}",
                "TMPDIR": str(temporary),
            }
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-o",
                f"cache_dir={folder}/cache{number}",
                f"--junitxml={folder}/{number}.xml",
                *options,
                *places,
            ]
            log = folder / f"{number}.log"
            with log.open("wb") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            stack.callback(process.terminate)  # where this is interrupted; else it has ended
            running.append((process, log))
        codes = []
        for process, log in running:
            code = process.wait()
            sys.stdout.write(log.read_text(errors="replace"))
            sys.stdout.flush()
            codes.append(0 if code == NO_TESTS else code)
    return max(codes)


def end_processes(mark: str) -> list[str]:
    """The processes of this run that do not end by themselves, which are killed."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := dict(processes(mark))) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"process {pid}: {command}" for pid, command in found.items()]


def processes(mark: str) -> Iterator[tuple[int, str]]:
    """The number and the command of each process with this mark in its environment; Linux alone has them."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                yield int(folder.name), command.strip()


def temporary_files(folder: Path) -> list[str]:
    """What stands in the halves' folders for temporary files, but for pytest's own."""
    return [
        str(path)
        for half in sorted(folder.glob("[0-9]"))
        for path in sorted(half.iterdir())
        if not path.name.startswith("pytest-of-")
    ]


def shared_memory() -> dict[str, bool]:
    """The names of this user's shared memory, and of semaphores."""
    found = {}
    with contextlib.suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with contextlib.suppress(OSError):
                found[path.name] = path.name != BOARD and path.stat().st_uid == os.getuid()
    return {name: True for name, is_own in found.items() if is_own}


def remove_shared_memory(before: dict[str, bool]) -> list[str]:
    """What is new since `before` and no process uses, which is removed; others may run beside the tests."""
    new = [name for name in shared_memory() if name not in before]
    used = used_files(str(SHARED_MEMORY)) if new else ""
    left = [SHARED_MEMORY / name for name in new if str(SHARED_MEMORY / name) not in used]
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()
    return [str(path) for path in left]


def used_files(folder: str) -> str:
    """All lines of the maps and open files of this machine's processes that name something in `folder`."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines += [line for line in (process / "maps").read_text().splitlines() if folder in line]
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    lines.append(str(file.readlink()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
