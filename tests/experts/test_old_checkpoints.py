"""Experts that version 0.1.0 saved are restored, and replaced by checkpoints of today one by one.

`checkpoint_of_0.1.0` holds two checkpoints of an `nn.Linear(2, 1)` that Adam trained, after one update and
after two. It stays as it is when the code changes.
"""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.experts.expert import Expert
from shoal.experts.server.checkpoints import Checkpoints

FOLDER, UID = Path(__file__).parent / "checkpoint_of_0.1.0", "ffn.1.2"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    return tmp_path


def make_expert():
    torch.manual_seed(1)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return Expert(UID, module, ((torch.zeros(1, 2),), {}), optimizer=optimizer)


def weights(expert):
    return torch.cat([parameter.detach().flatten() for parameter in expert.module.parameters()])


def test_an_expert_of_0_1_0_goes_on_where_it_was(folder):
    assert Checkpoints(folder).uids() == [UID]
    saved = Checkpoints(folder).load(UID)
    assert (saved.uid, saved.num_updates) == (UID, 2)
    assert saved.about == {"expert_class": "ffn", "hidden_dim": 2}
    expert = make_expert()
    assert expert.load(saved.state) == []
    assert [expert.has_applied(bytes([number] * 16)) for number in (1, 2, 3)] == [True, True, False]
    assert torch.allclose(weights(expert), torch.tensor([-0.0249, 0.3597, -0.6020]), atol=1e-4)
    assert expert.optimizer.state_dict()["state"][0]["step"] == 2


def test_the_one_before_counts_where_the_newest_of_0_1_0_is_damaged(folder):
    newest = max((folder / UID).glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert Checkpoints(folder).load(UID).num_updates == 1


def test_checkpoints_of_today_take_the_place_of_those_of_0_1_0(folder):
    checkpoints, expert = Checkpoints(folder, num_kept=2), make_expert()
    expert.load(checkpoints.load(UID).state)
    assert checkpoints.num_updates(UID) is None  # so that it is saved at once
    checkpoints.save(UID, expert.state())
    assert checkpoints.load(UID).path.name == "step-00000002"
    assert len(list((folder / UID).glob("*.json"))) == 2
    (folder / UID / "notes.json").write_text("{}")
    expert.backward([torch.ones(1, 2)], [torch.ones(1, 1)])
    checkpoints.save(UID, expert.state())
    names = sorted(path.name for path in (folder / UID).iterdir())
    assert names == ["notes.json", "step-00000002", "step-00000003"]
