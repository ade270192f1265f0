"""Against a mixture of the same experts that is computed here."""

import asyncio
import copy
import random

import msgspec
import pytest
import torch
from torch import nn

from experts.fake_client import FakeClient, add_linear_experts, peer_at, plain_schema
from shoal.core import SYSTEM_CLOCK, LoopThread, UsageError
from shoal.core.rates import FailureBackoff
from shoal.experts.client.batch import NotEnoughExperts
from shoal.experts.mixture import MixtureOfExperts
from shoal.experts.schema import ExpertSchema, TensorSchema

UIDS = [f"ffn.{first}.{last}" for first in range(3) for last in range(2)]
QUICK = {"timeout_after_k_min_s": 0.05}


@pytest.fixture(scope="module")
def loop():
    with LoopThread("mixture-tests") as loop:
        yield loop


@pytest.fixture
def client(loop):
    torch.manual_seed(0)
    return FakeClient(loop)


def local_mixture(gate, modules, x, k, left_out=(), run=lambda module, rows: module(rows)):
    """Sample by sample."""
    first, second = gate.split(gate(x))
    mixed = []
    for sample in range(len(x)):
        logits = {}
        for uid in modules:
            at, then = map(int, uid.split(".")[1:])
            logits[uid] = first[sample, at] + second[sample, then]
        best = sorted(logits, key=lambda uid: -logits[uid].item())[:k]
        best = [uid for uid in best if uid not in left_out]
        weights = torch.stack([logits[uid] for uid in best]).softmax(0)
        answers = torch.stack([run(modules[uid], x[sample : sample + 1])[0] for uid in best])
        mixed.append((weights.view(-1, *[1] * (answers.dim() - 1)) * answers).sum(0))
    return torch.stack(mixed)


def gradients(module_list):
    return [parameter.grad for module in module_list for parameter in module.parameters()]


def compare(client, moe, modules, x, k, left_out=(), **tolerance):
    """Outputs, and gradients of the input, the gate and every expert."""
    gate = copy.deepcopy(moe.gate)
    here = x.detach().clone().requires_grad_()
    there = x.detach().clone().requires_grad_()
    factor = torch.randn(len(x), x.shape[-1])
    expected = local_mixture(gate, modules, here, k, left_out)
    found = moe(there)
    torch.testing.assert_close(found, expected, **tolerance)
    (expected * factor).sum().backward()
    (found * factor).sum().backward()
    torch.testing.assert_close(there.grad, here.grad, **tolerance)
    torch.testing.assert_close(gradients([moe.gate]), gradients([gate]), **tolerance)
    theirs = gradients(client.modules[uid] for uid in modules if uid not in left_out)
    torch.testing.assert_close(theirs, gradients(modules[uid] for uid in modules if uid not in left_out))


def test_it_equals_a_local_mixture(client):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=3, beam_size=3)
    compare(client, moe, modules, torch.randn(17, 6), 3)


def test_each_expert_is_called_once_with_all_its_samples(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    moe(torch.randn(50, 6)).sum().backward()
    assert sorted(client.calls) == sorted((kind, uid, 50) for kind in ("forward", "backward") for uid in UIDS)


def test_a_step_asks_nothing_of_the_dht(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2)
    moe(torch.randn(50, 6))
    client.dht.num_asked = 0
    moe(torch.randn(50, 6)).sum().backward()
    assert client.dht.num_asked == 0
    assert moe.last_call.search_seconds < moe.last_call.seconds


def test_an_input_that_is_not_contiguous(client):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    compare(client, moe, modules, torch.randn(6, 9).t(), 2)


def test_experts_in_bf16(client):
    modules = add_linear_experts(client, UIDS, dtype=torch.bfloat16)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    x = torch.randn(9, 6).bfloat16().requires_grad_()
    expected = local_mixture(moe.gate, modules, x.detach(), 2)
    found = moe(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.02)
    found.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.isfinite().all()


def test_a_model_in_bf16_and_experts_in_float32(client):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    x = torch.randn(9, 6).bfloat16()
    expected = local_mixture(moe.gate, modules, x.float(), 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = moe(x)
    torch.testing.assert_close(found, expected.bfloat16(), atol=0.05, rtol=0.05)
    moe.settings = moe.experts.settings = moe.settings.but(when_none_answers="zeros", num_tries=1)
    client.faults = dict.fromkeys(UIDS, "lost")
    assert moe(x).dtype == torch.bfloat16


class TwoInputs(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.linear = nn.Linear(num_features, num_features)

    def forward(self, x, scale, *, mask):
        y = self.linear(x) * scale[:, None, None] * ~mask[:, :, None]
        return y, y.sum(2)


def test_several_inputs_keywords_and_outputs(client):
    schema = ExpertSchema(
        inputs=(TensorSchema("float32", (5, 6)), TensorSchema("float32", ()), TensorSchema("bool", (5,))),
        keyword_names=("mask",),
        outputs=(TensorSchema("float32", (5, 6)), TensorSchema("float32", (5,))),
        is_single=False,
    )
    for uid in UIDS:
        client.add(uid, TwoInputs(6), schema)
    modules = {uid: copy.deepcopy(client.modules[uid]) for uid in UIDS}
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    x, scale = torch.randn(4, 5, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    mask = torch.rand(4, 5) > 0.5
    outputs = moe(x, scale, mask=mask)
    assert isinstance(outputs, tuple)
    (outputs[0].square().sum() + outputs[1].sum()).backward()
    there, x.grad, scale.grad = (x.grad, scale.grad), None, None
    gate = copy.deepcopy(moe.gate)
    for index in range(2):

        def run(module, rows, index=index):
            at = int((x[:, None] == rows).all(-1).all(-1).nonzero()[0, 0])
            return module(rows, scale[at : at + 1], mask=mask[at : at + 1])[index]

        expected = local_mixture(gate, modules, x, 2, run=run)
        torch.testing.assert_close(outputs[index], expected)
        (expected.square() if index == 0 else expected).sum().backward()
    torch.testing.assert_close(there, (x.grad, scale.grad))
    with pytest.raises(UsageError, match="mask"):
        moe(x, scale)
    with pytest.raises(UsageError, match="input 1 is"):
        moe(x, scale[:, None], mask=mask)


def test_experts_learn_though_no_input_needs_a_gradient(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2)
    moe(torch.randn(9, 6)).sum().backward()
    assert {kind for kind, *_ in client.calls} == {"forward", "backward"}
    assert moe.gate.projection.weight.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(client, mode):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    x = torch.randn(9, 6)
    with mode():
        found = moe(x)
        torch.testing.assert_close(found, local_mixture(moe.gate, modules, x, 2))
    assert not found.requires_grad
    assert client.num_kept == 0


@pytest.mark.parametrize("fault", ["lost", "refuse", "hang", "nan", "shape"])
def test_who_fails_is_left_out_and_named(client, fault):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6, **QUICK)
    moe(torch.randn(2, 6))
    client.faults = {"ffn.1.0": fault}
    compare(client, moe, modules, torch.randn(9, 6), 6, left_out=["ffn.1.0"])
    (failed,) = [call for call in moe.last_call.experts if not call.is_answered]
    assert (failed.uid, failed.num_samples) == ("ffn.1.0", 9)
    assert failed.error
    assert (moe.last_call.num_asked, moe.last_call.num_answered) == (6, 5)
    client.calls.clear()
    moe(torch.randn(9, 6))  # it is not asked again at once, unless it was only too slow for the others
    assert ("ffn.1.0" in [uid for _, uid, _ in client.calls]) == (fault == "hang")


def test_a_replica_that_answers_nonsense_is_passed_over(client):
    modules = add_linear_experts(client, UIDS)
    client.dht.declare("ffn.1.0", peer_at(8), peer_at(9))
    client.faults = {("ffn.1.0", peer_at(8)): "nan"}
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    compare(client, moe, modules, torch.randn(9, 6), 6)
    (call,) = [call for call in moe.last_call.experts if call.uid == "ffn.1.0"]
    assert (call.peer, call.error) == (peer_at(9), None)
    client.faults["ffn.1.0", peer_at(9)] = "nan"
    moe(torch.randn(9, 6))
    (call,) = [call for call in moe.last_call.experts if call.uid == "ffn.1.0"]
    assert call.peer in (peer_at(8), peer_at(9))
    assert "NaN or infinity" in call.error


def test_what_the_client_remembers_of_a_forward_comes_back_to_it(client, monkeypatch):
    """As of a batch that went in parts."""
    add_linear_experts(client, UIDS)
    forward, backward = client.forward, client.backward
    parts = {}

    async def in_parts(uid, *args, **options):
        forwarded = await forward(uid, *args, **options)
        parts[uid] = (msgspec.structs.replace(forwarded, outputs=[]),)
        return msgspec.structs.replace(forwarded, parts=parts[uid])

    async def check_parts(forwarded, *args, **options):
        assert forwarded.parts is parts.pop(forwarded.uid)
        return await backward(forwarded, *args, **options)

    monkeypatch.setattr(client, "forward", in_parts)
    monkeypatch.setattr(client, "backward", check_parts)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    moe(torch.randn(9, 6)).sum().backward()
    assert parts == {}


def test_a_straggler_is_no_lost_peer(client, monkeypatch):
    add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index // 2))
    client.faults = {"ffn.1.0": "hang"}
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    monkeypatch.setattr("shoal.experts.client.batch._QUIET_S", 0.05)
    for left_out in (0, 1):
        moe(torch.randn(2, 6))
        assert moe.last_call.num_asked == 6 - left_out  # not ffn.1.1, which is at the same peer


def test_who_is_slow_and_alone_is_waited_for(client, monkeypatch):
    add_linear_experts(client, ["ffn.0", "ffn.1"])
    moe = MixtureOfExperts(client, "ffn", 6, (2,), k_best=1, forward_timeout_s=30, **QUICK)
    with torch.no_grad():
        moe.gate.projection.weight.copy_(torch.eye(2, 6))
        moe.gate.projection.bias.zero_()
    x = torch.eye(2, 6)
    moe.experts.directory._backoff = FailureBackoff(first_s=1e-6)
    client.faults = {"ffn.1": "lost"}
    with pytest.raises(NotEnoughExperts):
        moe(x)
    client.faults.clear()
    forward = client.forward

    async def slow(uid, *args, **options):
        if uid == "ffn.1":
            await asyncio.sleep(0.15)
        return await forward(uid, *args, **options)

    monkeypatch.setattr(client, "forward", slow)
    moe(x)
    assert (moe.last_call.num_asked, moe.last_call.num_answered) == (2, 2)


def test_when_a_server_is_lost_steps_go_on(client):
    """Though its experts fill most rows of the grid, and fewer are looked at than there are."""
    places = random.Random(0).sample([(first, last) for first in range(32) for last in range(32)], 48)
    uids = [f"ffn.{first}.{last}" for first, last in places]
    add_linear_experts(client, uids)
    moe = MixtureOfExperts(client, "ffn", 6, (32, 32), k_best=2)
    moe(torch.randn(256, 6))
    client.faults = dict.fromkeys(uids[::3] + uids[1::3], "lost")
    for _ in range(4):
        moe(torch.randn(256, 6))
        assert all(call.uid in uids[2::3] for call in moe.last_call.experts if call.is_answered)


@pytest.mark.parametrize("fault", ["backward-lost", "backward-hang", "backward-nan", "backward-refuse"])
def test_who_fails_in_backward_gives_no_gradient(client, fault):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6, **QUICK)
    gate = copy.deepcopy(moe.gate)
    client.faults = {"ffn.1.0": fault}
    x = torch.randn(9, 6, requires_grad=True)
    moe(x).sum().backward()
    (failed,) = [call for call in moe.last_call.experts if call.backward_error]
    assert failed.uid == "ffn.1.0"
    here = x.detach().clone().requires_grad_()
    dead = copy.deepcopy(modules)
    run = lambda module, rows: module(rows.detach() if module is dead["ffn.1.0"] else rows)  # noqa: E731
    local_mixture(gate, dead, here, 6, run=run).sum().backward()
    torch.testing.assert_close(x.grad, here.grad)
    torch.testing.assert_close(gradients([moe.gate]), gradients([gate]))


def test_a_sample_without_answers_raises_and_says_why(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=1, num_tries=1)
    x = torch.randn(40, 6)
    moe(x)
    lost = moe.last_call.experts[0]
    client.faults = {lost.uid: "lost"}
    with pytest.raises(NotEnoughExperts, match=f"{lost.num_samples} of 40 samples") as caught:
        moe(x)
    assert lost.uid in str(caught.value)
    assert str(lost.peer) in str(caught.value)
    assert caught.value.last_call is moe.last_call


def test_the_next_best_are_asked_before_that(client):
    modules = add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index))
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=1, beam_size=3)
    x = torch.randn(40, 6)
    moe(x)
    lost = moe.last_call.experts[0].uid
    client.faults = {lost: "lost"}
    others = {uid: module for uid, module in modules.items() if uid != lost}
    torch.testing.assert_close(moe(x), local_mixture(moe.gate, others, x, 1))
    assert moe.last_call.num_failed == 0


def test_every_sample_needs_its_own_answers(client):
    """However many answers the batch has in all."""
    add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index))
    moe = MixtureOfExperts(
        client, "ffn", 6, (3, 2), k_best=2, k_min=2, num_tries=1, when_none_answers="zeros"
    )
    x = torch.randn(40, 6)
    moe(x)
    lost = moe.last_call.experts[0]
    client.faults = {lost.uid: "lost"}
    with pytest.raises(NotEnoughExperts, match="fewer than 2 answers"):
        moe(x)
    assert lost.num_samples < 40


def test_zeros_by_option(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=1, num_tries=1, when_none_answers="zeros")
    x = torch.randn(40, 6, requires_grad=True)
    whole = moe(x)
    lost = moe.last_call.experts[0]
    client.faults = {lost.uid: "lost"}
    found = moe(x)
    is_zero = (found == 0).all(1)
    assert is_zero.sum() == lost.num_samples
    torch.testing.assert_close(found[~is_zero], whole[~is_zero])
    found.square().sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[is_zero] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients([moe.gate]))


def test_zeros_when_nobody_is_left(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, when_none_answers="zeros")
    x = torch.randn(4, 6, requires_grad=True)
    moe(x)
    client.faults = dict.fromkeys(UIDS, "lost")
    found = moe(x)
    assert (found == 0).all()
    (found + x).sum().backward()
    assert (x.grad == 1).all()
    client.faults = dict.fromkeys(UIDS, "nan")
    assert (moe(x) == 0).all()


def test_too_few_gradients_raise(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, backward_k_min=2)
    client.faults = dict.fromkeys(UIDS[:3], "backward-lost")
    found = moe(torch.randn(20, 6))
    with pytest.raises(NotEnoughExperts, match="fewer than 2 gradients"):
        found.sum().backward()


def test_a_gradient_that_is_not_finite_is_sent_to_nobody(client):
    """As in mixed precision, whose scaler looks for it in the end."""
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    x = torch.randn(4, 6, requires_grad=True)
    (moe(x) * torch.inf).sum().backward()
    assert not any(kind == "backward" for kind, *_ in client.calls)
    assert x.grad.isnan().all()


def test_who_has_failed_is_tried_again_without_being_relied_on(client):
    """However long its own deadline is: a server that is stopped holds nobody up twice who has another."""
    modules = add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index))
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3, **QUICK)
    directory = moe.experts.directory
    directory._backoff = FailureBackoff(first_s=0.2)
    x = torch.randn(40, 6)
    moe(x)
    lost = moe.last_call.experts[0].uid
    client.faults = {lost: "lost"}
    moe(x)
    while directory._backoff.has_any(SYSTEM_CLOCK.now_s()):
        pass
    client.faults = {lost: "hang"}
    client.calls.clear()
    torch.testing.assert_close(moe(x), local_mixture(moe.gate, modules, x, 2, left_out=[lost]))
    assert lost in [uid for _, uid, _ in client.calls]


def test_a_deadline_bounds_all_tries(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, forward_timeout_s=0.1)
    x = torch.randn(4, 6)
    moe(x)
    client.faults = dict.fromkeys(UIDS, "hang")
    with pytest.raises(NotEnoughExperts, match="left behind"):
        moe(x)
    assert 0.1 <= moe.last_call.seconds < 5


def test_a_deadline_bounds_the_search_and_what_is_asked_first(client, monkeypatch):
    add_linear_experts(client, UIDS)

    async def never(*args, **options):
        await asyncio.sleep(3600)

    options = {"k_best": 2, "forward_timeout_s": 0.1}
    with monkeypatch.context() as patched:
        patched.setattr(client, "schema_of", never)
        moe = MixtureOfExperts(client, "ffn", 6, (3, 2), **options)
        with pytest.raises(NotEnoughExperts, match="DeadlineExceeded"):
            moe(torch.randn(4, 6))
        assert moe.last_call.seconds < 5
        assert moe.last_call.num_failed == moe.last_call.num_asked > 0
    monkeypatch.setattr(client.dht, "get_coordinates", never)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), **options)
    with pytest.raises(NotEnoughExperts, match="none was found in time"):
        moe(torch.randn(4, 6))
    assert 0.1 <= moe.last_call.seconds < 5


def test_of_what_they_take_and_give_each_peer_has_one_vote(client):
    """However many experts it has."""
    modules = add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(min(index, 2)))
    for uid in UIDS[2:]:
        client.schemas[uid] = plain_schema(7)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    x = torch.randn(5, 6)
    torch.testing.assert_close(moe(x), local_mixture(moe.gate, modules, x, 6, left_out=UIDS[2:]))


def test_what_most_do_not_follow_is_dropped(client):
    modules = add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index))
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    moe(torch.randn(5, 6))
    wide = ExpertSchema(
        (TensorSchema("float32", (6,)),), (), (TensorSchema("float32", (8,)),), is_single=True
    )
    modules = {uid: nn.Linear(6, 8) for uid in UIDS}
    for uid in UIDS:
        client.add(uid, modules[uid], wide, *client.dht.served[uid])
    x = torch.randn(5, 6)
    torch.testing.assert_close(moe(x), local_mixture(moe.gate, modules, x, 6))
    with pytest.raises(UsageError, match="input 0 is"):
        moe(torch.randn(5, 3, 6))
    assert moe.last_call.experts == []
    assert moe(x).shape == (5, 8)


def test_what_most_experts_take_and_give_counts(client):
    """Not what the first one says."""
    modules = add_linear_experts(client, UIDS, peer_of=lambda index: peer_at(index))
    for uid in UIDS[:2]:
        client.schemas[uid] = plain_schema(7)
        client.modules[uid] = nn.Linear(7, 7)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=6)
    x = torch.randn(5, 6)
    torch.testing.assert_close(moe(x), local_mixture(moe.gate, modules, x, 6, left_out=UIDS[:2]))
    assert sorted(call.uid for call in moe.last_call.experts if call.error) == UIDS[:2]


def test_no_experts_at_all(client):
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2))
    with pytest.raises(NotEnoughExperts, match="none is declared"):
        moe(torch.randn(4, 6))
    add_linear_experts(client, UIDS[:1])
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_min=2)
    with pytest.raises(NotEnoughExperts, match="fewer than 2 answers"):
        moe(torch.randn(4, 6))
    assert client.calls == []


def test_an_input_that_is_not_finite_is_nobodys_failure(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2))
    x = torch.randn(4, 6)
    x[2, 2] = torch.nan
    with pytest.raises(UsageError, match="NaN or infinity"):
        moe(x)
    assert client.calls == []


def test_a_copy_calls_the_same_experts(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2))
    twin = copy.deepcopy(moe)
    x = torch.randn(4, 6)
    torch.testing.assert_close(twin(x), moe(x))
    assert twin.gate is not moe.gate


def test_an_empty_batch(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2))
    moe(torch.randn(4, 6))
    assert moe(torch.randn(0, 6)).shape == (0, 6)


def test_two_backwards_through_one_forward(client):
    add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2)
    x = torch.randn(4, 6, requires_grad=True)
    found = moe(x).sum()
    found.backward(retain_graph=True)
    once = x.grad.clone()
    found.backward()
    torch.testing.assert_close(x.grad, 2 * once)


@pytest.mark.gpu
def test_a_model_on_a_gpu(client):
    modules = add_linear_experts(client, UIDS)
    moe = MixtureOfExperts(client, "ffn", 6, (3, 2), k_best=2, beam_size=3)
    x = torch.randn(9, 6)
    here = x.clone().requires_grad_()
    expected = local_mixture(moe.gate, modules, here, 2)
    expected.square().sum().backward()
    moe.cuda()
    there = x.cuda().requires_grad_()
    found = moe(there)
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(there.grad.cpu(), here.grad)
