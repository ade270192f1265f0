"""Runs that keep checkpoints by themselves on machines without a common disk, here one for each worker."""

import threading

import pytest
import torch

from group.hosts import open_hosts, together
from shoal.core.run_options import RunOptions
from shoal.strategies import checkpointing, make_strategy

here = threading.local()


@pytest.fixture
def disks(tmp_path, monkeypatch):
    class Options:
        @staticmethod
        def from_environment():
            return RunOptions(checkpoint=str(tmp_path / f"disk-{here.rank}"))

    monkeypatch.setattr(checkpointing, "RunOptions", Options)
    return tmp_path


def train(group, name, num_steps):
    """How far it was at the start, and the parameters there and at the end."""
    here.rank = group.rank
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = make_strategy(group, name)
    with strategy.attach(model, optimizer):
        start, first = strategy.steps, model.weight.detach().clone()
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + group.rank)).sum().backward()
            optimizer.step()
        last = model.weight.detach().clone()
    return start, first, last


@pytest.mark.parametrize("name", ["all-reduce", "neighbor"])
def test_rank_0_saves_the_end_where_others_do_not_see_its_disk(disks, caplog, name):
    with open_hosts(2) as groups:
        before = together(groups, lambda group: train(group, name, 3))
    assert sorted(path.name for path in disks.glob("*/*")) == ["step-00000003"]
    assert not (disks / "disk-0" / "step-00000003" / "workers").exists()
    told = [record.getMessage() for record in caplog.records if "do not see" in record.getMessage()]
    (said,) = told
    assert said.startswith(f"ranks that do not see {disks / 'disk-0'} as rank 0 does: 1. Checkpoints there")
    caplog.clear()
    with open_hosts(2) as groups:
        after = together(groups, lambda group: train(group, name, 1))
    for start, first, _ in after:
        assert start == 3
        assert torch.equal(first, before[0][2])
    assert "rank 1 does not see" in caplog.text
    assert "left out" not in caplog.text


def test_a_session_in_another_group_saves_there(disks):
    """The old group is left: what is saved afterwards is agreed on in the new one."""
    with open_hosts(2) as old, open_hosts(2) as new:

        def work(group):
            here.rank = 0
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            strategy = make_strategy(group, "neighbor")
            with strategy.attach(model, optimizer) as session:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                session.change_group(new[group.rank])
                group.leave()
                path = strategy.save(disks / "asked")
                assert (path / "workers" / f"rank-{group.rank}.json").exists()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        together(old, work)
    assert [path.name for path in (disks / "asked").iterdir()] == ["step-00000001"]
    assert [path.name for path in (disks / "disk-0").iterdir()] == ["step-00000002"]
