"""Peers behind routers, called through relays: in virtual time, and over TLS on real sockets."""

import asyncio
import contextlib
import time

import pytest

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerId,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    UsageError,
    fanout,
    run_virtual,
)
from shoal.transport import RelayLimits, Reply
from shoal.transport.endpoint import Endpoint
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import Profile
from shoal.transport.network.shaped import ShapedNetwork
from shoal.transport.network.sockets import SocketNetwork
from shoal.transport.relay import ARRIVE, OPEN, REGISTER, WINDOW_BYTES, Arrival, Open
from transport.members import Swarm
from transport.wire import LOOPBACK, open_descriptors, soon, until

MBIT_BYTES = 125_000
GENEROUS = RelayLimits(bytes_per_s=1e12, bytes_per_s_each=1e12)


def id_of(name):
    return PeerId.of_public_key(name.encode().ljust(32, b"."))


def answer(endpoint):
    endpoint.handle("echo", lambda head, buffers: Reply([head.payload, str(head.peer.id)], buffers))
    endpoint.handle("take", lambda head, buffers: Reply(sum(map(len, buffers))))

    async def sum_up(head, channel):
        total_bytes = 0
        async for item in channel:
            total_bytes += sum(map(len, item.buffers))
        return Reply(total_bytes)

    endpoint.handle_channel("sum", sum_up)


class World:
    """Hosts in memory: some listen and relay, the others can be called through them only."""

    def __init__(self, profile="", script="", limits=GENEROUS):
        faults = FaultScript.parse(script) if script else None
        conditions = Conditions(Profile.parse(profile), faults) if profile else None
        self.network = MemoryNetwork(conditions, seed=3)
        self.limits = limits
        self.endpoints = {}
        self._closing = contextlib.AsyncExitStack()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        await self._closing.aclose()

    async def open(self, name, *, listens=False):
        endpoint = Endpoint(network=self.network.host(name), peer_id=id_of(name), relaying=self.limits)
        answer(endpoint)
        self.endpoints[name] = await self._closing.enter_async_context(endpoint)
        if listens:
            await endpoint.listen(Address(name, 1024))
        return endpoint

    async def open_relays(self, num):
        """So many relays, each as others know it."""
        names = [f"relay{number}" for number in range(num)]
        return [Peer((await self.open(name, listens=True)).addresses[0], id_of(name)) for name in names]

    async def open_home(self, relays, num=3, name="home"):
        """A peer that is registered at some of these relays."""
        home = await self.open(name)
        home.relays.keep(lambda: relays, num)
        await home.relays.registered(soon())
        return home

    def kill(self, name):
        self.network.host(name).kill()


def in_world(work, **settings):
    async def main():
        async with World(**settings) as world:
            return await work(world)

    return run_virtual(main())


async def pour(endpoint, peer, num_bytes, item_bytes=256 << 10):
    """Send so many bytes through a channel; how many arrived."""
    item = bytes(item_bytes)
    async with endpoint.streams.open_channel(peer, "sum", deadline=Deadline.after(300)) as channel:
        for _ in range(num_bytes // item_bytes):
            await channel.send(None, [item])
        await channel.end()
        return (await channel.result()).payload


# --- calls ---


def test_a_peer_that_cannot_be_dialed_is_called_through_a_relay():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        (address,) = home.relays.addresses
        assert address == Address("relay0", 1024, home.peer_id)
        assert Address.parse(str(address)) == address
        assert home.relays.seen_as[0].host == "home"
        for target in (Peer(address, home.peer_id), address):
            for transport in (far.streams, far.datagrams):
                reply = await transport.call(target, "echo", 7, [b"abc"], deadline=soon())
                assert reply.payload == [7, str(far.peer_id)]
                assert bytes(reply.buffers[0]) == b"abc"
        large = bytes(range(256)) * 40_000
        reply = await far.streams.call(address, "echo", 1, [large], deadline=soon())
        assert bytes(reply.buffers[0]) == large
        assert await pour(far, address, 8 << 20) == 8 << 20
        service = world.endpoints["relay0"].relaying
        assert service.num_streams == service.num_registered == 1
        assert service.num_bytes > 2 * len(large)

    in_world(work)


def test_two_calls_at_once_share_one_stream():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        calls = [
            far.streams.call(home.relays.addresses[0], "echo", number, deadline=soon())
            for number in range(20)
        ]
        answers = await fanout(calls, soon())
        assert [reply.payload[0] for reply in answers] == list(range(20))
        assert world.endpoints["relay0"].relaying.num_streams == 1

    in_world(work)


def test_both_of_two_clients_may_call_and_a_call_back_uses_the_connection_that_there_is():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open_home(relays, name="far")
        assert (await far.streams.call(home.relays.addresses[0], "echo", deadline=soon())).payload
        reply = await home.streams.call(far.relays.addresses[0], "echo", deadline=soon())
        assert reply.payload[1] == str(home.peer_id)
        assert world.endpoints["relay0"].relaying.num_streams == 1
        # who has dialed this peer is called back over that connection, without a relay
        host = await world.open("host", listens=True)
        await home.streams.call(host.addresses[0], "echo", deadline=soon())
        await host.streams.call(home.relays.addresses[0], "echo", deadline=soon())
        assert world.endpoints["relay0"].relaying.num_streams == 1

    in_world(work)


def test_the_end_of_either_side_is_the_end_of_the_stream():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        service = world.endpoints["relay0"].relaying
        address = home.relays.addresses[0]
        await far.streams.call(address, "echo", deadline=soon())
        far.streams.cut_off(home.peer_id)
        await until(lambda: service.num_streams == 0)
        await far.streams.call(address, "echo", deadline=soon())
        home.streams.cut_off(far.peer_id)
        await until(lambda: service.num_streams == 0)
        await far.streams.call(address, "echo", deadline=soon())  # and it is dialed again

    in_world(work)


def test_who_is_not_registered_is_not_reached_and_the_error_says_why():
    async def work(world):
        relays = await world.open_relays(1)
        far = await world.open("far")
        nobody = Address("relay0", 1024, id_of("nobody"))
        with pytest.raises(PeerUnreachable, match="through its relay") as caught:
            await far.streams.call(nobody, "echo", deadline=soon())
        assert "not registered at this relay" in caught.value.cause
        with pytest.raises(PeerUnreachable, match="through its relay"):
            await far.streams.call(Address("gone", 1, id_of("nobody")), "echo", deadline=soon())
        home = await world.open_home(relays)
        with pytest.raises(PeerRefused, match="not"):
            await far.streams.call(Peer(home.relays.addresses[0], id_of("else")), "echo", deadline=soon())
        home.relays.keep(lambda: (), 0)
        assert home.relays.addresses == ()
        await asyncio.sleep(60)  # its lease runs out
        with pytest.raises(PeerUnreachable):
            await far.streams.call(Address("relay0", 1024, home.peer_id), "echo", deadline=soon())

    in_world(work)


# --- relays that go ---


def test_when_a_relay_dies_the_others_take_over_within_ten_seconds():
    async def work(world):
        relays = await world.open_relays(5)
        home, far = await world.open_home(relays), await world.open("far")
        await until(lambda: len(home.relays.addresses) == 3)
        changes = []
        clock = asyncio.get_running_loop()
        home.relays.on_change.append(lambda: changes.append(clock.time()))
        first = home.relays.addresses[0]
        call = far.streams.open_channel(first, "sum", deadline=Deadline.after(300))
        async with call as channel:
            await channel.send(None, [b"x"])
            began_s = clock.time()
            world.kill(first.host)
            with pytest.raises(PeerLost, match="relay"):
                await channel.result()
            assert clock.time() - began_s < 10
        for address in home.relays.addresses[1:]:
            await far.streams.call(address, "echo", deadline=soon())
        await until(lambda: len(home.relays.addresses) == 3 and first not in home.relays.addresses)
        assert changes[-1] - began_s < 10
        for address in home.relays.addresses:
            await far.streams.call(address, "echo", deadline=soon())

    in_world(work)


def test_a_relay_that_falls_silent_is_noticed_by_both_sides_within_ten_seconds():
    script = "[[fault]]\nkind = 'pause'\nat_s = 5\npeer = 'relay0:1024'"

    async def work(world):
        relays = await world.open_relays(2)
        home, far = await world.open_home(relays[:1], num=1), await world.open("far")
        home.relays.keep(lambda: relays, 1)
        first = home.relays.addresses[0]
        clock = asyncio.get_running_loop()
        async with far.streams.open_channel(first, "sum", deadline=Deadline.after(300)) as channel:
            with pytest.raises(PeerLost, match="relay"):
                await channel.result()
            assert clock.time() < 15
        await until(lambda: home.relays.addresses and first not in home.relays.addresses)
        assert clock.time() < 15
        await far.streams.call(home.relays.addresses[0], "echo", deadline=soon())

    in_world(work, profile="[ways.default]\ndelay_ms = 20", script=script)


@pytest.mark.parametrize("slow", ["far", "home", "relay0"])
def test_a_line_that_is_full_for_a_minute_is_not_taken_for_a_relay_that_is_gone(slow):
    profile = f"""
        [ways.default]
        delay_ms = 20
        [peers]
        "relay0:*" = "fast"
        "home:*" = "fast"
        "far:*" = "fast"
        "{slow}:*" = "slow"
        [places.fast]
        [places.slow]
        up_mbit_s = 0.5
        down_mbit_s = 2
    """.replace(f'"{slow}:*" = "fast"\n', "")

    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        before = home.relays.addresses
        changes = []
        home.relays.on_change.append(lambda: changes.append(home.relays.addresses))
        assert await pour(far, before[0], 4 << 20) == 4 << 20
        large = bytes(4 << 20)
        reply = await far.streams.call(before[0], "echo", 1, [large], deadline=Deadline.after(300))
        assert bytes(reply.buffers[0]) == large
        assert changes == []

    in_world(work, profile=profile)


def test_a_relay_that_is_closed_is_replaced_over_real_sockets(run):
    async def check():
        async with members(3) as (relays, home, far):
            await until(lambda: len(home.relays.addresses) == 3)
            first = home.relays.addresses[0]
            await far.streams.call(first, "echo", deadline=soon())
            began_s = time.monotonic()
            gone = next(each for each in relays if each.addresses[0] == first.relay)
            await gone.streams.__aexit__(None, None, None)
            with pytest.raises(ShoalError):
                await far.streams.call(first, "echo", deadline=soon())
            await far.streams.call(home.relays.addresses[1], "echo", deadline=soon())
            await until(lambda: first not in home.relays.addresses)
            assert time.monotonic() - began_s < 10

    run(check())


# --- how fast ---


@pytest.mark.parametrize("delay_ms", [1, 50])
def test_a_relayed_stream_carries_four_fifths_of_the_relays_line(delay_ms):
    mbit_s, num_bytes = 40, 24 << 20
    profile = f"""
        [ways.default]
        delay_ms = {delay_ms}
        [peers]
        "relay0:1024" = "relay"
        "home:*" = "line"
        "far:*" = "line"
        [places.line]
        [places.relay]
        up_mbit_s = {mbit_s}
        down_mbit_s = {mbit_s}
    """

    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        address = home.relays.addresses[0]
        await far.streams.call(address, "echo", deadline=soon())
        clock = asyncio.get_running_loop()
        began_s = clock.time()
        assert await pour(far, address, num_bytes) == num_bytes
        return num_bytes / (clock.time() - began_s) / (mbit_s * MBIT_BYTES)

    share = in_world(work, profile=profile)
    print(f"{share:.3f} of the relay's line")
    assert 0.8 <= share <= 1.0


def test_a_member_above_its_quota_is_slowed_down_and_others_are_not():
    limits = RelayLimits(bytes_per_s=1e12, bytes_per_s_each=1e6)

    async def work(world):
        relays = await world.open_relays(1)
        home, other = await world.open_home(relays), await world.open_home(relays, name="other")
        greedy, modest = await world.open("greedy"), await world.open("modest")
        clock = asyncio.get_running_loop()

        async def pour_for_s(caller, target, num_bytes):
            began_s = clock.time()
            await pour(caller, target.relays.addresses[0], num_bytes)
            return clock.time() - began_s

        works = [pour_for_s(greedy, home, 10_000_000), pour_for_s(modest, other, 262_144)]
        return await fanout(works, Deadline.after(100))

    greedy_s, modest_s = in_world(work, limits=limits)
    assert 9 <= greedy_s <= 11
    assert modest_s < 0.5


# --- what members may do, and may not ---


def test_more_streams_and_peers_than_the_quota_are_refused_with_the_reason():
    limits = RelayLimits(max_streams=3, max_streams_each=2, max_registered=4)

    async def work(world):
        relays = await world.open_relays(1)
        homes = [await world.open_home(relays, name=f"home{number}") for number in range(4)]
        targets = [home.relays.addresses[0] for home in homes]
        far, other = await world.open("far"), await world.open("other")
        for target in targets[:2]:
            await far.streams.call(target, "echo", deadline=soon())
        with pytest.raises(PeerUnreachable) as caught:
            await far.streams.call(targets[2], "echo", deadline=soon())
        assert "2 streams of yours" in caught.value.cause
        await other.streams.call(targets[2], "echo", deadline=soon())
        with pytest.raises(PeerUnreachable) as caught:
            await other.streams.call(targets[3], "echo", deadline=soon())
        assert "3 streams pass this relay" in caught.value.cause
        late = await world.open("late")
        late.relays.keep(lambda: relays, 1)
        with pytest.raises(PeerUnreachable, match="No relay takes this peer"):
            await late.relays.registered(Deadline.after(2))
        with pytest.raises(PeerBusy, match="its 4 peers"):
            await late.streams.call(relays[0], REGISTER, deadline=soon())

    in_world(work, limits=limits)


def test_a_flood_of_opens_ends_at_the_quota_and_is_cleared_away():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        service = world.endpoints["relay0"].relaying

        async def open_and_stay():
            async with far.streams.open_channel(
                relays[0], OPEN, Open(home.peer_id.digest), deadline=Deadline.after(5)
            ) as channel:
                await channel.result()

        outcomes = await fanout([open_and_stay() for _ in range(100)], Deadline.after(4))
        assert sum(isinstance(each, PeerBusy) for each in outcomes) == 100 - service.limits.max_streams_each
        await until(lambda: service.num_streams == 0)
        await far.streams.call(home.relays.addresses[0], "echo", deadline=soon())

    in_world(work)


def test_garbage_inside_a_stream_harms_nobody_but_that_stream():
    async def work(world):
        relays = await world.open_relays(1)
        home, far = await world.open_home(relays), await world.open("far")
        garbage = [
            (None, [b"GET / HTTP/1.1\r\n"]),
            ({"x": 1}, []),
            (None, [bytes(100_000)]),
            (None, [b""] * 50),
        ]
        for payload, buffers in garbage:
            async with far.streams.open_channel(
                relays[0], OPEN, Open(home.peer_id.digest), deadline=soon()
            ) as channel:
                with contextlib.suppress(ShoalError):
                    await channel.send(payload, buffers)
                    await channel.end()
                    await channel.result()
        async with far.streams.open_channel(
            relays[0], OPEN, Open(home.peer_id.digest), deadline=soon()
        ) as channel:
            await channel.send(None, [bytes(5 << 20)])
            with pytest.raises(PeerError, match="bytes at once"):
                await channel.result()
        for payload in ({"target": b"short"}, {"target": 7}, None, {}):
            with pytest.raises(PeerRefused):
                async with far.streams.open_channel(relays[0], OPEN, payload, deadline=soon()) as channel:
                    await channel.result()
        await far.streams.call(home.relays.addresses[0], "echo", deadline=soon())

    in_world(work)


def test_who_never_reads_holds_a_window_of_the_relay_and_no_more():
    async def work(world):
        relays = await world.open_relays(1)
        silent, far = await world.open("silent"), await world.open("far")

        async def never_read(head, channel):
            await asyncio.Event().wait()

        silent.routes.remove(ARRIVE)
        silent.handle_channel(ARRIVE, never_read, payload_type=Arrival, window_bytes=WINDOW_BYTES)
        silent.relays.keep(lambda: relays, 1)
        await silent.relays.registered(soon())
        item, num_sent = bytes(64 << 10), 0
        async with far.streams.open_channel(
            relays[0], OPEN, Open(silent.peer_id.digest), deadline=Deadline.after(60)
        ) as channel:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    while True:
                        await channel.send(None, [item])
                        num_sent += 1
        # one window at the silent peer, one at the relay, and what is between
        assert num_sent * len(item) <= 3 * WINDOW_BYTES
        home = await world.open_home(relays)
        await far.streams.call(home.relays.addresses[0], "echo", deadline=soon())

    in_world(work)


def test_streams_pass_one_relay_and_nobody_registers_or_opens_through_another():
    async def work(world):
        relays = await world.open_relays(2)
        # relay1 is registered at relay0, as a peer behind a router would be
        world.endpoints["relay1"].relays.keep(lambda: relays[:1], 1)
        await world.endpoints["relay1"].relays.registered(soon())
        through = world.endpoints["relay1"].relays.addresses[0]
        home, far = await world.open_home(relays[1:]), await world.open("far")
        with pytest.raises(PeerRefused, match="one relay, not two"):
            async with far.streams.open_channel(
                through, OPEN, Open(home.peer_id.digest), deadline=soon()
            ) as channel:
                await channel.result()
        with pytest.raises(PeerRefused, match="without a relay"):
            await far.streams.call(through, REGISTER, deadline=soon())
        with pytest.raises(PeerRefused, match="not registered at you"):
            async with far.streams.open_channel(
                home.relays.addresses[0], ARRIVE, Arrival(far.peer_id.digest), deadline=soon()
            ) as channel:
                await channel.result()

    in_world(work)


def test_a_place_is_kept_for_who_asks_and_for_nobody_else(run):
    async def check():
        async with members() as ((relay,), home, far):
            service, target = relay.relaying, Peer(relay.addresses[0], relay.peer_id)
            await far.streams.call(target, REGISTER, {"peer_id": home.peer_id.digest}, deadline=soon())
            assert list(service._places) == [home.peer_id, far.peer_id]
            connections = [place.connection.peer.id for place in service._places.values()]
            assert connections == [home.peer_id, far.peer_id]
            with pytest.raises(PeerRefused, match="over a stream"):
                await far.datagrams.call(target, REGISTER, deadline=soon())

    run(check())


def test_who_has_no_id_is_not_relayed():
    async def work(world):
        relays = await world.open_relays(1)
        home = await world.open_home(relays)
        async with Endpoint(network=world.network.host("nameless")) as nameless:
            with pytest.raises(PeerRefused, match="have an id"):
                await nameless.streams.call(relays[0], REGISTER, deadline=soon())
            with pytest.raises(PeerUnreachable) as caught:
                await nameless.streams.call(home.relays.addresses[0], "echo", deadline=soon())
            assert "have an id" in caught.value.cause

    in_world(work)


def test_a_peer_without_a_secret_is_not_made_reachable_for_other_machines(run):
    async def check():
        async with Endpoint(peer_id=id_of("home")) as home:
            home.relays.keep(lambda: [Peer(Address("192.0.2.1", 1), id_of("relay"))], 1)
            with pytest.raises(PeerUnreachable):
                await home.relays.registered(Deadline.after(0.3))
            with pytest.raises(UsageError, match="Without a swarm secret"):
                home.streams.check_may_serve(Address("192.0.2.1", 1))

    run(check())


def test_limits_are_above_zero():
    with pytest.raises(UsageError, match="max_streams"):
        RelayLimits(max_streams=0)


# --- real sockets and TLS ---


@contextlib.asynccontextmanager
async def members(num_relays=1, *, network=None, limits=GENEROUS, is_sealed=True):
    """Relays, a peer at home that is registered there, and one that calls it."""
    swarm = Swarm()

    def endpoint(**settings):
        made = Endpoint(membership=swarm.member(), **settings) if is_sealed else None
        if made is None:
            made = Endpoint(peer_id=id_of(str(len(opened))), **settings)
        opened.append(made)
        answer(made)
        return made

    opened = []
    async with contextlib.AsyncExitStack() as closing:
        relays = []
        for _ in range(num_relays):
            settings = {"network": network} if network else {}
            relay = await closing.enter_async_context(endpoint(relaying=limits, **settings))
            await relay.listen(LOOPBACK)
            relays.append(relay)
        home = await closing.enter_async_context(endpoint())
        far = await closing.enter_async_context(endpoint())
        peers = [Peer(relay.addresses[0], relay.peer_id) for relay in relays]
        home.relays.keep(lambda: peers, num_relays)
        await home.relays.registered(soon())
        yield relays, home, far


@pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_calls_channels_and_large_buffers_over_real_sockets(run, is_sealed):
    async def check():
        async with members(is_sealed=is_sealed) as ((relay,), home, far):
            address = home.relays.addresses[0]
            reply = await far.streams.call(address, "echo", 1, deadline=soon())
            assert reply.payload == [1, str(far.peer_id)]
            large = bytes(range(256)) * 20_000
            reply = await far.streams.call(address, "echo", 1, [large], deadline=soon())
            assert bytes(reply.buffers[0]) == large
            assert await pour(far, address, 16 << 20) == 16 << 20
            assert relay.relaying.num_streams == 1
            home.streams.cut_off(far.peer_id)
            await until(lambda: relay.relaying.num_streams == 0)

    run(check())


def test_the_relay_sees_ciphertext_and_what_it_changes_ends_the_connection(run):
    async def check():
        async with members() as ((relay,), home, far):
            seen, word = [], b"nobody else may read this"
            should_tamper = False
            pass_on = relay.relaying._pass_on  # what a relay that listens in would change of its own program

            class Tapped:
                def __init__(self, channel):
                    self._channel = channel

                def __getattr__(self, name):
                    return getattr(self._channel, name)

                async def receive(self):
                    item = await self._channel.receive()
                    if item is not None:
                        seen.append(b"".join(item.buffers))
                        if should_tamper:
                            item.buffers[-1][-1] ^= 1
                    return item

            relay.relaying._pass_on = lambda source, *others: pass_on(Tapped(source), *others)
            address = home.relays.addresses[0]
            await far.streams.call(address, "echo", 1, [word], deadline=soon())
            assert seen
            assert word not in b"".join(seen)
            should_tamper = True
            with pytest.raises(PeerLost):
                await far.streams.call(address, "echo", 1, [word], deadline=soon())

    run(check())


def test_a_relay_that_leads_to_another_peer_is_noticed(run):
    async def check():
        async with members() as ((relay,), home, far):
            # the relay keeps the caller's wish for itself: it answers in the name of the peer that is meant
            other = Address(relay.addresses[0].host, relay.addresses[0].port, id_of("somebody else"))
            relay.relaying._places[other.relayed_id] = relay.relaying._places[home.peer_id]
            with pytest.raises(PeerError, match=home.peer_id.short):
                await far.streams.call(other, "echo", deadline=soon())

    run(check())


def test_a_relayed_stream_carries_four_fifths_of_a_shaped_line_of_real_sockets(run):
    mbit_s, num_bytes = 100, 12 << 20
    profile = f"""
        [ways.default]
        delay_ms = 5
        [peers]
        "relay:1" = "relay"
        [places.line]
        [places.relay]
        up_mbit_s = {mbit_s}
        down_mbit_s = {mbit_s}
    """

    async def check():
        conditions = Conditions(Profile.parse(profile))
        async with (
            ShapedNetwork(SocketNetwork(), conditions, Address("relay", 1)) as network,
            members(network=network) as (_, home, far),
        ):
            address = home.relays.addresses[0]
            await far.streams.call(address, "echo", deadline=soon())
            shares = []
            while len(shares) < 5 and max(shares, default=0) < 0.8:  # other programs only ever take time
                began_s = time.monotonic()
                assert await pour(far, address, num_bytes) == num_bytes
                shares.append(num_bytes / (time.monotonic() - began_s) / (mbit_s * MBIT_BYTES))
            assert 0.8 <= max(shares) <= 1.05, shares

    run(check())


def test_nothing_is_left_open(run):
    async def check():
        counts = []
        for _ in range(3):
            async with members(2) as (relays, home, far):
                address = home.relays.addresses[0]
                await far.streams.call(address, "echo", deadline=soon())
                far.streams.cut_off(home.peer_id)
                await until(lambda: not any(relay.relaying.num_streams for relay in relays))
                await far.streams.call(address, "echo", deadline=soon())
            counts.append(open_descriptors())
        assert counts[-1] <= counts[0], counts

    run(check())


def test_callers_wait_no_longer_than_their_deadline_for_a_relay(run):
    async def check():
        async with members() as ((relay,), home, far):
            relay.routes.remove(OPEN)

            async def never(head, channel):
                await asyncio.Event().wait()

            relay.handle_channel(OPEN, never)
            with pytest.raises(DeadlineExceeded):
                await far.streams.call(home.relays.addresses[0], "echo", deadline=Deadline.after(0.2))

    run(check())
