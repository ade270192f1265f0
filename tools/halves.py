"""Runs the tests as two halves at once, one for each of two cores; what fails is tried once more, alone.

    python tools/halves.py [options of pytest]

Some tests watch the time that things take; beside another half they may fail for want of a processor. Only
what fails again, by itself, counts. Output comes half by half, the exit code is 0 when all passed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
FIRST = ("contracts", "core", "data", "models", "report", "tensors", "topology", "transport")
"""Folders of the first half; everything else is in the second."""
NO_TESTS = 5  # pytest's exit code when nothing was selected


def halves() -> list[list[str]]:
    """What each half runs."""
    places = sorted(
        path
        for path in TESTS.iterdir()
        if (path.is_dir() and any(path.rglob("test_*.py"))) or path.match("test_*.py")
    )
    return [[str(path) for path in places if (path.name in FIRST) is is_first] for is_first in (True, False)]


def main(options: list[str]) -> int:
    """Run both halves, then what failed; the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, places in enumerate(halves()):
            command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}/{number}", *options]
            log = Path(folder) / f"{number}.log"
            with log.open("wb") as output:
                process = subprocess.Popen([*command, *places], stdout=output, stderr=subprocess.STDOUT)
            running.append((process, command, places, log))
        codes = []
        for process, command, places, log in running:
            code = process.wait()
            sys.stdout.write(log.read_text(errors="replace"))
            sys.stdout.flush()
            if code == 1:
                print("Once more, alone, what failed beside the other half:", flush=True)
                for other, *_ in running:
                    other.wait()
                code = subprocess.run([*command, "--last-failed", *places], check=False).returncode
            codes.append(0 if code == NO_TESTS else code)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
