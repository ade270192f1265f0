# ruff: noqa: PT012 - a scope raises when its block is left
import asyncio
import contextlib
import gc
import logging

import pytest

from shoal.core import Scope, StandingScope, UsageError

pytestmark = pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)


async def turns(number=10):
    for _ in range(number):
        await asyncio.sleep(0)


async def until_cancelled(log, name, num_turns=0, error=None):
    try:
        await asyncio.Event().wait()
    finally:
        log.append(f"{name} cancelled")
        await turns(num_turns)
        log.append(f"{name} ended")
        if error is not None:
            raise error


async def fail(error, num_turns=0):
    await turns(num_turns)
    raise error


def test_leaving_the_block_waits_for_all_and_results_stay_with_the_tasks(run):
    async def main():
        async with Scope() as scope:
            tasks = [scope.start(asyncio.sleep(0.001 * (5 - number), number)) for number in range(5)]
        assert all(task.done() for task in tasks)
        return [task.result() for task in tasks]

    assert run(main()) == [0, 1, 2, 3, 4]


def test_tasks_may_start_tasks_while_the_block_waits(run):
    async def main():
        log = []

        async def parent(scope):
            await turns()
            scope.start(child())

        async def child():
            await turns()
            log.append("child")

        async with Scope() as scope:
            scope.start(parent(scope))
        return log

    assert run(main()) == ["child"]


@pytest.mark.parametrize("names", ["abcdefgh", "hgfedcba"])
def test_tasks_are_cancelled_in_order_of_creation(run, names):
    async def main():
        log = []
        async with Scope() as scope:
            for name in names:
                scope.start(until_cancelled(log, name), name)
            await turns()
            scope.cancel()
        return log

    assert [line for line in run(main()) if "cancelled" in line] == [f"{name} cancelled" for name in names]


def test_a_task_that_never_began_is_cancelled_without_a_warning(run):
    async def main():
        log = []
        async with Scope() as scope:
            scope.start(until_cancelled(log, "a"))
            scope.start_soon(until_cancelled(log, "b"))
            scope.cancel()
        gc.collect()
        return log

    assert run(main()) == []


def test_a_failure_ends_the_others_and_the_block_and_is_raised(run):
    async def main():
        log = []
        with pytest.raises(KeyError, match="first"):
            async with Scope() as scope:
                scope.start(until_cancelled(log, "a"))
                scope.start(fail(KeyError("first")))
                scope.start(until_cancelled(log, "b"))
                await asyncio.Event().wait()
        assert asyncio.current_task().cancelling() == 0
        await turns()  # the owner's cancellation is over
        return log

    assert run(main()) == ["a cancelled", "a ended", "b cancelled", "b ended"]


def test_a_failure_during_the_wait_at_the_end_is_raised_too(run):
    async def main():
        log = []
        with pytest.raises(KeyError):
            async with Scope() as scope:
                scope.start(until_cancelled(log, "a"))
                scope.start(fail(KeyError("first"), num_turns=5))
        assert asyncio.current_task().cancelling() == 0
        return log

    assert run(main()) == ["a cancelled", "a ended"]


@pytest.mark.parametrize("is_in_body", [True, False])
def test_cleaning_up_is_not_cut_short_by_a_second_cancellation(run, is_in_body):
    async def main():
        log = []
        with pytest.raises(KeyError):
            async with Scope() as scope:
                scope.start(until_cancelled(log, "a", num_turns=10))
                scope.start(fail(KeyError("first"), num_turns=3))
                if is_in_body:
                    await asyncio.Event().wait()
        return log

    assert run(main()) == ["a cancelled", "a ended"]


def test_later_failures_are_notes_of_the_first(run):
    async def main():
        async with Scope("crew") as scope:
            scope.start(until_cancelled([], "a", error=ValueError("second")))
            scope.start(fail(KeyError("first")))
            scope.start(until_cancelled([], "b", error=OSError("third")))

    with pytest.raises(KeyError) as caught:
        run(main())
    assert caught.value.__notes__ == [
        "Another task of the scope 'crew' failed too: ValueError('second')",
        "Another task of the scope 'crew' failed too: OSError('third')",
    ]


def test_an_error_of_the_body_ends_the_tasks_and_is_raised(run):
    async def main():
        log = []
        with pytest.raises(ZeroDivisionError) as caught:
            async with Scope("crew") as scope:
                scope.start(until_cancelled(log, "a", num_turns=3))
                scope.start(until_cancelled(log, "b", error=ValueError("in cleanup")))
                await turns()
                raise ZeroDivisionError
        assert caught.value.__notes__ == [
            "Meanwhile a task of the scope 'crew' failed: ValueError('in cleanup')"
        ]
        assert asyncio.current_task().cancelling() == 0
        return log

    assert run(main()) == ["a cancelled", "b cancelled", "b ended", "a ended"]


@pytest.mark.parametrize("is_in_body", [True, False])
def test_cancelling_the_owner_ends_the_tasks_and_is_passed_on(run, is_in_body):
    async def main():
        log = []

        async def owner():
            async with Scope() as scope:
                scope.start(until_cancelled(log, "a", num_turns=3))
                scope.start(until_cancelled(log, "b"))
                if is_in_body:
                    await asyncio.Event().wait()
            log.append("never")

        task = asyncio.create_task(owner())
        await turns()
        task.cancel()
        await turns(2)
        task.cancel()  # an impatient second time changes nothing: tasks still finish what they clean up
        with pytest.raises(asyncio.CancelledError):
            await task
        return log

    assert run(main()) == ["a cancelled", "b cancelled", "b ended", "a ended"]


def test_a_timeout_around_a_scope_is_a_timeout(run):
    async def main():
        log = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), Scope() as scope:
                scope.start(until_cancelled(log, "a"))
        assert asyncio.current_task().cancelling() == 0
        return log

    assert run(main()) == ["a cancelled", "a ended"]


def test_no_task_starts_outside_the_block(run):
    async def main():
        scope = Scope("crew")
        with pytest.raises(UsageError, match="'crew' takes no tasks now"):
            scope.start(asyncio.sleep(0))
        async with scope:
            scope.start(asyncio.sleep(0))
        for start in (scope.start, scope.start_soon):
            with pytest.raises(UsageError, match="closing"):
                start(asyncio.sleep(0))
        async with Scope() as cancelled:
            cancelled.cancel()
            with pytest.raises(UsageError):
                cancelled.start_soon(asyncio.sleep(0))
        gc.collect()  # nothing was left unawaited

    run(main())


def test_an_inner_failure_goes_through_the_outer_scope(run):
    async def main():
        log = []
        with pytest.raises(KeyError, match="inner"):
            async with Scope("outer") as outer:
                outer.start(until_cancelled(log, "outer"))
                async with Scope("inner") as inner:
                    inner.start(until_cancelled(log, "inner"))
                    inner.start(fail(KeyError("inner"), 3))
        assert asyncio.current_task().cancelling() == 0
        return log

    assert run(main()) == ["inner cancelled", "inner ended", "outer cancelled", "outer ended"]


def test_an_outer_failure_ends_the_inner_scope_first(run):
    async def main():
        log = []
        with pytest.raises(KeyError, match="outer"):
            async with Scope("outer") as outer:
                outer.start(fail(KeyError("outer"), 3))
                async with Scope("inner") as inner:
                    inner.start(until_cancelled(log, "inner"))
                log.append("never")
        assert asyncio.current_task().cancelling() == 0
        return log

    assert run(main()) == ["inner cancelled", "inner ended"]


def test_an_inner_failure_that_is_handled_leaves_the_outer_scope_running(run):
    async def main():
        async with Scope("outer") as outer:
            task = outer.start(asyncio.sleep(0.005, "done"))
            with contextlib.suppress(KeyError):
                async with Scope("inner") as inner:
                    inner.start(fail(KeyError("inner")))
            await turns()
        return task.result()

    assert run(main()) == "done"


def test_both_scopes_failing_at_once_lose_neither_error(run):
    async def main():
        async with Scope("outer") as outer:
            outer.start(fail(KeyError("outer"), 3))
            async with Scope("inner") as inner:
                inner.start(fail(ValueError("inner"), 3))
                await asyncio.Event().wait()

    with pytest.raises(ValueError, match="inner") as caught:
        run(main())
    assert caught.value.__notes__ == ["Meanwhile a task of the scope 'outer' failed: KeyError('outer')"]


def test_what_is_started_soon_fails_for_itself_alone(run, caplog):
    async def main():
        async with Scope("crew") as scope:
            scope.start_soon(fail(KeyError("mine")), name="sweep")
            scope.start_soon(fail(KeyError("other")))
            return await scope.start(asyncio.sleep(0.001, "done"))

    with caplog.at_level(logging.ERROR):
        assert run(main()) == "done"
    assert [record.getMessage() for record in caplog.records] == ["sweep failed", "crew failed"]
    assert "KeyError: 'mine'" in caplog.text


def test_a_standing_scope_is_opened_and_closed_by_different_tasks(run):
    async def main():
        log = []
        standing = StandingScope("service")
        scope = await asyncio.create_task(standing.open())
        for name in "abc":
            scope.start(until_cancelled(log, name))
        await turns()
        await asyncio.create_task(standing.close())
        with pytest.raises(UsageError):
            scope.start(asyncio.sleep(0))
        await standing.close()  # twice is fine
        return log

    assert [line for line in run(main()) if "cancelled" in line] == [
        "a cancelled",
        "b cancelled",
        "c cancelled",
    ]


def test_a_standing_scope_raises_a_tasks_error_when_it_is_closed(run):
    async def main():
        log = []
        standing = StandingScope("service")
        scope = await standing.open()
        scope.start(until_cancelled(log, "a"))
        scope.start(fail(KeyError("broken")))
        await turns()
        assert log == ["a cancelled", "a ended"]
        with pytest.raises(UsageError):
            scope.start(asyncio.sleep(0))
        with pytest.raises(KeyError, match="broken"):
            await standing.close()

    run(main())


def test_a_standing_scope_that_was_never_opened_may_be_closed(run):
    async def main():
        standing = StandingScope()
        with pytest.raises(UsageError):
            standing.scope.start(asyncio.sleep(0))
        await standing.close()

    run(main())
