"""Rounds that average one fragment in turn: what moves by what, and what those keep who miss a round."""

import asyncio

import pytest
import torch

from shoal.swarm import CommittedSGD, CommittedState, OptimizerPart, PartitionedOptimizer
from shoal.swarm.wire import PART
from shoal.tensors import Int4, Plain
from swarm.swarms import World, gradient, virtual

NUM_ELEMENTS, NUM_FRAGMENTS = 80_000, 4
OPTIMIZER = PartitionedOptimizer(
    [OptimizerPart(70_000, CommittedSGD(0.7, 0.9)), OptimizerPart(80_000, CommittedSGD(1.0))]
)


def streaming(**settings):
    world = World(num_elements=NUM_ELEMENTS, target_samples=0, num_fragments=NUM_FRAGMENTS, **settings)
    world.optimizer = OPTIMIZER
    return world


def difference(key, number):
    return gradient(100 * key + number, NUM_ELEMENTS)


async def one_round(world, key, numbers=None):
    """Has members bring what they have learned, and waits for the step of all."""
    runs = {number: run for number, run in world.alive().items() if numbers is None or number in numbers}
    steps = {number: run.state.num_steps for number, run in world.alive().items()}
    for number, run in runs.items():
        run.add(difference(key, number), 5)
        run.set_ready()
    await world.wait(lambda: all(r.state.num_steps > steps[number] for number, r in world.alive().items()))


def fragment_of(step):
    state = CommittedState(torch.zeros(NUM_ELEMENTS), OPTIMIZER, b"")
    state.num_steps = step
    return slice(*state.fragment(NUM_FRAGMENTS))


def test_fragments_divide_the_parameters():
    for num_elements in (3, 16, 40, 100, 80_000):
        state = CommittedState(torch.zeros(num_elements), CommittedSGD(), b"")
        ends = []
        for step in range(8):
            state.num_steps = step
            begin, end = state.fragment(4)
            assert begin < end
            assert begin == (ends[-1] % num_elements if ends else 0)
            ends.append(end)
        assert num_elements in ends


@pytest.mark.parametrize("codec", [Plain(), Int4()])
def test_a_round_moves_one_fragment_by_all_that_was_learned_since_its_last_one(codec):
    """What is learned meanwhile adds up; with a codec nothing is promised but the same bits."""

    async def main():
        async with streaming() as world:
            world.codec = codec
            await world.start_all(3)
            expected = CommittedState(torch.zeros(NUM_ELEMENTS), OPTIMIZER, b"")
            pending = torch.zeros(NUM_ELEMENTS)
            for key in range(2 * NUM_FRAGMENTS):
                before, due = world.runs[0].state.parameters.clone(), fragment_of(key)
                await one_round(world, key)
                pending += sum(difference(key, number) for number in range(3)) / 3
                OPTIMIZER.step(expected.parameters, pending[due].clone(), expected.kept, due.start)
                pending[due] = 0
                assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
                now = world.runs[0].state.parameters
                is_moved = now != before
                assert not is_moved[: due.start].any()
                assert not is_moved[due.stop :].any()
                assert is_moved[due].any()
                if isinstance(codec, Plain):
                    assert torch.allclose(now, expected.parameters, atol=1e-4)
            assert all(run.ledger.num_committed == 40 for run in world.runs.values())
            world.check()

    virtual(main())


def test_who_misses_a_round_brings_what_it_has_learned_to_the_next_one_of_that_fragment():
    async def main():
        async with streaming() as world:
            await world.start_all(3)
            cut = {"late": True}
            late = world.runs[2].context.me
            world.fault = lambda _, number, method: (
                "lost" if method == PART and number == 2 and cut["late"] else None
            )
            steps = world.runs[0].state.num_steps
            await one_round(world, 0)
            assert world.runs[0].state.num_steps == steps + 1
            cut["late"] = False
            first = fragment_of(0)
            # what it could not bring is still its own, and is in its model
            progress = world.runs[2].ledger.progress()
            sent = world.runs[0].ledger.progress()
            is_kept = torch.isclose(progress, difference(0, 2))
            assert is_kept[first].any()
            assert is_kept[first.stop :].all()
            assert not sent[first].any()
            for key in range(1, NUM_FRAGMENTS + 1):
                await one_round(world, key)
            for run in world.runs.values():
                assert not run.ledger.progress()[first].any()
                assert run.ledger.num_committed == 5 * (NUM_FRAGMENTS + 1)
            assert world.runs[2].context.me == late
            world.check()
            world.check_samples()

    virtual(main())


def test_a_killed_member_costs_a_round_no_more_than_elsewhere_and_a_joiner_goes_on_with_the_right_fragment():
    async def main():
        async with streaming() as world:
            await world.start_all(4)
            await one_round(world, 0)
            for number, run in world.runs.items():
                run.add(difference(1, number), 5)
                run.set_ready()
            world.kill(3)
            await world.wait(lambda: all(run.state.num_steps == 2 for run in world.alive().values()))
            contacts = [world.runs[0].context.me.peer]
            joiner = await world.start(4, contacts, may_found=False)
            await world.wait(lambda: joiner.is_member and joiner.state.num_steps >= 2)
            await one_round(world, 2)
            await one_round(world, 3)
            assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
            assert joiner.ledger.num_committed == 10
            world.check()
            world.check_samples()

    virtual(main())


def test_the_model_of_a_member_is_what_is_committed_and_what_it_has_learned_since():
    """As a training loop has it: progress that comes while a round is under way is not lost."""

    async def main():
        async with streaming() as world:
            await world.start_all(2)
            run = world.runs[0]
            learned = torch.zeros(NUM_ELEMENTS)
            committed_before = run.state.parameters.clone()
            for key in range(3):
                steps = run.state.num_steps
                for number, member in world.runs.items():
                    member.add(difference(key, number), 5)
                    member.set_ready()
                learned += difference(key, 0)
                while run.state.num_steps == steps:
                    # under way: nothing of it is forgotten
                    if torch.equal(run.state.parameters, committed_before):
                        assert torch.allclose(run.ledger.progress(), learned, atol=1e-5)
                    await asyncio.sleep(0.05)
                learned[fragment_of(key)] = 0
                committed_before = run.state.parameters.clone()
                assert torch.allclose(run.ledger.progress(), learned, atol=1e-5)

    virtual(main())
