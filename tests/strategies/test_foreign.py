"""Models that something else shares among the same workers, which `attach` refuses."""

import contextlib
import copy
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core import UsageError
from shoal.group import share
from shoal.group.cluster.torch_world import destroy_world
from shoal.group.solo import SoloGroup
from shoal.strategies import GradientAllReduce, LocalSGD, TorchDDP


@contextlib.contextmanager
def torch_world(group, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=group.rank, world_size=group.size)
    try:
        yield
    finally:
        destroy_world()


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def refusal(group, model, optimizer):
    with pytest.raises(UsageError) as refused:
        LocalSGD(group).attach(model, optimizer, stays=True)
    return str(refused.value)


def everything(group, arguments):
    """All in one world: bringing up gloo takes longer than what is looked at."""
    told = {}
    with torch_world(group, share(group, arguments["folder"])[0]):
        model, optimizer = make()
        with GradientAllReduce(group).attach(model, optimizer, stays=True):
            step(model, optimizer)
        told["a default process group alone"] = "fine"

        wrapped = DistributedDataParallel(model)
        told["wrapper"] = refusal(group, wrapped, optimizer)
        told["around"] = refusal(group, nn.Sequential(wrapped, nn.Linear(1, 1)), optimizer)
        told["inside"] = refusal(group, model, optimizer)
        del wrapped
        with LocalSGD(group).attach(model, optimizer, stays=True):
            step(model, optimizer)
        told["after the wrapper has gone"] = "fine"

        model, optimizer = make()
        with contextlib.suppress(UsageError), LocalSGD(group).attach(model, optimizer, stays=True):
            late = DistributedDataParallel(model)
            with pytest.raises(UsageError) as refused:
                step(late, optimizer)
            told["after attach"] = str(refused.value)
        del late

        alone = dist.new_group([group.rank], use_local_synchronization=True)
        model, optimizer = make()
        mesh_of_one = DistributedDataParallel(model, process_group=alone)
        with LocalSGD(group).attach(model, optimizer, stays=True):
            step(mesh_of_one, optimizer)
        told["a mesh of this worker alone"] = "fine"

        with TorchDDP(group).attach(model, optimizer, stays=True):
            step(model, optimizer)
        told["the strategy ddp"] = "fine"
    return told


def test_what_averages_the_same_model_is_refused(workers, tmp_path):
    for told in workers.run(everything, 2, {"folder": str(tmp_path)}, timeout_s=50):
        refused = {name: text for name, text in told.items() if text != "fine"}
        assert sorted(refused) == ["after attach", "around", "inside", "wrapper"]
        for text in refused.values():
            assert "DistributedDataParallel shares this model among 2 ranks" in text
            assert "shoal run --env shoal" in text
            assert "leave attach()" in text


def with_accelerate(group, arguments):
    model, optimizer = make()
    state = types.SimpleNamespace(_shared_state={"num_processes": 2})
    sys.modules["accelerate.state"] = types.SimpleNamespace(PartialState=state)
    try:
        text = refusal(group, model, optimizer)
    finally:
        del sys.modules["accelerate.state"]
    with LocalSGD(group).attach(model, optimizer, stays=True):
        step(model, optimizer)
    return text


def test_accelerate_with_several_processes_is_refused(workers):
    for text in workers.run(with_accelerate, 2):
        assert "Accelerate shares this model among 2 processes" in text


def test_a_group_of_one_may_have_what_it_likes():
    model, optimizer = make()
    with LocalSGD(SoloGroup()).attach(copy.deepcopy(model), optimizer):
        pass
