import pytest
import torch

from experts.fake_client import FakeClient, peer_at, plain_schema
from shoal.core import LoopThread
from shoal.experts.client.batch import BatchCall, sum_by_sample
from shoal.experts.client.directory import Directory, Routes
from shoal.experts.names import ExpertAddress, ExpertUid
from shoal.experts.settings import MixtureSettings


@pytest.fixture
def batch():
    """Three samples that go to (0, 1), (1, 2) and (1)."""
    with LoopThread("parallel-tests") as loop:
        client = FakeClient(loop)
        experts = tuple(
            ExpertAddress(ExpertUid("ffn", (index,)), (peer_at(index),), 0.0) for index in range(3)
        )
        for expert in experts:
            client.add(str(expert.uid), torch.nn.Identity(), plain_schema(2))
        routes = Routes(experts, torch.tensor([[0, 1], [2, 1], [1, -1]]), torch.tensor([[0], [1], [2]]))
        directory = Directory(client, "ffn", (3,))
        yield (
            client,
            BatchCall(directory, MixtureSettings(k_best=2), routes, plain_schema(2), torch.device("cpu")),
        )


def test_samples_are_grouped_by_expert(batch):
    client, round_ = batch
    x = torch.arange(6.0).view(3, 2)
    outputs = round_.forward([x], None, is_kept=False)
    assert sorted(client.calls) == [("forward", "ffn.0", 1), ("forward", "ffn.1", 3), ("forward", "ffn.2", 1)]
    assert [share.rows.tolist() for share in round_.answered] == [[0], [0, 1, 2], [1]]
    torch.testing.assert_close(outputs, [x[:1], x, x[1:2]])
    assert round_.is_answered.tolist() == [[True, True], [True, True], [True, False]]
    assert round_.last_call.num_samples == 3


def test_what_they_gave_is_added_up_by_sample(batch):
    client, round_ = batch
    client.faults = {"ffn.0": "lost"}
    x = torch.arange(6.0).view(3, 2)
    outputs = round_.forward([x], None, is_kept=False)
    weights = torch.tensor([[9.0, 1.0], [0.5, 2.0], [3.0, 9.0]])
    expected = torch.stack([1.0 * x[0], 2.5 * x[1], 3.0 * x[2]])
    torch.testing.assert_close(sum_by_sample(round_.answered, outputs, (3, 2), weights), expected)
    torch.testing.assert_close(
        sum_by_sample(round_.answered, outputs, (3, 2)), torch.stack([x[0], 2 * x[1], x[2]])
    )
    halves = [output.bfloat16() for output in outputs]
    assert sum_by_sample(round_.answered, halves, (3, 2)).dtype == torch.bfloat16
