"""docs/integrations.md counts right, and shows what the examples do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
ROWS = dict(re.findall(r"^\| \[(.*?)\]\(#.*?\) \| (\d+) \|", PAGE, re.MULTILINE))
EXAMPLES = {"Hugging Face's Trainer": "trainer", "Lightning": "lightning", "Accelerate": "accelerate"}


def diff_of(name):
    title = name[0].upper() + name[1:]
    return re.search(rf"^## {title}\n.*?```diff\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)[1].splitlines()


@pytest.mark.parametrize("name", ROWS)
def test_lines_are_counted(name):
    added = [line for line in diff_of(name) if line.startswith("+")]
    removed = [line for line in diff_of(name) if line.startswith("-")]
    assert len(added) == int(ROWS[name])
    assert len(removed) < len(added)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_have_these_lines_and_no_others(name):
    added = [line[1:].strip() for line in diff_of(name) if line.startswith("+")]
    lines = (ROOT / "examples" / f"with_{EXAMPLES[name]}.py").read_text().split('"""', 2)[2].splitlines()
    ours = [line.strip() for line in lines if re.search(r"shoal|Shoal|\bgroup\b|\bstrategy\b|share\(", line)]
    assert sorted(set(ours) - {"from shoal.data import digits"}) == sorted(added)


def test_the_page_is_of_all_variables():
    from shoal.launch.settings import LaunchSettings, Meeting, variables_of_all, variables_of_one

    settings = LaunchSettings(("x",), 1, env="torchrun")
    variables = variables_of_all(settings, Meeting("127.0.0.1", 1))
    variables |= variables_of_one("torchrun", 0, 0, 1)
    own = {name for name in variables if name.startswith("SHOAL_")} - {"SHOAL_RUN", "SHOAL_RUN_SECRET"}
    assert own == set(re.findall(r"`(SHOAL_\w+)`", PAGE))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_loop_runs_before_and_after(tmp_path):
    lines = diff_of("a loop of your own")
    program = tmp_path / "loop.py"
    for sign, start in (("-", [sys.executable]), ("+", [sys.executable, "-m", "shoal", "run", "-np", "2"])):
        program.write_text("\n".join(line[1:] for line in lines if not line or line[0] in (" ", sign)))
        done = subprocess.run(
            [*start, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=80, check=False
        )
        assert done.returncode == 0, done.stderr
        assert set(torch.load(tmp_path / "digits.pt")) == {"1.weight", "1.bias", "3.weight", "3.bias"}
        (tmp_path / "digits.pt").unlink()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_sharded_loop_runs(tmp_path):
    program = tmp_path / "train.py"
    lines = diff_of("a model sharded by FSDP2")
    program.write_text("\n".join(line[1:] for line in lines if not line or line[0] in " +"))
    words = re.search(r"^shoal (run .*--workers-per-machine.*)$", PAGE, re.MULTILINE)[1].split()
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", EXAMPLES.values())
def test_the_examples_run(name, tmp_path):
    library = {"trainer": "transformers"}.get(name, name)
    pytest.importorskip(library, reason="pip install 'shoal[integrations]'")
    words = ["run", "-np", "2", "--strategy", "local-sgd", str(ROOT / "examples" / f"with_{name}.py")]
    command = [
        sys.executable,
        "-m",
        "shoal",
        *words,
        *([] if name == "accelerate" else [str(tmp_path / "out")]),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sign = {"trainer": r"eval_loss", "lightning": r"accuracy", "accelerate": r"epoch 3: loss"}[name]
    assert re.search(sign, done.stdout + done.stderr)
