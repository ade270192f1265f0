import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """As in the processes that simulate: several would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
