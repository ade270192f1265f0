import subprocess
import sys
from pathlib import Path

import pytest

import law

ROOT = Path(__file__).parents[2]


@pytest.fixture
def findings(tmp_path):
    """What the linter finds in a file of a room, as 'line: text'."""

    def findings(code, room="transport"):
        file = tmp_path / "shoal" / room / "sample.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        return [finding.removeprefix(f"{file}:") for finding in law.check(tmp_path / "shoal")]

    return findings


OUTSIDE_CORE = {
    "import asyncio\nasyncio.wait([])": "core.fanout",
    "import asyncio\nasyncio.gather()": "core.fanout",
    "import asyncio\nasyncio.as_completed([])": "core.fanout",
    "import asyncio\nasyncio.TaskGroup()": "core.Scope",
    "import asyncio\nasyncio.ensure_future(work())": "core.Scope",
    "import asyncio\nasyncio.create_task(work())": "core.Scope",
    "import asyncio\nasyncio.run(work())": "core.LoopThread",
    "import asyncio as aio\naio.gather()": "core.fanout",
    "from asyncio import gather\ngather()": "core.fanout",
    "from asyncio import TaskGroup as Group\nGroup()": "core.Scope",
    "loop = make()\nloop.create_task(work())": "core.Scope",
    "import time\ntime.time()": "core.Clock",
    "from time import time\ntime()": "core.Clock",
    "import time\nclock = time.time": "core.Clock",
    "import threading\nthreading.Thread(target=print)": "core.LoopThread",
    "from threading import Thread\nThread(target=print)": "core.LoopThread",
    "import threading\nthreading.Timer(1, print)": "core.LoopThread",
    "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor()": "core.LoopThread",
}
EVERYWHERE = {
    "import x\npickle.loads(b'')": "unpickles",
    "import torch\ntorch.load('f')": "safetensors",
    "import os\nos.fork()": "spawn",
    "import asyncio\nasyncio.get_event_loop()": "pass the loop in",
    "import threading\nclass Server(threading.Thread): pass": "inherits from Thread",
    "from multiprocessing import Process\nclass Server(Process): pass": "inherits from Thread",
    "import multiprocessing\nmultiprocessing.get_context('fork')": "spawn",
    "import multiprocessing\nmultiprocessing.set_start_method('forkserver')": "spawn",
    "import torch.multiprocessing as mp\nmp.get_context('fork')": "spawn",
    "import multiprocessing\nmultiprocessing.get_context()": "spawn",
}
IMPORTS = ["import pickle", "import pickle as p", "from pickle import loads", "import dill", "import marshal"]
PROCESSES = [
    "import multiprocessing\nmultiprocessing.Process()",
    "import subprocess\nsubprocess.run([])",
    "import subprocess\nsubprocess.Popen([])",
    "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
]
SETS = [
    "names = {1, 2}\nfor name in names: pass",
    "names = set()\nprint([name for name in names])",
    "names: set[str] = f()\nprint({name: 1 for name in names})",
    "first = second = frozenset()\nfor name in second: pass",
    "def f(names: set[int]):\n    for name in names: pass",
    "def f(*, names: frozenset[int]):\n    yield from names",
    "names = []\nfor name in set(names): pass",
    "names = {1}\nfor name in names | other: pass",
    "names = {1}\nfor name in names.union(other): pass",
    "names = {1}\nprint(list(names))",
    "names = {1}\nprint([*names])",
    "names = {'a'}\nprint(','.join(names))",
    "names = {1}\nprint(enumerate(names))",
    "names = {0.1}\nprint(sum(names))",
    "class A:\n def __init__(self):\n  self.names = set()\n def f(self):\n  for x in self.names: pass",
]


@pytest.mark.parametrize("code", OUTSIDE_CORE)
def test_what_is_forbidden_outside_core_is_found(findings, code):
    (finding,) = findings(code)
    assert finding.startswith("2: ")
    assert OUTSIDE_CORE[code] in finding


@pytest.mark.parametrize("code", OUTSIDE_CORE)
def test_what_is_forbidden_outside_core_is_allowed_there(tmp_path, code):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "sample.py").write_text(code)
    assert law.check(tmp_path) == []


@pytest.mark.parametrize("room", ["transport", "core", "launch"])
@pytest.mark.parametrize("code", EVERYWHERE)
def test_what_is_forbidden_everywhere_is_found_everywhere(findings, code, room):
    assert [
        finding
        for finding in findings(code, room)
        if finding.startswith("2: ") and EVERYWHERE[code] in finding
    ]


@pytest.mark.parametrize("code", IMPORTS)
def test_what_unpickles_is_not_imported(findings, code):
    (finding,) = findings(code, room="core")
    assert finding.startswith("1: ")
    assert "nothing unpickles" in finding


@pytest.mark.parametrize("code", PROCESSES)
def test_only_launch_and_bench_start_processes(tmp_path, findings, code):
    (finding,) = findings(code)
    assert finding.startswith("2: ")
    for room in ("launch", "bench", "doctor"):
        (tmp_path / "other" / room).mkdir(parents=True)
        (tmp_path / "other" / room / "sample.py").write_text(code)
    assert law.check(tmp_path / "other") == []


@pytest.mark.parametrize("code", SETS)
def test_iterating_over_a_set_is_found(findings, code):
    (finding,) = findings(code)
    assert "iterates over a set" in finding


def test_a_del_method_is_found(findings):
    (finding,) = findings("class A:\n    def __del__(self):\n        pass", room="core")
    assert finding.startswith("2: __del__")


GOOD = """
import asyncio
import multiprocessing
import time

from shoal.core import Scope, fanout


async def good(names: set[str], clock, loop):
    async with Scope() as scope:
        scope.start(asyncio.sleep(0))
    for name in sorted(names):
        print(name, name in names, len(names), max(names), any(names))
    names = sorted(names)
    for name in names:
        print(name)
    await fanout([], deadline)
    return clock.now_s(), time.monotonic(), multiprocessing.get_context("spawn")


def other(names: list[str]) -> list[str]:
    return [name for name in names]


class Resource:
    def __enter__(self):
        return self
"""


def test_good_code_passes_in_silence(findings):
    assert findings(GOOD) == []


def test_a_set_of_one_function_is_no_set_in_another(findings):
    code = "def f():\n    names = set()\n    return names\n\n\ndef g(names):\n    for name in names: pass"
    assert findings(code) == []


def test_a_line_with_a_reason_is_let_through_and_one_without_is_not(findings):
    assert findings("import time\ntime.time()  # law: measures the clock itself") == []
    assert findings("import threading\nthreading.Thread(\n    target=f,\n)  # law: measures threads") == []
    assert len(findings("import time\ntime.time()  # law:")) == 1
    assert len(findings("import time\ntime.time()\nf()  # law: something else")) == 1
    assert len(findings("import time\ntime.time()  # fine")) == 1


def test_core_is_a_room_and_not_any_folder_of_that_name(findings):
    assert len(findings("import time\ntime.time()", room="transport/core")) == 1


def run_tool(folder):
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "law.py"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_law_holds_in_the_package():
    done = run_tool(ROOT / "src" / "shoal")
    assert done.returncode == 0, done.stdout
    assert "The law holds" in done.stdout


def test_a_finding_is_printed_with_its_place_and_the_exit_code_says_so(tmp_path):
    (tmp_path / "bad.py").write_text("import time\n\ntime.time()\n")
    done = run_tool(tmp_path)
    assert done.returncode == 1
    assert done.stdout == f"{tmp_path / 'bad.py'}:3: time.time: use a core.Clock\n"


def test_what_is_hard_to_read_may_only_become_less(tmp_path, capsys):
    for room in ("dht", "group"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "seat.py").write_text(
            'class Seat:\n    """By name."""\n\n    def _own(self): ...\n'
        )
    found = law.hard_to_read(tmp_path)
    twice, short, folders = found
    assert [len(found[kind]) for kind in found] == [1, 2, 0]
    assert "dht/seat.py" in found[twice][0]
    assert "group/seat.py" in found[twice][0]
    assert not law.check_ratchet(tmp_path, {twice: 1, short: 2, folders: 0})
    risen = law.check_ratchet(tmp_path, {twice: 0, short: 2, folders: 0})
    assert "1 class names that stand twice, where 0 were" in risen[-1]
    assert not law.check_ratchet(tmp_path, {twice: 5, short: 2, folders: 0})
    assert "Write 1 into ratchet.json" in capsys.readouterr().out
