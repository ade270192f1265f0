"""Loops without `with`: what is not closed is closed when the program ends well, and only then."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("without_with_program.py")
pytestmark = pytest.mark.timeout(120)


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("strategy", "ending"),
    [
        ("local-sgd", "forgotten"),
        slowly("local-sgd", "closed"),
        slowly("all-reduce", "forgotten"),
        slowly("all-reduce", "closed"),
        slowly("ddp", "forgotten"),
    ],
)
def test_a_program_that_ends_well_ends_its_training_in_order(shoal_run, tmp_path, strategy, ending):
    run = shoal_run(
        "-np", 2, "--strategy", strategy, "--checkpoint", tmp_path / "run", PROGRAM, ending, tmp_path
    )
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    models = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert models[0] == pytest.approx(models[1])  # under local-sgd by the last round
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000006"]


@pytest.mark.parametrize(
    ("strategy", "ending", "code"),
    [
        ("all-reduce", "raised", 1),
        slowly("all-reduce", "exit 3", 3),
        slowly("local-sgd", "raised", 1),
    ],
)
def test_a_program_that_fails_is_lost_to_the_others(shoal_run, tmp_path, strategy, ending, code):
    run = shoal_run("-np", 2, "--strategy", strategy, PROGRAM, ending, tmp_path)
    _, errors = run.communicate()
    assert run.returncode == code, errors
    assert f"rank 0 failed with exit code {3 if ending == 'exit 3' else 1}" in errors
    assert not (tmp_path / "0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_a_worker_that_exits_early_without_an_error_leaves_in_order(shoal_run, tmp_path, strategy):
    run = shoal_run("-np", 2, "--strategy", strategy, PROGRAM, "exit 0", tmp_path)
    _, errors = run.communicate()
    assert run.returncode == 0, errors
    assert "lost" not in errors
    assert (tmp_path / "1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["forgotten", "closed", "raised"])
def test_alone(tmp_path, ending):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), ending, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == (ending == "raised")
    assert (tmp_path / "0").exists() == (ending != "raised")
    assert done.stderr.count("Traceback") == (ending == "raised")
