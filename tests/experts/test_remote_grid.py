"""End to end over loopback: two servers that declare their experts in a DHT, and mixtures on top of them."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from experts.loopback import linear_expert
from shoal.dht import connect
from shoal.experts.mixture import MixtureOfExperts, SwitchMixtureOfExperts
from shoal.experts.names import declare_experts
from shoal.experts.server.server import ExpertServer

UIDS = [f"ffn.{first}.{last}" for first in range(2) for last in range(4)]


class Host:
    """A peer of the swarm that serves experts."""

    def __init__(self, closing, join, uids):
        self.experts = [linear_expert(uid) for uid in uids]
        self.swarm = closing.enter_context(connect(*join, listen="127.0.0.1:0"))
        self.server = ExpertServer(self.swarm.dht.endpoint, self.experts)
        self.swarm.run(self.server.__aenter__())
        self.is_up = True
        closing.callback(self.stop)

    def declare(self):
        uids = [expert.uid for expert in self.experts]
        declared = self.swarm.run(declare_experts(self.swarm.dht, uids, self.swarm.in_s(600)))
        assert all(declared.values())

    def stop(self):
        if self.is_up:
            self.is_up = False
            self.swarm.run(self.server.__aexit__(None, None, None))


@pytest.fixture
def world():
    """Two hosts, which have every second expert each, and a client."""
    with contextlib.ExitStack() as closing:
        first = Host(closing, (), UIDS[::2])
        second = Host(closing, (first.swarm.address,), UIDS[1::2])
        client = closing.enter_context(connect(first.swarm.address))
        first.declare()
        second.declare()
        yield first, second, client


def dense(gate, modules, x):
    """Every expert for every sample, weighed by the softmax over all."""
    first, second = gate.split(gate(x))
    logits = (first[:, :, None] + second[:, None, :]).flatten(1)
    answers = torch.stack([modules[uid](x) for uid in UIDS], 1)
    return (logits.softmax(1)[:, :, None] * answers).sum(1)


def test_a_training_step_through_two_servers(world):
    first, second, client = world
    modules = {
        expert.uid: copy.deepcopy(expert.module).requires_grad_()
        for expert in (*first.experts, *second.experts)
    }
    moe = MixtureOfExperts(client, "ffn", 8, (2, 4), k_best=8, beam_size=2)
    gate = copy.deepcopy(moe.gate)
    there = torch.randn(33, 8, requires_grad=True)
    here = there.detach().clone().requires_grad_()
    for _ in range(2):  # the second time with experts that have learnt
        there.grad = here.grad = None
        found, expected = moe(there), dense(gate, modules, here)
        torch.testing.assert_close(found, expected)
        found.square().mean().backward()
        expected.square().mean().backward()
        torch.testing.assert_close(there.grad, here.grad)
        torch.testing.assert_close(moe.gate.projection.weight.grad, gate.projection.weight.grad)
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        assert moe.last_call.num_answered == 8
        assert all(call.backward_seconds is not None for call in moe.last_call.experts)
    for expert in (*first.experts, *second.experts):
        torch.testing.assert_close(expert.module.weight, modules[expert.uid].weight)
    peers = {call.uid: call.peer.id for call in moe.last_call.experts}
    assert peers["ffn.0.0"] == first.swarm.peer_id
    assert peers["ffn.0.1"] == second.swarm.peer_id


def test_training_goes_on_when_a_server_is_gone(world):
    first, second, client = world
    moe = MixtureOfExperts(client, "ffn", 8, (2, 4), k_best=2, beam_size=2)
    switch = SwitchMixtureOfExperts(client, "ffn", 8, (2, 4))
    model = nn.Sequential(nn.Linear(8, 8), moe)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    losses = []
    for step in range(12):
        if step == 4:
            second.stop()
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {call.peer.id for call in moe.last_call.experts} == {first.swarm.peer_id}
    output, balance = switch(x)
    assert output.isfinite().all()
    assert balance.isfinite()
