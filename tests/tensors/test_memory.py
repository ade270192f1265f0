import pytest
import torch

from shoal.tensors.memory import copy_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("num_rows", [3, 1 << 12])
def test_large_copies_are_those_of_torch(dtype, num_rows):
    source = torch.randn(num_rows, 8, 4, 4).to(dtype)
    for given in (
        source,
        source.contiguous(memory_format=torch.channels_last),
        source.transpose(0, 1),
        source[::2],
        source.conj(),
        source[:, :2],
    ):
        for out in (torch.zeros_like(given), torch.zeros(given.shape, dtype=dtype)):
            copy_into(out, given)
            assert torch.equal(out, given)
    out = torch.zeros(source.shape, dtype=torch.complex128)
    copy_into(out, source)
    assert torch.equal(out, source.to(torch.complex128))
