"""One that takes the place of another of the same step: whenever it is stopped, one of them counts."""

import pytest
import torch

from shoal.strategies import checkpoints
from shoal.strategies.checkpoints import Manifest


def write(folder, step, value):
    staging = checkpoints.stage(folder, step)
    files = checkpoints.write_model(staging, {"x": torch.tensor([value])})
    return checkpoints.seal(staging, Manifest(step, 1, "all-reduce", files))


def test_what_is_replaced_counts_until_the_new_one_is_there(tmp_path, monkeypatch):
    write(tmp_path, 1, 1.0)
    path = write(tmp_path, 2, 2.0)
    rename = type(path).rename

    def stop_halfway(self, target):
        if target == path:
            raise OSError(5, "power failed")
        return rename(self, target)

    with monkeypatch.context() as patches:
        patches.setattr(type(path), "rename", stop_halfway)
        with pytest.raises(OSError, match="power failed"):
            write(tmp_path, 2, 3.0)
    assert not path.exists()
    assert checkpoints.newest(tmp_path).model()["x"].item() == 2.0
    write(tmp_path, 3, 4.0)
    (replaced,) = tmp_path.glob(".*-replaced")
    assert not (tmp_path / "step-00000001").exists()
    assert checkpoints.open_checkpoint(replaced).model()["x"].item() == 2.0
    write(tmp_path, 2, 5.0)
    assert not list(tmp_path.glob(".*-replaced"))
    assert checkpoints.newest(tmp_path).model()["x"].item() == 5.0
