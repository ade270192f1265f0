"""What `shoal top` says of the bytes of strategies that fetch, put and exchange: what is sent is received."""

import pytest
import torch

from cli.test_top_jobs import hide_other_jobs
from group.hosts import open_hosts, together
from shoal.cli.top import JobSource
from shoal.core import board
from shoal.strategies import make_strategy


@pytest.mark.parametrize("name", ["pair", "window", "neighbor"])
def test_what_a_strategy_sends_is_what_is_received(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(board, "NOTE_S", 0.0)
    hide_other_jobs(monkeypatch)
    found = []

    def train(group):
        group.run = "job"
        model = torch.nn.Linear(9, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with make_strategy(group, name).attach(model, optimizer, stays=True):
            for _ in range(8):
                model(torch.ones(1, 9)).sum().backward()
                optimizer.step()
            group.barrier().wait()
            if group.rank == 0:
                found.append(JobSource("job").look())
            group.barrier().wait()

    with open_hosts(3) as groups:
        together(groups, train)
    (shot,) = found
    moved = next(one for one in shot.views[0].matrices if one.title == "Who sends to whom")
    assert len(moved.names) == 3
    assert shot.result["sent_bytes"] == shot.result["received_bytes"] >= 8 * 40
