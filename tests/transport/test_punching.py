"""Hole punching in memory: who comes to reach whom directly, what stays relayed; no call waits for it."""

import asyncio
import contextlib

import pytest

from shoal.core import Address, Deadline, Peer, PeerBusy, PeerId, PeerLost, PeerRefused, Scope, ShoalError
from shoal.core.virtual import run_virtual
from shoal.transport import Conditions, Endpoint, FaultScript, Limits, MemoryNetwork, Profile, Reply
from shoal.transport.network.nat import NATS
from shoal.transport.punching import ALIVE_S, FIRST_PAUSE_S, OFFER, UNUSED_S, Offer

PROFILE = "[ways.default]\ndelay_ms = 20"


def peer_id(name):
    return PeerId.of_public_key(name.encode())


class Swarm:
    """Relays that everybody can dial, and peers behind a router each."""

    def __init__(self, num_relays=2, seed=0, script=None):
        self.network = MemoryNetwork(Conditions(Profile.parse(PROFILE), script), seed)
        self.num_relays = num_relays
        self.relays = []
        self.closing = contextlib.AsyncExitStack()

    async def __aenter__(self):
        for number in range(self.num_relays):
            endpoint = await self.open(f"relay{number}")
            await endpoint.listen(Address(f"relay{number}", 31337))
            self.relays.append(Peer(endpoint.addresses[0], endpoint.peer_id))
        return self

    async def __aexit__(self, *error):
        await self.closing.aclose()

    async def open(self, name, behind="", **options):
        host = self.network.host(name, behind=behind)
        endpoint = Endpoint(network=host, peer_id=peer_id(name), **options)
        endpoint.handle("who", lambda head, buffers: Reply([name, str(head.peer.address)]))
        return await self.closing.enter_async_context(endpoint)

    async def peer(self, name, kind, behind=None, **options):
        """A peer behind a router of this kind, its own unless it is named, that relays are registered for."""
        router = behind or f"{name}-router"
        if router not in self.network.routers:
            self.network.router(router, kind)
        endpoint = await self.open(name, router, **options)
        endpoint.relays.keep(lambda: self.relays)
        await endpoint.relays.registered(Deadline.after(10))
        await asyncio.sleep(1)
        return endpoint


def relayed(endpoint):
    return Peer(endpoint.relays.addresses[0], endpoint.peer_id)


async def who(one, other, transport="streams"):
    reply = await getattr(one, transport).call(relayed(other), "who", deadline=Deadline.after(10))
    return reply.payload


def way(one, other):
    return one.streams.connection_kinds().get(other.peer_id)


async def met(swarm, kinds, wait_s=30.0):
    one, other = [await swarm.peer(name, kind) for name, kind in zip(("anna", "bert"), kinds, strict=True)]
    assert (await who(one, other))[0] == "bert"
    assert way(one, other) == "relayed"
    await asyncio.sleep(wait_s)
    return one, other


def ways_between(kinds, **options):
    async def main():
        async with Swarm(**options) as swarm:
            one, other = await met(swarm, kinds)
            there = (await who(one, other), way(one, other))
            back = (await who(other, one), way(other, one))
            return there, back, one.punching.num_tried, one.punching.num_punched

    return run_virtual(main(), limit_s=1000)


ALL = [(one, other) for number, one in enumerate(NATS) for other in list(NATS)[number:]]
PUNCHED = [pair for pair in ALL if "endpoint-independent" in pair or set(pair) == {"port-restricted"}]


@pytest.mark.parametrize("kinds", ALL)
def test_which_kinds_of_routers_are_punched(kinds):
    (there, way_there), (back, way_back), num_tried, num_punched = ways_between(kinds)
    assert (there[0], back[0]) == ("bert", "anna")
    expected = "punched" if kinds in PUNCHED else "relayed"
    assert (way_there, way_back) == (expected, expected)
    assert (num_tried, num_punched) == (1, expected == "punched")


@pytest.mark.parametrize("kinds", [("endpoint-independent", "symmetric"), ("symmetric", "symmetric")])
def test_one_relay_is_enough(kinds):
    (there, way_there), (back, way_back), *_ = ways_between(kinds, num_relays=1)
    assert way_there == way_back == ("punched" if kinds[0] != kinds[1] else "relayed")
    assert (there[0], back[0]) == ("bert", "anna")


def test_it_happens_the_same_way_every_time():
    assert ways_between(PUNCHED[0]) == ways_between(PUNCHED[0])


def test_neighbours_behind_one_router_meet_inside():
    async def main():
        async with Swarm() as swarm:
            one, other = [await swarm.peer(name, "symmetric", "home") for name in ("anna", "bert")]
            await who(one, other)
            await asyncio.sleep(30)
            return await who(one, other), way(one, other)

    (name, origin), how = run_virtual(main(), limit_s=1000)
    assert (name, how) == ("bert", "punched")
    assert origin.startswith("anna:")


def test_both_may_begin_at_the_same_time():
    async def main():
        async with Swarm() as swarm:
            one, other = [await swarm.peer(name, "port-restricted") for name in ("anna", "bert")]
            async with Scope() as scope:
                for here, there in ((one, other), (other, one)):
                    scope.start(who(here, there))
            await asyncio.sleep(30)
            return way(one, other), way(other, one), one.punching.num_punched + other.punching.num_punched

    assert run_virtual(main(), limit_s=1000) == ("punched", "punched", 1)


def test_calls_go_on_over_the_relay_while_a_way_is_looked_for_and_where_there_is_none():
    async def main():
        loop = asyncio.get_running_loop()
        async with Swarm() as swarm:
            one, other = await met(swarm, ("symmetric", "symmetric"), wait_s=0)
            longest_s = 0.0
            for _ in range(200):
                began_s = loop.time()
                await who(one, other)
                longest_s = max(longest_s, loop.time() - began_s)
                await asyncio.sleep(0.05)
            return longest_s, one.punching.num_tried

    longest_s, num_tried = run_virtual(main(), limit_s=1000)
    assert num_tried == 1
    assert longest_s < 0.1  # twice there and back, at 20 ms


def test_an_attempt_is_made_every_few_minutes_and_ever_more_seldom():
    async def main():
        counts = []
        async with Swarm() as swarm:
            one, other = await met(swarm, ("symmetric", "symmetric"), wait_s=0)
            for _ in range(60):
                await asyncio.sleep(60)
                await who(one, other)
                counts.append(one.punching.num_tried)
        return counts

    counts = run_virtual(main(), limit_s=10_000)
    assert counts[0] == 1
    assert counts[int(FIRST_PAUSE_S / 60) + 1] == 2
    assert 4 <= counts[-1] <= 6  # in an hour


def test_what_is_punched_needs_no_relay_and_calls_under_way_end_where_they_began():
    async def main():
        began, may_end = asyncio.Event(), asyncio.Event()

        async def slow(head, buffers):
            began.set()
            await may_end.wait()
            return Reply(head.peer.address.is_relayed)

        async with Swarm() as swarm:
            one, other = await met(swarm, ("port-restricted", "port-restricted"), wait_s=0)
            other.handle("slow", slow)
            peer = relayed(other)
            async with Scope() as scope:
                call = scope.start(one.streams.call(peer, "slow", deadline=Deadline.after(100)))
                await began.wait()
                await asyncio.sleep(30)
                may_end.set()
                was_relayed = (await call).payload
            await asyncio.sleep(5)
            num_relayed = sum(
                connection.is_relayed
                for end in (one, other)
                for connection in end.streams._shards[0].connections
            )  # that the connection before is gone cannot be seen from outside
            for relay in swarm.relays:
                swarm.network.hosts[relay.address.host].kill()
            await asyncio.sleep(30)
            reply = await one.streams.call(peer, "who", deadline=Deadline.after(5))
            back = await other.streams.call(
                Peer(Address("relay0", 31337, one.peer_id), one.peer_id), "who", deadline=Deadline.after(5)
            )
            return was_relayed, num_relayed, reply.payload[0], back.payload[0]

    assert run_virtual(main(), limit_s=1000) == (True, 0, "bert", "anna")


def test_a_direct_way_that_ends_is_replaced_by_the_relay():
    async def main():
        async with Swarm() as swarm:
            one, other = await met(swarm, ("port-restricted", "port-restricted"))
            before = way(one, other)
            one.streams.cut_off(other.peer_id)
            await asyncio.sleep(0)
            reply = await who(one, other)
            after = way(one, other)
            for _ in range(15):  # while it is used
                await asyncio.sleep(FIRST_PAUSE_S / 10)
                await who(one, other)
            return before, reply[0], after, way(one, other)

    assert run_virtual(main(), limit_s=1000) == ("punched", "bert", "relayed", "punched")


def test_a_direct_way_that_falls_silent_is_noticed_within_ten_seconds():
    script = FaultScript.parse(
        '[[fault]]\nkind = "partition"\nbetween = [["anna:*"], ["bert:*"]]\nat_s = 60\nfor_s = 100'
    )

    async def main():
        loop = asyncio.get_running_loop()
        async with Swarm(script=script) as swarm:
            one, other = await met(swarm, ("port-restricted", "port-restricted"))
            before = way(one, other)
            await asyncio.sleep(61 - loop.time())
            with pytest.raises(PeerLost, match="both routers"):
                await one.streams.call(relayed(other), "who", deadline=Deadline.after(60))
            lost_at_s = loop.time()
            name, origin = await who(one, other)
            return before, lost_at_s, name, Address.parse(origin).is_relayed

    before, lost_at_s, name, is_relayed = run_virtual(main(), limit_s=1000)
    assert (before, name, is_relayed) == ("punched", "bert", True)
    assert lost_at_s < 71


def test_datagrams_get_through_and_their_way_is_kept_while_it_is_used():
    async def main():
        async with Swarm() as swarm:
            one, other = await met(swarm, ("endpoint-independent", "symmetric"), wait_s=0)
            first = await who(one, other, "datagrams")
            origins, sent = [], []
            for _ in range(3):
                await asyncio.sleep(100)  # no router keeps a port that long
                origins.append((await who(one, other, "datagrams"))[1])
                sent.append(other.datagrams.stats.packets_in)
            back = await who(other, one, "datagrams")
            await asyncio.sleep(2 * UNUSED_S)
            quiet = one.datagrams.stats.packets_out, other.datagrams.stats.packets_out
            await asyncio.sleep(10 * ALIVE_S)
            is_quiet = quiet == (one.datagrams.stats.packets_out, other.datagrams.stats.packets_out)
            return first, origins, sent, back, is_quiet

    first, origins, sent, back, is_quiet = run_virtual(main(), limit_s=10_000)
    assert first[1].startswith("relay")
    assert all(origin.startswith("anna-router:") for origin in origins)
    assert sent[0] < sent[1] < sent[2]
    assert back[1].startswith("bert-router:")
    assert is_quiet


def test_datagrams_go_over_the_relay_again_when_their_way_is_gone():
    async def main():
        async with Swarm() as swarm:
            one, other = await met(swarm, ("port-restricted", "port-restricted"))
            assert (await who(one, other, "datagrams"))[1].startswith("anna-router:")
            for router in ("anna-router", "bert-router"):  # both have lost their tables
                swarm.network.routers[router].table = swarm.network.router("other", "symmetric").table
            await asyncio.sleep(2 * ALIVE_S)
            return other.peer_id in one.datagrams.punched, (await who(one, other, "datagrams"))[0]

    assert run_virtual(main(), limit_s=1000) == (False, "bert")


def test_offers_are_taken_from_relayed_peers_only_and_seldom():
    async def main():
        async with Swarm() as swarm:
            one = await swarm.peer("anna", "port-restricted")
            stranger = await swarm.open("stranger")
            await stranger.listen(Address("stranger", 31337))
            offer = Offer(("nowhere:1",), "nowhere:1")
            outcomes = []
            for _ in range(5):
                try:
                    await stranger.streams.call(relayed(one), OFFER, offer, deadline=Deadline.after(10))
                    outcomes.append("taken")
                except PeerBusy as error:
                    outcomes.append("often" if "often" in str(error) else "busy")
                await asyncio.sleep(6)
            direct = Peer(stranger.addresses[0], stranger.peer_id)
            with pytest.raises(PeerRefused, match="relay"):
                await one.streams.call(direct, OFFER, offer, deadline=Deadline.after(10))
            for bad in (None, Offer(("x",) * 5, ""), {"tcp": [1]}):
                with pytest.raises(ShoalError):
                    await stranger.streams.call(relayed(one), OFFER, bad, deadline=Deadline.after(10))
            return outcomes

    assert run_virtual(main(), limit_s=1000) == ["taken"] * 3 + ["often"] * 2


def test_nonsense_addresses_lead_nowhere_and_nothing_is_left_behind():
    async def main():
        async with Swarm() as swarm:
            one = await swarm.peer("anna", "port-restricted")
            stranger = await swarm.open("stranger")
            offer = Offer(("", "nowhere", "nowhere:0", "[x"), "?", ("::::",))
            peer = relayed(one)
            before = one.streams.num_connections
            await stranger.streams.call(peer, OFFER, offer, deadline=Deadline.after(10))
            await stranger.streams.notify(peer, "punch.go", deadline=Deadline.after(10))
            await asyncio.sleep(15)
            return one.streams.num_connections - before, len(swarm.network.hosts["anna"]._listeners)

    assert run_virtual(main(), limit_s=1000) == (1, 0)  # the stranger's own


def test_peers_without_limits_of_their_own_are_not_stuck_where_connections_are_few():
    async def main():
        async with Swarm() as swarm:
            one = await swarm.peer("anna", "port-restricted")
            other = await swarm.peer("bert", "port-restricted", limits=Limits(max_connections=1))
            await who(one, other)
            await asyncio.sleep(30)
            return (await who(one, other))[0]

    assert run_virtual(main(), limit_s=1000) == "bert"


def test_only_so_many_look_for_a_way_to_one_peer_at_a_time():
    async def main():
        async with Swarm() as swarm:
            one = await swarm.peer("anna", "symmetric")
            offer = Offer(("nowhere:1",), "nowhere:1")

            async def ask(number):
                stranger = await swarm.open(f"stranger{number}")
                with contextlib.suppress(PeerBusy):
                    await stranger.streams.call(relayed(one), OFFER, offer, deadline=Deadline.after(10))
                    return True
                return False

            async with Scope() as scope:
                tasks = [scope.start(ask(number)) for number in range(14)]
            first = [task.result() for task in tasks]
            async with Scope() as scope:
                tasks = [scope.start(ask(number)) for number in range(14, 20)]
            return sum(first), sum(task.result() for task in tasks)

    assert run_virtual(main(), limit_s=1000) == (14, 2)
