"""A run whose workers come and go, as a test drives it: `shoal run --elastic`, its notes and its lines."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from shoal.launch.live import ask_launcher

PATIENCE_S = 150.0
"""What has not happened by then hangs: the import of torch alone takes half a minute on a busy machine."""
PROGRAM = Path(__file__).with_name("growing_program.py")


class GrowingRun:
    """One run; ends with the block."""

    def __init__(self, folder, num_workers, *options, task=16, pause_s=0.01, max_workers=8):
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "shoal",
            "run",
            "--elastic",
            "-np",
            num_workers,
            "--max-np",
            max_workers,
        ]
        command += [*options, PROGRAM, folder, task, pause_s]
        self.lines: list[str] = []
        self._came = threading.Condition()
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join(5)
        self.process.stdout.close()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self):
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip())
                self._came.notify_all()

    def line(self, pattern, timeout_s=PATIENCE_S):
        """Waits for a line, and gives the match."""

        def found():
            return next((match for line in self.lines if (match := re.search(pattern, line))), None)

        with self._came:
            assert self._came.wait_for(found, timeout_s), (pattern, self.lines)
            return found()

    @property
    def name(self):
        return self.line(r"`shoal scale (\S+) N`")[1]

    def scale(self, size):
        return ask_launcher(self.name, size)

    def notes(self):
        found = []
        for path in self.folder.glob("*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            found += [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(found, key=lambda note: note["at_s"])

    def steps(self, since_s=0.0):
        return [note for note in self.notes() if "step" in note and note["at_s"] > since_s]

    def pids(self):
        """Of all workers that have come as far as the group, in that order."""
        return list(dict.fromkeys(note["pid"] for note in self.notes()))

    def alive(self):
        return [pid for pid in self.pids() if _is_alive(pid)]

    def wait_until(self, is_so, what, timeout_s=PATIENCE_S):
        end_s = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, (what, self.process.returncode, self.lines)
            assert time.monotonic() < end_s, (what, self.lines)
            time.sleep(0.02)

    def wait_for_size(self, size, since_s=0.0):
        """Waits until that many workers have done a step together."""

        def is_so():
            latest = {note["pid"]: note for note in self.steps(since_s)}
            together = [note for note in latest.values() if note["size"] == size]
            return len(together) >= size

        self.wait_until(is_so, f"steps of {size} workers")

    def finish(self, timeout_s=PATIENCE_S):
        """Lets all stop after the same step; gives the exit code."""
        last = max((note["step"] for note in self.steps()), default=0) + 60
        (self.folder / "until.new").write_text(str(last))
        (self.folder / "until.new").rename(self.folder / "until")
        return self.process.wait(timeout_s)

    def wait(self):
        """Waits for the end for as long as anybody still writes notes; gives the exit code."""
        written = -1
        while True:
            try:
                return self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                before, written = written, sum(path.stat().st_size for path in self.folder.glob("*.jsonl"))
                assert written > before, ("it stands still", self.lines)

    def models_by_step(self):
        """By step: the models that workers had after it."""
        found = defaultdict(set)
        for note in self.steps():
            found[note["step"]].add(note["model"])
        return found

    def items_by_epoch(self):
        """By epoch: how often each example was trained on."""
        found = defaultdict(Counter)
        for note in self.steps():
            found[note["epoch"]].update(note["items"])
        return found

    def check_examples(self, num_examples):
        """Each example once in each epoch that is over, but for those that were listed.

        Whether the last step of a killed worker counted, the others know and its notes do not.
        """
        notes = self.notes()
        listed = defaultdict(list)
        for note in notes:
            for epoch, items in note.get("lost", {}).items():
                listed[int(epoch)] += items
        last = {note["pid"]: note for note in notes if "taken" in note or "step" in note}
        open_ends = [note for note in last.values() if "taken" in note]
        counts = self.items_by_epoch()
        finished = [note["pid"] for note in notes if "finished" in note]
        # all end after the same step, which may be in another epoch of each
        num_over = min(note["epoch"] for note in last.values() if note["pid"] in finished)
        for epoch in range(num_over):
            uncertain = {item for note in open_ends if note["epoch"] == epoch for item in note["items"]}
            uncertain.update(listed[epoch])
            missing = set(range(num_examples)) - set(counts[epoch])
            assert missing <= uncertain, (epoch, missing, listed)
            assert {item for item, count in counts[epoch].items() if count > 1} <= uncertain, (epoch, listed)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
