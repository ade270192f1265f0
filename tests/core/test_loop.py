import asyncio
import concurrent.futures
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from shoal.core import Deadline, DeadlineExceeded, LoopThread, UsageError
from shoal.core import loop as loop_module
from shoal.core.loop import SWITCH_INTERVAL_S, new_event_loop, own_the_process

MAKERS = {"uvloop": new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=list(MAKERS))
def loop(request):
    with LoopThread(make_loop=MAKERS[request.param]) as loop:
        yield loop
    gc.collect()  # a coroutine that was never awaited would warn now


async def forever(log, cleanup_s=0.0):
    log.append("started")
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(cleanup_s)
        log.append("ended")


async def fail(error):
    await asyncio.sleep(0)
    raise error


def test_a_script_runs_coroutines_on_the_loops_thread(loop):
    async def where():
        return threading.current_thread().name

    assert loop.run(asyncio.sleep(0, "done")) == "done"
    assert loop.run(where(), Deadline.after(10)) == "shoal-loop"


def test_exceptions_come_back(loop):
    with pytest.raises(KeyError, match="mine"):
        loop.run(fail(KeyError("mine")))
    assert loop.run(asyncio.sleep(0, 1)) == 1


@pytest.mark.parametrize("deadline_s", [None, 10])
def test_the_coroutines_own_timeout_is_no_deadline(loop, deadline_s):
    deadline = None if deadline_s is None else Deadline.after(deadline_s)
    with pytest.raises(TimeoutError, match="own") as caught:
        loop.run(fail(TimeoutError("own")), deadline)
    assert not isinstance(caught.value, DeadlineExceeded)

    async def caller():
        await loop.run_from_async(fail(TimeoutError("own")), deadline)

    with pytest.raises(TimeoutError, match="own") as caught:
        asyncio.run(caller())
    assert not isinstance(caught.value, DeadlineExceeded)


def test_it_may_be_used_inside_another_running_loop(loop):
    async def notebook_cell():
        return loop.run(asyncio.sleep(0, "done"))

    assert asyncio.run(notebook_cell()) == "done"


def test_a_caller_on_another_loop_awaits_without_blocking_it(loop):
    async def caller():
        opened = asyncio.Event()  # of the other loop
        here = asyncio.get_running_loop()

        async def work():
            here.call_soon_threadsafe(opened.set)
            return threading.current_thread().name

        task = asyncio.create_task(loop.run_from_async(work()))
        await opened.wait()
        return await task

    assert asyncio.run(caller()) == "shoal-loop"


def test_blocking_code_runs_on_the_thread_and_blocks_no_other_loop(loop):
    may_end = threading.Event()

    def work():
        assert may_end.wait(10)
        return threading.current_thread().name

    async def caller():
        asyncio.get_running_loop().call_soon(may_end.set)
        return await loop.run_blocking(work)

    assert asyncio.run(caller()) == "shoal-loop"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(loop.run_blocking(lambda: 1 / 0))


def test_run_on_its_own_thread_is_refused(loop):
    async def confused():
        return loop.run(asyncio.sleep(0))

    with pytest.raises(UsageError, match="await the coroutine instead"):
        loop.run(confused())


def test_a_deadline_cancels_and_lets_the_coroutine_clean_up(loop):
    log = []
    with pytest.raises(DeadlineExceeded, match="before its deadline"):
        loop.run(forever(log, cleanup_s=0.01), Deadline.after(0.02))
    assert log == ["started", "ended"]


def test_a_deadline_from_another_loop_cancels_and_lets_it_clean_up_too(loop):
    log = []
    with pytest.raises(DeadlineExceeded, match="before its deadline"):
        asyncio.run(loop.run_from_async(forever(log, cleanup_s=0.01), Deadline.after(0.02)))
    assert log == ["started", "ended"]
    assert asyncio.run(loop.run_from_async(asyncio.sleep(0, 1), Deadline.never())) == 1


def test_cancelling_the_caller_on_another_loop_cancels_the_work(loop):
    ended = threading.Event()

    async def caller():
        began = asyncio.Event()
        here = asyncio.get_running_loop()

        async def work():
            here.call_soon_threadsafe(began.set)
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        task = asyncio.create_task(loop.run_from_async(work()))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(caller())
    assert ended.wait(10)


def test_a_coroutine_that_cannot_start_in_time_never_does_more_than_begin(loop):
    """The loop is busy until after the deadline."""
    release, log = threading.Event(), []
    loop.loop.call_soon_threadsafe(release.wait, 10)
    timer = threading.Timer(0.05, release.set)
    timer.start()
    with pytest.raises(DeadlineExceeded):
        loop.run(forever(log), Deadline.after(0.01))
    assert log in ([], ["started", "ended"])
    timer.join()


def test_a_coroutine_whose_caller_left_before_it_began_is_dropped(loop):
    release = threading.Event()
    loop.loop.call_soon_threadsafe(release.wait, 10)
    log, unhandled = [], []
    loop.loop.set_exception_handler(lambda _, context: unhandled.append(context))

    async def caller():
        task = asyncio.create_task(loop.run_from_async(forever(log)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(caller())
    release.set()
    loop.run(asyncio.sleep(0))
    gc.collect()
    assert (log, unhandled) == ([], [])


def test_submit_returns_a_future_that_can_be_cancelled(loop):
    assert loop.submit(asyncio.sleep(0, 3)).result(10) == 3
    log = []
    began, ended = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await forever(log)
        finally:
            ended.set()

    future = loop.submit(work())
    assert began.wait(10)
    future.cancel()
    assert ended.wait(10)
    assert log == ["started", "ended"]


def test_many_threads_may_call_at_once(loop):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: loop.run(asyncio.sleep(0.0001, number)), range(200)))
    assert answers == list(range(200))


@pytest.mark.parametrize("make_loop", MAKERS.values(), ids=MAKERS)
def test_closing_cancels_what_is_running_and_lets_it_clean_up(make_loop):
    log = []
    with LoopThread(make_loop=make_loop) as loop:
        for _ in range(3):
            loop.submit(forever(log, cleanup_s=0.002))
        loop.run(asyncio.sleep(0))
        inner = loop.loop
    assert log == ["started"] * 3 + ["ended"] * 3
    assert inner.is_closed()
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-loop"]


@pytest.mark.parametrize("make_loop", MAKERS.values(), ids=MAKERS)
def test_tasks_that_start_while_closing_are_ended_too(make_loop):
    log = []

    async def parent():
        try:
            await asyncio.Event().wait()
        finally:
            children.append(asyncio.get_running_loop().create_task(forever(log)))
            await asyncio.sleep(0)

    children = []
    with LoopThread(make_loop=make_loop) as loop:
        loop.submit(parent())
        loop.run(asyncio.sleep(0))
    gc.collect()
    assert log == ["started", "ended"]


def test_a_task_that_will_not_end_does_not_hold_up_closing_for_ever(monkeypatch, caplog):
    monkeypatch.setattr(loop_module, "_CLOSE_GRACE_S", 0.01)

    async def stubborn():
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING), LoopThread(make_loop=asyncio.new_event_loop) as loop:
        loop.submit(stubborn())
        loop.run(asyncio.sleep(0))
    assert "did not end when its loop was closed" in caplog.text


def test_a_failure_while_closing_is_logged(caplog):
    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("in cleanup")

    with caplog.at_level(logging.WARNING), LoopThread() as loop:
        task = loop.submit(work())
        loop.run(asyncio.sleep(0))
    assert "KeyError('in cleanup')" in caplog.text
    with pytest.raises(KeyError):
        task.result(0)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("make_loop", MAKERS.values(), ids=MAKERS)
def test_closing_while_another_thread_waits_ends_its_wait(make_loop, is_async):
    began = threading.Event()

    async def work():
        began.set()
        await asyncio.Event().wait()

    def call(loop):
        return asyncio.run(loop.run_from_async(work())) if is_async else loop.run(work())

    def wait(loop):
        with pytest.raises(DeadlineExceeded, match="its loop thread was closed"):
            call(loop)
        return "told"

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with LoopThread(make_loop=make_loop) as loop:
            waiting = pool.submit(wait, loop)
            assert began.wait(10)
        assert waiting.result(10) == "told"


@pytest.mark.parametrize("make_loop", MAKERS.values(), ids=MAKERS)
def test_calls_that_meet_the_closing_loop_all_end(make_loop):
    """Work that is queued just before the loop stops must not be forgotten, its caller waiting for ever."""

    def hammer(loop):
        count = 0
        try:
            while True:
                loop.run(asyncio.sleep(0))
                count += 1
        except (UsageError, DeadlineExceeded):
            return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(15):
            with LoopThread(make_loop=make_loop) as loop:
                hammers = [pool.submit(hammer, loop) for _ in range(4)]
                loop.run(asyncio.sleep(0.001))
            for item in hammers:
                item.result(10)
    gc.collect()


def test_after_closing_there_is_a_clear_error_and_it_may_be_opened_again():
    loop = LoopThread("mine")
    for _ in range(2):
        with pytest.raises(UsageError, match="'mine' is not open"):
            loop.run(asyncio.sleep(0))
        with pytest.raises(UsageError, match="'mine' is not open"):
            loop.submit(asyncio.sleep(0))
        with pytest.raises(UsageError, match="'mine' is not open"):
            asyncio.run(loop.run_from_async(asyncio.sleep(0)))
        with loop:
            assert loop.run(asyncio.sleep(0, 1)) == 1
    gc.collect()


def test_opening_twice_is_refused_and_closing_twice_is_fine(loop):
    with pytest.raises(UsageError, match="open already"):
        loop.__enter__()
    other = LoopThread("other").__enter__()
    other.__exit__(None, None, None)
    other.__exit__(None, None, None)


def test_it_cannot_close_itself(loop):
    async def close():
        loop.__exit__(None, None, None)

    with pytest.raises(UsageError, match="cannot close itself"):
        loop.run(close())


def test_an_error_in_the_block_closes_the_loop():
    loop = LoopThread()
    with pytest.raises(ZeroDivisionError), loop:
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="not open"):
        assert loop.loop


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("deadline", ["None", "Deadline.after(60)"])
def test_ctrl_c_interrupts_a_blocked_script_and_the_coroutine_cleans_up(deadline):
    script = textwrap.dedent(f"""
        import asyncio
        from shoal.core import Deadline, LoopThread

        async def work():
            print("waiting", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                print("cleaned up", flush=True)

        try:
            with LoopThread() as loop:
                loop.run(work(), {deadline})
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "waiting\n"
        sent_s = time.monotonic()
        child.send_signal(signal.SIGINT)
        said, complaints = child.communicate(timeout=20)
    assert said.splitlines() == ["cleaned up", "interrupted"]
    assert complaints == ""
    assert child.returncode == 0
    assert time.monotonic() - sent_s < 3


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a thread")
def test_ctrl_c_that_does_not_wake_the_blocked_thread_is_noticed_soon():
    """As where it comes just before the wait begins: the handler is due, and nothing wakes the wait."""
    script = textwrap.dedent("""
        import asyncio, signal, threading
        from shoal.core import LoopThread

        async def work():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            await asyncio.Event().wait()

        try:
            with LoopThread() as loop:
                loop.run(work())
        except KeyboardInterrupt:
            print("interrupted")
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_processes_of_our_own_hand_the_interpreter_over_often():
    before = sys.getswitchinterval()
    try:
        own_the_process()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before)


def test_without_uvloop_the_standard_loop_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    assert type(loop).__module__.startswith("asyncio")
    loop.close()
