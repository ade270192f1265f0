"""Routers that translate addresses, in memory: whom others see, and what gets in."""

import asyncio
import random

import pytest

from shoal.core import Address, UsageError
from shoal.core.virtual import run_virtual
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.nat import NATS, AddressTranslation, Dependence, NatRules
from shoal.transport.network.profiles import Profile

ENDPOINT, ADDRESS, PORT = Dependence
LAPTOP = Address("laptop", 5000)


class Mailbox(asyncio.DatagramProtocol):
    def __init__(self):
        self.packets = []

    def datagram_received(self, data, addr):
        self.packets.append((data, addr))


class Lines(asyncio.BufferedProtocol):
    def __init__(self):
        self.heard, self.memory, self.is_lost = b"", bytearray(1000), False

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return memoryview(self.memory)

    def buffer_updated(self, nbytes):
        self.heard += self.memory[:nbytes]

    def eof_received(self):
        return False

    def connection_lost(self, exc):
        self.is_lost = True


async def mailbox(host, port=0):
    box = Mailbox()
    carrier = await host.open_datagrams(Address(host.name, port), box)
    box.send = lambda data, where: carrier.sendto(data, where)
    box.where = (host.name, carrier.get_extra_info("sockname")[1])
    return box


def table(kind):
    return AddressTranslation(kind, random.Random(1))


# --- the table ---


@pytest.mark.parametrize(("kind", "num_ports"), [(ENDPOINT, 1), (ADDRESS, 2), (PORT, 3)])
def test_a_mapping_depends_on_as_much_of_the_other_address_as_its_rules_say(kind, num_ports):
    nat = table(NatRules(kind, ENDPOINT))
    remotes = [Address("a", 1), Address("a", 2), Address("b", 1)]
    ports = [nat.leave("udp", LAPTOP, remote, 0.0).port for remote in remotes]
    assert len(dict.fromkeys(ports)) == num_ports
    assert ports == [nat.leave("udp", LAPTOP, remote, 1.0).port for remote in remotes]


@pytest.mark.parametrize(
    ("filtering", "let_in"), [(ENDPOINT, {"a1", "a2", "b1"}), (ADDRESS, {"a1", "a2"}), (PORT, {"a1"})]
)
def test_a_port_lets_in_whom_its_rules_say(filtering, let_in):
    nat = table(NatRules(ENDPOINT, filtering))
    port = nat.leave("udp", LAPTOP, Address("a", 1), 0.0).port
    remotes = {"a1": Address("a", 1), "a2": Address("a", 2), "b1": Address("b", 1)}
    assert {name for name, remote in remotes.items() if nat.enter("udp", port, remote, 1.0)} == let_in


def test_mappings_are_each_carriers_own():
    nat = table("endpoint-independent")
    port = nat.leave("udp", LAPTOP, Address("a", 1), 0.0).port
    assert nat.enter("tcp", port, Address("a", 1), 0.0) is None


def test_a_mapping_ends_when_nothing_leaves_through_it_for_long_enough():
    nat = table("endpoint-independent")
    remote, idle_s = Address("a", 1), nat.rules.udp_idle_s
    port = nat.leave("udp", LAPTOP, remote, 0.0).port
    assert nat.leave("udp", LAPTOP, remote, idle_s).port == port
    assert nat.enter("udp", port, remote, 2 * idle_s) is not None
    assert nat.enter("udp", port, remote, 2 * idle_s + 0.1) is None  # what comes in keeps nothing open
    assert nat.leave("udp", LAPTOP, remote, 2 * idle_s + 0.1).port != port


def test_who_was_not_sent_to_for_long_is_let_in_no_more():
    nat = table("port-restricted")
    idle_s = nat.rules.udp_idle_s
    port = nat.leave("udp", LAPTOP, Address("a", 1), 0.0).port
    nat.leave("udp", LAPTOP, Address("b", 1), idle_s)
    assert nat.enter("udp", port, Address("b", 1), idle_s + 1) is not None
    assert nat.enter("udp", port, Address("a", 1), idle_s + 1) is None


def test_a_mapping_lives_as_long_as_a_stream_is_open_through_it():
    nat = table("symmetric")
    mapping = nat.leave("tcp", LAPTOP, Address("a", 1), 0.0)
    mapping.num_streams += 1
    assert nat.enter("tcp", mapping.port, Address("a", 1), 1e6) is mapping
    mapping.num_streams -= 1
    assert nat.enter("tcp", mapping.port, Address("a", 1), 1e6) is None


def test_dead_mappings_are_forgotten_and_their_ports_free():
    nat = table("symmetric")
    for number in range(66_000):  # more than there are ports
        nat.leave("udp", LAPTOP, Address("a", 1 + number % 60_000), number * 0.1)
    assert len(nat._by_port) < 1000  # bounded memory is what is looked at


def test_an_unknown_kind_is_an_error():
    with pytest.raises(UsageError, match="symetric"):
        table("symetric")


# --- datagrams ---


def answers(kind):
    """Whose packets reach a laptop's port after it has sent to `a` alone, and how others see that port."""

    async def main():
        network = MemoryNetwork()
        network.router("home", kind)
        laptop = await mailbox(network.host("laptop", behind="home"))
        a, other = await mailbox(network.host("a")), await mailbox(network.host("a"))
        b = await mailbox(network.host("b"))
        laptop.send(b"hello", a.where)
        await asyncio.sleep(1)
        ((_, seen),) = a.packets
        for name, box in (("a", a), ("other", other), ("b", b)):
            box.send(name.encode(), seen)
            box.send(b"to nobody", laptop.where)  # a private address has no way in
        await asyncio.sleep(1)
        laptop.send(b"hello", b.where)
        await asyncio.sleep(1)
        return seen, b.packets[0][1], laptop.packets, a.where

    return run_virtual(main())


@pytest.mark.parametrize(
    ("kind", "let_in"),
    [
        ("endpoint-independent", ["a", "other", "b"]),
        ("address-dependent", ["a", "other"]),
        ("port-restricted", ["a"]),
        ("symmetric", ["a"]),
    ],
)
def test_datagrams_get_in_as_the_kind_allows(kind, let_in):
    seen, seen_by_b, packets, a = answers(kind)
    assert seen[0] == seen_by_b[0] == "home"
    assert (seen == seen_by_b) == (kind in ("endpoint-independent", "port-restricted"))
    assert [data.decode() for data, _ in packets] == let_in
    assert packets[0][1] == a


def test_the_same_seed_gives_the_same_ports():
    assert answers("symmetric") == answers("symmetric")


def test_hosts_behind_one_router_reach_each_other_directly_and_not_by_its_outside():
    async def main():
        network = MemoryNetwork()
        network.router("home", "endpoint-independent")
        one, other = [await mailbox(network.host(name, behind="home")) for name in ("one", "other")]
        outside = await mailbox(network.host("outside"))
        one.send(b"direct", other.where)
        other.send(b"out", outside.where)
        await asyncio.sleep(1)
        one.send(b"around", outside.packets[0][1])
        await asyncio.sleep(1)
        return one.where, other.packets

    where, packets = run_virtual(main())
    assert packets == [(b"direct", where)]


def test_profiles_and_faults_know_hosts_behind_routers_by_their_own_names():
    profile = Profile.parse(
        """
        [ways.default]
        delay_ms = 10
        [[ways.between]]
        from = "laptop:*"
        to = "server:*"
        delay_ms = 200
        """
    )
    script = FaultScript.parse('[[fault]]\nkind = "partition"\npeers = ["laptop:*"]\nat_s = 5\nfor_s = 5')

    async def main():
        loop = asyncio.get_running_loop()
        network = MemoryNetwork(Conditions(profile, script))
        network.router("home", "symmetric")
        laptop = await mailbox(network.host("laptop", behind="home"))
        server = await mailbox(network.host("server"))
        laptop.send(b"one", server.where)
        await asyncio.sleep(0.19)
        before = len(server.packets)
        await asyncio.sleep(0.02)
        seen = server.packets[0][1]
        server.send(b"back", seen)
        await asyncio.sleep(1)
        came = len(laptop.packets)
        await asyncio.sleep(6 - loop.time())
        server.send(b"lost", seen)
        await asyncio.sleep(3)
        return before, came, len(laptop.packets)

    assert run_virtual(main()) == (0, 1, 1)


# --- streams ---


async def serving(host, port=0):
    return await host.listen(Address(host.name, port))


async def dialed(host, address, from_port=0):
    """A protocol that speaks to whoever is there."""
    lines = Lines()
    if from_port:
        await host.adopt(await host.connect_from(from_port, address), lines)
    else:
        await host.dial(address, lines)
    return lines


def test_a_stream_leaves_through_a_router_and_bytes_go_both_ways():
    async def main():
        network = MemoryNetwork()
        network.router("home", "symmetric")
        laptop, server = network.host("laptop", behind="home"), network.host("server")
        listener = await serving(server)
        mine = await dialed(laptop, listener.address)
        accepted = await listener.accept()
        theirs = Lines()
        await server.adopt(accepted, theirs)
        mine.transport.write(b"up")
        theirs.transport.write(b"down")
        await asyncio.sleep(10_000)  # longer than any time-out of the router: the stream is open
        theirs.transport.write(b" again")
        await asyncio.sleep(1)
        mapping = network.routers["home"].table.owner("tcp", accepted.origin.port, 20_000)
        mine.transport.close()
        await asyncio.sleep(1)
        return accepted.origin.host, theirs.heard, mine.heard, mapping.num_streams

    assert run_virtual(main()) == ("home", b"up", b"down again", 0)


@pytest.mark.parametrize("target", ["laptop", "home"])
def test_a_stream_from_outside_is_dropped_without_an_answer(target):
    async def main():
        network = MemoryNetwork()
        network.router("home", "endpoint-independent")
        listener = await serving(network.host("laptop", behind="home"))
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            await network.host("outside").dial(Address(target, listener.address.port), Lines())
        return loop.time()

    assert run_virtual(main()) == 127  # as TCP gives up: seven greetings, each wait twice as long


def test_a_stream_gets_in_where_a_mapping_is_for_everybody_and_is_refused_where_nobody_listens():
    async def main():
        network = MemoryNetwork()
        network.router("home", "endpoint-independent")
        laptop, server, other = network.host("laptop", behind="home"), *map(network.host, "so")
        public = await serving(server)
        private = await serving(laptop, 7000)
        first = await laptop.connect_from(7000, public.address)
        outside = (await public.accept()).origin
        await dialed(other, outside)
        got_in = (await private.accept()).origin.host
        private.close()
        with pytest.raises(ConnectionRefusedError):
            await dialed(other, outside)
        first.close()
        return got_in

    assert run_virtual(main()) == "o"


def punch(kinds, delays_s=(0.0, 0.0), profile=None):
    """What both sides hear when they dial each other's outside port at about the same time, within 20 s."""

    async def main():
        network = MemoryNetwork(Conditions(Profile.parse(profile)) if profile else None)
        server = network.host("server")
        public = await serving(server)
        hosts, outsides = [], []
        for number, kind in enumerate(kinds):
            network.router(f"router{number}", kind)
            hosts.append(network.host(f"peer{number}", behind=f"router{number}"))
            await serving(hosts[-1], 7000)
            await hosts[-1].connect_from(7000, public.address)
            outsides.append((await public.accept()).origin)

        async def try_out(number):
            await asyncio.sleep(delays_s[number])
            try:
                async with asyncio.timeout(20):
                    lines = await dialed(hosts[number], outsides[1 - number], 7000)
            except TimeoutError:
                return None
            lines.transport.write(f"I am {number}.".encode())
            await asyncio.sleep(5)
            return lines.heard.decode()

        tasks = [asyncio.ensure_future(try_out(number)) for number in (0, 1)]
        return [await task for task in tasks]

    return run_virtual(main())


@pytest.mark.parametrize("delays_s", [(0.0, 0.0), (0.3, 0.0), (0.0, 2.5)])
@pytest.mark.parametrize("delay_ms", [0, 50])
def test_both_sides_dial_and_it_becomes_one_stream(delays_s, delay_ms):
    profile = f"[ways.default]\ndelay_ms = {delay_ms}"
    heard = punch(["port-restricted", "port-restricted"], delays_s, profile)
    assert heard == ["I am 1.", "I am 0."]


def test_it_does_not_where_both_routers_choose_another_port_for_everybody():
    assert punch(["symmetric", "symmetric"]) == [None, None]
    assert punch(["symmetric", "port-restricted"]) == [None, None]


def test_every_kind_reaches_one_that_lets_everybody_in():
    for kind in NATS:
        assert punch([kind, "endpoint-independent"])[0] is not None


def test_a_dial_that_is_given_up_leaves_nothing_behind():
    async def main():
        network = MemoryNetwork()
        network.router("home", "symmetric")
        laptop, server = network.host("laptop", behind="home"), network.host("server")
        listener = await serving(server)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await dialed(server, Address("home", 4000))
        task = asyncio.ensure_future(dialed(laptop, listener.address))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(1)
        table = network.routers["home"].table
        return [mapping.num_streams for mapping in table._by_port.values()], laptop._streams, laptop._dials

    assert run_virtual(main()) == ([0], {}, {})
