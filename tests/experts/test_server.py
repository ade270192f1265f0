"""The server over loopback: what clients get equals what the module gives, whatever happens around it."""

from __future__ import annotations

import contextlib
import secrets
import threading

import pytest
import torch
from torch import nn

from experts.loopback import client_of, linear_expert, serving
from shoal.core import (
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerLeaving,
    PeerRefused,
    RemoteFailure,
    UsageError,
)
from shoal.experts import HostingConfig, hosted, wire
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import JobKind
from shoal.experts.settings import ClientSettings, ServerSettings
from shoal.tensors import EncodedMeta, TensorSpec
from shoal.transport import StreamTransport


class Gate:
    """A module that waits until it may go on, so that a test knows what the device is doing."""

    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.may_go = threading.Semaphore(0)
        self.batch_sizes = []
        self.module = _Gated(self)

    def expert(self, uid="gated"):
        return Expert(uid, self.module, ((torch.zeros(3, 2),), {}))


class _Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self._gate = [gate]
        self.is_open = True

    def forward(self, x):
        gate = self._gate[0]
        if not self.is_open:
            gate.batch_sizes.append(len(x))
            gate.begun.release()
            assert gate.may_go.acquire(timeout=30)
        return x + 1


class Mixed(nn.Module):
    """Several inputs, one by name, one of integers, and two outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x, index, *, scale):
        return self.linear(x) * scale.unsqueeze(-1), x.sum(1) + index


def mixed_expert():
    torch.manual_seed(0)
    module = Mixed()
    example = ((torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)), {"scale": torch.ones(3)})
    return Expert("mixed", module, example, optimizer=torch.optim.SGD(module.parameters(), lr=0.5))


@contextlib.contextmanager
def remote(expert, settings=None, client_settings=None):
    with serving(expert, settings=settings) as served, client_of(client_settings) as client:
        yield client.expert(expert.uid, served.peer), served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_and_gradients_are_those_of_the_module(dtype):
    expert = linear_expert(dtype=dtype, lr=0.01)
    local = linear_expert(dtype=dtype, lr=0.01)
    with remote(expert) as (module, _):
        x = torch.randn(8, 5, dtype=dtype).t().requires_grad_()  # not contiguous
        twin = x.detach().clone().requires_grad_()
        for _ in range(3):  # the expert has learnt in between
            module(x).square().sum().backward()
            expected = local.module(twin)
            expected.square().sum().backward()
            local.optimizer.step()
            local.optimizer.zero_grad()
            torch.testing.assert_close(x.grad, twin.grad)
        with torch.no_grad():
            torch.testing.assert_close(module(x), local.module(twin))
    assert expert.num_updates == 3


def test_several_inputs_keywords_and_outputs():
    expert, local = mixed_expert(), mixed_expert()
    with remote(expert) as (module, _):
        x, scale = torch.randn(5, 4, requires_grad=True), torch.rand(5, requires_grad=True)
        twins = [tensor.detach().clone().requires_grad_() for tensor in (x, scale)]
        index = torch.arange(5)
        outputs = module(x, index, scale=scale)
        expected = local.module(twins[0], index, scale=twins[1])
        for output, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, other)
        (outputs[0].sum() + outputs[1].square().sum()).backward()
        (expected[0].sum() + expected[1].square().sum()).backward()
        torch.testing.assert_close(x.grad, twins[0].grad)
        torch.testing.assert_close(scale.grad, twins[1].grad)
        with pytest.raises(UsageError, match="takes float32"):
            module(x, index)
        with pytest.raises(UsageError, match=r"input 0 is float32\[5, 3\]"):
            module(x[:, :3], index, scale=scale)


def test_an_expert_learns_although_no_input_needs_a_gradient_and_does_not_without_gradients():
    expert = linear_expert()
    with remote(expert) as (module, served):
        module(torch.randn(2, 8)).sum().backward()
        assert expert.num_updates == 1
        with torch.no_grad():
            module(torch.randn(2, 8))
        assert len(served.server.kept) == 0


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_tensors_travel_compressed(codec):
    expert, local = linear_expert(num_features=64), linear_expert(num_features=64)
    with remote(expert, client_settings=ClientSettings(codec=codec)) as (module, _):
        x = torch.randn(16, 64, requires_grad=True)
        y = module(x)
        torch.testing.assert_close(y, local.module(x), rtol=0.05, atol=0.1)
        y.square().sum().backward()
        assert x.grad.isfinite().all()
        assert expert.num_updates == 1


def test_stochastic_rounding_draws_anew_for_each_answer():
    expert = linear_expert(num_features=64)
    with remote(expert, client_settings=ClientSettings(codec="int8:tensor,stochastic")) as (module, _):
        with torch.no_grad():
            answers = [module(torch.zeros(16, 64)) for _ in range(2)]  # zeros are not rounded on the way
        for answer in answers:
            torch.testing.assert_close(answer[0], expert.module(torch.zeros(64)), rtol=0, atol=0.01)
        assert not torch.equal(*answers)


def test_requests_of_many_clients_are_computed_together_and_come_apart_again():
    gate = Gate()
    with serving(gate.expert()) as served, client_of() as client:
        module = client.expert("gated", served.peer)
        assert module.schema
        gate.module.is_open = False
        inputs = [torch.randn(num, 2) for num in (1, 2, 3, 4)]
        with contextlib.ExitStack() as threads:
            loops = [threads.enter_context(LoopThread(f"client{index}")) for index in range(4)]
            futures = [loops[0].submit(_call(module, inputs[0]))]
            assert gate.begun.acquire(timeout=30)
            futures += [
                loop.submit(_call(module, tensor)) for loop, tensor in zip(loops[1:], inputs[1:], strict=True)
            ]
            _wait_until(lambda: served.server.num_waiting == 3)
            gate.may_go.release(2)
            for future, tensor in zip(futures, inputs, strict=True):
                torch.testing.assert_close(future.result(30), tensor + 1)
    assert gate.batch_sizes == [1, 9]


async def _call(module, tensor):
    with torch.no_grad():
        return module(tensor)


def _wait_until(is_so):
    done = threading.Event()
    for _ in range(3000):
        if is_so():
            return
        done.wait(0.01)
    raise AssertionError("it never came to be so")


class Picky(nn.Module):
    """Fails on negative numbers."""

    def forward(self, x):
        if (x < 0).any():
            raise ValueError("I take no negative numbers")
        return x * 2


def test_a_request_that_fails_does_not_spoil_those_computed_with_it():
    gate = Gate()
    picky = Expert("picky", Picky(), ((torch.ones(3, 2),), {}))
    with serving(gate.expert(), picky) as served, client_of() as client:
        gated, module = client.expert("gated", served.peer), client.expert("picky", served.peer)
        assert gated.schema
        assert module.schema
        gate.module.is_open = False
        with contextlib.ExitStack() as threads:
            loops = [threads.enter_context(LoopThread(f"client{index}")) for index in range(3)]
            first = loops[0].submit(_call(gated, torch.ones(1, 2)))
            assert gate.begun.acquire(timeout=30)
            bad = loops[1].submit(_call(module, -torch.ones(1, 2)))
            good = loops[2].submit(_call(module, torch.ones(1, 2)))
            _wait_until(lambda: served.server.num_waiting == 2)
            gate.may_go.release()
            assert first.result(30) is not None
            torch.testing.assert_close(good.result(30), 2 * torch.ones(1, 2))
            with pytest.raises(RemoteFailure, match="I take no negative numbers"):
                bad.result(30)


@pytest.fixture
def raw():
    """Calls as they travel, without the client's own rules."""
    with contextlib.ExitStack() as closing:
        loop = closing.enter_context(LoopThread("raw"))
        transport = StreamTransport()
        loop.run(transport.__aenter__())

        async def close():
            await transport.__aexit__(None, None, None)

        closing.callback(lambda: loop.run(close()))

        def call(peer, method, payload, buffers=(), timeout_s=30.0):
            return loop.run(
                transport.call(peer, method, payload, buffers, deadline=Deadline.after(timeout_s))
            )

        call.loop, call.transport = loop, transport
        yield call


def backward_request(uid, x, grad, request_id, kept_as=b""):
    grads, grad_buffers = wire.to_wire([grad])
    inputs, input_buffers = wire.to_wire([x]) if not kept_as else ((), [])
    return wire.BackwardRequest(uid, request_id, grads, inputs, kept_as), [*grad_buffers, *input_buffers]


def test_a_backward_sent_twice_updates_once(raw):
    expert = linear_expert()
    with serving(expert) as served:
        x, grad = torch.randn(3, 8), torch.randn(3, 8)
        request, buffers = backward_request("expert0", x, grad, secrets.token_bytes(16))
        answers = [raw(served.peer, wire.BACKWARD, request, buffers) for _ in range(3)]
        assert expert.num_updates == 1
        assert bytes(answers[0].buffers[0]) == bytes(answers[2].buffers[0])
        other, buffers = backward_request("expert0", x, grad, secrets.token_bytes(16))
        raw(served.peer, wire.BACKWARD, other, buffers)
        assert expert.num_updates == 2


def test_a_backward_that_comes_again_while_it_runs_updates_once(raw):
    gate = Gate()
    expert = linear_expert()
    with serving(expert, gate.expert()) as served, client_of() as client:
        gated = client.expert("gated", served.peer)
        assert gated.schema
        gate.module.is_open = False
        x, grad = torch.randn(3, 8), torch.randn(3, 8)
        request, buffers = backward_request("expert0", x, grad, secrets.token_bytes(16))
        with LoopThread("busy") as loop:
            blocking = loop.submit(_call(gated, torch.ones(1, 2)))
            assert gate.begun.acquire(timeout=30)
            again = [
                raw.loop.submit(
                    raw.transport.call(
                        served.peer, wire.BACKWARD, request, buffers, deadline=Deadline.after(30)
                    )
                )
                for _ in range(2)
            ]
            _wait_until(lambda: served.server.num_waiting == 1 and served.server._num_open == 3)
            gate.may_go.release()
            assert blocking.result(30) is not None
            first, second = (future.result(30) for future in again)
        assert bytes(first.buffers[0]) == bytes(second.buffers[0])
        assert expert.num_updates == 1


def test_a_huge_gradient_in_a_batch_of_several_takes_nothing_from_the_others(raw):
    gate, expert = Gate(), linear_expert()
    x, grad = torch.randn(3, 8), torch.randn(3, 8)
    for _ in range(10):
        expert.backward([x], [grad])
    huge = torch.full((3, 8), 1e12)
    with serving(expert, gate.expert()) as served, client_of() as client:
        gated = client.expert("gated", served.peer)
        assert gated.schema
        gate.module.is_open = False
        before = expert.module.weight.detach().clone()
        with LoopThread("busy") as loop:
            blocking = loop.submit(_call(gated, torch.ones(1, 2)))
            assert gate.begun.acquire(timeout=30)
            waiting = [
                raw.loop.submit(
                    raw.transport.call(
                        served.peer, wire.BACKWARD, request, buffers, deadline=Deadline.after(30)
                    )
                )
                for request, buffers in (
                    backward_request("expert0", x, gradient, secrets.token_bytes(16))
                    for gradient in (grad, huge, grad, grad)
                )
            ]
            _wait_until(lambda: served.server.num_waiting == 4)
            gate.may_go.release()
            assert blocking.result(30) is not None
            assert all(future.result(30).buffers for future in waiting)
    assert expert.statistics.num_clipped_updates == 1
    honest = 0.1 * grad.t() @ x
    lied = before - 3 * honest - expert.module.weight.detach()  # what is left of the huge one
    assert 0 < lied.norm() < 15 * honest.norm()


def test_an_answer_that_is_kept_no_longer_is_said_to_be_so(raw):
    expert = linear_expert()
    with serving(expert, settings=ServerSettings(remembered_bytes=1)) as served:
        request, buffers = backward_request(
            "expert0", torch.randn(3, 8), torch.randn(3, 8), secrets.token_bytes(16)
        )
        raw(served.peer, wire.BACKWARD, request, buffers)
        with pytest.raises(PeerRefused, match="applied before"):
            raw(served.peer, wire.BACKWARD, request, buffers)
        assert expert.num_updates == 1


def test_a_backward_is_applied_once_to_a_state_however_often_the_server_is_started_anew(raw, tmp_path):
    config = HostingConfig(hidden_dim=8, device="cpu", num_loops=1, checkpoint_dir=str(tmp_path))
    (first, first_buffers), (second, second_buffers) = (
        backward_request("expert0", torch.randn(3, 8), torch.randn(3, 8), secrets.token_bytes(16))
        for _ in range(2)
    )

    def state(hosting):
        return hosting.server.experts["expert0"].state()

    with hosted(config) as (hosting, _):
        raw(Peer(hosting.address), wire.BACKWARD, first, first_buffers)
    with contextlib.suppress(_Killed), hosted(config) as (hosting, _):  # it was saved with the first
        with pytest.raises(PeerRefused, match="applied before"):
            raw(Peer(hosting.address), wire.BACKWARD, first, first_buffers)
        raw(Peer(hosting.address), wire.BACKWARD, second, second_buffers)
        expected = state(hosting)
        assert expected.num_updates == 2
        raise _Killed
    with hosted(config) as (hosting, _):  # the second was lost with the state that it had led to
        assert state(hosting).num_updates == 1
        raw(Peer(hosting.address), wire.BACKWARD, second, second_buffers)
        with pytest.raises(PeerRefused, match="applied before"):
            raw(Peer(hosting.address), wire.BACKWARD, first, first_buffers)
        again = state(hosting)
    assert again.numbers == expected.numbers
    assert again.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in expected.tensors.items())


class _Killed(Exception):
    """A server that ends by an error saves nothing."""


def test_inputs_are_kept_for_backward_and_sent_again_when_they_are_gone(raw):
    expert = linear_expert(lr=0.0)
    with remote(expert) as (module, served):
        x = torch.randn(3, 8, requires_grad=True)
        y = module(x)
        assert len(served.server.kept) == 1
        y.sum().backward()
        assert len(served.server.kept) == 0
        first = x.grad.clone()
        x.grad = None
        y = module(x)
        served.server.kept.drop(next(iter(served.server.kept._kept)))
        y.sum().backward()
        torch.testing.assert_close(x.grad, first)
        assert expert.num_updates == 2
        request, buffers = backward_request("expert0", x, torch.ones(3, 8), secrets.token_bytes(16), b"gone")
        answer = raw(served.peer, wire.BACKWARD, request, buffers)
        assert wire.msgspec.convert(answer.payload, wire.Answer).is_missing_inputs
        assert expert.num_updates == 2


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing():
    expert = linear_expert()
    with remote(expert) as (module, _):
        before = {name: tensor.clone() for name, tensor in expert.module.state_dict().items()}
        with pytest.raises(PeerRefused, match="not finite"):
            (module(torch.randn(2, 8)) * float("nan")).sum().backward()
        assert expert.num_updates == 0
        for name, tensor in expert.module.state_dict().items():
            torch.testing.assert_close(tensor, before[name])


def test_what_does_not_fit_the_schema_is_refused_before_it_is_received(raw):
    with serving(linear_expert()) as served:
        metas, buffers = wire.to_wire([torch.randn(3, 7)])
        with pytest.raises(PeerRefused, match=r"input 0 is float32\[3, 7\]"):
            raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", metas), buffers)
        metas, _ = wire.to_wire([torch.randn(3, 8)])
        with pytest.raises(PeerRefused, match="buffers of"):
            raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", metas), [bytes(5)])
        with pytest.raises(PeerRefused, match="'expert7' is not served here"):
            raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert7", metas), [bytes(96)])
        with pytest.raises(PeerRefused):
            raw(served.peer, wire.FORWARD, {"uid": "expert0"}, [bytes(96)])
        grads, buffers = wire.to_wire([torch.randn(2, 8), torch.randn(3, 8)])
        request = wire.BackwardRequest("expert0", bytes(16), grads[:1], grads[1:])
        with pytest.raises(PeerRefused, match="outputs for 2 samples"):
            raw(served.peer, wire.BACKWARD, request, buffers)


def test_a_busy_server_says_so_and_clients_come_back():
    gate = Gate()
    with serving(gate.expert(), settings=ServerSettings(max_waiting=1)) as served, client_of() as client:
        module = client.expert("gated", served.peer)
        assert module.schema
        gate.module.is_open = False
        with contextlib.ExitStack() as threads:
            loops = [threads.enter_context(LoopThread(f"client{index}")) for index in range(4)]
            futures = [loops[0].submit(_call(module, torch.ones(1, 2)))]
            assert gate.begun.acquire(timeout=30)
            futures += [loop.submit(_call(module, torch.ones(1, 2))) for loop in loops[1:]]
            _wait_until(
                lambda: served.server.num_waiting == 2
            )  # twice as many when no client has more than one
            module.forward_timeout_s = 0.05
            with pytest.raises((PeerBusy, DeadlineExceeded)):
                module(torch.ones(1, 2))
            gate.module.is_open = True
            gate.may_go.release(5)
            for future in futures:
                assert future.result(30) is not None


def test_work_whose_client_is_gone_or_late_is_not_done(raw):
    gate = Gate()
    with serving(gate.expert()) as served, client_of() as client:
        module = client.expert("gated", served.peer)
        assert module.schema
        gate.module.is_open = False
        metas, buffers = wire.to_wire([torch.ones(1, 2)])
        with LoopThread("busy") as loop:
            blocking = loop.submit(_call(module, torch.ones(1, 2)))
            assert gate.begun.acquire(timeout=30)
            gone = raw.loop.submit(
                raw.transport.call(
                    served.peer,
                    wire.FORWARD,
                    wire.ForwardRequest("gated", metas),
                    buffers,
                    deadline=Deadline.after(30),
                )
            )
            _wait_until(lambda: served.server.num_waiting == 1)
            gone.cancel()
            _wait_until(lambda: served.server.num_waiting == 0)
            with pytest.raises(DeadlineExceeded):
                raw(served.peer, wire.FORWARD, wire.ForwardRequest("gated", metas), buffers, timeout_s=0.05)
            _wait_until(lambda: served.server.num_waiting == 0)
            gate.may_go.release()
            assert blocking.result(30) is not None
    assert gate.batch_sizes == [1]


def test_a_leaving_server_finishes_what_it_has_accepted_and_takes_nothing_new():
    gate = Gate()
    with serving(gate.expert()) as served, client_of() as client:
        module = client.expert("gated", served.peer)
        assert module.schema
        gate.module.is_open = False
        with contextlib.ExitStack() as threads:
            loops = [threads.enter_context(LoopThread(f"client{index}")) for index in range(3)]
            accepted = [loops[0].submit(_call(module, torch.ones(1, 2)))]
            assert gate.begun.acquire(timeout=30)
            accepted.append(loops[1].submit(_call(module, torch.ones(2, 2))))
            _wait_until(lambda: served.server.num_waiting == 1)
            leaving = loops[2].submit(served.loop.run_from_async(served.server.leave(Deadline.after(30))))
            _wait_until(lambda: served.server.is_leaving)
            with pytest.raises(PeerLeaving):
                module(torch.ones(1, 2))
            assert not leaving.done()
            gate.may_go.release(2)
            assert leaving.result(30)
            for future in accepted:
                assert future.result(30) is not None


def test_experts_come_and_go_while_others_are_served():
    with serving(linear_expert("a")) as served, client_of() as client:
        served.loop.run(served.server.add(linear_expert("b")))
        module = client.expert("b", served.peer)
        assert module(torch.randn(2, 8)).shape == (2, 8)
        with pytest.raises(UsageError, match="already"):
            served.loop.run(served.server.add(linear_expert("b")))
        removed = served.loop.run(served.server.remove("b"))
        assert removed.uid == "b"
        with pytest.raises(PeerRefused, match="'b' is not served here"):
            module(torch.randn(2, 8))
        assert client.expert("a", served.peer)(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(UsageError, match="Two experts"), serving(linear_expert("a"), linear_expert("a")):
        pass


def test_large_requests_come_through_helper_threads_unchanged():
    with LoopThread("helper") as helper:
        module = nn.Identity()
        expert = Expert("nop", module, ((torch.zeros(3, 1024),), {}))
        with serving(expert, helpers=[helper]) as served, client_of() as client, client_of() as other:
            x = torch.randn(2048, 1024, requires_grad=True)
            for each in (client, other):
                y = each.expert("nop", served.peer)(x)
                assert torch.equal(y, x)
                y.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_bf16_computing_answers_in_the_type_of_the_schema():
    expert, local = linear_expert(), linear_expert()
    with remote(expert, ServerSettings(precision="bf16")) as (module, _):
        x = torch.randn(3, 8, requires_grad=True)
        y = module(x)
        assert y.dtype is torch.float32
        torch.testing.assert_close(y, local.module(x), rtol=0.02, atol=0.02)
        assert not torch.equal(y, local.module(x))
        y.sum().backward()
        assert x.grad.dtype is torch.float32
        assert expert.num_updates == 1


@pytest.mark.parametrize("codec", ["bogus", "int8:" + "1" * 5000, "low-rank:x", "x" * 100])
def test_a_codec_that_is_none_is_refused_and_nothing_is_done(raw, codec):
    expert = linear_expert()
    with serving(expert) as served:
        x, grad = torch.randn(3, 8), torch.randn(3, 8)
        request, buffers = backward_request("expert0", x, grad, secrets.token_bytes(16))
        request = wire.msgspec.structs.replace(request, codec=codec)
        for _ in range(2):
            with pytest.raises(PeerRefused):
                raw(served.peer, wire.BACKWARD, request, buffers)
        assert expert.num_updates == 0
        metas, buffers = wire.to_wire([x])
        assert raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", metas), buffers).buffers


def test_claims_of_absurd_batches_are_refused_before_anything_is_computed(raw):
    with serving(linear_expert(), settings=ServerSettings(max_batch_size=64)) as served:
        for kind in JobKind:
            served.server._inline._is_quick["expert0", kind] = True
        spec = TensorSpec("float32", (10_000_000, 8))
        bomb = wire.ForwardRequest("expert0", (EncodedMeta("top-k", spec, (1,)),))
        with pytest.raises(PeerRefused, match="above this server's 64 a batch"):
            raw(served.peer, wire.FORWARD, bomb, [bytes(4), bytes(4)])
        for shape in ((-5, 8), (65, 8)):
            meta = EncodedMeta("none", TensorSpec("float32", shape))
            with pytest.raises(PeerRefused, match="64 a batch"):
                raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", (meta,)))
        empty = EncodedMeta("none", TensorSpec("float32", ()))
        for request in (
            wire.BackwardRequest("expert0", bytes(16), (empty,)),
            wire.BackwardRequest("expert0", bytes(16), ()),
        ):
            with pytest.raises(PeerRefused, match="output"):
                raw(served.peer, wire.BACKWARD, request, [])


def test_a_backward_whose_time_was_over_in_the_line_can_be_sent_again(raw):
    gate = Gate()
    expert = linear_expert()
    with serving(expert, gate.expert()) as served, client_of() as client:
        gated = client.expert("gated", served.peer)
        assert gated.schema
        gate.module.is_open = False
        request, buffers = backward_request(
            "expert0", torch.randn(3, 8), torch.randn(3, 8), secrets.token_bytes(16)
        )
        with LoopThread("busy") as loop:
            blocking = loop.submit(_call(gated, torch.ones(1, 2)))
            assert gate.begun.acquire(timeout=30)
            with pytest.raises(DeadlineExceeded):
                raw(served.peer, wire.BACKWARD, request, buffers, timeout_s=0.1)
            gate.may_go.release()
            assert blocking.result(30) is not None
        _wait_until(lambda: served.server._applied.num_under_way == 0)
        assert raw(served.peer, wire.BACKWARD, request, buffers).buffers
        assert expert.num_updates == 1


def test_a_device_that_breaks_tells_so_and_goes_on(raw):
    expert = linear_expert()
    with serving(expert) as served:
        metas, buffers = wire.to_wire([torch.randn(3, 8)])
        start = served.server.device.start

        def break_once(jobs):
            served.server.device.start = start
            raise MemoryError("no more")

        served.server.device.start = break_once
        with pytest.raises(RemoteFailure, match="no more"):
            raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", metas), buffers)
        assert raw(served.peer, wire.FORWARD, wire.ForwardRequest("expert0", metas), buffers).buffers
        assert served.loop.run(served.server.leave(Deadline.after(5)))
