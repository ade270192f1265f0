"""`core.scope.fanout`, apart from the scopes that test_scope.py is about."""

import asyncio
import gc
import math
import random

import pytest

from shoal.core import Deadline, DeadlineExceeded, ManualClock, UsageError, fanout, results_of

pytestmark = pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)

NEVER = Deadline.never()


async def forever(log=None, cleanup_s=0.0):
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(cleanup_s)
        if log is not None:
            log.append("ended")


async def fail(error):
    await asyncio.sleep(0)
    raise error


def test_results_and_errors_stand_in_the_order_given(run):
    async def main():
        delays_s = [0.004, 0.001, 0.003, 0.0]
        calls = [asyncio.sleep(delay_s, number) for number, delay_s in enumerate(delays_s)]
        return await fanout([*calls, fail(KeyError("five")), asyncio.sleep(0, 6)], NEVER)

    outcomes = run(main())
    assert outcomes[:4] == [0, 1, 2, 3]
    assert isinstance(outcomes[4], KeyError)
    assert outcomes[5] == 6


def test_no_calls_give_no_results(run):
    assert run(fanout([], NEVER)) == []
    assert run(fanout(iter(()), Deadline.after(-1))) == []


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_at_most_so_many_run_at_once_and_all_run(run, limit):
    async def main():
        running, most, order = 0, 0, []

        async def call(number):
            nonlocal running, most
            running += 1
            most = max(most, running)
            order.append(number)
            await asyncio.sleep(0.0005)
            running -= 1
            return number

        outcomes = await fanout((call(number) for number in range(20)), NEVER, limit=limit)
        assert outcomes == order == list(range(20))
        return most

    assert run(main()) == min(limit, 20)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_none_at_all_is_refused(run, limit):
    with pytest.raises(UsageError, match="limit must be above 0"):
        run(fanout([asyncio.sleep(0)], NEVER, limit=limit))
    gc.collect()


def test_what_is_unfinished_at_the_deadline_is_cancelled_and_stands_as_an_error(run):
    async def main():
        log = []
        calls = [asyncio.sleep(0, "quick"), forever(log, 0.001), fail(KeyError()), forever(log)]
        outcomes = await fanout(calls, Deadline.after(0.01))
        assert log == ["ended", "ended"]  # nothing outlives the call
        return outcomes

    quick, *others = run(main())
    assert quick == "quick"
    assert [type(other) for other in others] == [DeadlineExceeded, KeyError, DeadlineExceeded]


def test_a_timer_that_rings_early_is_still_the_deadline(run):
    """uvloop rounds its timers to milliseconds, the nearer way."""

    async def main():
        rng = random.Random(0)
        for _ in range(30):
            deadline = Deadline.after(0.001 + 0.002 * rng.random())
            async with asyncio.timeout(5):
                (outcome,) = await fanout([forever()], deadline)
            assert isinstance(outcome, DeadlineExceeded)

    run(main())


def test_calls_beyond_the_limit_at_the_deadline_never_start(run):
    async def main():
        log = []
        outcomes = await fanout([forever(log), forever(log), forever(log)], Deadline.after(0.005), limit=1)
        gc.collect()  # no coroutine that was never awaited
        return log, [type(outcome) for outcome in outcomes]

    assert run(main()) == (["ended"], [DeadlineExceeded] * 3)


def test_after_the_deadline_nothing_starts(run):
    async def main():
        log = []
        outcomes = await fanout([forever(log)], Deadline.after(-1, ManualClock()))
        gc.collect()
        return log, [type(outcome) for outcome in outcomes]

    assert run(main()) == ([], [DeadlineExceeded])


def test_enough_results_end_the_rest(run):
    async def main():
        log, seen = [], []

        def is_enough(results):
            seen.append(list(results))
            return sum(not isinstance(result, Exception) for result in results) >= 2

        calls = [
            forever(log),
            asyncio.sleep(0.002, "b"),
            fail(KeyError("c")),
            asyncio.sleep(0.001, "d"),
            forever(log),
        ]
        outcomes = await fanout(calls, NEVER, is_enough=is_enough)
        assert log == ["ended", "ended"]
        assert [str(result) for result in seen[-1]] == ["b", "'c'", "d"]  # in the order given
        return outcomes

    a, b, c, d, e = run(main())
    assert (b, d) == ("b", "d")
    assert [type(error) for error in (a, c, e)] == [DeadlineExceeded, KeyError, DeadlineExceeded]


def test_an_error_in_is_enough_ends_all_and_is_raised(run):
    async def main():
        log = []

        def is_enough(results):
            return bool(results) and 1 / 0

        with pytest.raises(ZeroDivisionError):
            await fanout([forever(log), asyncio.sleep(0)], NEVER, is_enough=is_enough)
        return log

    assert run(main()) == ["ended"]


def test_cancelling_the_caller_cancels_all_and_waits_for_them(run):
    async def main():
        log = []
        task = asyncio.create_task(
            fanout([forever(log, 0.002), forever(log, 0.001), forever(log)], NEVER, limit=2)
        )
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()  # a second time: it still waits
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
        return log

    assert run(main()) == ["ended", "ended"]


def test_cancelling_the_caller_while_the_deadline_ends_calls_leaves_none_behind(run):
    async def main():
        log = []
        task = asyncio.create_task(fanout([forever(log, 0.05)], Deadline.after(0.002)))
        await asyncio.sleep(0.01)
        assert not log
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return log

    assert run(main()) == ["ended"]


def test_a_call_that_finishes_while_it_is_cancelled_keeps_its_result(run):
    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "saved"

    assert run(fanout([stubborn()], Deadline.after(0.002))) == ["saved"]


def test_an_infinite_deadline_sets_no_timer(run):
    assert run(fanout([asyncio.sleep(0, 1)], Deadline.after(math.inf))) == [1]


def test_results_are_those_of_all_calls_or_the_first_error(run):
    async def fail(text):
        raise ValueError(text)

    def outcomes(*calls):
        return run(fanout(calls, Deadline.never()))

    assert results_of(outcomes(asyncio.sleep(0, 1), asyncio.sleep(0, 2))) == [1, 2]
    with pytest.raises(ValueError, match="first"):
        results_of(outcomes(asyncio.sleep(0, 1), fail("first"), fail("second")))
