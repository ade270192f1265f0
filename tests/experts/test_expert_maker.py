import pytest
import torch

from shoal.core import UsageError
from shoal.experts.config import HostingConfig
from shoal.experts.server.assignment import ExpertMaker
from shoal.experts.server.checkpoints import Checkpoints


def maker(folder=None, **fields):
    return ExpertMaker(HostingConfig(hidden_dim=4, **fields), None if folder is None else Checkpoints(folder))


def weights(expert):
    return torch.cat([parameter.detach().flatten() for parameter in expert.module.parameters()])


def test_first_weights_depend_on_seed_and_uid_alone():
    first = weights(maker().new("ffn.1"))
    torch.rand(3)
    assert torch.equal(weights(maker().make("ffn.1")), first)
    assert not torch.equal(weights(maker().new("ffn.2")), first)
    assert not torch.equal(weights(maker(seed=1).new("ffn.1")), first)


def test_experts_are_trained_as_the_configuration_says():
    expert = maker(
        optimizer="sgd",
        lr=0.5,
        scheduler="linear",
        num_warmup_steps=1,
        num_training_steps=4,
        max_grad_norm=2.0,
    ).new("ffn.1")
    assert isinstance(expert.optimizer, torch.optim.SGD)
    assert expert.optimizer.param_groups[0]["initial_lr"] == 0.5
    assert expert.scheduler is not None
    assert expert.max_grad_norm == 2.0
    assert maker(optimizer="none").new("ffn.1").optimizer is None


def test_what_was_saved_is_restored(tmp_path):
    making = maker(tmp_path)
    expert = making.make("ffn.1")
    assert making.saved_uids() == []
    expert.backward([torch.ones(2, 4)], [torch.ones(2, 4)])
    Checkpoints(tmp_path).save("ffn.1", expert.state(), making.about)
    assert making.saved_uids() == ["ffn.1"]
    again = maker(tmp_path, seed=9).make("ffn.1")
    assert torch.equal(weights(again), weights(expert))
    assert again.num_updates == 1


def test_experts_of_another_kind_are_refused(tmp_path):
    making = maker(tmp_path)
    Checkpoints(tmp_path).save("ffn.1", making.new("ffn.1").state(), making.about)
    with pytest.raises(UsageError, match="was saved with expert_class ffn, not lah-ffn"):
        maker(tmp_path, expert_class="lah_ffn").make("ffn.1")


def test_a_class_that_nobody_knows_is_refused_before_anything_is_made():
    with pytest.raises(UsageError, match="'fnn' is not known"):
        maker(expert_class="fnn")
