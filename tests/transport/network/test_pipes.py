"""A pipe under links of every kind: order, leaving, arriving, holding up, cutting."""

import asyncio
import math
import random

import pytest

from shoal.core.virtual import run_virtual
from shoal.transport.network.links import IDEAL_LINK, Passage
from shoal.transport.network.pipes import Pipe, corrupted


class FakeLink:
    """Takes `delay_s` from the end of a queue of `bytes_per_s`; may be cut."""

    def __init__(self, delay_s=0.0, bytes_per_s=math.inf):
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.free_at_s = 0.0
        self.is_cut = self.is_corrupting = False
        self.callbacks = {}

    def carry_stream(self, now_s, size_bytes):
        if self.is_cut:
            return Passage(math.inf, math.inf)
        self.free_at_s = max(now_s, self.free_at_s) + size_bytes / self.bytes_per_s
        return Passage(self.free_at_s, self.free_at_s + self.delay_s, self.is_corrupting)

    def when_changed(self, callback):
        token = object()
        self.callbacks[token] = callback
        return lambda: self.callbacks.pop(token, None)

    def change(self, **what):
        for name, value in what.items():
            setattr(self, name, value)
        for callback in tuple(self.callbacks.values()):
            callback()


class Ends:
    """A pipe and all that it says, with the times."""

    def __init__(self, link, **options):
        self.loop = asyncio.get_running_loop()
        self.events = []
        self.pipe = Pipe(
            self.loop, link, self.say, lambda: self.say("drained"), choice=random.Random(1), **options
        )

    def say(self, what):
        self.events.append((self.loop.time(), what))

    async def after(self, seconds):
        await asyncio.sleep(seconds)
        return self.events


def virtual(test):
    """Run an async test in virtual time."""

    def run():
        run_virtual(test(), limit_s=10_000)

    run.__name__ = test.__name__
    return run


@virtual
async def test_an_ideal_link_delivers_in_the_next_turn_and_in_order():
    ends = Ends(IDEAL_LINK)
    ends.pipe.push(b"one")
    ends.pipe.push(b"two")
    ends.pipe.push_eof(lambda: ends.say("end"))
    assert ends.events == []
    assert ends.pipe.queued_bytes == 0
    assert not ends.pipe.is_full
    await asyncio.sleep(0)
    assert ends.events == [(0.0, b"one"), (0.0, b"two"), (0.0, "end")]


@virtual
async def test_delay_and_bandwidth_add_up():
    ends = Ends(FakeLink(delay_s=0.5, bytes_per_s=10))
    ends.pipe.push(b"x" * 10)
    ends.pipe.push(b"y" * 20)
    assert ends.pipe.queued_bytes == 30
    assert ends.pipe.is_full
    await asyncio.sleep(1)
    assert ends.pipe.queued_bytes == 20
    assert await ends.after(10) == [(1.5, b"x" * 10), (3.0, "drained"), (3.5, b"y" * 20)]
    assert not ends.pipe.is_full


@virtual
async def test_what_arrives_sooner_does_not_overtake():
    link = FakeLink(delay_s=2)
    ends = Ends(link)
    ends.pipe.push(b"slow")
    link.delay_s = 0.1
    ends.pipe.push(b"quick")
    ends.pipe.push_eof(lambda: ends.say("end"))
    assert await ends.after(5) == [(2.0, b"slow"), (2.0, b"quick"), (2.0, "end")]


@virtual
async def test_a_buffer_hides_what_it_can_hold():
    ends = Ends(FakeLink(bytes_per_s=10), buffer_bytes=100)
    ends.pipe.push(b"x" * 100)
    assert not ends.pipe.is_full
    assert ends.pipe.queued_bytes == 100
    ends.pipe.push(b"y")
    assert ends.pipe.is_full
    events = await ends.after(100)
    assert (pytest.approx(10.1), "drained") in events
    assert len(events) == 3


@virtual
async def test_pushing_while_full_puts_the_drained_off():
    ends = Ends(FakeLink(bytes_per_s=10))
    ends.pipe.push(b"x" * 10)
    await asyncio.sleep(0.5)
    ends.pipe.push(b"y" * 10)
    events = await ends.after(10)
    assert [event for event in events if event[1] == "drained"] == [(2.0, "drained")]


@virtual
async def test_a_link_that_is_cut_holds_bytes_until_it_changes():
    link = FakeLink(delay_s=1)
    ends = Ends(link)
    ends.pipe.push(b"before")
    link.is_cut = True
    ends.pipe.push(b"first")
    ends.pipe.push(b"second")
    ends.pipe.push_eof(lambda: ends.say("end"))
    assert ends.pipe.queued_bytes == 11
    assert ends.pipe.is_full
    assert await ends.after(50) == [(1.0, b"before")]
    link.change()  # something else has changed
    assert len(link.callbacks) == 1
    await asyncio.sleep(50)
    link.change(is_cut=False)
    assert link.callbacks == {}
    events = await ends.after(10)
    assert events[1:] == [(100.0, "drained"), (101.0, b"first"), (101.0, b"second"), (101.0, "end")]


@virtual
async def test_a_paused_receiver_holds_the_sender_up():
    ends = Ends(FakeLink(delay_s=1))
    ends.pipe.push(b"on its way")
    ends.pipe.pause()
    ends.pipe.push(b"held")
    assert ends.pipe.queued_bytes == 4
    assert await ends.after(10) == []
    ends.pipe.resume()
    events = await ends.after(10)
    assert [event for event in events if event[1] != "drained"] == [(10.0, b"on its way"), (11.0, b"held")]


@virtual
async def test_pausing_inside_a_delivery_stops_at_once():
    ends = Ends(IDEAL_LINK)
    ends.pipe._deliver = lambda data: (ends.say(data), ends.pipe.pause())
    for data in (b"one", b"two"):
        ends.pipe.push(data)
    assert await ends.after(1) == [(0.0, b"one")]
    ends.pipe.resume()
    assert await ends.after(1) == [(0.0, b"one"), (1.0, b"two")]


@virtual
async def test_closing_drops_everything():
    link = FakeLink(delay_s=1, bytes_per_s=10)
    ends = Ends(link)
    ends.pipe.push(b"x" * 10)
    link.is_cut = True
    ends.pipe.push(b"held")
    ends.pipe.close()
    ends.pipe.push(b"more")
    ends.pipe.push_eof(lambda: ends.say("end"))
    assert ends.pipe.queued_bytes == 0
    assert link.callbacks == {}
    link.change(is_cut=False)
    assert await ends.after(10) == []


@virtual
async def test_closing_inside_a_delivery_stops_at_once():
    ends = Ends(IDEAL_LINK)
    ends.pipe._deliver = lambda data: (ends.say(data), ends.pipe.close())
    ends.pipe.push(b"one")
    ends.pipe.push(b"two")
    assert await ends.after(1) == [(0.0, b"one")]


@virtual
async def test_cutting_drops_what_has_not_left():
    ends = Ends(FakeLink(delay_s=5, bytes_per_s=10))
    for _ in range(5):
        ends.pipe.push(b"x" * 10)
    await asyncio.sleep(2.5)
    ends.pipe.cut(lambda: ends.say("reset"))
    assert ends.pipe.queued_bytes == 0
    data = [event for event in await ends.after(50) if event[1] != "drained"]
    assert data[:2] == [(6.0, b"x" * 10), (7.0, b"x" * 10)]
    assert [what for _, what in data[2:]] == ["reset"]


@virtual
async def test_what_follows_a_cut_does_not_wait_for_what_was_dropped():
    link = FakeLink(delay_s=1, bytes_per_s=10)
    ends = Ends(link)
    ends.pipe.push(b"x" * 1000)
    await asyncio.sleep(2)
    link.free_at_s = 0.0
    ends.pipe.cut(lambda: ends.say("reset"))
    assert await ends.after(200) == [(3.0, "reset")]
    for data in (b"x" * 10, b"y" * 1000):
        ends.pipe.push(data)
    await asyncio.sleep(1.5)
    link.free_at_s = 0.0
    ends.pipe.cut(lambda: ends.say("reset"))
    assert (await ends.after(200))[1:] == [(204.0, b"x" * 10), (204.5, "reset")]


@virtual
async def test_cutting_inside_a_delivery():
    ends = Ends(FakeLink(delay_s=1, bytes_per_s=10))
    ends.pipe._deliver = lambda data: (ends.say(data), ends.pipe.cut(lambda: ends.say("reset")))
    for data in (b"x" * 10, b"y" * 100):
        ends.pipe.push(data)
    events = await ends.after(50)
    assert events[0] == (2.0, b"x" * 10)
    assert [what for _, what in events[1:]] == ["reset"]


@virtual
async def test_the_end_of_a_sender_waits_for_a_link_that_is_cut():
    link = FakeLink(delay_s=5)
    ends = Ends(link)
    assert ends.pipe.is_unused
    ends.pipe.push(b"on its way")
    assert not ends.pipe.is_unused
    link.is_cut = True
    ends.pipe.push(b"held")
    ends.pipe.cut(lambda: ends.say("reset"))
    assert await ends.after(50) == [(5.0, b"on its way")]
    link.change(is_cut=False)
    assert await ends.after(50) == [(5.0, b"on its way"), (55.0, "reset")]


@virtual
async def test_a_corrupting_link_changes_one_byte_and_not_the_original():
    link = FakeLink()
    link.is_corrupting = True
    ends = Ends(link)
    data = bytes(range(100))
    ends.pipe.push(data)
    ends.pipe.push_eof(lambda: ends.say("end"))
    events = await ends.after(1)
    damaged = events[0][1]
    assert len(damaged) == 100
    assert sum(a != b for a, b in zip(data, damaged, strict=True)) == 1
    assert data == bytes(range(100))
    assert events[1] == (0.0, "end")


def test_corruption_is_seeded():
    data = bytes(1000)
    assert corrupted(data, random.Random(3)) == corrupted(data, random.Random(3))
    assert corrupted(data, random.Random(3)) != corrupted(data, random.Random(4))


@virtual
async def test_pushing_while_bytes_arrive_keeps_the_order():
    ends = Ends(IDEAL_LINK)
    ends.pipe._deliver = lambda data: (ends.say(data), len(data) < 4 and ends.pipe.push(data + b"!"))
    ends.pipe.push(b"a")
    assert [what for _, what in await ends.after(1)] == [b"a", b"a!", b"a!!", b"a!!!"]


def test_it_runs_on_an_ordinary_loop(run):
    async def work():
        loop = asyncio.get_running_loop()
        ends = Ends(FakeLink(delay_s=0.02, bytes_per_s=1e6))
        ends.pipe._link.free_at_s = loop.time()
        done = loop.create_future()
        began_s = loop.time()
        for _ in range(10):
            ends.pipe.push(bytes(1000))
        ends.pipe.push_eof(lambda: done.set_result(loop.time() - began_s))
        took_s = await done
        assert sum(len(what) for _, what in ends.events if what != "drained") == 10_000
        assert 0.028 < took_s < 0.5

    run(work())
