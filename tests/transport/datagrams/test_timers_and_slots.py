"""Timers behind one of the loop, and call slots."""

import asyncio

import pytest

from shoal.core import Deadline
from shoal.transport.datagrams.caller import Timers
from shoal.transport.limits import CallSlots
from transport.lossy import run_virtual


class Timed:
    def __init__(self, log, name):
        self.log, self.name, self.is_over = log, name, False

    def on_timer(self, now_s):
        self.log.append((self.name, round(now_s, 3)))


def test_alarms_ring_in_order_with_one_timer():
    async def check():
        loop, log = asyncio.get_running_loop(), []
        timers = Timers(loop)
        for name, at_s in (("c", 3.0), ("a", 1.0), ("b", 1.0), ("d", 2.5)):
            timers.set(at_s, Timed(log, name))
        assert len([timer for timer in loop._timers if not timer[2].cancelled()]) == 1
        await asyncio.sleep(10)
        assert log == [("a", 1.0), ("b", 1.0), ("d", 2.5), ("c", 3.0)]

    run_virtual(check())


def test_nobody_is_woken_who_is_over_and_then_no_timer_is_left():
    async def check():
        loop, log = asyncio.get_running_loop(), []
        timers = Timers(loop)
        sleepers = [Timed(log, number) for number in range(100)]
        for number, timed in enumerate(sleepers):
            timers.set(1.0 + number, timed)
        for timed in sleepers:
            timed.is_over = True
        await asyncio.sleep(1.5)
        assert log == []
        assert not [timer for timer in loop._timers if not timer[2].cancelled()]

    run_virtual(check())


def test_an_alarm_may_set_others_and_close_ends_all():
    async def check():
        loop, log = asyncio.get_running_loop(), []
        timers = Timers(loop)

        class Again(Timed):
            def on_timer(self, now_s):
                super().on_timer(now_s)
                timers.set(now_s + 1.0, self)

        timers.set(1.0, Again(log, "x"))
        await asyncio.sleep(3.5)
        timers.close()
        await asyncio.sleep(10)
        assert log == [("x", 1.0), ("x", 2.0), ("x", 3.0)]

    run_virtual(check())


def test_an_alarm_that_is_set_for_now_rings_in_a_later_turn():
    async def check():
        loop, log = asyncio.get_running_loop(), []
        timers = Timers(loop)

        class Again(Timed):
            def on_timer(self, now_s):
                super().on_timer(now_s)
                self.is_over = len(self.log) > 5
                timers.set(now_s, self)

        timers.set(1.0, Again(log, "x"))
        await asyncio.sleep(2)
        assert log == [("x", 1.0)] * 6

    run_virtual(check())


def test_places_are_given_in_order_of_asking():
    async def check():
        line, log = CallSlots(asyncio.get_running_loop(), 1), []

        async def one(name):
            assert await line.take(Deadline.after(100))
            log.append(name)
            await asyncio.sleep(1)
            line.give_back()

        await asyncio.gather(*map(one, "abc"))
        assert log == ["a", "b", "c"]
        assert line.try_take()
        assert not line.try_take()

    run_virtual(check())


@pytest.mark.parametrize("is_given_at_once", [False, True])
def test_a_place_is_not_lost_with_one_who_gives_up(is_given_at_once):
    async def check():
        loop = asyncio.get_running_loop()
        line = CallSlots(loop, 1)
        assert line.try_take()
        waiting = loop.create_task(line.take(Deadline.after(100)))
        await asyncio.sleep(1)
        if is_given_at_once:
            line.give_back()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if not is_given_at_once:
            line.give_back()
        assert line.try_take()

    run_virtual(check())


def test_places_that_are_owed_come_first():
    async def check():
        loop = asyncio.get_running_loop()
        line = CallSlots(loop, -2)
        waiting = loop.create_task(line.take(Deadline.after(100)))
        for is_in in (False, False, True):
            await asyncio.sleep(1)
            assert not waiting.done()
            line.give_back()
            await asyncio.sleep(1)
            assert waiting.done() is is_in

    run_virtual(check())


def test_all_are_let_in_when_the_places_mean_nothing_any_more():
    async def check():
        loop = asyncio.get_running_loop()
        line = CallSlots(loop, -2)
        waiting = [loop.create_task(line.take(Deadline.after(100))) for _ in range(3)]
        await asyncio.sleep(1)
        line.let_all_in()
        assert await asyncio.gather(*waiting) == [True] * 3

    run_virtual(check())


def test_a_deadline_ends_the_wait():
    async def check():
        line = CallSlots(asyncio.get_running_loop(), 1)
        assert line.try_take()
        assert not await line.take(Deadline.after(2))
        line.give_back()
        assert line.try_take()
        assert not line.try_take()

    run_virtual(check())


def test_a_place_that_is_given_when_time_is_over_is_taken():
    async def check():
        loop = asyncio.get_running_loop()
        line = CallSlots(loop, 1)
        assert line.try_take()
        loop.call_later(1.0, line.give_back)  # in the turn in which the deadline passes
        is_taken = await line.take(Deadline.after(1.0))
        if is_taken:
            line.give_back()
        assert line.try_take()
        assert is_taken

    run_virtual(check())
