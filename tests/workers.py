"""Worker processes for tests of groups and strategies: spawned once for the whole run, and reused.

    def work(group, arguments):                 # in any importable module, or in the test's own file
        return group.all_reduce(torch.tensor([float(group.rank)])).wait().item()

    def test_it(workers):
        assert workers.run(work, size=3) == [1.0, 1.0, 1.0]

Each run opens a new group of the kind and size that is asked for (`contracts.groups`) and closes it. What a
function returns must be something that JSON can carry. A worker that raises, dies or hangs fails the test
with its rank, traceback and what it printed; one that gave no answer is replaced.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"
START_S = 60.0
GRACE_S = 5.0
"""How long the others may go on once one has failed, and how much later than a worker its parent gives up."""


class WorkerFailure(AssertionError):
    """What went wrong, by rank."""


class Workers:
    """The pool; a context manager. It grows to the largest size that is asked for."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-workers-")
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self._workers:
            worker.close_input()
        for worker in self._workers:
            worker.end()
        self._folder.cleanup()

    def run(self, function, size=1, arguments=None, *, kind="host", timeout_s=30.0, settings=None):
        """Results by rank of `function(group, arguments)`.

        A name is `module:function` or `path.py:function`; `settings` are further ones of the group.
        """
        while len(self._workers) < size:
            self._workers.append(_Worker(Path(self._folder.name)))
        used = self._workers[:size]
        key = f"test {uuid.uuid4()}"
        try:
            _collect([worker for worker in used if not worker.is_ready], START_S)
            if os.environ.get("SHOAL_TEST_DEVICE"):
                timeout_s *= 3  # to map memory of a real GPU takes longer than to map that of the CPU
            for rank, worker in enumerate(used):
                worker.order(
                    function=_name_of(function),
                    arguments=arguments or {},
                    group={"kind": kind, "rank": rank, "size": size, "key": key, **(settings or {})},
                    timeout_s=timeout_s,
                )
            answers = _collect(used, timeout_s)
            failures = [
                f"rank {rank} of {size} ({kind}): {worker.describe(answer)}"
                for rank, (worker, answer) in enumerate(zip(used, answers, strict=True))
                if _is_failure(answer)
            ]
            if failures:
                raise WorkerFailure("\n".join([f"{_name_of(function)} failed", *failures]))
        finally:
            for worker in used:
                if worker.answer is None:
                    worker.kill()
                    self._workers.remove(worker)
        return [answer["result"] for answer in answers]


class _Worker:
    """One process, as its parent sees it."""

    def __init__(self, folder):
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed with the process
        self._answer = b""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(SOURCE), str(TESTS), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": "1",
            "SHOAL_STATE": str(folder / "state"),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self.output = self._process.stdout

    def order(self, **what):
        self._errors.truncate(0)
        self._errors.seek(0)
        self._answer = b""
        with contextlib.suppress(BrokenPipeError):  # it is dead: collecting its answer says so
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def read(self):
        """Whether its answer is complete, or will never be."""
        part = os.read(self.output.fileno(), 1 << 16)
        self._answer += part
        return not part or part.endswith(b"\n")

    @property
    def is_ready(self):
        """Whether it has said anything yet."""
        return bool(self._answer)

    @property
    def answer(self):
        return json.loads(self._answer) if self._answer.endswith(b"\n") else None

    def describe(self, answer):
        if answer is not None:
            return answer["failure"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        code = self._process.poll()
        self._errors.seek(0)
        printed = self._errors.read()[-6000:].decode(errors="replace")
        ending = "gave no answer in time" if code is None else f"ended with code {code}"
        return f"its process {self._process.pid} {ending}; it printed\n{printed}"

    def close_input(self):
        """With that it ends by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self.kill()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self.close_input()
        self.output.close()
        self._errors.close()


def _collect(workers, timeout_s):
    """Answers in order; None where there is none. A failure of one leaves the others little time."""
    ends_s = time.monotonic() + timeout_s + GRACE_S
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        while selector.get_map():
            ready = selector.select(max(0.0, ends_s - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                if key.data.read():
                    selector.unregister(key.fileobj)
                    if _is_failure(key.data.answer):
                        ends_s = min(ends_s, time.monotonic() + GRACE_S)
    return [worker.answer for worker in workers]


def _is_failure(answer):
    return answer is None or "failure" in answer


def _name_of(function):
    return function if isinstance(function, str) else f"{inspect.getfile(function)}:{function.__name__}"


# --- inside a worker ---


def main():
    """Serve orders until the parent closes the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a function prints must not mix with answers
    import torch

    from contracts.groups import open_group

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        try:
            function = _load(order["function"])
            faulthandler.dump_traceback_later(order["timeout_s"], exit=True)  # where it hangs, and its end
            with open_group(**order["group"]) as group:
                answer = json.dumps({"result": function(group, order["arguments"])})
        except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
            answer = json.dumps({"failure": traceback.format_exc()})
        faulthandler.cancel_dump_traceback_later()
        answers.write(answer.encode() + b"\n")
        answers.flush()
    os._exit(0)  # a quarter of a second sooner than torch would let it


def _load(name):
    module, _, function = name.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), function)
    known = f"_worker_{module}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, module)
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return getattr(sys.modules[known], function)


if __name__ == "__main__":
    main()
