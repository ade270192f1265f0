import copy

import pytest
import torch
from torch import nn

from experts.fake_client import FakeClient, add_linear_experts, plain_schema
from shoal.core import LoopThread, UsageError
from shoal.experts.client.batch import NotEnoughExperts
from shoal.experts.mixture import SwitchMixtureOfExperts
from shoal.experts.schema import ExpertSchema, TensorSchema

UIDS = [f"ffn.{first}.{last}" for first in range(3) for last in range(4)]
GRID = (3, 4)


@pytest.fixture(scope="module")
def loop():
    with LoopThread("switch-tests") as loop:
        yield loop


@pytest.fixture
def client(loop):
    torch.manual_seed(0)
    return FakeClient(loop)


def local_switch(gate, modules, x):
    """Sample by sample; the output, and the expert of each."""
    first, second = (axis.softmax(1) for axis in gate.split(gate(x)))
    outputs, chosen = [], []
    for sample in range(len(x)):
        at, then = int(first[sample].argmax()), int(second[sample].argmax())
        answer = modules[f"ffn.{at}.{then}"](x[sample : sample + 1])[0]
        outputs.append(x[sample] + first[sample, at] * second[sample, then] * answer)
        chosen.append((at, then))
    return torch.stack(outputs), torch.tensor(chosen), (first, second)


def test_it_equals_a_local_switch(client):
    modules = add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.0)
    gate = copy.deepcopy(switch.gate)
    there = torch.randn(30, 6, requires_grad=True)
    here = there.detach().clone().requires_grad_()
    found, loss = switch(there)
    expected, chosen, probabilities = local_switch(gate, modules, here)
    torch.testing.assert_close(found, expected)
    expected_loss = 0.0
    for axis, probability in enumerate(probabilities):
        for coordinate in range(GRID[axis]):
            part = (chosen[:, axis] == coordinate).float().mean()
            expected_loss = expected_loss + GRID[axis] * part * probability[:, coordinate].mean()
    torch.testing.assert_close(loss, expected_loss)
    (found.square().sum() + loss).backward()
    (expected.square().sum() + expected_loss).backward()
    torch.testing.assert_close(there.grad, here.grad)
    torch.testing.assert_close(switch.gate.projection.weight.grad, gate.projection.weight.grad)
    assert {num for kind, _, num in client.calls} != {1}
    assert sum(num for kind, _, num in client.calls if kind == "forward") == 30


def test_the_loss_is_least_when_all_is_even(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.0)
    with torch.no_grad():
        switch.gate.projection.weight.zero_()
        switch.gate.projection.bias.zero_()
        _, even = switch(torch.randn(12, 6))
        assert float(even) == pytest.approx(2.0)
        switch.gate.projection.bias.copy_(torch.tensor([30.0, 0, 0, 0, 0, 30.0, 0]))
        _, collapsed = switch(torch.randn(12, 6))
    assert float(collapsed) == pytest.approx(3 + 4, abs=1e-3)


def test_descending_the_loss_balances_the_experts(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID)
    with torch.no_grad():
        switch.gate.projection.bias[0] += 2.0
    optimizer = torch.optim.SGD(switch.gate.parameters(), lr=0.3)
    x = torch.randn(128, 6)
    losses = []
    for _ in range(25):
        _, loss = switch(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert losses[-1] < 2.3


def test_noise_is_for_training_and_leaves_the_input_alone(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.5, keep_probability=0.5)
    x = torch.randn(30, 6)
    before = x.clone()
    with torch.no_grad():
        assert not torch.equal(switch(x)[0], switch(x)[0])
        assert torch.equal(x, before)
        utilization = [each.clone() for each in switch.utilization]
        switch.eval()
        assert torch.equal(switch(x)[0], switch(x)[0])
        assert torch.equal(switch.utilization[0], utilization[0])


def test_dropped_coordinates_are_not_used(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, keep_probability=1e-9)
    with torch.no_grad():
        for _ in range(4):
            client.calls.clear()
            _, loss = switch(torch.randn(30, 6))
            assert len(client.calls) == 1  # one coordinate of each axis is left
            assert float(loss) == pytest.approx(3 + 4)


def test_utilization_follows_each_axis(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.0)
    with torch.no_grad():
        switch.gate.projection.bias.copy_(torch.tensor([0, 90.0, 0, 0, 0, 0, 90.0]))
        switch(torch.randn(8, 6))
    torch.testing.assert_close(switch.utilization[0], torch.tensor([0.3, 0.4, 0.3]))
    torch.testing.assert_close(switch.utilization[1], torch.tensor([0.225, 0.225, 0.225, 0.325]))
    assert list(switch.state_dict())[:2] == ["utilization_0", "utilization_1"]


@pytest.mark.parametrize("fault", ["lost", "nan"])
def test_who_gets_no_answer_is_passed_on(client, fault):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.0)
    x = torch.randn(30, 6, requires_grad=True)
    whole, _ = switch(x)
    lost = switch.last_call.experts[0]
    client.faults = {lost.uid: fault}
    found, loss = switch(x)
    is_passed = (found == x).all(1)
    assert is_passed.sum() == lost.num_samples
    torch.testing.assert_close(found[~is_passed], whole[~is_passed])
    (found.sum() + loss).backward()
    assert (x.grad[is_passed] - 1).abs().max() < 0.5
    assert x.grad.isfinite().all()


def test_the_next_best_is_asked_where_an_answer_is_needed(client):
    add_linear_experts(client, UIDS)
    x = torch.randn(30, 6)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=0.0, k_min=1)
    switch(x)
    lost = switch.last_call.experts[0].peer
    client.faults = {uid: "lost" for uid, peers in client.dht.served.items() if peers == (lost,)}
    found, _ = switch(x)
    assert switch.last_call.num_failed == 0
    assert not (found == x).all(1).any()
    client.faults = dict.fromkeys(UIDS, "lost")
    found, _ = switch(x)
    assert torch.equal(found, x)
    raising = SwitchMixtureOfExperts(client, "ffn", 6, GRID, k_min=1, when_none_answers="raise")
    with pytest.raises(NotEnoughExperts) as caught:
        raising(x)
    assert raising.last_call is caught.value.last_call
    assert raising.last_call.num_failed > 0


def test_where_there_is_nobody_yet_all_is_passed_on(client):
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID)
    x = torch.randn(5, 6, requires_grad=True)
    found, loss = switch(x)
    assert torch.equal(found, x)
    (found.sum() + loss).backward()
    assert (x.grad == 1).all()
    add_linear_experts(client, UIDS)
    client.faults = dict.fromkeys(UIDS, "lost")  # they are declared, and dead
    found, loss = SwitchMixtureOfExperts(client, "ffn", 6, GRID)(x)
    assert torch.equal(found, x)
    assert loss.isfinite()


def test_the_output_has_the_dtype_of_the_input(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID)
    assert switch(torch.randn(5, 6).bfloat16())[0].dtype == torch.bfloat16


def test_who_fails_in_backward_stops_nobody(client):
    add_linear_experts(client, UIDS)
    switch = SwitchMixtureOfExperts(client, "ffn", 6, GRID)
    client.faults = dict.fromkeys(UIDS, "backward-lost")
    x = torch.randn(30, 6, requires_grad=True)
    switch(x)[0].sum().backward()
    assert x.grad.isfinite().all()
    assert all(call.backward_error for call in switch.last_call.experts)


def test_what_is_no_switch_is_refused(client):
    with pytest.raises(UsageError, match="one expert"):
        SwitchMixtureOfExperts(client, "ffn", 6, GRID, k_best=2)
    with pytest.raises(UsageError, match="jitter"):
        SwitchMixtureOfExperts(client, "ffn", 6, GRID, jitter=1.5)
    wide = ExpertSchema(
        (TensorSchema("float32", (6,)),), (), (TensorSchema("float32", (5,)),), is_single=True
    )
    for uid in UIDS:
        client.add(uid, nn.Linear(6, 5), wide)
    assert plain_schema(6) != wide
    with pytest.raises(UsageError, match="another shape"):
        SwitchMixtureOfExperts(client, "ffn", 6, GRID)(torch.randn(4, 6))
