"""What a peer makes of answers, also of those that follow no protocol."""

import asyncio

import msgspec
import pytest

from dht.worlds import Liar, identity_of, in_world
from shoal.core import DeadlineExceeded, Peer, PeerRefused, ProtocolError
from shoal.dht.records import Slot, key_of
from shoal.dht.wire import Finding, Found, LookupKind, Pong, State, Want
from shoal.transport import Reply
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript, Skew
from shoal.transport.network.profiles import Profile


class Odd(Liar):
    """Answers a ping or a find with whatever it is told to."""

    def __init__(self, *args, ping=None, find=None):
        super().__init__(*args, values=None)
        self.answers = ping, find

    def _ping(self, head, buffers):
        return self._answer(self.answers[0]) if self.answers[0] else super()._ping(head, buffers)

    def _find(self, head, buffers):
        wants = head.payload.wants
        return self._answer(self.answers[1], wants) if self.answers[1] else super()._find(head, buffers)

    def _answer(self, made, *args):
        answer = made(self, *args)
        return answer if isinstance(answer, Reply) else Reply(msgspec.msgpack.encode(answer))


# --- pings ---


def test_a_ping_tells_how_far_and_how_late_somebody_is():
    async def work(swarm, one, two):
        answered = await one.ping(two.peer)
        assert answered.peer == two.peer
        assert answered.seen_as == str(one.peer.address)
        assert 0.01 < answered.round_trip_s < 1.0
        assert abs(answered.clock_gap_s - 2.0) <= answered.round_trip_s / 2
        assert (await one.ping(str(two.peer.address))).peer == two.peer
        assert (await one.ping(two.peer.address)).peer == two.peer
        assert one.counts.num_pings >= 3

    script = FaultScript(fault=[Skew(peer="p1:*", offset_s=2.0)])
    in_world(work, 2, conditions=Conditions(Profile.load("wan"), script))


def test_nobody_answers_for_somebody_else():
    async def work(swarm, one, two):
        with pytest.raises(PeerRefused, match="another peer is expected"):
            await one.ping(Peer(two.peer.address, identity_of("third").peer_id))
        async with Odd(swarm, "odd", ping=lambda odd: Pong(two.peer_id.digest, "", 0.0)) as odd:
            with pytest.raises(ProtocolError, match="in the name of another peer"):
                await one.ping(odd.peer)

    in_world(work, 2)


@pytest.mark.parametrize(
    "pong",
    [
        lambda odd: Pong(b"short", "", 0.0),
        lambda odd: Pong(bytes(500), "", 0.0),
        lambda odd: [1, 2, 3],
        lambda odd: {},
        lambda odd: Reply(None),
        lambda odd: Reply("text"),
        lambda odd: Reply(b"\x93\xc4\x14" + odd.identity.peer_id.digest + b"\xa2\xff\xfe\xca\0\0\0\0"),
        lambda odd: Reply(b"\x91" * 100_000),
    ],
)
def test_a_pong_that_is_none_is_told_as_such(pong):
    async def work(swarm, one):
        async with Odd(swarm, "odd", ping=pong) as odd:
            with pytest.raises(ProtocolError, match="does not follow the DHT's protocol"):
                await one.ping(odd.peer)
            with pytest.raises(ProtocolError):
                await one.ping(odd.peer.address)
        assert len(one.table) == 0

    in_world(work, 1)


def test_an_odd_clock_does_no_harm():
    async def work(swarm, one):
        for wall_s in (float("nan"), float("inf"), -1e300):
            pong = Pong(b"", "no address at all", wall_s)
            async with Odd(
                swarm,
                "odd",
                ping=lambda odd, pong=pong: msgspec.structs.replace(pong, peer_id=odd.peer.id.digest),
            ) as odd:
                assert (await one.ping(odd.peer)).seen_as == "no address at all"

    in_world(work, 1)


# --- finds ---


@pytest.mark.parametrize(
    "found",
    [
        lambda odd, wants: Found([], []),
        lambda odd, wants: Found([], [Finding(State.NOTHING, b"")] * (len(wants) + 1)),
        lambda odd, wants: [[], [[0, b""]] * 50_000],
        lambda odd, wants: [[1, 2], 3],
        lambda odd, wants: Reply(b"\x92\x90"),
        lambda odd, wants: Reply(None, [b"\xc1" * 500_000]),
    ],
)
def test_who_answers_a_find_with_nonsense_is_backed_off_and_others_are_asked(found):
    async def work(swarm, *peers):
        await peers[1].store("name", "value", peers[1].in_s(60))
        async with Odd(swarm, "odd", find=found) as odd:
            await odd.mingle(peers)
            for peer in peers:
                peer.cache.forget(key_of("name").digest)
                contact = peer.protocol.book.of(odd.peer)
                with pytest.raises(ProtocolError):
                    await peer.protocol.call_find(contact, [Want(bytes(20))])
                assert peer.protocol.is_backed_off(contact)
                assert contact not in peer.table
                assert (await peer.get("name")).value == "value"

    in_world(work, 9)


@pytest.mark.parametrize(
    "found",
    [
        lambda odd, wants: Found([b"", b"x" * 19, bytes(600)], [Finding(9, bytes(range(256)))] * len(wants)),
        lambda odd, wants: Found([], [Finding(State.HERE, b"\x05\xff", [Slot(b"", b"", 1.0)])] * len(wants)),
        lambda odd, wants: Found([], [Finding(State.HERE, b"", [Slot(b"\xc1", b"\xc1", 1e18)])] * len(wants)),
        lambda odd, wants: Found([], [Finding(State.HERE, b"", [Slot(b"", b"\x01", 1e18)])] * len(wants)),
        lambda odd, wants: Found([], [Finding(State.TOO_LARGE, b"")] * len(wants)),
        lambda odd, wants: Found([], [Finding(State.HERE, b"", [], b"\x80" * 70_000, True)] * len(wants)),
        lambda odd, wants: Found(
            [], [Finding(-(2**60), b"", [Slot(b"", b"\x01", float("nan"))])] * len(wants)
        ),
    ],
)
def test_answers_of_the_right_shape_that_make_no_sense_do_no_harm(found):
    async def work(swarm, *peers):
        await peers[1].store("name", "value", peers[1].in_s(60))
        await peers[1].store("grid.", 1, peers[1].in_s(60), subkey=7)
        async with Odd(swarm, "odd", find=found) as odd:
            await odd.mingle(peers)
            for peer in peers:
                for latest in (False, True):
                    peer.cache.forget(key_of("name").digest)
                    assert (await peer.get("name", latest=latest)).value == "value"
                assert await peer.get("nothing") is None
                assert await peer.get_coordinates(["grid."]) == [(7,)]
        assert asyncio.get_running_loop().time() < 60.0

    in_world(work, 9)


def test_silence_is_a_failure_and_told_to_the_table():
    async def work(swarm, one, two):
        contact = one.protocol.book.of(two.peer)
        await swarm.kill("p1")
        with pytest.raises(DeadlineExceeded):
            await one.protocol.call_find(contact, [Want(bytes(20), LookupKind.PEERS)])
        assert one.protocol.is_backed_off(contact)
        assert one.counts.num_failed == 1
        assert len(one.table) == 0

    in_world(work, 2)
