"""Every strategy's runs in virtual time, with faults and without, are those recorded, to the bit.

What is trained has whole numbers for data and is made of operations on single elements, so that neither the
number of threads nor a BLAS has a part in its gradients. What remains are the roundings of torch's kernels:
those for AVX2 and AVX512 give the same bits, those without fused multiply-add others. Where workers are
stacked, a small product of matrices comes to it. See `recorded` for recording anew.
"""

import hashlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from recorded import check_recorded, recorded
from shoal.simulate.contest import course_of, run_workers
from shoal.simulate.job import TrainingJob
from shoal.simulate.stacked.executor import RULES, run_stacked
from shoal.simulate.tasks import TASKS, Score, TrainingTask
from shoal.simulate.world import Compute, World
from shoal.strategies import BUILT_IN, canonical
from shoal.transport import FaultScript, Profile

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this processor rounds otherwise than those that the runs were recorded on",
)
RECORDED = Path(__file__).parent / "recorded_runs.json"
NUM_WORKERS, NUM_STEPS, EVAL_EVERY = 4, 12, 3
SHAPES = ((3, 4), (5,))
NUM_ELEMENTS = sum(map(math.prod, SHAPES))
OUTSIDE = ("ddp", "horovod", "swarm")
"""They talk to their peers by libraries of their own, which know nothing of virtual time."""
SLOW_LINES = Profile.parse(
    "[places.home]\nup_mbit_s = 0.2\ndown_mbit_s = 0.4\n"
    "[ways.default]\ndelay_ms = 3\njitter_ms = 2\nmbit_s = 0.1\nloss = 0.02"
)
SCRIPTS = {
    "without faults": None,
    "killed": '[[fault]]\nkind = "kill"\nat_s = 0.065\npeer = "rank:3"',
    "paused": '[[fault]]\nkind = "pause"\nat_s = 0.065\nfor_s = 0.1\npeer = "rank:3"',
    "parted": '[[fault]]\nkind = "partition"\nat_s = 0.065\nfor_s = 0.1\n'
    'between = [["rank:0", "rank:1"], ["rank:2", "rank:3"]]',
    "disturbed": '[[fault]]\nkind = "slow"\nat_s = 0.03\nfor_s = 0.1\nfactor = 3\npeer = "rank:1"\n'
    '[[fault]]\nkind = "drop"\nprobability = 0.2\nfor_steps = 6\n'
    '[[fault]]\nkind = "corrupt"\nprobability = 0.05\nfor_steps = 6\nlink = ["rank:0", "rank:2"]',
}
CASES = {
    "all-reduce": {},
    "all-reduce, two buckets": {"bucket_mib": 0.00007},
    "all-reduce, of parameters": {"local_steps": 2},
    "neighbor": {},
    "neighbor, one peer": {"topology": "one-peer-exponential", "global_average_every": 4},
    "neighbor, overlapped": {"topology": "star", "order": "adapt-while-combine"},
    "hierarchical": {"topology": "ring"},
    "hierarchical, overlapped": {"topology": "ring", "order": "adapt-while-combine"},
    "pair": {},
    "sma": {},
    "local-sgd": {"local_steps": 3},
    "local-sgd, coded": {"local_steps": 3, "codec": "int8", "average_momentum": True},
    "diloco": {"local_steps": 3},
    "diloco, streaming": {"local_steps": 4, "fragments": 2, "overlap_steps": 1, "mixing": 0.5},
    "noloco": {"local_steps": 3},
    "sparse-loco": {"local_steps": 3, "density": 0.3},
    "push-sum": {},
    "window": {},
    "window, barrier": {"force_barrier": True, "codec": "fp16"},
    "parameter-server": {},
    "parameter-server, pulled seldom": {"pull_every": 2},
    "parameter-server, bounded": {"mode": "bounded", "staleness": 1},
    "parameter-server, sync": {"mode": "sync", "num_aggregate": 3},
    "parameter-server, sync over lines": {"mode": "sync", "num_aggregate": 3},
    "gradient-tracking": {},
    "exact-diffusion": {},
    "extra": {},
    "d2": {},
    "momentum": {},
    "choco": {},
    "choco, int8": {"codec": "int8", "gamma": 0.8},
    "sgp": {},
    "relay": {},
    "staleness-aware": {},
}
AT_ONCE = ("parameter-server, sync",)
"""On links that cost nothing, so that the chunks of all workers come at once."""
STACKED = [name for name, options in CASES.items() if name.split(",")[0] in RULES and "codec" not in options]


class Weights(nn.Module):
    """`model(inputs)` is each weight times an input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (
            nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float32).view(shape) / 8)
            for shape in SHAPES
        )

    def forward(self, inputs):
        return torch.cat([self.one.flatten(), self.two]) * inputs


class Goals(TrainingTask):
    """Each worker has goals of its own in each step; a model is as good as it is near to those of nobody."""

    name = "quadratic"

    def model(self):
        return Weights()

    def batches(self, rank):
        generator = torch.Generator().manual_seed(100 * self.job.seed + rank)
        while True:
            inputs, labels = torch.randint(1, 16, (2, NUM_ELEMENTS), generator=generator).float()
            yield inputs / 16, labels / 4 + rank

    def loss(self, outputs, labels):
        return (outputs - labels).square().sum() / 2

    def evaluate(self, model):
        weights = itertools.chain(*(parameter.flatten().tolist() for parameter in model.parameters()))
        distance = math.fsum(abs(weight - 2) for weight in weights)
        return Score(distance, distance / NUM_ELEMENTS)


def has_servers(case):
    return case.startswith(("parameter-server", "staleness-aware"))


def job_of(case):
    return TrainingJob(
        task=Goals.name,
        strategy=case.split(",")[0],
        options=CASES[case],
        num_workers=NUM_WORKERS,
        steps=NUM_STEPS,
        eval_every=EVAL_EVERY,
        learning_rate=0.125,
        momentum=0.5,
        seed=3,
    )


def world_of(case, script=None):
    num_servers = 2 if case == "parameter-server" else 1
    return World(
        num_workers=NUM_WORKERS,
        num_servers=num_servers if has_servers(case) else 0,
        workers_per_machine=2,
        profile=Profile() if case in AT_ONCE else SLOW_LINES,
        compute=Compute(step_ms=10, factors={2: 2.0}),
        faults=None if script is None else FaultScript.parse(script),
        seed=5,
    )


def digest(*parts):
    """Of numbers by their exact values, and of bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
        found.update(b";")
    return found.hexdigest()[:16]


def told_of(task, logs, served=None, broken=""):
    """What of a run must stay; each part by itself, so that one sees which has changed."""
    course = course_of(task, logs, served, broken)
    snapshots = [(log.rank, snapshot) for log in logs for snapshot in log.snapshots]
    return {
        "parameters": digest(
            *(tensor.numpy().tobytes() for _, snapshot in snapshots for tensor in snapshot.tensors)
        ),
        "times": digest(*((rank, each.step, each.at_s) for rank, each in snapshots)),
        "bytes": digest(*((rank, each.sent_bytes, each.received_bytes) for rank, each in snapshots)),
        "waited": digest(*(log.waited_s for log in logs)),
        "losses": digest(*((each.step, each.at_s, each.loss, each.worst) for each in course.moments)),
        "staleness": digest(course.staleness),
        "steps": [log.snapshots[-1].step if log.snapshots else None for log in logs],
        "ended_at_s": {str(log.rank): log.ended_at_s for log in logs if log.ended_at_s is not None},
        "moved_bytes": course.moments[-1].moved_bytes if course.moments else None,
        "seconds": course.moments[-1].at_s if course.moments else None,
    }


def run_case(case, script):
    task = Goals(job_of(case))
    ran = run_workers(task, world_of(case, script))
    return told_of(task, ran.logs, ran.served, ran.broken)


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_each_strategy_is_the_one_recorded(case):
    found = {name: run_case(case, script) for name, script in SCRIPTS.items()}
    assert found["without faults"]["steps"] == [NUM_STEPS] * NUM_WORKERS
    different = {str(each) for each in found.values()}
    # a script that does nothing would pin nothing; workers with a server do not need each other
    assert len(different) == len(SCRIPTS) - has_servers(case)
    check_recorded(RECORDED, case, found)


@pytest.mark.parametrize("case", STACKED)
def test_a_stacked_run_is_the_one_recorded(case, monkeypatch):
    monkeypatch.setitem(TASKS, Goals.name, Goals)  # jobs name their tasks
    job = job_of(case)
    check_recorded(RECORDED, f"stacked {case}", told_of(Goals(job), run_stacked(job, world_of(case))))


def test_every_strategy_that_can_be_simulated_is_recorded():
    assert {canonical(case.split(",")[0]) for case in CASES} == set(BUILT_IN) - set(OUTSIDE)
    assert {case.split(",")[0] for case in STACKED} == set(RULES)
    assert set(recorded(RECORDED)) == {*CASES, *(f"stacked {case}" for case in STACKED)}
