"""examples/my_strategy.py keeps its promises in every group; docs/write-a-strategy.md shows what is so."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from contracts.strategies import DEVICE
from examples.test_coming_from import as_process, commands_of, parsed
from shoal.group import SoloGroup
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import Strategy
from shoal.tensors import Flat
from shoal.testing import check_strategy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_strategy.py"
PAGE = (ROOT / "docs" / "write-a-strategy.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = commands_of("write-a-strategy.md")


def load_example():
    """The module as `shoal run` finds it: in the folder where it is started."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        return importlib.import_module("my_strategy")
    finally:
        sys.path.remove(str(EXAMPLE.parent))


def section(title):
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


# --- the example ---


def test_it_is_short_and_uses_public_names():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 60
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in imported} == {"typing", "msgspec", "shoal.strategies", "shoal.tensors"}
    for node in imported:
        module = importlib.import_module(node.module)
        assert [alias.name for alias in node.names if alias.name not in dir(module)] == []


def test_it_keeps_its_promises():
    told = re.findall(r"^\d+\. (.*)$", section("Test it"), re.MULTILINE)
    assert check_strategy(load_example().NoLoCo) == told


def checked(group, arguments):
    return check_strategy(load_example().NoLoCo, group=group, device=DEVICE)


HERE = [("solo", 1), ("host", 3), ("torch", 2), ("metered", 3), ("shaped", 3), ("faulty", 3), ("traced", 3)]
LATER = [pytest.param("torch", 4, marks=pytest.mark.slow), pytest.param("gloo", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("kind", "size"), [*HERE, *LATER])
def test_it_keeps_its_promises_in_every_group(workers, kind, size):
    kept = workers.run(checked, size, kind=kind, timeout_s=50)
    assert [len(each) for each in kept] == [2 if size == 1 else 6] * size


def test_it_computes_the_formula():
    """By hand, for two workers whose losses are `½ (x − target)²`."""
    targets, rate, period, num_rounds = torch.tensor([1.0, 4.0], dtype=torch.float64), 0.25, 3, 4
    kind = load_example().NoLoCo

    def work(worker):
        model = nn.Linear(1, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        model.weight.data.fill_(2.0)
        strategy = kind(worker.group, local_steps=period, outer_lr=0.6, outer_momentum=0.3, pull=0.8)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(period * num_rounds):
                optimizer.zero_grad()
                ((model.weight - targets[worker.rank]).square() / 2).sum().backward()
                optimizer.step()
            return model.weight.item()

    got = [outcome.value for outcome in run_exact(World(num_workers=2), work)]
    x = slow = torch.full((2,), 2.0, dtype=torch.float64)
    momentum = torch.zeros(2, dtype=torch.float64)
    for _ in range(num_rounds):
        for _ in range(period):
            x = x - rate * (x - targets)
        momentum = 0.3 * momentum + 0.6 * (x - slow).mean() - 0.8 * (slow - slow.mean())
        x = slow = slow + momentum
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), x)


# --- the page ---


def test_the_page_shows_the_example():
    assert BLOCKS[0] == EXAMPLE.read_text()


def test_the_code_runs(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    names = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "write-a-strategy.md", "exec"), names)
    for options in ({"pull": 0.0}, {"local_steps": 3}):
        names["test_my_strategy_keeps_its_promises"](options)


def test_flags_are_those_of_the_program():
    assert len(COMMANDS) == 7
    for command in COMMANDS:
        assert parsed(shlex.split(command)[1:]).params


SHORTER = {
    "run": "--epochs 1",
    "compare": "--task quadratic --workers 2 --steps 4 --seeds 1 --lr 0.1 --profile ideal",
    "bench": "--pairs 1 --block-seconds 0.05 --num-warmup-batches 1 --batch-size 2 --device cpu",
}


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    "command",
    [COMMANDS[0], *(pytest.param(command, marks=pytest.mark.slow) for command in COMMANDS[1:])],
)
def test_commands_run(command, tmp_path):
    for name in ("my_strategy.py", "train_digits.py"):
        (tmp_path / name).write_text((EXAMPLE.parent / name).read_text())
    words, shorter = shlex.split(command), SHORTER
    if is_failing := "--allow-failures" in words:
        program = tmp_path / "train_digits.py"
        failure = re.search(r"`(if group\.rank.*?)`", PAGE)[1]
        loop = "        for x, y in loader:\n"
        assert program.read_text().count(loop) == 1
        program.write_text(program.read_text().replace(loop, f"        {failure}\n{loop}"))
        shorter = {"run": "--epochs 3"}
    python, *rest = as_process([*words, *shorter[words[1]].split()])
    path = os.pathsep.join(entry for entry in sys.path if entry != str(EXAMPLE.parent))
    done = subprocess.run(
        [python, "-P", *rest],  # as the installed program: without the current folder on its path
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=160,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if words[1] == "run":
        assert f"my-noloco, {words[words.index('-np') + 1]} workers" in done.stdout
        assert ("RuntimeError" in done.stdout + done.stderr) == is_failing
    if "--checkpoint" in words:
        assert sorted((tmp_path / "checkpoints").glob("step-*/model.safetensors"))


def first_columns(title):
    rows = re.findall(r"^\| (.*?) \|", section(title), re.MULTILINE)
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)]


class Empty(Strategy):
    name = "empty"
    works_alone = True


def test_tables_name_what_there_is():
    model = nn.Linear(1, 1)
    strategy = Empty(SoloGroup())
    with strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        offered = first_columns("What the session offers")
        names = {re.match(r"\w+", text)[0] for text in offered if not re.match(r"(-?a\b|Flat)", text)}
        assert {"parameters", "average", "window", "is_void"} <= names
        assert [name for name in names if not hasattr(session, name)] == []
    vector = set(re.findall(r"\ba\.(\w+)\(|Flat\.(\w+)\(", section("What the session offers")))
    assert [name for pair in vector for name in pair if name and not hasattr(Flat, name)] == []
    methods = [re.match(r"\w+", text)[0] for text in first_columns("Where your methods are called")]
    assert [name for name in methods if not hasattr(Strategy, name)] == []
    known = ("name", "is_asynchronous")
    said = first_columns("What the class says")
    assert [name for name in said if name not in known and not hasattr(Strategy, name)] == []


@pytest.mark.parametrize("message", [text for text in first_columns("Common mistakes") if " " in text])
def test_quoted_messages_are_the_sources(message):
    words = [re.escape(word) for word in message.split()]
    # a message may be broken into several literals
    assert re.search(r"(?:\s|\"\s*f?\")+".join(words), SOURCE), message
