"""Training in virtual time: peers come and go, and the model learns as if nobody had."""

import asyncio
import gc
import random
import tracemalloc

import pytest
import torch

from shoal.data import digits, mnist
from shoal.swarm import CommittedSGD
from swarm.swarms import World, gradient, virtual

BATCH = 16
DATA = {"digits": digits, "mnist": mnist}


def logits(vector, images):
    """Softmax regression: a matrix and one number for each class."""
    inputs = images.flatten(1)
    return inputs @ vector[:-10].view(-1, 10) + vector[-10:]


def accuracy(vector, data):
    images, labels = DATA[data](train=False)
    return float((logits(vector, images).argmax(1) == labels).float().mean())


async def train(run, world, number, data):
    """A peer's own loop: a gradient of softmax regression, whenever it is done with one."""
    choice = random.Random(number)
    images, labels = data
    while number in world.alive():
        await asyncio.sleep(choice.uniform(0.2, 0.6))
        if run.is_member:
            rows = torch.tensor([choice.randrange(len(images)) for _ in range(BATCH)])
            vector = run.state.parameters.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(logits(vector, images[rows]), labels[rows])
            run.add(torch.autograd.grad(loss, vector)[0], BATCH)


async def learn(data, seconds=None, num_samples=None, every_s=15.0, num_peers=8):
    """Trains for a time in which one peer is killed and one joins again and again, or undisturbed until so
    many samples are in; gives the accuracy, the samples, and how many peers there have been.
    """
    images, labels = DATA[data](train=True)
    choice, loop = random.Random(3), asyncio.get_running_loop()
    num_elements = images[0].numel() * 10 + 10
    async with World(num_elements=num_elements, target_samples=200) as world:
        world.optimizer = CommittedSGD(learning_rate=0.5)
        await world.start_all(num_peers)
        for number, run in list(world.runs.items()):
            world.scope.start_soon(train(run, world, number, (images, labels)), name="training")
        if seconds is None:
            first = world.runs[0].state
            await world.wait(lambda: first.num_samples >= num_samples, 10_000)
        else:
            until_s = loop.time() + seconds
            while loop.time() < until_s:
                await asyncio.sleep(every_s)
                members = [number for number, run in world.alive().items() if run.is_member]
                world.kill(choice.choice(members))
                number = len(world.runs)
                contacts = [run.context.me.peer for run in world.alive().values()]
                run = await world.start(number, contacts, may_found=False)
                world.scope.start_soon(train(run, world, number, (images, labels)), name="training")
        world.scope.cancel()
        await world.wait(
            lambda: len({run.state.name for run in world.alive().values() if run.is_member}) == 1
        )
        await world.wait(lambda: all(run.is_member for run in world.alive().values()))
        await world.wait(lambda: len({run.state.name for run in world.alive().values()}) == 1)
        world.check()
        world.check_samples()
        state = next(run for run in world.alive().values()).state
        return accuracy(state.parameters, data), state.num_samples, len(world.runs)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("data", sorted(DATA))
def test_with_churn_is_learned_as_well_as_without(data):
    """Eight peers, of which one is killed and one joins every 15 s for five minutes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine they wait for each other: minutes instead of seconds
    try:
        churned, num_samples, num_peers = virtual(learn(data, seconds=300.0))
        calm, _, _ = virtual(learn(data, num_samples=num_samples))
    finally:
        torch.set_num_threads(num_threads)
    assert num_peers == 8 + 20
    assert num_samples > 50_000
    assert calm > 0.85
    assert abs(churned - calm) <= 0.01


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
