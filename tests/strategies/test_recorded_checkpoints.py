"""Checkpoints that earlier versions wrote are taken up, and the run goes on as it did then, to the bit.

`checkpoints_of_VERSION.tar.xz` holds one checkpoint of each case, of two workers after three steps, and
`checkpoints_of_VERSION.json` digests of what each worker had when that version took it up, and after three
steps more. They are made once, and stay when the code changes:

    SHOAL_RECORD=1 .venv/bin/pytest tests/strategies/test_recorded_checkpoints.py

makes those of a version that has none yet. The digests hold where torch has its kernels for AVX2 or AVX512.
"""

import hashlib
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from recorded import VARIABLE
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import BUILT_IN, make_strategy

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor rounds otherwise than those that the checkpoints were made on",
)
FOLDER = Path(__file__).parent
NUM_WORKERS, SAVED_AT, NUM_STEPS = 2, 3, 6
CASES = {
    "all-reduce": {"monitor": True},
    "neighbor": {"topology": "ring", "order": "adapt-while-combine"},
    "pair": {},
    "sma": {},
    "local-sgd": {"local_steps": 2, "codec": "int8"},
    "diloco": {"local_steps": 2, "codec": "top-k:0.25"},
    "diloco, streaming": {"local_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5},
    "noloco": {"local_steps": 2},
    "sparse-loco": {"local_steps": 2, "density": 0.2},
    "push-sum": {},
    "window": {},
    "gradient-tracking": {},
    "exact-diffusion": {},
    "extra": {},
    "d2": {},
    "momentum": {},
    "choco": {"codec": "top-k:0.25"},
    "sgp": {},
    "relay": {},
    "parameter-server": {},
    "parameter-server, bounded": {"mode": "bounded", "staleness": 1},
    "staleness-aware": {},
}
YOUNG = ("noloco", "sparse-loco")
"""No version that was released has them; the next one that is recorded does."""
WITHOUT = ("ddp", "horovod", "hierarchical", "swarm")
"""They keep nothing of their own, need more than two workers on one machine, or live on real sockets."""
SERVED = ("parameter-server", "staleness-aware")
"""They have servers beside the workers, and run in virtual time."""
IN_TURN = ("pair", "push-sum", "window")
"""Who comes first is a matter of chance in these, unless one steps after the other."""
FORGETFUL = ("window",)
"""What neighbours have put here is no part of a checkpoint, and a run that was not stopped has it."""


class Weights(nn.Module):
    """17 numbers, and operations on single elements only: no BLAS has a part in it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))

    def forward(self, inputs):
        return torch.cat([self.one.flatten(), self.two]) * inputs


def seed_all():
    """All checkpoints then have the same random states, which compress to one."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class Run:
    """A worker's training; what it is given in a step depends on its rank and the step alone."""

    def __init__(self, group, case):
        seed_all()
        self.group, self.name = group, case.split(",")[0]
        self.model = Weights()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.strategy = make_strategy(group, self.name, **CASES[case])

    def attach(self):
        return self.strategy.attach(self.model, self.optimizer, stays=True)

    def train(self, until):
        while self.strategy.steps < until:
            generator = torch.Generator().manual_seed(10 * self.strategy.steps + self.group.rank)
            inputs, labels = torch.randint(1, 16, (2, 17), generator=generator).float()
            self.optimizer.zero_grad()
            (self.model(inputs / 16) - labels / 4).square().sum().backward()
            self.step()

    def step(self):
        if self.name not in IN_TURN:
            self.optimizer.step()
            return
        for turn in range(self.group.size):
            if turn == self.group.rank:
                self.optimizer.step()
            self.group.barrier().wait()

    def digest(self):
        """Of the bits of all parameters, and of their momenta where servers do not have them."""
        states = [] if self.name in SERVED else self.optimizer.state_dict()["state"].values()
        tensors = [*self.model.parameters(), *(state["momentum_buffer"] for state in states)]
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def saves(group, arguments):
    run = Run(group, arguments["case"])
    with run.attach():
        run.train(SAVED_AT)
        run.strategy.save(arguments["folder"])
        saved = run.digest()
        run.train(NUM_STEPS)
        return {"saved": saved, "at the end": run.digest()}


def resumes(group, arguments):
    run = Run(group, arguments["case"])
    run.strategy.load(arguments["folder"])
    with run.attach():
        assert run.strategy.steps == SAVED_AT
        taken_up = run.digest()
        run.train(NUM_STEPS)
        return {"saved": taken_up, "at the end": run.digest()}


def serves(group, arguments):
    run = Run(group, arguments["case"])
    while run.strategy.serve(run.model, run.optimizer):
        pass


def run_case(workers, function, case, folder):
    """What each worker tells, by rank."""
    arguments = {"case": case, "folder": str(folder)}
    if case.split(",")[0] not in SERVED:
        return workers.run(function, NUM_WORKERS, arguments)
    outcomes = run_exact(
        World(num_workers=NUM_WORKERS, num_servers=1),
        lambda worker: function(worker.group, arguments),
        lambda server: serves(server.group, arguments),
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes[:NUM_WORKERS]]


def file_of(version, ending):
    return FOLDER / f"checkpoints_of_{version}{ending}"


def record(workers, folder):
    """Make the files of this version."""
    archive, digests = file_of(shoal.__version__, ".tar.xz"), {}
    if archive.exists():
        pytest.fail(f"{archive.name} is there, and what it holds must stay readable.")
    for case in CASES:
        made = folder / case
        whole = run_case(workers, saves, case, made)
        digests[case] = run_case(workers, resumes, case, made)
        assert digests[case] == whole or case.split(",")[0] in FORGETFUL
    with tarfile.open(archive, "w:xz", preset=9) as file:
        for path in sorted(folder.rglob("*")):
            file.add(path, path.relative_to(folder), recursive=False, filter=anonymous)
    file_of(shoal.__version__, ".json").write_text(json.dumps(digests, indent=1) + "\n")


def anonymous(entry):
    """Without whose it is, and when it was made."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


@pytest.fixture(scope="module")
def checkpoints(workers, tmp_path_factory):
    """The folder with all checkpoints of each version, and their digests, by version."""
    if os.environ.get(VARIABLE):
        record(workers, tmp_path_factory.mktemp("recorded"))
    found = {}
    for path in sorted(FOLDER.glob("checkpoints_of_*.json")):
        version = path.stem.removeprefix("checkpoints_of_")
        folder = tmp_path_factory.mktemp("checkpoints")
        with tarfile.open(file_of(version, ".tar.xz")) as file:
            file.extractall(folder, filter="data")
        found[version] = folder, json.loads(path.read_text())
    return found


@pytest.mark.parametrize("case", YOUNG)
def test_a_run_goes_on_as_if_it_had_not_been_stopped(workers, tmp_path, case):
    whole = run_case(workers, saves, case, tmp_path)
    assert run_case(workers, resumes, case, tmp_path) == whole


@pytest.mark.parametrize("case", [case for case in CASES if case not in YOUNG])
def test_checkpoints_of_earlier_versions_are_taken_up(workers, checkpoints, case):
    versions = {version: kept for version, kept in checkpoints.items() if case in kept[1]}
    assert versions
    for version, (folder, digests) in versions.items():
        assert run_case(workers, resumes, case, folder / case) == digests[case], version


def test_every_strategy_that_keeps_something_has_a_checkpoint(checkpoints):
    assert {case.split(",")[0] for case in CASES} == set(BUILT_IN) - set(WITHOUT)
    assert {case for _, digests in checkpoints.values() for case in digests} == set(CASES) - set(YOUNG)
