import pytest
import torch

from shoal.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_random_batch_fits_its_network(name):
    entry = MODELS[name]
    x, y = entry.random_batch(batch_size=2)
    assert x.shape == (2, *entry.input_shape)
    assert entry.build()(x).shape == (2, entry.num_classes)
    assert y.shape == (2,)
    assert y.dtype == torch.int64
    assert 0 <= y.min() <= y.max() < entry.num_classes


def test_batches_follow_the_seed():
    entry = MODELS["small-mlp"]
    (x, y), (same_x, same_y), (other_x, _) = (entry.random_batch(seed) for seed in (1, 1, 2))
    assert torch.equal(x, same_x)
    assert torch.equal(y, same_y)
    assert not torch.equal(x, other_x)
    assert len(x) == entry.batch_size
