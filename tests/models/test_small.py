import pytest
import torch

from shoal.models import small_cnn, small_mlp


@pytest.mark.parametrize(("build", "num_parameters"), [(small_mlp, 2410), (small_cnn, 3842)])
def test_they_are_as_small_as_they_say(build, num_parameters):
    assert sum(parameter.numel() for parameter in build().parameters()) == num_parameters
    assert f"{num_parameters:,}" in build.__doc__


def test_the_convolutional_one_has_buffers():
    names = [name for name, _ in small_cnn().named_buffers()]
    assert "1.running_mean" in names
    assert torch.isfinite(small_cnn()(torch.rand(3, 1, 8, 8))).all()
