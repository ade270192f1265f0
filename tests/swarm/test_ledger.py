"""Samples: in once, carried over once, or listed as lost; residuals follow the bitmap."""

import random

import pytest
import torch

from shoal.core import UsageError
from shoal.swarm.ledger import SampleLedger
from shoal.swarm.state import credited_samples
from shoal.swarm.wire import ABORT, STEP, Commit, PartResult, RoundPlan, to_bitmap
from shoal.tensors import Plain, TopK, decode

SIZE = 8


def commit(samples, bitmaps, kind=STEP):
    num_parts = len(bitmaps)
    bounds = tuple(SIZE * part // num_parts for part in range(num_parts + 1))
    zeros = (0,) * num_parts
    plan = RoundPlan((0,), (samples,), bounds, zeros, zeros, 1.0)
    parts = tuple(PartResult(1, b"", to_bitmap([0] if bit else [], 1)) for bit in bitmaps)
    return Commit(b"f", 0, b"s", kind, (), plan=plan, parts=parts)


def test_the_mean_of_what_was_added():
    ledger = SampleLedger(SIZE, Plain())
    ledger.add(torch.full((SIZE,), 1.0), 3)
    ledger.add(torch.full((SIZE,), 5.0), 1)
    frozen = ledger.freeze()
    assert frozen.samples == 4
    assert torch.equal(frozen.mean, torch.full((SIZE,), 2.0))
    assert ledger.freeze() is None


def test_an_abort_carries_everything_over():
    ledger = SampleLedger(SIZE, Plain())
    ledger.add(torch.ones(SIZE), 4)
    ledger.freeze()
    ledger.settle(commit(4, [1, 1], ABORT), 0)
    assert (ledger.num_pending, ledger.num_committed) == (4, 0)
    assert torch.equal(ledger.freeze().mean, torch.ones(SIZE))


def test_half_of_the_elements_are_half_of_the_samples():
    ledger = SampleLedger(SIZE, Plain())
    ledger.add(torch.ones(SIZE), 10)
    ledger.freeze()
    ledger.settle(commit(10, [1, 0]), 0)
    assert (ledger.num_committed, ledger.num_pending) == (5, 5)
    assert ledger.freeze() is None, "carried samples alone have no mean for the other elements"
    ledger.add(torch.full((SIZE,), 4.0), 10)
    frozen = ledger.freeze()
    assert frozen.samples == 15
    expected = torch.tensor([4.0] * 4 + [2.5] * 4)
    assert torch.allclose(frozen.mean, expected)


@pytest.mark.parametrize("seed", range(10))
def test_every_sample_is_somewhere_once(seed):
    choice = random.Random(seed)
    ledger = SampleLedger(SIZE, Plain())
    for _ in range(50):
        for _ in range(choice.randint(0, 3)):
            ledger.add(torch.randn(SIZE), choice.randint(1, 20))
        frozen = ledger.freeze()
        assert ledger.is_balanced
        if frozen is None:
            continue
        fate = choice.random()
        if fate < 0.1:
            ledger.give_up("unknown")
        elif fate < 0.2:
            ledger.take_back()
        else:
            kind = choice.choice([STEP, STEP, ABORT])
            ledger.settle(commit(frozen.samples, [choice.randint(0, 1) for _ in range(4)], kind), 0)
        assert ledger.is_balanced


def test_credits_are_shares_of_elements():
    assert credited_samples(commit(10, [1, 1, 0, 1])) == [7]
    assert credited_samples(commit(10, [1, 1], ABORT)) == []


def test_a_residual_is_adopted_only_where_the_part_went_in():
    ledger = SampleLedger(SIZE, TopK(0.25))
    values = torch.arange(1.0, SIZE + 1)
    ledger.add(values, 1)
    frozen = ledger.freeze()
    first, second = ledger.encode(frozen, 0, 0, 4), ledger.encode(frozen, 1, 4, 8)
    assert ledger.encode(frozen, 0, 0, 4) is first, "the same bytes when they are sent again"
    ledger.settle(commit(1, [1, 0]), 0)
    left = values[:4] - decode(first)
    ledger.add(torch.zeros(SIZE), 1)
    again = ledger.freeze()
    due = ledger.encode(again, 0, 0, 4)
    assert torch.allclose(decode(due) + again.rests[0], left)
    assert torch.allclose(decode(ledger.encode(again, 1, 4, 8)) + again.rests[1], values[4:] * 0.5)
    assert decode(second).count_nonzero() == 1


def test_what_is_no_contribution_is_refused():
    ledger = SampleLedger(SIZE, Plain())
    with pytest.raises(UsageError):
        ledger.add(torch.ones(SIZE + 1), 1)
    with pytest.raises(UsageError):
        ledger.add(torch.ones(SIZE), 0)


def test_what_an_ended_fork_had_is_lost():
    ledger = SampleLedger(SIZE, Plain())
    ledger.add(torch.ones(SIZE), 4)
    ledger.freeze()
    ledger.settle(commit(4, [1, 1]), 0)
    ledger.reconcile(lambda fork, number: fork == b"f")
    assert ledger.num_committed == 4
    ledger.reconcile(lambda fork, number: False)
    assert (ledger.num_committed, ledger.num_lost) == (0, 4)
    assert ledger.is_balanced
