"""Other trainers, and a loop with a DDP of its own, under `shoal run`: each in the real library."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
PROGRAMS = {
    "program_of_trainer.py": "transformers",
    "program_of_lightning.py": "lightning",
    "program_of_accelerate.py": "accelerate",
    "program_like_nanogpt.py": "torch",
}
"""And the library that each wants."""
NUM_POINTS, NUM_EPOCHS, LOCAL_STEPS = 64, 3, 4
STRATEGIES = ("all-reduce", "neighbor", "local-sgd", "pair")
CASES = [{"name": name, "strategy": name, "batch_size": 8} for name in STRATEGIES]
CASES[2]["options"] = {"local_steps": LOCAL_STEPS}
ACCUMULATED = {"name": "accumulated", "strategy": "all-reduce", "num_accumulated": 2}
WORDS = ("-m", "shoal", "run", "--timeout", "200", "-np")


def start(program, folder, cases, *words):
    pytest.importorskip(PROGRAMS[program], reason="pip install 'shoal[integrations]'")
    command = [sys.executable, *WORDS, *words, str(HERE / program), str(folder), json.dumps(cases)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def train(program, folder, cases, num_workers):
    """What each worker tells of each case, by its name, in the order of their ranks."""
    done = start(program, folder, cases, str(num_workers))
    assert done.returncode == 0, done.stderr[-4000:]
    told = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    told = sorted(map(json.loads, told), key=lambda one: one["rank"])
    assert len(told) == num_workers * len(cases), done.stdout[-4000:]
    return {case["name"]: [one for one in told if one["name"] == case["name"]] for case in cases}


@pytest.fixture(scope="module", params=PROGRAMS)
def pair_and_alone(request, tmp_path_factory):
    """Two workers with each strategy, one process with the double batch, and the folder of the two."""
    folder = tmp_path_factory.mktemp("trained")
    pair = train(request.param, folder / "pair", [*CASES, {**ACCUMULATED, "batch_size": 4}], 2)
    cases = [{**CASES[0], "batch_size": 16}, {**ACCUMULATED, "batch_size": 8}]
    return pair, train(request.param, folder / "alone", cases, 1), folder / "pair"


def test_each_example_is_seen_once_an_epoch_by_one_worker(pair_and_alone):
    half = NUM_POINTS // 2
    for name, workers in pair_and_alone[0].items():
        counts = collections.Counter(number for worker in workers for number in worker["seen"])
        assert counts == dict.fromkeys(range(NUM_POINTS), NUM_EPOCHS), name
        for epoch in range(NUM_EPOCHS):
            first, second = ({*worker["seen"][epoch * half : (epoch + 1) * half]} for worker in workers)
            assert not first & second, name
        assert {worker["num_epochs"] for worker in workers} == {NUM_EPOCHS}
        assert {worker["steps"] for worker in workers} == {NUM_EPOCHS * NUM_POINTS // 16}


def test_workers_differ_between_rounds_and_not_after_them(pair_and_alone):
    told = {name: workers[0]["distances"] for name, workers in pair_and_alone[0].items()}
    rounds = told["local-sgd"][LOCAL_STEPS - 1 :: LOCAL_STEPS]
    assert max(rounds) < 1e-6
    assert min({*told["local-sgd"]} - {*rounds}) > 1e-4, "the workers never differ: something else shares"
    assert len(told["local-sgd"]) == NUM_EPOCHS * NUM_POINTS // 16
    assert max(told["all-reduce"] + told["accumulated"]) < 1e-6
    assert max(told["pair"]) > 1e-4


def test_all_reduce_equals_one_process_with_the_double_batch(pair_and_alone):
    pair, alone, _ = pair_and_alone
    for name, (single,) in alone.items():
        first, second = (worker["loss"] for worker in pair[name])
        assert first == second == pytest.approx(single["loss"], rel=0.01), name
        assert pair[name][0]["steps"] == single["steps"]


def test_rank_0_alone_saves(pair_and_alone):
    _, _, folder = pair_and_alone
    for case in CASES:
        saved = [path.name for path in (folder / case["name"]).rglob("*")]
        assert any(name == "saved-by-0" or name.endswith(".ckpt") for name in saved), saved
        assert "saved-by-1" not in saved
        # a second logger of Lightning's would have taken another version
        assert "version_1" not in saved


@pytest.mark.parametrize("program", ["program_of_trainer.py", "program_like_nanogpt.py"])
def test_with_torchruns_variables_both_would_share_and_that_is_refused(program, tmp_path):
    done = start(program, tmp_path, CASES[2:3], "2", "--env", "torchrun")
    assert done.returncode == 1
    assert "UsageError" in done.stderr
    assert "shoal run" in done.stderr
    assert "RESULT" not in done.stdout
