"""Clients: which replica is asked, what is tried again, and what is not believed."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest
import torch
from torch import nn

from experts.loopback import client_of, linear_expert, serving
from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    TensorError,
    UsageError,
)
from shoal.experts import wire
from shoal.experts.client.client import ExpertClient, Forwarded
from shoal.experts.client.servers import KnownServers
from shoal.experts.expert import Expert
from shoal.experts.schema import ExpertSchema, TensorSchema
from shoal.experts.settings import ClientSettings, ServerSettings
from shoal.transport import Reply, StreamTransport

SCHEMA = ExpertSchema((TensorSchema("float32", (2,)),), (), (TensorSchema("float32", (2,)),), is_single=True)
NOBODY = Peer(Address("127.0.0.1", 9))


class Impostor:
    """A server that answers whatever a test wants it to."""

    def __init__(self):
        self.answer = self.echo
        self.requests = []

    def echo(self, head, buffers):
        metas = head.payload.inputs if head.method == wire.FORWARD else head.payload.grad_outputs
        return Reply(wire.Answer(metas), [bytes(buffer) for buffer in buffers[: len(metas)]])

    async def serve(self, head, buffers):
        self.requests.append(head.payload)
        reply = self.answer(head, buffers)
        return await reply if hasattr(reply, "__await__") else reply


@contextlib.contextmanager
def impostor():
    with LoopThread("impostor") as loop:
        made = Impostor()
        transport = StreamTransport()
        transport.handle(
            wire.INFO, lambda head, _: Reply(wire.Info(SCHEMA, 4096)), payload_type=wire.InfoRequest
        )
        transport.handle(wire.FORWARD, made.serve, payload_type=wire.ForwardRequest)
        transport.handle(wire.BACKWARD, made.serve, payload_type=wire.BackwardRequest)
        loop.run(transport.__aenter__())
        made.peer = Peer(loop.run(transport.listen(Address("127.0.0.1", 0))))

        async def close():
            await transport.__aexit__(None, None, None)

        made.loop = loop
        try:
            yield made
        finally:
            loop.run(close())


def forward(client, *peers, timeout_s=30.0, is_kept=False):
    x = torch.arange(6.0).reshape(3, 2)
    return client.run(
        client.forward("e", list(peers), [x], deadline=Deadline.after(timeout_s), is_kept=is_kept)
    )


async def never(head, buffers):
    import asyncio

    await asyncio.get_running_loop().create_future()


def test_a_replica_takes_over_when_the_first_is_gone():
    with impostor() as server, client_of() as client:
        for _ in range(3):
            assert forward(client, NOBODY, server.peer).peer == server.peer
        with pytest.raises(PeerUnreachable):
            forward(client, NOBODY)
        assert client.is_suspect(NOBODY)
        assert not client.is_suspect(server.peer)


def test_a_slow_replica_is_hedged_and_only_one_answer_counts():
    with impostor() as slow, impostor() as fast, client_of() as client:
        forward(client, slow.peer)
        slow.answer = never
        answered = forward(client, slow.peer, fast.peer)
        assert answered.peer == fast.peer
        assert len(slow.requests) <= 2
    with impostor() as slow, impostor() as fast, client_of(ClientSettings(has_hedges=False)) as client:
        for server in (slow, fast):
            forward(client, server.peer)
        slow.answer = fast.answer = never
        with pytest.raises(DeadlineExceeded):
            forward(client, slow.peer, fast.peer, timeout_s=0.2)
        assert len(slow.requests) + len(fast.requests) == 3


def test_a_replica_whose_answer_is_not_accepted_is_passed_over_and_suspected():
    with impostor() as broken, impostor() as sound, client_of() as client:
        nan = torch.full((3, 2), float("nan"))

        def lie(head, buffers):
            metas, lies = wire.to_wire([nan])
            return Reply(wire.Answer(metas), lies)

        def accept(outputs):
            if not outputs[0].isfinite().all():
                raise TensorError("not finite")

        broken.answer = lie
        x = torch.arange(6.0).reshape(3, 2)
        for _ in range(5):
            answered = client.run(
                client.forward("e", [broken.peer, sound.peer], [x], is_kept=False, accept=accept)
            )
            assert answered.peer == sound.peer
        assert client.is_suspect(broken.peer)
        with pytest.raises(PeerRefused, match="not finite") as caught:
            client.run(client.forward("e", [broken.peer], [x], is_kept=False, accept=accept))
        assert caught.value.peer == broken.peer


def test_a_batch_that_is_more_than_a_server_takes_goes_in_parts():
    expert = linear_expert("e", 2)
    with serving(expert, settings=ServerSettings(max_batch_size=4)) as served, client_of() as client:
        module = client.expert("e", served.peer)
        x = torch.randn(11, 2, requires_grad=True)
        module(x).square().sum().backward()
        # each part is a step of its own, so later parts may meet weights that have moved
        assert x.grad.shape == (11, 2)
        assert 1 <= expert.num_updates <= 3
        with torch.no_grad():
            torch.testing.assert_close(module(x), expert.module(x))


def test_failures_without_end_are_counted_without_end():
    server = KnownServers(ClientSettings()).of(NOBODY)
    for _ in range(5000):
        server.on_failure(now_s := server.suspect_until_s)
    assert server.suspect_until_s == now_s + 120.0


def test_a_replica_that_never_answers_is_asked_last_from_then_on():
    with impostor() as stuck, impostor() as sound, client_of() as client:
        stuck.answer = never
        for _ in range(4):
            assert forward(client, stuck.peer, sound.peer).peer == sound.peer
        assert client.is_suspect(stuck.peer)
        assert len(stuck.requests) == 1
        assert forward(client, stuck.peer, sound.peer).seconds < 1.0


def test_a_server_is_not_believed_about_itself():
    with impostor() as server, client_of() as client:
        metas, buffers = wire.to_wire([torch.zeros(3, 2)])
        for waited_s in (float("nan"), -1e9, 1e9):
            server.answer = lambda head, _, w=waited_s: Reply(wire.Answer(metas, w), buffers)
            forward(client, server.peer)
        assert 0 <= client._servers.of(server.peer).waited_s < 60


def test_a_busy_server_is_asked_again_and_a_busy_first_replica_does_not_lose_the_call():
    with impostor() as server, client_of() as client:
        refusals = [PeerBusy("not now")] * 3

        def busy_at_first(head, buffers):
            if refusals:
                raise refusals.pop()
            return server.echo(head, buffers)

        server.answer = busy_at_first
        assert forward(client, server.peer).peer == server.peer
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([torch.zeros(3, 4)], r"output 0 is float32\[3, 4\]"),
        ([torch.zeros(2, 2)], "outputs for 2 samples"),
        ([torch.zeros(3, 2, dtype=torch.float64)], "output 0 is float64"),
        ([], "0 outputs"),
        ([None], "an output is missing"),
    ],
)
def test_an_answer_that_does_not_fit_is_not_believed_and_its_peer_named(tensors, what):
    with impostor() as server, client_of() as client:

        def lie(head, buffers):
            metas, lies = wire.to_wire(tensors)
            return Reply(wire.Answer(metas), lies)

        server.answer = lie
        with pytest.raises(PeerRefused, match=what) as caught:
            forward(client, server.peer)
        assert caught.value.peer == server.peer
        assert client.is_suspect(server.peer)


def test_nonsense_is_an_error_of_the_peer():
    with impostor() as server, client_of() as client:
        metas, buffers = wire.to_wire([torch.zeros(3, 2)])
        for nonsense in (Reply({"a": 1}), Reply(wire.Answer(metas), []), Reply(None, buffers)):
            server.answer = lambda head, _, nonsense=nonsense: nonsense
            with pytest.raises(PeerRefused) as caught:
                forward(client, server.peer)
            assert caught.value.peer == server.peer


def test_a_backward_goes_to_the_peer_that_answered_and_keeps_its_id_when_sent_again():
    x = torch.arange(6.0).reshape(3, 2)
    with impostor() as server, client_of() as client:
        answered = forward(client, NOBODY, server.peer, is_kept=True)
        server.requests.clear()
        misses = [Reply(wire.Answer((), is_missing_inputs=True))]

        def miss_once(head, buffers):
            return misses.pop() if misses else server.echo(head, buffers)

        server.answer = miss_once
        (gradient,) = client.run(client.backward(answered, [x], [torch.ones(3, 2)]))
        assert torch.equal(gradient, torch.ones(3, 2))
        first, second = server.requests
        assert first.request_id == second.request_id
        assert (first.inputs, first.kept_as) == ((), answered.kept_as)
        assert len(second.inputs) == 1
        wrong = Forwarded("e", server.peer, [], 0.0, answered.kept_as)
        server.answer = lambda head, _: Reply(wire.Answer(()))
        with pytest.raises(PeerRefused, match="0 gradients for 1 inputs"):
            client.run(client.backward(wrong, [x], [torch.ones(3, 2)]))


def test_a_backward_whose_connection_breaks_is_sent_again_and_applied_once():
    expert = linear_expert("e", 2)
    with serving(expert) as served, client_of() as client:
        x = torch.arange(6.0).reshape(3, 2)
        answered = forward(client, served.peer, is_kept=True)

        async def cut():
            for connection in tuple(client.transport._dialed.values()):
                connection.abort()

        client.run(cut())
        (gradient,) = client.run(client.backward(answered, [x], [torch.ones(3, 2)]))
        assert gradient.shape == (3, 2)
        assert expert.num_updates == 1


def test_replicas_are_ranked_by_speed_load_and_failures():
    servers = KnownServers(ClientSettings())
    fast, slow, failed, unknown = (Peer(Address("10.0.0.1", port)) for port in (1, 2, 3, 4))
    servers.of(fast).on_answer("forward", 0.1, 0, 0.0)
    servers.of(slow).on_answer("forward", 0.2, 0, 0.0)
    servers.of(failed).on_answer("forward", 0.01, 0, 0.0)
    servers.of(failed).on_failure(100.0)
    peers = [failed, slow, fast, unknown]
    assert servers.ranked(peers, 101.0) == [unknown, fast, slow, failed]
    servers.of(fast).num_in_flight = 2
    assert servers.ranked(peers, 101.0) == [unknown, slow, fast, failed]
    assert servers.ranked(peers, 106.0)[:2] == [unknown, failed]
    until_s = servers.of(failed).suspect_until_s
    servers.of(failed).on_failure(until_s - 1)  # of a call that was made before
    assert servers.of(failed).suspect_until_s == until_s


def test_who_was_slow_long_ago_is_asked_again():
    servers = KnownServers(ClientSettings())
    quick, stopped = (Peer(Address("10.0.0.1", port)) for port in (1, 2))
    now_s = time.monotonic()
    servers.of(quick).on_answer("forward", 0.01, 0, 0.0)
    servers.of(stopped).on_answer("forward", 0.01, 0, 0.0)
    servers.of(stopped).on_overtaken(5.0, now_s)
    assert servers.ranked([stopped, quick], now_s) == [quick, stopped]
    servers.of(quick)._seen_s = now_s + 60  # which has been asked all the while
    assert servers.ranked([stopped, quick], now_s + 60) == [stopped, quick]
    servers.of(stopped).on_answer("forward", 0.01, 0, 0.0)
    assert servers.of(stopped).answer_s == pytest.approx(0.01)


def test_an_expert_that_is_another_one_now_is_asked_what_it_takes():
    with serving(linear_expert("e", 2)) as served, client_of() as client:
        module = client.expert("e", served.peer)
        assert module(torch.zeros(1, 2)).shape == (1, 2)
        served.loop.run(served.server.remove("e"))
        served.loop.run(served.server.add(linear_expert("e", 4)))
        assert module(torch.zeros(1, 4)).shape == (1, 4)
        with pytest.raises(UsageError, match="takes float32"):
            module(torch.zeros(1, 3))


def test_deadlines_follow_what_a_server_takes_and_never_go_below_seconds():
    server = KnownServers(ClientSettings(first_s=30.0, patience=2.0)).of(NOBODY)
    assert server.timeout_s("forward", 0) == 60.0
    for _ in range(10):
        server.on_answer("forward", 0.001, 0, 0.0)
    assert server.timeout_s("forward", 0) == 10.0
    for _ in range(64):
        server.on_answer("forward", 20.0, 0, 0.0)
    assert server.timeout_s("forward", 0) >= 40.0
    assert server.timeout_s("backward", 0) == 60.0


def test_a_client_says_what_it_lacks():
    client = ExpertClient()
    with pytest.raises(UsageError, match="not open"):
        client.expert("e", "127.0.0.1:9")(torch.zeros(1, 2))
    with client:
        with pytest.raises(UsageError, match="no swarm"):
            client.expert("e")
        with pytest.raises(UsageError, match="open already"):
            client.open()
    client.close()


def test_what_travels_comes_back_whole_and_claims_are_checked():
    tensors = [torch.randn(3, 4), None, torch.arange(5), torch.randn(2, 2).to(torch.bfloat16)]
    metas, buffers = wire.to_wire(tensors)
    wire.check_sizes(metas, [len(buffer) for buffer in buffers])
    for tensor, other in zip(tensors, wire.from_wire(metas, buffers), strict=True):
        assert other is None if tensor is None else torch.equal(tensor, other)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(wire.Answer(metas, 0.5)), type=wire.Answer)
    assert again == wire.Answer(metas, 0.5)
    with pytest.raises(wire.TensorError, match="4 buffers came"):
        wire.from_wire(metas, [*buffers, b""])
    with pytest.raises(wire.TensorError):
        wire.check_sizes(metas, [1, 2, 3])


def test_an_expert_without_gradients_anywhere_gives_none():
    module = nn.Identity()
    expert = Expert("index", module, ((torch.zeros(3, dtype=torch.int64),), {}))
    with serving(expert) as served, client_of() as client:
        y = client.expert("index", served.peer)(torch.arange(4))
        assert torch.equal(y, torch.arange(4))
        assert not y.requires_grad


def test_small_calls_do_not_wait_for_the_clients_loop():
    expert = linear_expert()
    with (
        serving(expert) as served,
        LoopThread("client") as loop,
        ExpertClient(loop=loop) as client,
    ):
        module = client.expert("expert0", served.peer)
        x = torch.randn(2, 8, requires_grad=True)
        expected = module(x)  # learns what the expert takes, over the loop
        may_go = threading.Event()
        loop.loop.call_soon_threadsafe(may_go.wait, 60)
        try:
            found = module(x)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
        finally:
            may_go.set()
        assert x.grad is not None
        assert expert.num_updates == 1
