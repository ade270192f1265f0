import asyncio
import signal
import threading

import pytest

from shoal.core import Deadline, DeadlineExceeded, ShoalError, running_clock
from shoal.core.turns import Ended, LoopInTurns, Turns


def run(*programs):
    turns = Turns()
    turns.run([(f"program {number}", program) for number, program in enumerate(programs)])
    return turns


def test_who_waits_less_comes_first_whoever_began():
    seen = []

    def wait(seconds):
        def program(turn):
            for _ in range(2):
                turn.pause(turn.now_s + seconds)
                seen.append((turn.now_s, turn.number))

        return program

    run(wait(3.0), wait(2.0), wait(2.0))
    assert seen == [(2.0, 1), (2.0, 2), (3.0, 0), (4.0, 1), (4.0, 2), (6.0, 0)]


def test_time_that_one_spends_is_its_own_until_it_looks_up():
    seen = []

    def spend(turn):
        turn.spend(5.0)
        seen.append(("spent", turn.now_s))
        turn.look_up()
        seen.append(("looked up", turn.now_s))

    def other(turn):
        turn.pause(1.0)
        seen.append(("other", turn.now_s))

    run(spend, other)
    assert seen == [("spent", 5.0), ("other", 1.0), ("looked up", 5.0)]


def test_calls_come_before_threads_of_the_same_time():
    seen = []
    turns = Turns()

    def program(turn):
        turns.call_at(2.0, lambda: seen.append("call"))
        turn.pause(2.0)
        seen.append("thread")

    turns.run([("program", program)])
    assert seen == ["call", "thread"]


def test_one_is_woken_by_another_or_by_its_time():
    ends = []

    def sleeper(turn):
        turn.park("a word", 10.0)
        ends.append(turn.now_s)
        turn.park("a word", 10.0)
        ends.append(turn.now_s)

    def waker(turn):
        turn.pause(4.0)
        turns.turns[0].wake(4.0)

    turns = Turns()
    turns.run([("sleeper", sleeper), ("waker", waker)])
    assert ends == [4.0, 10.0]


def test_the_clock_is_that_of_whose_turn_it_is():
    def program(turn):
        turn.spend(2.0)
        assert Deadline.after(1.0).at_s == 3.0
        assert turns.clock.wall_s() - turns.clock.now_s() == 1_700_000_000.0

    turns = Turns()
    turns.run([("program", program)])
    assert turns.turns[0].error is None


def test_those_that_wait_for_nothing_are_named():
    cleaned = []

    def program(turn):
        try:
            turn.park("Godot")
        finally:
            cleaned.append(turn.number)

    with pytest.raises(ShoalError, match=r"at 0 s .* program 0 for Godot; program 1 for Godot"):
        run(program, program)
    assert cleaned == [0, 1]


def test_what_one_raises_ends_it_alone():
    def fail(turn):
        raise ValueError(turn.number)

    def go_on(turn):
        turn.pause(1.0)

    turns = run(fail, go_on)
    assert isinstance(turns.turns[0].error, ValueError)
    assert turns.turns[1].error is None
    assert turns.now_s == 1.0


def test_what_a_call_raises_ends_all():
    turns = Turns()

    def program(turn):
        turns.call_at(1.0, lambda: 1 // 0)
        turn.pause(2.0)

    with pytest.raises(ZeroDivisionError):
        turns.run([("program", program)])


# --- those that only look ---


def test_who_looks_over_and_over_sees_what_happens_when_it_happens():
    there = []

    def look(turn):
        while not turn.poll(lambda: bool(there), "something"):
            pass
        there.append(turn.now_s)

    def act(turn):
        turn.pause(1.0)
        turn.pause(2.0)
        there.append("act")
        turn.pause(3.0)

    run(look, act, look)
    assert there == ["act", 2.0, 2.0]


def test_to_look_now_and_then_takes_no_time():
    def program(turn):
        for _ in range(1000):
            turn.poll(lambda: False, "something")
            turn.spend(0.0)
        assert turn.now_s == 0.0

    turns = run(program, lambda turn: turn.pause(1.0))
    assert turns.turns[0].error is None


def test_those_that_look_for_what_cannot_come_are_named():
    def look(turn):
        while not turn.poll(lambda: False, "Godot"):
            pass

    with pytest.raises(ShoalError, match=r"program 0 for Godot; program 1 for Godot"):
        run(look, look)


def test_an_interrupt_ends_one_that_looks():
    ended = []

    def look(turn):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            while not turn.poll(lambda: False, "something"):
                pass
        finally:
            ended.append(turn.number)

    def tick(turn):
        while True:
            turn.pause(turn.now_s + 1.0)

    with pytest.raises(KeyboardInterrupt):
        run(look, tick)
    assert ended == [0]


def test_a_program_that_is_added_begins_at_that_time():
    seen = []
    turns = Turns()

    def later(turn):
        seen.append(("later", turn.now_s))
        turn.pause(turn.now_s + 2.0)
        seen.append(("later", turn.now_s))

    def first(turn):
        turn.pause(4.0)
        seen.append(("first", turn.now_s))

    turns.call_at(1.0, lambda: turns.add("later", later))
    turns.run([("first", first)])
    assert seen == [("later", 1.0), ("later", 3.0), ("first", 4.0)]
    assert [turn.name for turn in turns.turns] == ["first", "later"]


@pytest.mark.parametrize("wait", ["park", "pause", "computing", "not begun"])
def test_who_is_interrupted_raises_at_that_time(wait):
    seen = []
    turns = Turns()

    def program(turn):
        seen.append("begun")
        try:
            if wait == "park":
                turn.park("nothing")
            elif wait == "pause":
                turn.pause(5.0)
            else:
                turn.spend(5.0)
                turn.look_up()
        finally:
            seen.append(turn.now_s)

    turns.call_at(0.0 if wait == "not begun" else 2.0, lambda: turns.turns[0].interrupt(KeyError("out")))
    turns.run([("program", program)])
    assert isinstance(turns.turns[0].error, KeyError)
    assert seen == ([] if wait == "not begun" else ["begun", 2.0])


def test_coroutines_live_on_the_clock_of_the_threads_that_wait_for_them():
    seen = []
    turns = Turns()
    loop = LoopInTurns(turns)

    async def work(name, seconds):
        seen.append((f"{name} begins", asyncio.get_running_loop().time()))
        await asyncio.sleep(seconds)
        seen.append((f"{name} ends", running_clock().now_s()))
        return name

    def program(name, computing_s, waiting_s):
        def run(turn):
            turn.spend(computing_s)
            assert loop.run(work(name, waiting_s)) == name
            assert turn.now_s == turns.now_s == computing_s + waiting_s
            turn.spend(1.0)

        return name, run

    turns.run([program("one", 3.0, 0.0), program("two", 1.0, 4.0), program("three", 2.0, 1.5)])
    loop.close()
    assert all(turn.error is None for turn in turns.turns)
    assert seen == [
        ("two begins", 1.0),
        ("three begins", 2.0),
        ("one begins", 3.0),
        ("one ends", 3.0),
        ("three ends", 3.5),
        ("two ends", 5.0),
    ]


def test_what_goes_on_beside_the_threads_goes_on_between_them():
    turns = Turns()
    loop = LoopInTurns(turns)
    beats = []

    async def beat():
        while True:
            beats.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)

    async def begin():
        return asyncio.get_running_loop().create_task(beat())

    def program(turn):
        loop.run(begin())
        for _ in range(3):
            turn.spend(1.25)
        turn.look_up()
        assert beats == [0.0, 1.0, 2.0, 3.0]

    turns.run([("program", program)])
    loop.close()
    assert turns.turns[0].error is None


def test_a_thread_waits_for_a_coroutine_until_its_deadline_or_its_own_end():
    turns = Turns()
    loop = LoopInTurns(turns)
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asyncio.get_running_loop().time())

    def late(turn):
        with pytest.raises(DeadlineExceeded):
            loop.run(forever(), Deadline.after(2.0))
        assert turn.now_s == 2.0

    def killed(turn):
        with pytest.raises(Ended):
            loop.run(forever())
        assert turn.now_s == 3.0
        assert loop.run(asyncio.sleep(1.0, "it can still clean up")) == "it can still clean up"

    def killer(turn):
        turn.pause(3.0)
        turns.turns[1].interrupt(Ended())

    turns.run([("late", late), ("killed", killed), ("killer", killer)])
    loop.close()
    assert [turn.error for turn in turns.turns] == [None, None, None]
    assert ended == [2.0, 3.0]


def test_errors_of_a_coroutine_are_raised_where_it_is_waited_for():
    turns = Turns()
    loop = LoopInTurns(turns)

    async def fail():
        await asyncio.sleep(1.0)
        raise ShoalError("no")

    def program(turn):
        with pytest.raises(ShoalError, match="no"):
            loop.run(fail())

    turns.run([("program", program)])
    loop.close()
    assert turns.turns[0].error is None
