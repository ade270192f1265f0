"""On the CPU nothing is recorded, but all else is as on an accelerator."""

from __future__ import annotations

import torch

from shoal.simulate.mixture.model import MixtureModel, RecordedStep
from shoal.simulate.mixture.settings import MixtureRunSettings
from simulate.plain_mixture import TINY


def test_a_recorded_step_leaves_what_a_plain_one_does() -> None:
    settings = MixtureRunSettings(**TINY)
    plain, recorded = MixtureModel(settings), MixtureModel(settings)
    for model in (plain, recorded):
        model.gathered_rows = 1000
    step = RecordedStep(recorded, torch.Generator())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(1, settings.batch_size, 784, generator=generator)
        labels = torch.randint(10, (1, settings.batch_size), generator=generator)
        (wanted,), got = plain.gradients(x, labels), step.run(x, labels)
        assert torch.equal(got.loss, wanted.loss)
        assert all(map(torch.equal, got.trunk, wanted.trunk))
        assert torch.equal(got.experts, wanted.experts)
        rows = recorded.bank.pool.rows(got.rows), plain.bank.pool.rows(wanted.rows)
        assert torch.equal(*rows)
        for model, gradients in ((plain, wanted), (recorded, got)):
            model.update_trunk(gradients.trunk)
            model.bank.count_step()
            for layer in range(settings.num_layers):
                model.bank.deliver(*gradients.of_layer(layer))
            model.bank.decide()
