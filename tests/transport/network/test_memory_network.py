"""Hosts in memory: streams and datagrams that behave as sockets do, under links and without."""

import asyncio
import math

import pytest

from shoal.core import Address, UsageError
from shoal.core.virtual import START_WALL_S, run_virtual
from shoal.transport.network.links import Passage
from shoal.transport.network.memory import SOCKET_BYTES, MemoryNetwork


class FakeLink:
    def __init__(self, delay_s=0.1, bytes_per_s=math.inf):
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.free_at_s = 0.0
        self.is_cut = self.is_corrupting = False
        self.num_copies = 1
        self.callbacks = {}

    def carry_stream(self, now_s, size_bytes):
        if self.is_cut:
            return Passage(math.inf, math.inf)
        self.free_at_s = max(now_s, self.free_at_s) + size_bytes / self.bytes_per_s
        return Passage(self.free_at_s, self.free_at_s + self.delay_s, self.is_corrupting)

    def carry_datagram(self, now_s, size_bytes):
        return [self.carry_stream(now_s, size_bytes)] * self.num_copies

    def when_changed(self, callback):
        token = object()
        self.callbacks[token] = callback
        return lambda: self.callbacks.pop(token, None)


class FakeConditions:
    """Every link the same, and settable before anything is dialed."""

    def __init__(self, **link):
        self.link_options = link
        self.links = {}
        self.kills = {}
        self.num_starts = 0

    def start(self):
        self.num_starts += 1

    def link(self, source, target):
        return self.links.setdefault((source, target), FakeLink(**self.link_options))

    def on_kill(self, address, callback):
        self.kills[address] = callback
        return lambda: self.kills.pop(address, None)

    def clock_for(self, where, clock):
        return SkewedClock(clock) if where().host == "skewed" else clock

    def change(self, **what):
        for link in self.links.values():
            for name, value in what.items():
                setattr(link, name, value)
            for callback in tuple(link.callbacks.values()):
                callback()


class SkewedClock:
    def __init__(self, clock):
        self.now_s = clock.now_s
        self.wall_s = lambda: clock.wall_s() + 100


class Recorder(asyncio.BufferedProtocol):
    """Keeps what it hears, into a small buffer of its own."""

    def __init__(self, buffer_bytes=1000):
        self.loop = asyncio.get_running_loop()
        self.buffer = bytearray(buffer_bytes)
        self.heard = b""
        self.events = []
        self.ended = self.loop.create_future()
        self.keeps_open = False

    def say(self, what):
        self.events.append((self.loop.time(), what))

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=0)
        self.say("made")

    def get_buffer(self, sizehint):
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes):
        self.heard += self.buffer[:nbytes]

    def pause_writing(self):
        self.say("paused")

    def resume_writing(self):
        self.say("resumed")

    def eof_received(self):
        self.say("eof")
        return self.keeps_open

    def connection_lost(self, exc):
        self.say("lost")
        self.ended.set_result(exc)

    @property
    def names(self):
        return [name for _, name in self.events]


def virtual(test):
    def run():
        run_virtual(test(), limit_s=100_000)

    run.__name__ = test.__name__
    return run


class Pair:
    """Two hosts with a stream between them."""

    def __init__(self, conditions=None, seed=0):
        self.network = MemoryNetwork(conditions, seed)
        self.one, self.other = self.network.host("one"), self.network.host("other")

    async def connect(self, dialer=None, server=None):
        self.listener = await self.other.listen(Address("other", 0))
        self.dialer, self.server = dialer or Recorder(), server or Recorder()
        accepting = asyncio.ensure_future(self._accept())
        await self.one.dial(self.listener.address, self.dialer)
        await accepting
        return self

    async def _accept(self):
        accepted = await self.listener.accept()
        assert accepted.origin == Address("one", 32768)
        await self.other.adopt(accepted, self.server)


@virtual
async def test_bytes_go_both_ways_in_later_turns_and_in_order():
    pair = await Pair().connect()
    pair.dialer.transport.write(b"to ")
    pair.dialer.transport.writelines([b"the ", memoryview(b"other"), bytearray(b"!")])
    pair.server.transport.write(b"back")
    assert pair.server.heard == b""
    await asyncio.sleep(1)
    assert pair.server.heard == b"to the other!"
    assert pair.dialer.heard == b"back"


@virtual
async def test_memory_that_changes_after_a_write_does_not_change_what_arrives():
    pair = await Pair().connect()
    memory = bytearray(b"before")
    pair.dialer.transport.write(memory)
    pair.dialer.transport.writelines([memoryview(memory)])
    memory[:] = b"after!"
    await asyncio.sleep(1)
    assert pair.server.heard == b"beforebefore"


@virtual
async def test_large_writes_fill_small_buffers():
    pair = await Pair().connect()
    data = bytes(range(256)) * 1000
    pair.dialer.transport.write(data)
    await asyncio.sleep(1)
    assert pair.server.heard == data


@virtual
async def test_names_of_both_ends():
    pair = await Pair().connect()
    info = pair.dialer.transport.get_extra_info
    assert info("peername") == ("other", 1024)
    assert info("sockname") == ("one", 32768)
    assert info("socket") is None
    assert pair.server.transport.get_extra_info("peername") == ("one", 32768)


@virtual
async def test_dialing_takes_a_round_trip_and_bytes_a_way():
    pair = await Pair(FakeConditions(delay_s=0.25)).connect()
    assert pair.dialer.events[0] == (0.5, "made")
    assert pair.server.events[0] == (0.25, "made")
    pair.dialer.transport.write(b"x")
    await asyncio.sleep(0.25)
    await asyncio.sleep(0)
    assert pair.server.heard == b"x"


@virtual
async def test_nobody_there_is_refused_after_a_round_trip():
    pair = Pair(FakeConditions(delay_s=0.25))
    for address in (Address("other", 5), Address("nobody", 5)):
        before_s = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionRefusedError):
            await pair.one.dial(address, Recorder())
        assert asyncio.get_running_loop().time() - before_s == 0.5


@virtual
async def test_dialing_through_a_cut_link_waits_until_it_heals():
    conditions = FakeConditions(delay_s=0.25)
    pair = Pair(conditions)
    pair.network.link(pair.one.address, pair.other.address)
    conditions.change(is_cut=True)
    asyncio.get_running_loop().call_later(60, lambda: conditions.change(is_cut=False))
    await pair.connect()
    assert pair.dialer.events[0] == (60.5, "made")


@virtual
async def test_a_dial_that_is_given_up_leaves_nothing_behind():
    conditions = FakeConditions(delay_s=10)
    pair = Pair(conditions)
    listener = await pair.other.listen(Address("other", 0))
    for given_up_after_s in (1, 15):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(given_up_after_s):
                await pair.one.dial(listener.address, Recorder())
    await asyncio.sleep(100)
    assert not pair.one._streams
    for _ in range(2):  # as with sockets, whoever accepts learns of it
        server = Recorder()
        await pair.other.adopt(await listener.accept(), server)
        assert isinstance(await server.ended, ConnectionResetError)
    assert not pair.other._streams


@virtual
async def test_a_slow_line_pauses_the_writer_until_all_has_left():
    pair = await Pair(FakeConditions(delay_s=1, bytes_per_s=1000)).connect()
    began_s = asyncio.get_running_loop().time()
    pair.dialer.transport.write(bytes(SOCKET_BYTES))
    assert "paused" not in pair.dialer.names  # a socket takes so much without a word
    pair.dialer.transport.write(bytes(1000))
    assert pair.dialer.names[-1] == "paused"
    assert pair.dialer.transport.get_write_buffer_size() == 1000
    await asyncio.sleep(100)
    when_s, name = pair.dialer.events[-1]
    assert name == "resumed"
    assert when_s - began_s == pytest.approx((SOCKET_BYTES + 1000) / 1000)
    assert pair.dialer.transport.get_write_buffer_size() == 0
    assert len(pair.server.heard) == SOCKET_BYTES + 1000


@virtual
async def test_closing_sends_everything_first():
    pair = await Pair(FakeConditions(delay_s=1, bytes_per_s=1000)).connect()
    pair.dialer.transport.write(bytes(100_000))
    pair.dialer.transport.close()
    pair.dialer.transport.write(b"too late")
    assert pair.dialer.transport.is_closing()
    assert await pair.dialer.ended is None
    assert await pair.server.ended is None
    assert len(pair.server.heard) == 100_000
    assert pair.server.names == ["made", "eof", "lost"]
    assert pair.dialer.events[-1][0] == pytest.approx(102)
    assert pair.server.events[-1][0] == pytest.approx(103)


@virtual
async def test_aborting_drops_what_has_not_left_and_resets():
    pair = await Pair(FakeConditions(delay_s=1, bytes_per_s=1000)).connect()
    for _ in range(100):
        pair.dialer.transport.write(bytes(1000))
    await asyncio.sleep(10.5)
    pair.dialer.transport.abort()
    assert await pair.dialer.ended is None
    assert isinstance(await pair.server.ended, ConnectionResetError)
    assert len(pair.server.heard) == 10_000


@virtual
async def test_half_closed_streams_go_on_in_the_other_direction():
    pair = await Pair().connect()
    pair.server.keeps_open = True
    pair.dialer.transport.write_eof()
    await asyncio.sleep(1)
    assert pair.server.names == ["made", "eof"]
    pair.server.transport.write(b"still here")
    await asyncio.sleep(1)
    assert pair.dialer.heard == b"still here"
    pair.server.transport.close()
    assert await pair.dialer.ended is None


@virtual
async def test_whoever_sends_to_a_closed_end_is_reset():
    pair = await Pair(FakeConditions(delay_s=1)).connect()
    pair.server.keeps_open = True
    pair.dialer.transport.close()
    await asyncio.sleep(5)
    pair.server.transport.write(b"hello?")
    assert isinstance(await pair.server.ended, ConnectionResetError)


@virtual
async def test_a_paused_reader_holds_the_writer_up():
    pair = await Pair(FakeConditions(delay_s=1)).connect()
    pair.server.transport.pause_reading()
    assert not pair.server.transport.is_reading()
    for _ in range(3):
        pair.dialer.transport.write(bytes(SOCKET_BYTES))
    await asyncio.sleep(50)
    assert pair.server.heard == b""
    assert pair.dialer.names[-1] == "paused"
    pair.server.transport.resume_reading()
    await asyncio.sleep(50)
    assert len(pair.server.heard) == 3 * SOCKET_BYTES
    assert pair.dialer.names[-1] == "resumed"


@virtual
async def test_pausing_in_the_middle_of_a_write_keeps_the_rest():
    class Slow(Recorder):
        def buffer_updated(self, nbytes):
            super().buffer_updated(nbytes)
            self.transport.pause_reading()
            self.loop.call_later(1, self.transport.resume_reading)

    pair = await Pair().connect(server=Slow(buffer_bytes=10))
    pair.dialer.transport.write(bytes(range(100)))
    await asyncio.sleep(4.5)
    assert len(pair.server.heard) == 50
    await asyncio.sleep(100)
    assert pair.server.heard == bytes(range(100))


@virtual
async def test_a_protocol_that_fails_loses_its_stream_only():
    class Broken(Recorder):
        def buffer_updated(self, nbytes):
            raise KeyError("broken")

    pair = await Pair().connect(server=Broken())
    pair.dialer.transport.write(b"x")
    assert isinstance(await pair.server.ended, KeyError)
    assert isinstance(await pair.dialer.ended, ConnectionResetError)


@virtual
async def test_a_newcomer_can_be_refused_with_last_words_or_dropped():
    pair = Pair()
    listener = await pair.other.listen(Address("other", 0))
    first, second = Recorder(), Recorder()
    await pair.one.dial(listener.address, first)
    (await listener.accept()).refuse(b"no room")
    assert await first.ended is None
    assert first.heard == b"no room"
    await pair.one.dial(listener.address, second)
    accepted = await listener.accept()
    accepted.close()
    assert await second.ended is None
    with pytest.raises(ConnectionResetError):
        await pair.other.adopt(accepted, Recorder())


@virtual
async def test_closing_a_listener_cuts_off_those_who_wait_and_frees_the_port():
    pair = Pair()
    listener = await pair.other.listen(Address("other", 77))
    waiting = Recorder()
    await pair.one.dial(listener.address, waiting)
    listener.close()
    assert isinstance(await waiting.ended, ConnectionResetError)
    with pytest.raises(ConnectionRefusedError):
        await pair.one.dial(listener.address, Recorder())
    again = await pair.other.listen(Address("other", 77))
    listener.close()  # the second time: the port is somebody else's
    await pair.one.dial(again.address, Recorder())


@virtual
async def test_ports_are_given_in_order_and_once():
    host = MemoryNetwork().host("one")
    first, second = [await host.listen(Address("one", 0)) for _ in range(2)]
    assert (first.address.port, second.address.port) == (1024, 1025)
    carrier = await host.open_datagrams(first.address, asyncio.DatagramProtocol())  # both kinds on one port
    assert carrier.get_extra_info("sockname") == ("one", 1024)
    for listen in (
        host.listen(first.address),
        host.open_datagrams(first.address, asyncio.DatagramProtocol()),
    ):
        with pytest.raises(UsageError, match="in use"):
            await listen
    with pytest.raises(UsageError, match="another host's name"):
        await host.listen(Address("other", 0))


class Mailbox(asyncio.DatagramProtocol):
    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.received, self.errors, self.is_lost = [], [], False

    def datagram_received(self, data, addr):
        self.received.append((self.loop.time(), data, addr))

    def error_received(self, exc):
        self.errors.append(exc)

    def connection_lost(self, exc):
        self.is_lost = True


async def mailboxes(conditions=None):
    pair = Pair(conditions)
    boxes = Mailbox(), Mailbox()
    carriers = [
        await host.open_datagrams(Address(host.name, 0), box)
        for host, box in zip((pair.one, pair.other), boxes, strict=True)
    ]
    return pair, boxes, carriers, await pair.one.resolve(Address("other", 1024))


@virtual
async def test_datagrams_arrive_with_their_sender():
    _, (box, other_box), (carrier, other_carrier), where = await mailboxes(FakeConditions(delay_s=0.5))
    carrier.sendto(b"ping", where)
    await asyncio.sleep(1)
    assert other_box.received == [(0.5, b"ping", ("one", 1024))]
    other_carrier.sendto(bytearray(b"pong"), other_box.received[0][2])
    await asyncio.sleep(1)
    assert box.received == [(1.5, b"pong", ("other", 1024))]


@virtual
async def test_datagrams_to_nobody_are_lost_in_silence():
    _, (box, _), (carrier, other_carrier), where = await mailboxes()
    carrier.sendto(b"x", ("other", 999))
    carrier.sendto(b"x", ("nobody", 1))
    other_carrier.close()
    carrier.sendto(b"x", where)
    await asyncio.sleep(1)
    assert box.errors == []


@virtual
async def test_datagrams_that_are_too_long_are_refused():
    _, (box, other_box), (carrier, _), where = await mailboxes()
    carrier.sendto(bytes(65_507), where)
    carrier.sendto(bytes(65_508), where)
    await asyncio.sleep(1)
    assert [len(data) for _, data, _ in other_box.received] == [65_507]
    assert len(box.errors) == 1
    with pytest.raises(ValueError, match="address"):
        carrier.sendto(b"x")


@virtual
async def test_datagrams_are_lost_doubled_and_damaged_as_the_link_says():
    conditions = FakeConditions()
    pair, (_, other_box), (carrier, _), where = await mailboxes(conditions)
    link = pair.network.link(pair.one.address, pair.other.address)
    for num_copies in (0, 2):
        link.num_copies = num_copies
        carrier.sendto(b"x", where)
    link.num_copies, link.is_corrupting = 1, True
    carrier.sendto(b"damaged", where)
    carrier.sendto(b"", where)
    link.is_corrupting, link.is_cut = False, True
    carrier.sendto(b"held up", where)
    await asyncio.sleep(10)
    data = [data for _, data, _ in other_box.received]
    assert data[:2] == [b"x", b"x"]
    assert data[3] == b""
    assert sum(a != b for a, b in zip(data[2], b"damaged", strict=True)) == 1
    assert len(data) == 4


@virtual
async def test_a_killed_host_resets_its_streams_and_falls_silent():
    conditions = FakeConditions(delay_s=0.5)
    pair = await Pair(conditions).connect()
    box, other_box = Mailbox(), Mailbox()
    carrier = await pair.one.open_datagrams(Address("one", 0), box)
    other_carrier = await pair.other.open_datagrams(Address("other", 0), other_box)
    pair.server.transport.write(b"last words")
    conditions.change(is_cut=True)
    conditions.kills[Address("other", 1024)]()
    assert pair.other.is_dead
    assert isinstance(await pair.server.ended, ConnectionAbortedError)
    await asyncio.sleep(10)
    assert pair.dialer.heard == b"last words"
    assert not pair.dialer.ended.done()  # nobody hears of a death through a cut link
    conditions.change(is_cut=False)
    healed_s = asyncio.get_running_loop().time()
    assert isinstance(await pair.dialer.ended, ConnectionResetError)
    assert asyncio.get_running_loop().time() == healed_s + 0.5
    other_carrier.sendto(b"x", ("one", carrier.get_extra_info("sockname")[1]))
    carrier.sendto(b"x", ("other", 1025))
    await asyncio.sleep(5)
    assert box.received == other_box.received == []
    assert other_box.is_lost
    with pytest.raises(ConnectionRefusedError):
        await pair.one.dial(pair.listener.address, Recorder())
    with pytest.raises(OSError, match="killed"):
        await pair.other.dial(Address("one", 1), Recorder())
    with pytest.raises(UsageError, match="killed"):
        await pair.other.listen(Address("other", 0))


@virtual
async def test_a_dial_that_is_given_up_behind_a_cut_link_leaves_nothing():
    conditions = FakeConditions(delay_s=0.5)
    pair = await Pair(conditions).connect()
    conditions.change(is_cut=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await pair.one.dial(pair.listener.address, Recorder())
    assert [link.callbacks for link in conditions.links.values()] == [{}, {}]
    conditions.change(is_cut=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await pair.listener.accept()


@virtual
async def test_conditions_know_a_host_by_its_first_address():
    conditions = FakeConditions()
    network = MemoryNetwork(conditions)
    host = network.host("one")
    assert list(conditions.kills) == [Address("one", 1024)]
    await host.listen(Address("one", 7))
    await host.listen(Address("one", 0))
    assert host.address == Address("one", 7)
    assert list(conditions.kills) == [Address("one", 7)]
    assert conditions.num_starts > 0


@virtual
async def test_each_host_has_its_own_clock_and_random_numbers():
    network = MemoryNetwork(FakeConditions(), seed=5)
    assert network.host("skewed").clock.wall_s() == START_WALL_S + 100
    assert network.host("right").clock.wall_s() == START_WALL_S
    again = MemoryNetwork(seed=5)
    assert network.host("a").random.random() == again.host("a").random.random()
    assert network.host("a").random.random() != again.host("b").random.random()
    assert MemoryNetwork(seed=6).host("c").random.random() != again.host("c").random.random()
    assert network.host("a") is network.host("a")


def test_it_works_on_an_ordinary_loop(run):
    async def work():
        pair = await Pair().connect()
        pair.dialer.transport.write(b"hello")
        pair.dialer.transport.close()
        await pair.server.ended
        assert pair.server.heard == b"hello"

    run(work())
