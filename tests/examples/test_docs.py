"""What the pages on training, failures, elastic runs and strategies show and quote is so."""

import re
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cli.run import run
from shoal.data import digits
from shoal.group import SoloGroup
from shoal.strategies import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
MACHINES_PAGE = (ROOT / "docs" / "several-machines.md").read_text()
FAILURES_PAGE = (ROOT / "docs" / "failures.md").read_text()
ELASTIC_PAGE = (ROOT / "docs" / "elastic.md").read_text()
STRATEGIES_PAGE = (ROOT / "docs" / "strategies.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def section(title, page=PAGE):
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE)[1]


def first_column(title, page=PAGE):
    rows = re.findall(r"^\| (.*?) \|", section(title, page), re.MULTILINE)
    return [quoted for row in rows[1:] for quoted in re.findall(r"`([^`]+)`", row)]


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = digits(train=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    names = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(images, labels), batch_size=36),
    }
    for block in re.findall(r"```python\n(.*?)```", PAGE + ELASTIC_PAGE, re.DOTALL):
        exec(compile(block, "training.md", "exec"), names)
    assert (tmp_path / "checkpoints" / "step-00000050" / "model.safetensors").exists()


def test_the_code_about_strategies_runs():
    names = {"shoal": shoal, "group": SoloGroup()}
    for block in re.findall(r"```python\n(.*?)```", STRATEGIES_PAGE, re.DOTALL):
        exec(compile(block, "strategies.md", "exec"), names)
    assert names["streaming"].options.codec == "int8"


def test_flags_are_those_of_the_program():
    app = typer.Typer()
    app.command()(run)
    known = {name for option in typer.main.get_command(app).params for name in option.opts}
    pages = PAGE + MACHINES_PAGE + FAILURES_PAGE + ELASTIC_PAGE
    page = re.sub(r"^(?:torchrun|srun|MASTER_ADDR|make|python) .*$", "", pages, flags=re.MULTILINE)
    lines = re.findall(r"^shoal run (.*?)(?: \S+\.py\b.*)?$", page, re.MULTILINE)
    assert len(lines) > 9
    used = [word for line in lines for word in line.split() if word.startswith("-")]
    assert set(used) - known == set()
    told = set(re.findall(r"`(--[a-z-]+)", MACHINES_PAGE + FAILURES_PAGE))
    assert told - known == {"--nnodes"}  # that one is torchrun's


@pytest.mark.parametrize("message", first_column("Troubleshooting", FAILURES_PAGE))
def test_quoted_messages_are_the_sources(message):
    for part in message.split("…"):
        words = [re.escape(word) for word in part.split()]
        # a message may be broken into several literals
        assert re.search(r"(?:\s|\"\s*f?\")+".join(words), SOURCE), part


def test_tables_name_all_strategies_and_options():
    assert first_column("Strategies")[: len(BUILT_IN)] == list(BUILT_IN)
    assert first_column("Where they run", STRATEGIES_PAGE) == list(BUILT_IN)
    told = section("Where they run", STRATEGIES_PAGE).replace("_", "-")
    aliases = [alias for row in BUILT_IN.values() for alias in row.aliases]
    assert [alias for alias in aliases if not re.search(rf"\b{alias}\b", told)] == []
    page = section("Options")
    for row in BUILT_IN.values():
        assert [name for name in row.options.__struct_fields__ if f"`{name}`" not in page] == []
    assert {"sync-sgd", "gradient-allreduce", "neighbor-allreduce", "async-sgd"} <= set(aliases)
