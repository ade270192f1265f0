"""Collectives by torch.distributed: the same program on the CPU and, where there is one, on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "device_program.py"
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")


def run(num_workers, backend, device):
    words = [sys.executable, "-m", "shoal", "run", "-np", str(num_workers), str(PROGRAM), backend, device]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{num_workers} workers did it all" in ended.stdout


def test_gloo_on_the_cpu():
    run(2, "gloo", "cpu")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("num_workers", "backend"), [(1, "nccl"), (2, "gloo")])
def test_one_gpu(num_workers, backend):
    run(num_workers, backend, "cuda:0")


@pytest.mark.slow
@pytest.mark.gpu
@needs_two
def test_two_gpus():
    run(2, "nccl", "cuda")
