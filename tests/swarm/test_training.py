"""Training in virtual time: peers come and go, and the model learns as if nobody had."""

import asyncio
import gc
import random
import tracemalloc

import pytest
import torch

from shoal.data import digits
from shoal.swarm import CommittedSGD
from swarm.swarms import World, gradient, virtual

NUM_ELEMENTS = 64 * 10 + 10
BATCH = 16


def logits(vector, images):
    return images.flatten(1) @ vector[:640].view(64, 10) + vector[640:]


def accuracy(vector):
    images, labels = digits(train=False)
    return float((logits(vector, images).argmax(1) == labels).float().mean())


async def train(run, world, number, data, until_s):
    """A peer's own loop: a gradient of softmax regression, whenever it is done with one."""
    choice = random.Random(number)
    images, labels = data
    while asyncio.get_running_loop().time() < until_s and number in world.alive():
        await asyncio.sleep(choice.uniform(0.2, 0.6))
        if run.is_member:
            rows = torch.tensor([choice.randrange(len(images)) for _ in range(BATCH)])
            vector = run.state.parameters.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(logits(vector, images[rows]), labels[rows])
            run.add(torch.autograd.grad(loss, vector)[0], BATCH)


async def learn(has_churn, num_samples=20_000, num_peers=6):
    """Trains on digits until so many samples are in; with churn one is killed and one joins every 5 s."""
    data, choice = digits(train=True), random.Random(3)
    async with World(num_elements=NUM_ELEMENTS, target_samples=200) as world:
        world.optimizer = CommittedSGD(learning_rate=0.5)
        await world.start_all(num_peers)
        for number, run in list(world.runs.items()):
            world.scope.start_soon(train(run, world, number, data, 1e9))
        while max(run.state.num_samples for run in world.alive().values()) < num_samples:
            await asyncio.sleep(5)
            if has_churn:
                members = [number for number, run in world.alive().items() if run.is_member]
                world.kill(choice.choice(members))
                number = len(world.runs)
                contacts = [run.context.me.peer for run in world.alive().values()]
                run = await world.start(number, contacts, may_found=False)
                world.scope.start_soon(train(run, world, number, data, 1e9))
        world.scope.cancel()
        await world.wait(lambda: len({r.state.name for r in world.alive().values() if r.is_member}) == 1)
        world.check()
        run = next(run for run in world.alive().values() if run.is_member)
        return accuracy(run.state.parameters), len(world.runs)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_digits_with_churn_are_learned_as_well_as_without():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine they wait for each other: minutes instead of seconds
    try:
        calm, _ = virtual(learn(False))
        churned, num_peers = virtual(learn(True))
    finally:
        torch.set_num_threads(num_threads)
    assert num_peers > 8
    assert calm > 0.85
    assert churned > calm - 0.015


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_stays_flat_over_failing_rounds():
    """Every round fails at some message; what members keep must not grow with it."""

    async def main():
        choice = random.Random(1)
        async with World(target_samples=20) as world:
            await world.start_all(4)
            world.fault = lambda *_: "lost" if choice.random() < 0.02 else None
            sizes = []
            for block in range(4):
                for key in range(40):
                    for number, run in world.runs.items():
                        run.add(gradient(key + number), 5)
                    await asyncio.sleep(2.0)
                world.commits.clear()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
                if block == 0:
                    tracemalloc.start()
            world.check()
            return sizes

    sizes = virtual(main())
    tracemalloc.stop()
    grown = sizes[3] - sizes[2]
    assert grown < 400_000  # histories of 40 rounds, and what is under way


def test_rounds_on_a_slow_network():
    """Delays of a tenth of a second and lines of a few Mbit/s: nobody is dropped for being far away."""
    from shoal.transport import Conditions, Profile

    async def main():
        async with World(Conditions(Profile.load("home"), seed=1), num_elements=20_000) as world:
            await world.start_all(4)
            numbers = [run.context.me.start_number for run in world.runs.values()]
            for key in range(5):
                steps = world.runs[0].state.num_steps
                for number, run in world.runs.items():
                    run.add(gradient(key + number, 20_000), 5)
                await world.wait(
                    lambda steps=steps: all(r.state.num_steps > steps for r in world.runs.values())
                )
            assert numbers == [run.context.me.start_number for run in world.runs.values()]
            assert all(run.ledger.num_committed == 25 for run in world.runs.values())
            world.check()

    virtual(main())
