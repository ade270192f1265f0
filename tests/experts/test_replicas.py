"""Replicas of an expert find each other in the DHT and come together, in virtual time and on sockets."""

import asyncio
import contextlib
import hashlib
import json

import msgspec
import pytest
import torch

from dht.living_swarm import LivingSwarm
from dht.memory_swarm import MemorySwarm, in_swarm
from experts.fake_server import FakeServer, small_expert, train, values
from shoal.core import (
    Address,
    Deadline,
    LoopThread,
    Peer,
    PeerBusy,
    PeerLost,
    PeerRefused,
    Scope,
    UsageError,
    run_virtual,
)
from shoal.core.identity import Identity
from shoal.dht.node import DHT
from shoal.experts.names import declare_experts
from shoal.experts.server.replicas import AVERAGE, STATE, Piece, ReplicaRequest, Replicas
from shoal.experts.server.server import ExpertServer
from shoal.tensors import TensorSpec, pack
from shoal.tensors.transfer import HeldState, StateDonor, StateIndex, StateTaker
from shoal.transport import Endpoint, Head, Membership, Reply, SwarmSecret
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.profiles import Profile

SLOW_LINE = """
name = "lines"
[places.home]
up_mbit_s = 2
down_mbit_s = 2
[ways.default]
delay_ms = 50
"""
UID = "ffn.1.2"
NEVER_S = 1e6


@contextlib.asynccontextmanager
async def replicas_of(*experts_and_peers, every_s=60.0):
    """Replicas that run, of each of these experts at its peer; all are declared."""
    made = []
    async with Scope() as scope:
        for expert, dht in experts_and_peers:
            await declare_experts(dht, [expert.uid], dht.in_s(3600))
            made.append(Replicas(FakeServer(expert), dht, every_s))
        for one in made:
            scope.start(one.run())
        yield made
        scope.cancel()


def test_two_replicas_become_equal_and_stay_so():
    async def work(swarm, first, second, _):
        mine, theirs = small_expert(seed=1, num_updates=2), small_expert(seed=2, num_updates=3)
        mean = (values(mine) + values(theirs)) / 2
        async with replicas_of((mine, first), (theirs, second)) as made:
            await asyncio.sleep(200)
            assert torch.equal(values(mine), values(theirs))
            torch.testing.assert_close(values(mine), mean)
            train(mine, 5)
            assert not torch.equal(values(mine), values(theirs))
            await asyncio.sleep(200)
            assert torch.equal(values(mine), values(theirs))
            assert sum(one.num_averaged for one in made) >= 4
            assert [one.num_copied for one in made] == [0, 0]
            assert (mine.num_updates, theirs.num_updates) == (7, 3)
            assert min(mine.num_changes - 7, theirs.num_changes - 3) >= 4  # whoever began it

    in_swarm(3, work)


def test_many_replicas_come_to_the_mean_of_all():
    async def work(swarm, *peers):
        experts = [small_expert(seed=seed, num_updates=1) for seed in range(3)]
        mean = torch.stack([values(expert) for expert in experts]).mean(0)
        async with replicas_of(*zip(experts, peers, strict=True)):
            await asyncio.sleep(60 * 15)
            for expert in experts:
                torch.testing.assert_close(values(expert), mean, rtol=1e-3, atol=1e-4)

    in_swarm(3, work)


def test_who_is_gone_is_passed_over():
    async def main():
        async with LivingSwarm() as swarm:
            peers = await swarm.start_many(4)
            experts = [small_expert(seed=seed, num_updates=1) for seed in range(3)]
            async with replicas_of(*zip(experts[:2], peers, strict=False)):
                await declare_experts(peers[2], [UID], peers[2].in_s(3600))
                await swarm.kill("p2")
                await asyncio.sleep(600)
                assert torch.equal(values(experts[0]), values(experts[1]))

    run_virtual(main())


def test_a_newcomer_becomes_a_copy_and_then_learns_with_the_others():
    async def work(swarm, first, second):
        old, new = small_expert(seed=1, num_updates=3), small_expert(seed=2)
        old.backward([torch.randn(3, 4)], [torch.randn(3, 4)], [b"known to a client"[:16]])
        before = values(old)
        async with replicas_of((old, first), (new, second)) as (_, newcomer):
            await asyncio.sleep(10)
            assert torch.equal(values(new), before)
            assert new.clip.norms == old.clip.norms
            assert "applied_ids" in old.state().tensors
            assert "applied_ids" not in new.state().tensors  # who knows an id may ask for its answer
            assert torch.equal(values(old), before)
            assert new.num_updates == 4
            assert new.num_changes == 1
            assert newcomer.num_copied == 1
            train(old, 2)
            train(new, 2)
            assert torch.equal(values(new), values(old))  # the optimizer was copied too

    in_swarm(2, work)


def test_a_large_expert_is_met_over_a_slow_line_beside_small_ones():
    """How long the small ones take says nothing of it."""

    async def main():
        async with MemorySwarm(Conditions(Profile.parse(SLOW_LINE), seed=1)) as swarm:
            peers = await swarm.add_many(2)
            made = []
            for number, dht in enumerate(peers):
                experts = [small_expert(f"ffn.{uid}", seed=number, num_updates=1) for uid in range(6)]
                made.append(Replicas(FakeServer(*experts), dht, NEVER_S))
                await declare_experts(dht, [expert.uid for expert in experts] + [UID], dht.in_s(36000))
            async with Scope() as scope:
                for one in made:
                    scope.start(one.run())
                await asyncio.sleep(10)
                assert await made[1].sync() == 6
                old, new = (small_expert(num_updates=1 - n, num_features=1200) for n in range(2))
                num_bytes = 4 * values(old).numel()
                for replicas, expert in zip(made, (old, new), strict=True):
                    await replicas._server.add(expert)
                began_s = asyncio.get_running_loop().time()
                assert await made[1].sync([UID]) == 1
                assert torch.equal(values(new), values(old))
                train(new, 1)
                copied_s = asyncio.get_running_loop().time()
                assert await made[0].sync([UID]) == 1
                assert torch.equal(values(new), values(old))
                averaged_s = asyncio.get_running_loop().time() - copied_s
                line_s = num_bytes / 0.25e6
                assert copied_s - began_s < 3.5 * line_s  # the weights, and two moments of Adam
                assert line_s < averaged_s < 1.9 * line_s  # both ways at once, for most of it
                scope.cancel()

    run_virtual(main())


def test_of_newcomers_one_is_copied_by_all():
    async def work(swarm, *peers):
        experts = [small_expert(seed=seed) for seed in range(3)]
        lowest = min(range(3), key=lambda index: peers[index].peer_id)
        before = values(experts[lowest])
        async with replicas_of(*zip(experts, peers, strict=True)):
            await asyncio.sleep(30)
            for expert in experts:
                assert torch.equal(values(expert), before)

    in_swarm(3, work)


def test_who_is_alone_or_plain_meets_nobody():
    async def work(swarm, peer):
        expert, plain = small_expert(), small_expert("expert0")
        async with replicas_of((expert, peer)) as (alone,):
            alone._server.experts["expert0"] = plain
            assert await alone.sync() == 0
            assert not alone.is_newcomer(expert)
        with pytest.raises(UsageError, match="every 0 s"):
            Replicas(FakeServer(), peer, 0)

    in_swarm(1, work)


def test_a_look_up_that_fails_is_not_taken_for_being_alone(caplog):
    async def main():
        async with LivingSwarm() as swarm:
            first, second = await swarm.start_many(2)
            new = small_expert(seed=2)
            await declare_experts(first, [UID], first.in_s(3600))
            replicas = Replicas(FakeServer(new), second, 60.0)
            await swarm.kill("p0")
            second.storage.__init__(second.peer_id, second.settings)
            second.cache.__init__(second.settings)
            assert await replicas.sync() == 0
            assert replicas.is_newcomer(new)
            assert "could not be found out" in caplog.text

    run_virtual(main())


# --- those who are asked ---


async def ask(dht, peer, method, uid, *items):
    async with dht.endpoint.streams.open_channel(
        peer, method, ReplicaRequest(uid), deadline=Deadline.after(30)
    ) as channel:
        answers = []
        for payload, tensors in items:
            await channel.send(payload, pack(tensors)[1])
            answers.append(await channel.receive())
        await channel.end()
        await channel.result()
        return answers


def in_meeting(work, num_updates=1):
    """Run `work(asker, replicas, expert, peer)` beside a replica that knows the asker."""

    async def main(swarm, asker, asked):
        expert = small_expert(num_updates=num_updates)
        await declare_experts(asker, [UID], asker.in_s(3600))
        async with replicas_of((expert, asked), every_s=NEVER_S) as (replicas,):
            await asyncio.sleep(1)
            await work(asker, replicas, expert, asked.peer)

    in_swarm(2, main)


def whole(name, tensor):
    return (Piece(name, 0, TensorSpec("float32", tuple(tensor.shape))),)


@pytest.mark.parametrize(
    ("payload", "tensor"),
    [
        (whole("0.bias", torch.zeros(4)), torch.tensor([0, 0, torch.nan, 0])),
        (whole("0.bias", torch.zeros(4)), torch.zeros(5)),
        (whole("0.bias", torch.zeros(5)), torch.zeros(5)),
        (whole("0.other", torch.zeros(4)), torch.zeros(4)),
        ("nonsense", torch.zeros(4)),
        ([["0.bias", 0, ["float32", [2**62]]]], torch.zeros(4)),
    ],
)
def test_what_cannot_be_averaged_is_refused_and_told_of(caplog, payload, tensor):
    async def work(asker, replicas, expert, peer):
        before = values(expert)
        with pytest.raises(PeerRefused):
            await ask(asker, peer, AVERAGE, UID, (payload, [tensor]))
        assert torch.equal(values(expert), before)
        assert f"is not averaged with what {asker.peer_id.short}" in caplog.text
        (answer,) = await ask(asker, peer, AVERAGE, UID, (whole("0.bias", torch.zeros(4)), [torch.zeros(4)]))
        assert answer is not None  # the next one is met as usual

    in_meeting(work)


def test_one_meeting_at_a_time():
    async def work(asker, replicas, expert, peer):
        streams = asker.endpoint.streams
        request, deadline = ReplicaRequest(UID), Deadline.after(30)
        async with streams.open_channel(peer, AVERAGE, request, deadline=deadline) as channel:
            await channel.send(whole("0.bias", torch.zeros(4)), pack([torch.zeros(4)])[1])
            await channel.receive()
            for method in (AVERAGE, STATE):
                with pytest.raises(PeerBusy, match="meeting another"):
                    await ask(asker, peer, method, UID)
            assert await replicas.sync() == 0
        await asyncio.sleep(1)  # the channel was given up: its place is free
        await ask(asker, peer, AVERAGE, UID)

    in_meeting(work)


def test_a_silent_one_does_not_keep_its_place():
    async def work(asker, replicas, expert, peer):
        streams = asker.endpoint.streams
        async with streams.open_channel(
            peer, AVERAGE, ReplicaRequest(UID), deadline=Deadline.after(3600)
        ) as channel:
            await channel.send(whole("0.bias", torch.zeros(4)), pack([torch.zeros(4)])[1])
            await asyncio.sleep(100)
            await ask(asker, peer, AVERAGE, UID)

    in_meeting(work)


def test_who_may_not_average():
    async def work(asker, replicas, expert, peer):
        with pytest.raises(PeerRefused, match="not served here"):
            await ask(asker, peer, AVERAGE, "ffn.9")
        replicas._server.experts["ffn.7"] = small_expert("ffn.7", num_updates=1)
        with pytest.raises(PeerBusy, match=r"not known here as one that serves ffn\.7"):
            await ask(asker, peer, AVERAGE, "ffn.7")
        replicas._server.is_leaving = True
        with pytest.raises(PeerBusy, match="leaving"):
            await ask(asker, peer, AVERAGE, UID)

    in_meeting(work)


@pytest.mark.parametrize("is_swarm_secret", [True, False])
def test_who_gives_no_name_may_average_only_where_names_prove_nothing(is_swarm_secret):
    async def work(asker, replicas, expert, peer):
        head = Head(AVERAGE, ReplicaRequest(UID), (), Peer(Address("a", 1)), Deadline.after(9))
        endpoint = replicas._dht.endpoint
        if is_swarm_secret:
            endpoint.membership = Membership(Identity.generate(), SwarmSecret(b"s" * 32))
        with pytest.raises(PeerBusy if is_swarm_secret else Met):
            await replicas._rpc_average(head, Met())
        endpoint.membership = None

    in_meeting(work)


class Met(Exception):
    """A channel that somebody has begun to read."""

    async def receive(self):
        raise self


def test_a_newcomer_is_not_averaged_with():
    async def work(asker, replicas, expert, peer):
        replicas._newcomers[UID] = True
        with pytest.raises(PeerBusy, match="is new"):
            await ask(asker, peer, AVERAGE, UID)

    in_meeting(work)


# --- liars ---


def against(serve, method, num_updates, held=None):
    """What becomes of an expert whose only other replica answers with `serve`."""

    async def main(swarm, liar, honest):
        expert = small_expert(num_updates=num_updates)
        before = values(expert)
        liar.endpoint.routes.add_channel(method, serve, ReplicaRequest)
        if held is not None:
            StateDonor(liar.endpoint.streams).hold(held)
        for dht in (liar, honest):
            await declare_experts(dht, [UID], dht.in_s(3600))
        assert await Replicas(FakeServer(expert), honest, 60.0).sync() == 0
        assert torch.equal(values(expert), before)
        assert expert.num_updates == num_updates
        return liar.peer_id.short

    return in_swarm(2, main)


@pytest.mark.parametrize("lie", ["nan", "shape", "other", "nothing", "nonsense", "end"])
def test_a_replica_that_answers_nonsense_is_named_and_changes_nothing(caplog, lie):
    async def serve(head, channel):
        item = await channel.receive()
        tensors = [torch.zeros(piece[2][1]) for piece in item.payload]
        payload = item.payload
        if lie == "nan":
            tensors[0][0] = torch.nan
        elif lie == "shape":
            tensors[0] = torch.zeros(9, 9)
        elif lie == "other":
            payload, tensors = payload[:1], tensors[:1]
        elif lie == "nothing":
            tensors = []
        elif lie == "nonsense":
            payload = {"a": 1}
        if lie != "end":
            await channel.send(payload, pack(tensors)[1])
            await channel.receive()
        return Reply()

    short = against(serve, AVERAGE, num_updates=1)
    assert f"What {short}" in caplog.text
    assert "is not to be used" in caplog.text


def lying_index(held, **told):
    """The same bytes under an index that says something else."""
    index = msgspec.structs.replace(msgspec.msgpack.decode(held.index, type=StateIndex), **told)
    held.index = msgspec.msgpack.encode(index)
    held.name = hashlib.sha256(held.index).hexdigest()
    return held


def lying_state(lie):
    """A state that its taker must not become."""
    state = small_expert(num_updates=2).state()
    tensors = state.tensors
    if lie == "another module":
        tensors["module.extra"] = torch.zeros(1)
    elif lie == "less":
        del tensors["module.0.bias"]
    elif lie == "not a number":
        tensors["module.0.weight"][0, 0] = torch.nan
    elif lie == "no tensors":
        tensors["optimizer.0.step"] = 1.0
    if lie in ("nothing", "no state"):
        return HeldState([] if lie == "nothing" else {"tensors": 1, "numbers": 2})
    numbers = [] if lie == "no numbers" else state.numbers
    held = HeldState({"tensors": tensors, "numbers": json.dumps(numbers)})
    if lie in ("too much", "impossible"):
        spec = TensorSpec("float32", (2**40 if lie == "too much" else -1,))
        return lying_index(held, specs=[spec] * len(tensors))
    if lie in ("no such tensor", "no JSON", "too deep"):
        plains = {"no such tensor": b'{"$tensor": "x"}', "no JSON": b"{", "too deep": b"[" * 10**5}
        return lying_index(held, plain=plains[lie])
    if lie == "other bytes":
        held.leaf = lambda number: [memoryview(b"other bytes")]
    return held


@pytest.mark.parametrize(
    "lie",
    [
        "too much",
        "impossible",
        "another module",
        "less",
        "not a number",
        "no tensors",
        "no numbers",
        "nothing",
        "no state",
        "no such tensor",
        "no JSON",
        "too deep",
        "other bytes",
        "no name",
    ],
)
def test_a_state_that_is_not_to_be_used_changes_nothing(caplog, lie):
    held = lying_state(lie)

    async def serve(head, channel):
        await channel.send(["no name"] if lie == "no name" else held.name)
        await channel.receive()
        return Reply()

    short = against(serve, STATE, num_updates=0, held=held)
    assert f"What {short}" in caplog.text


@pytest.mark.parametrize("lie", ["gone", "silent", "other bytes"])
def test_a_newcomer_copies_the_next_replica_when_one_fails_in_the_middle(lie):
    held = lying_state(lie)

    async def serve(head, channel):
        await channel.send(held.name)
        await channel.receive()
        return Reply()

    async def serve_leaf(head, buffers):
        if lie == "silent":
            await asyncio.sleep(NEVER_S)
        raise PeerRefused("This peer does not hold it any more.")

    async def main(swarm, *peers):
        liar, honest, mine = sorted(peers, key=lambda dht: dht.peer_id)
        liar.endpoint.routes.add_channel(STATE, serve, ReplicaRequest)
        StateDonor(liar.endpoint.streams).hold(held)
        if lie != "other bytes":
            liar.endpoint.routes.remove("state.leaf")
            liar.endpoint.streams.handle("state.leaf", serve_leaf)
        await declare_experts(liar, [UID], liar.in_s(NEVER_S))
        old, new = small_expert(seed=1, num_updates=3), small_expert(seed=2)
        async with replicas_of((old, honest), (new, mine), every_s=NEVER_S) as (_, newcomer):
            await asyncio.sleep(400 if lie == "silent" else 10)
            assert newcomer.num_copied == 1
            assert torch.equal(values(new), values(old))
            train(old, 2)
            train(new, 2)
            assert torch.equal(values(new), values(old))

    in_swarm(3, main)


def test_a_state_is_held_while_it_is_taken_and_no_longer():
    async def work(asker, replicas, expert, peer):
        streams, request = asker.endpoint.streams, ReplicaRequest(UID)
        for ends in (True, False):
            async with streams.open_channel(peer, STATE, request, deadline=Deadline.never()) as channel:
                name = (await channel.receive()).payload
                await asyncio.sleep(50)
                taken = await StateTaker(streams, name).take([peer], Deadline.after(30))
                assert torch.equal(
                    taken["tensors"]["module.0.weight"], expert.state().tensors["module.0.weight"]
                )
                await asyncio.sleep(50)  # whoever asked has 60 s more
                with pytest.raises(PeerBusy, match="meeting another"):
                    await ask(asker, peer, AVERAGE, UID)
                if ends:
                    await channel.end()
                await asyncio.sleep(1 if ends else 20)  # or fell silent
                with pytest.raises(PeerLost, match="does not hold the state"):
                    await StateTaker(streams, name).take([peer], Deadline.after(30))
                await ask(asker, peer, AVERAGE, UID)

    in_meeting(work)


# --- on sockets ---


class Told(Replicas):
    """Says when it has met others for the first time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.was_synced = asyncio.Event()

    async def sync(self, uids=None):
        num_met = await super().sync(uids)
        self.was_synced.set()
        return num_met


async def open_peer(closing, secret, helpers=(), join=()):
    membership = Membership(Identity.generate(), secret)
    endpoint = await closing.enter_async_context(Endpoint(membership=membership, helpers=helpers))
    await endpoint.listen(Address("127.0.0.1", 0))
    return await closing.enter_async_context(DHT(endpoint=endpoint, join=join))


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_servers_with_several_loops_meet_through_tls_with_those_who_have_declared(run, is_newcomer):
    async def main(helpers):
        async with contextlib.AsyncExitStack() as closing:
            secret = SwarmSecret(b"s" * 32)
            first = await open_peer(closing, secret, helpers[:1])
            second = await open_peer(closing, secret, helpers[1:], [first.peer.address])
            stranger = await open_peer(closing, secret, (), [first.peer.address])
            num_updates = 1, 1 - is_newcomer
            experts = [small_expert(seed=seed, num_updates=num) for seed, num in enumerate(num_updates)]
            made = []
            for dht, expert in zip((first, second), experts, strict=True):
                server = await closing.enter_async_context(ExpertServer(dht.endpoint, [expert]))
                await declare_experts(dht, [UID], dht.in_s(600))
                made.append(Told(server, dht, NEVER_S))
            async with Scope() as scope:
                for one in made:
                    scope.start(one.run())
                    await one.was_synced.wait()
                assert [one.num_averaged for one in made] == [0, not is_newcomer]
                assert [one.num_copied for one in made] == [0, is_newcomer]
                assert torch.equal(values(experts[0]), values(experts[1]))
                with pytest.raises(PeerBusy, match="not known here"):
                    await ask(stranger, first.peer, AVERAGE, UID)
                scope.cancel()

    with LoopThread() as one, LoopThread() as other:
        run(main([one, other]))
