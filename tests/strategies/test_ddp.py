"""Torch's own DDP around a model that stays what it is."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shoal.core import UsageError
from shoal.group import Done, share
from shoal.group.cluster import torch_world
from shoal.group.solo import SoloGroup
from shoal.strategies.ddp import TorchDDP
from strategies import loops


def odd_models(group, arguments):
    differences = {}
    for name in ("branches", "tied", "many small"):
        model, optimizer = loops.make(name, group.rank)
        strategy = TorchDDP(group, find_unused_parameters=name == "branches")
        with strategy.attach(model, optimizer, stays=True):
            for step in range(4):
                optimizer.zero_grad()
                loops.loss_of(model, group.rank, step).backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        differences[name] = loops.distance(model, loops.plain(name, group.size, 4, clip=0.5))
        assert not dist.is_initialized()
        assert "forward" not in vars(model)
    return differences


def test_equals_one_worker_with_all_batches(workers):
    for differences in workers.run(odd_models, 2):
        assert max(differences.values()) < 1e-6, differences


def own_process_group(group, arguments):
    """Under the user's torch.distributed, with hooks of the user's, evaluation, and an exception."""
    folder = share(group, arguments["folder"])[0]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=group.rank, world_size=group.size)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = []
        model.register_forward_hook(lambda *_: calls.append("forward"))
        strategy = TorchDDP(group, should_broadcast_buffers=True)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 3) * (1 + group.rank)).square().mean().backward()
                optimizer.step()
            if group.rank == 0:
                with torch.no_grad():
                    model.eval()(torch.randn(4, 3))
                    model.train()(torch.randn(4, 3))
        with pytest.raises(ZeroDivisionError), strategy.attach(model, optimizer):
            raise ZeroDivisionError
        assert dist.is_initialized()
        assert "forward" not in vars(model)
        assert list(model.state_dict()) == list(
            nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
        )
        return [len(calls), [part.tolist() for part in model.parameters()]]
    finally:
        dist.destroy_process_group()


def test_a_users_own_process_group_and_hooks(workers, tmp_path):
    first, second = workers.run(own_process_group, 2, {"folder": str(tmp_path)})
    assert (first[0], second[0]) == (4, 2)
    assert first[1] == second[1]


def buffers_copied(group, arguments):
    """The bytes that the group sends in two steps, and whether the buffers are those of rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = TorchDDP(group, should_broadcast_buffers=True, local_steps=arguments["local_steps"])
    with strategy.attach(model, optimizer, stays=True):
        before = group.stats.sent_bytes
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3) * (1 + group.rank)).square().mean().backward()
            optimizer.step()
        return group.stats.sent_bytes - before


def test_buffers_are_copied_by_torch_or_by_the_session_and_not_by_both(workers):
    assert workers.run(buffers_copied, 2, {"local_steps": 1}) == [0, 0]
    assert any(workers.run(buffers_copied, 2, {"local_steps": 3}))


def test_what_torch_cannot_do_is_refused():
    with pytest.raises(UsageError, match="monitor"):
        TorchDDP(SoloGroup(), monitor=True)
    with pytest.raises(UsageError, match="no local steps"):
        TorchDDP(SoloGroup(), is_uneven=True, local_steps=2)


@pytest.mark.parametrize(
    ("gpus", "backend"), [(["a", "b"], "nccl"), (["a", "a"], "gloo"), (["a", ""], "gloo")]
)
def test_nccl_where_each_worker_has_a_gpu_of_its_own(monkeypatch, gpus, backend):
    group = SoloGroup()
    group.size = 2
    told = [torch.frombuffer(bytearray(msgspec.msgpack.encode(gpu)), dtype=torch.uint8) for gpu in gpus]
    monkeypatch.setattr(group, "all_gather", lambda own: Done(told))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    assert torch_world._backend(group, torch.device("cuda", 0)) == backend
