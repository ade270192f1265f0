"""Virtual time: it jumps, it keeps order, and it refuses what belongs to real time."""

import asyncio
import itertools
import math
import socket
import subprocess
import sys
import threading
import time

import pytest

from shoal.core import Deadline, DeadlineExceeded, Scope, ShoalError, UsageError, fanout
from shoal.core.virtual import START_WALL_S, VirtualLoop, run_virtual


def test_a_day_of_waiting_takes_no_time():
    async def main():
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began_s = time.perf_counter()
    assert run_virtual(main()) == 86_400
    assert time.perf_counter() - began_s < 1


def test_the_clock_follows_the_loop():
    async def main():
        clock = asyncio.get_running_loop().clock
        deadline = Deadline.after(10)
        await asyncio.sleep(4)
        return clock.now_s(), clock.wall_s(), deadline.remaining_s

    assert run_virtual(main()) == (4.0, START_WALL_S + 4, 6.0)


def test_the_time_is_the_timers_own_and_does_not_drift():
    times_s = [0.1 * number for number in range(1, 200)]

    async def main():
        loop = asyncio.get_running_loop()
        seen_s = []
        for at_s in times_s:
            loop.call_at(at_s, lambda: seen_s.append(loop.time()))
        await asyncio.sleep(1000)
        return seen_s

    assert run_virtual(main()) == times_s


def test_equal_times_run_in_order_of_creation_and_close_ones_in_order_of_time():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        for name in range(50):
            loop.call_at(1.0, seen.append, name)
        loop.call_at(math.nextafter(2.0, 3.0), seen.append, "later")
        loop.call_at(2.0, seen.append, "sooner")
        await asyncio.sleep(5)
        return seen

    assert run_virtual(main()) == [*range(50), "sooner", "later"]


def test_a_timer_of_the_past_runs_in_this_moment_after_what_is_ready():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        seen = []
        loop.call_soon(seen.append, "ready")
        loop.call_at(3.0, seen.append, "past")
        loop.call_later(0, seen.append, "now")
        loop.call_soon(seen.append, "ready too")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return seen, loop.time()

    assert run_virtual(main()) == (["ready", "past", "now", "ready too"], 5.0)


def test_cancelled_timers_neither_run_nor_hold_time_up_nor_pile_up():
    async def main():
        loop = asyncio.get_running_loop()
        seen = []
        for number in range(10_000):
            timer = loop.call_later(10 + number, seen.append, number)
            if number % 1000:
                timer.cancel()
        num_kept = len(loop._timers)
        await asyncio.sleep(20_000)
        return seen, num_kept

    seen, num_kept = run_virtual(main())
    assert seen == list(range(0, 10_000, 1000))
    assert num_kept < 300


def test_timeouts_and_fanout_keep_virtual_time():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        results = await fanout([asyncio.sleep(5, "five"), asyncio.sleep(500)], Deadline.after(100))
        return loop.time(), results[0], type(results[1])

    assert run_virtual(main()) == (160.0, "five", DeadlineExceeded)


def test_a_deadlock_is_told_with_the_names_of_those_who_wait():
    async def main():
        async with Scope("both") as scope:
            scope.start_soon(asyncio.Event().wait(), name="left")
            scope.start_soon(asyncio.Event().wait(), name="right")

    with pytest.raises(ShoalError, match=r"Nothing can happen any more at 0 s.*3 tasks.*left, main, right"):
        run_virtual(main())


def test_a_timer_that_never_comes_is_a_deadlock():
    async def main():
        asyncio.get_running_loop().call_later(math.inf, print)
        await asyncio.Event().wait()

    with pytest.raises(ShoalError, match="Nothing can happen"):
        run_virtual(main())


def test_what_yields_forever_is_told(monkeypatch):
    monkeypatch.setattr("shoal.core.virtual._MAX_TURNS", 1000)

    async def main():
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(ShoalError, match="stands still"):
        run_virtual(main())


def test_what_yields_forever_is_named_with_the_lines_at_which_it_stands():
    async def yields():
        for _ in itertools.count():
            await asyncio.sleep(0)

    async def main():
        async with Scope("both") as scope:
            scope.start_soon(asyncio.Event().wait(), name="patient")
            scope.start_soon(yields(), name="busy")

    with pytest.raises(
        ShoalError, match=r"stands still at 0 s: busy at test_virtual.py:\d+ yields"
    ) as caught:
        run_virtual(main())
    assert "patient" not in str(caught.value)


def test_the_limit_ends_a_program_that_goes_on_forever_and_cleans_up():
    ended = []

    async def main():
        try:
            for _ in itertools.count():
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(0.5)
            ended.append(asyncio.get_running_loop().time())

    with pytest.raises(DeadlineExceeded, match="limit of 100 s"):
        run_virtual(main(), limit_s=100)
    assert ended == [100.5]


def test_tasks_that_are_left_are_cancelled():
    ended = []

    async def stay(name):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(name)

    async def main():
        tasks = [asyncio.create_task(stay(number)) for number in range(20)]
        await asyncio.sleep(1)
        return len(tasks)

    assert run_virtual(main()) == 20
    assert ended == list(range(20))


def test_tasks_that_are_left_are_cancelled_in_order_whatever_their_names():
    ended = []

    async def stay(name):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(name)

    async def main():
        for number in range(5000):  # those that end leave no trace
            await asyncio.create_task(asyncio.sleep(0), name=f"short {number}")
        tasks = [asyncio.create_task(stay(number), name="x" * (number % 3)) for number in range(200)]
        await asyncio.sleep(1)
        return len(tasks), len(asyncio.get_running_loop()._tasks)

    num_tasks, num_kept = run_virtual(main())
    assert (num_tasks, ended) == (200, list(range(200)))
    assert num_kept < 2000


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_task_that_survives_its_cancellation_does_not_hold_the_end_up():
    num_cancelled = 0

    async def survive():
        nonlocal num_cancelled
        while True:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                num_cancelled += 1

    async def main():
        task = asyncio.create_task(survive())
        task._log_destroy_pending = False
        await asyncio.sleep(1)
        return "ended"

    assert run_virtual(main()) == "ended"
    assert num_cancelled == 10


def test_errors_come_out():
    async def main():
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


@pytest.mark.parametrize(
    "work",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.create_connection(asyncio.Protocol, "127.0.0.1", 1),
        lambda loop: loop.create_server(asyncio.Protocol, "127.0.0.1", 0),
        lambda loop: loop.create_datagram_endpoint(asyncio.DatagramProtocol, ("127.0.0.1", 0)),
        lambda loop: loop.add_signal_handler(2, print),
        lambda loop: asyncio.to_thread(print),
    ],
)
def test_real_time_is_refused(work):
    async def main():
        with pytest.raises(UsageError, match="Virtual time has no place for"):
            await work(asyncio.get_running_loop())

    run_virtual(main())


def test_sockets_are_refused():
    async def main():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            with pytest.raises(UsageError, match="a socket"):
                await asyncio.get_running_loop().sock_accept(listener)

    run_virtual(main())


def test_other_threads_are_refused_and_its_own_is_not():
    async def main():
        loop = asyncio.get_running_loop()
        refused, done = [], asyncio.Event()

        def reach():
            try:
                loop.call_soon_threadsafe(print)
            except UsageError as error:
                refused.append(error.what)

        thread = threading.Thread(target=reach)
        thread.start()
        thread.join()
        loop.call_soon_threadsafe(done.set)
        await done.wait()
        return refused

    assert run_virtual(main()) == ["Virtual time has no place for a call from another thread."]


def test_it_does_not_run_inside_another_loop(run):
    async def inner():
        """Never run."""

    async def outer():
        with pytest.raises(UsageError, match="inside another loop"):
            run_virtual(inner())

    run(outer())


def test_a_loop_can_be_used_again_and_closed_twice():
    loop = VirtualLoop()
    assert loop.run_until_complete(asyncio.sleep(3, "one")) == "one"
    assert loop.run_until_complete(asyncio.sleep(3, "two")) == "two"
    assert loop.time() == 6
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError):
        loop.call_soon(print)
    with pytest.raises(RuntimeError):
        loop.call_later(1, print)


def test_async_generators_are_closed():
    ended = []

    async def numbers():
        try:
            while True:
                yield 1
        finally:
            ended.append(True)

    async def main():
        source = numbers()
        await anext(source)
        return source

    source = run_virtual(main())
    assert ended == [True]
    del source


SCRAMBLED = """
import asyncio, hashlib, random
from shoal.core import Scope
from shoal.core.virtual import run_virtual

async def main():
    loop, choice, events = asyncio.get_running_loop(), random.Random(1), hashlib.blake2b()
    async def wander(name):
        for _ in range(20):
            await asyncio.sleep(choice.choice([0, 0.5, 1]))
            events.update(f"{loop.time()} {name};".encode())
    async with Scope("all") as scope:
        for number in range(50):
            scope.start_soon(wander(f"task {number}"), name=f"task {number}")
    return events.hexdigest()

print(run_virtual(main()))
"""


def test_two_processes_with_different_hash_seeds_do_the_same():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRAMBLED],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 64
