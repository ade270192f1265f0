"""In virtual time."""

import asyncio
import types

import pytest
import torch

from shoal.core import Deadline, run_virtual, running_clock
from shoal.experts.client.batch import Patience, ask_all

NEVER = 10_000


def waited(calls, num_samples, **rule):
    """When it ended, and which calls were heard to their end; calls are (rows, seconds, is_answered)."""
    return outcome(calls, num_samples, **rule)[:2]


def outcome(calls, num_samples, **rule):
    """With whether those that were cut off were needed no more."""
    ended = []

    async def call(part):
        await asyncio.sleep(part.seconds)
        ended.append(part.number)
        return part.is_answered

    async def main():
        timeout_s = rule.pop("timeout_s", None)
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        patience = Patience(rule.pop("k_min", 1), deadline, rule.pop("after_s", None))
        on_trial = rule.pop("on_trial", ())
        parts = [
            types.SimpleNamespace(
                number=number,
                rows=torch.tensor(rows),
                seconds=seconds,
                is_answered=is_answered,
                is_relied_on=number not in on_trial,
            )
            for number, (rows, seconds, is_answered) in enumerate(calls)
        ]
        is_enough = await ask_all(parts, call, num_samples, patience)
        return running_clock().now_s(), is_enough

    end_s, is_enough = run_virtual(main())
    return end_s, sorted(ended), is_enough


def test_it_ends_when_all_have_answered():
    assert waited([([0, 1], 3.0, True), ([1], 0.5, True)], 2, after_s=9) == (3.0, [0, 1])


def test_others_get_their_time_once_every_sample_has_enough():
    calls = [([0], 1.0, True), ([1], 2.0, True), ([0, 1], 2.4, True), ([0, 1], NEVER, True)]
    assert waited(calls, 2, after_s=0.5) == (2.5, [0, 1, 2])


def test_every_sample_counts_for_itself():
    calls = [([0], 1.0, True), ([0], 1.0, True), ([1], 8.0, True), ([0, 1], NEVER, True)]
    assert waited(calls, 2, after_s=0.5) == (8.5, [0, 1, 2])
    assert waited(calls, 2, k_min=2, timeout_s=30) == (30.0, [0, 1, 2])


def test_a_failure_is_no_answer():
    calls = [([0], 1.0, False), ([0], 5.0, True), ([0], NEVER, True)]
    assert waited(calls, 1, after_s=0.5) == (5.5, [0, 1])


def test_a_sample_that_can_have_no_more_answers_holds_nobody_up():
    calls = [([0], 1.0, False), ([1], 2.0, True), ([1], NEVER, True)]
    assert waited(calls, 2, after_s=0.5) == (2.5, [0, 1])


def test_without_a_number_they_are_waited_for_while_answers_come():
    steady = [([0], 0.5 + 0.9 * number, True) for number in range(6)]
    end_s, ended = waited([*steady, ([0], NEVER, True)], 1)
    assert end_s == pytest.approx(0.5 + 0.9 * 5 + 1.5)  # three times what the first answer took
    assert ended == [0, 1, 2, 3, 4, 5]
    quick = [([0], 0.01, True), ([0], NEVER, True)]
    assert waited(quick, 1) == (pytest.approx(1.01), [0])


def test_nobody_relies_on_those_on_trial_who_has_another():
    calls = [([0, 1], 2.0, True), ([1], NEVER, True)]
    assert waited(calls, 2, after_s=0.5, on_trial=[1]) == (2.5, [0])
    assert waited(calls, 2, on_trial=[1]) == (8.0, [0])
    assert waited(calls, 2, k_min=2, after_s=0.5, on_trial=[1]) == (2.5, [0])
    calls = [([0, 1], 2.0, False), ([1], 1.0, True), ([0], 2.2, True)]  # but their answers count
    assert waited(calls, 2, after_s=0.5, on_trial=[1, 2]) == (2.2, [0, 1, 2])


def test_who_has_nobody_else_waits_for_those_on_trial():
    calls = [([0], 1.0, True), ([1], 7.0, True), ([0], NEVER, True)]
    assert waited(calls, 2, after_s=0.5, on_trial=[1]) == (7.5, [0, 1])
    calls = [([0], 1.0, False), ([0], 7.0, True)]  # also when the others have failed
    assert waited(calls, 1, after_s=0.5, on_trial=[1]) == (7.0, [0, 1])


def test_it_tells_stragglers_from_those_who_were_needed():
    calls = [([0], 1.0, True), ([1], NEVER, True), ([1], 3.0, True)]
    assert outcome(calls, 2, after_s=0.5)[2]
    assert not outcome(calls[:2], 2, after_s=0.5, timeout_s=4.0)[2]


def test_a_deadline_ends_it():
    assert waited([([0], 1.0, True), ([1], NEVER, True)], 2, timeout_s=4.0) == (4.0, [0])
    assert waited([([0], NEVER, True)], 1, timeout_s=0.0) == (0.0, [])


def test_who_needs_no_answers_waits_for_one():
    assert waited([([0], 20.0, True)], 1, k_min=0) == (20.0, [0])


def test_nobody_to_ask():
    assert waited([], 3) == (0.0, [])
