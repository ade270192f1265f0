"""Faults: at every message of a round in turn, then many at random: one state, no hang, no sample twice."""

import asyncio
import collections
import ctypes
import gc
import logging
import math
import random
import resource
import sys
from pathlib import Path

import pytest
import torch

from shoal.core import Deadline
from swarm.swarms import World, gradient, virtual

MESSAGE_FAULTS = [
    "lost",
    "answer lost",
    "late",
    "twice",
    "before",
    "after",
]  # the sender is killed before, after
TEN_KINDS = [*MESSAGE_FAULTS, "killed", "joined", "cut in two", "stopped"]
NUM_PEERS = 5
STATM = Path("/proc/self/statm")
NUM_ELEMENTS = 13_000  # three reducers


async def start(world, clients=()):
    await world.start_all(NUM_PEERS, clients=clients)
    world.num_calls = 0


async def one_round(world):
    """Has all contribute, and waits until all that live have gone on together, and then once more."""
    for key in range(2):
        steps = {number: run.state.num_steps for number, run in world.runs.items()}
        for number, run in world.alive().items():
            run.add(gradient(10 * key + number, NUM_ELEMENTS), 5)
        await world.wait(
            lambda steps=steps: all(
                run.state.num_steps > steps[number] for number, run in world.alive().items()
            ),
            timeout_s=60,
        )
    await world.wait(lambda: len({run.state.name for run in world.alive().values()}) == 1, timeout_s=60)


async def survive(kind, message, clients=()):
    async with World(num_elements=NUM_ELEMENTS) as world:
        await start(world, clients)
        world.fault = lambda number, sender, method: kind if number == message else None
        await one_round(world)
        if kind == "late":
            await asyncio.sleep(50)  # it arrives
        world.check()
        world.check_samples()
        assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
        return asyncio.get_running_loop().time()


def num_messages(clients=()):
    async def main():
        async with World(num_elements=NUM_ELEMENTS) as world:
            await start(world, clients)
            for number, run in world.runs.items():
                run.add(gradient(number, NUM_ELEMENTS), 5)
            await world.wait(lambda: all(run.state.num_steps == 1 for run in world.runs.values()))
            world.check()
            return world.num_calls

    return virtual(main())


@pytest.fixture
def group_size(request, monkeypatch):
    """More contributors than this average on two levels; usually that begins far above five peers."""
    monkeypatch.setattr("shoal.swarm.plan.GROUP", request.param)


@pytest.mark.parametrize("group_size", [32, 2], indirect=True)
@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_a_round_survives_a_fault_at_some_message(kind, group_size):
    virtual(survive(kind, 8 * MESSAGE_FAULTS.index(kind)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group_size", [32, 2], indirect=True)
@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_a_round_survives_a_fault_at_every_message(kind, group_size):
    for message in range(num_messages()):
        virtual(survive(kind, message))


@pytest.mark.parametrize("clients", [(4,), (2, 3, 4)])
@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_a_round_with_clients_survives_a_fault_at_some_message(kind, clients):
    virtual(survive(kind, 8 * MESSAGE_FAULTS.index(kind), clients))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("clients", [(4,), (2, 3, 4)])
@pytest.mark.parametrize("kind", MESSAGE_FAULTS)
def test_a_round_with_clients_survives_a_fault_at_every_message(kind, clients):
    for message in range(num_messages(clients)):
        virtual(survive(kind, message, clients))


async def suffer(seed, seconds=60.0, num_reachable=math.inf, **settings):
    """Training under random faults of ten kinds; at the end they stop, and all must agree again.

    Where only so many can be dialed these are not killed, and all others are clients. Where rounds are
    audited, nobody is banned: all are honest. Gives how many there were of each, and what came of it.
    """
    choice = random.Random(seed)
    rate = choice.choice([0.01, 0.03, 0.1])
    kinds = choice.sample(MESSAGE_FAULTS, choice.randint(2, 5))
    faults = collections.Counter()
    async with World(seed=seed, target_samples=15, minority_after_s=30.0, **settings) as world:

        async def find():
            members = [run.context.me for run in world.alive().values() if run.is_member]
            return [member.peer for member in members if member.is_callable]

        def members():
            return [key for key, run in world.alive().items() if run.is_member]

        for number in range(NUM_PEERS):
            is_client = number >= num_reachable
            await world.start(number, may_found=number == 0, find=find, is_client=is_client)
        await world.wait(lambda: all(len(run.members) == NUM_PEERS for run in world.runs.values()))

        def fault(message, sender, method):
            if choice.random() >= rate:
                return None
            kind = choice.choice(kinds)
            if kind in ("before", "after") and (
                len(members()) <= 3 or sender < num_reachable < math.inf or choice.random() < 0.7
            ):
                kind = "lost"  # else there would soon be nobody left
            faults[kind] += 1
            return kind

        world.fault = fault
        loop = asyncio.get_running_loop()
        until_s, number = loop.time() + seconds, NUM_PEERS
        while loop.time() < until_s:
            event = choice.random()
            kind = None
            if event < 0.05 and len(members()) > 3:
                killed = choice.choice(members())
                if not killed < num_reachable < math.inf:
                    kind = "killed"
                    world.kill(killed)
            elif event < 0.15 and len(world.alive()) < 8:
                kind = "joined"
                is_client = number >= num_reachable
                await world.start(number, may_found=False, find=find, is_client=is_client)
                number += 1
            elif event < 0.18:
                kind = "cut in two"
                island = choice.sample(sorted(world.alive()), len(world.alive()) // 2)
                world.cut = lambda caller, host, island=island: (
                    (caller in island) != (int(host[1:]) in island)
                )
            elif event < 0.25:
                world.cut = None
            elif event < 0.28:
                kind = "stopped"
                frozen = choice.choice(sorted(world.alive()))
                world.cut = lambda caller, host, frozen=frozen: frozen in (caller, int(host[1:]))
            if kind is not None:
                faults[kind] += 1
            for key, run in world.alive().items():
                if choice.random() < 0.7:
                    run.add(gradient(key, world.num_elements), choice.randint(1, 9))
            await asyncio.sleep(choice.uniform(0.1, 2.0))
            world.check()
        world.fault = world.cut = None
        num_whole = 0
        for _ in range(300):
            for key, run in world.alive().items():
                run.add(gradient(key, world.num_elements), 5)
            await asyncio.sleep(1)
            runs = list(world.alive().values())
            is_one = len({run.state.fork for run in runs}) == 1
            num_whole = num_whole + 1 if is_one and all(len(r.members) == len(runs) for r in runs) else 0
            if num_whole == 8:  # nobody is about to be dropped for what was before
                break
        else:
            raise AssertionError("they have not become one again")
        await world.wait(lambda: len({run.state.name for run in world.alive().values()}) == 1)
        world.check()
        world.check_samples()
        assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
        assert not any(run.context.bans.num_changes for run in world.runs.values())
        num_audited = sum(run.audits.num_audited for run in world.runs.values())
        assert (num_audited > 0) == ("robust" in settings)
        came = [(list(run.history), run.state.fingerprint(), run.ledger.lost) for run in world.runs.values()]
        return faults, (loop.time(), world.num_calls, came)


@pytest.mark.parametrize("seed", range(2))
def test_random_faults(seed):
    virtual(suffer(seed, seconds=20.0))


@pytest.mark.parametrize("seed", range(300, 302))
def test_random_faults_among_clients(seed):
    virtual(suffer(seed, seconds=20.0, num_reachable=2))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_reachable", [1, 2])
def test_many_random_faults_among_clients(num_reachable):
    for seed in range(400, 440):
        virtual(suffer(seed, num_reachable=num_reachable))


def test_honest_reducers_are_never_banned_under_random_faults():
    virtual(suffer(1, seconds=20.0, num_elements=NUM_ELEMENTS, robust="centered-clip"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["centered-clip", "median"])
def test_honest_reducers_are_never_banned_under_random_faults_of_many_seeds(kind):
    for seed in range(300, 310):
        virtual(suffer(seed, num_elements=NUM_ELEMENTS, robust=kind))


def test_random_faults_with_audits_replay_to_the_bit():
    options = {"seconds": 8.0, "num_elements": NUM_ELEMENTS, "robust": "median"}
    assert virtual(suffer(7, **options)) == virtual(suffer(7, **options))


def test_random_faults_replay_to_the_bit():
    assert virtual(suffer(7, seconds=10.0)) == virtual(suffer(7, seconds=10.0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_faults_replay_to_the_bit():
    for seed in range(200, 206):
        assert virtual(suffer(seed)) == virtual(suffer(seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_ten_thousand_random_faults_over_200_seeds(first):
    faults = collections.Counter()
    for seed in range(first, first + 20):
        faults.update(virtual(suffer(seed))[0])
    assert sorted(faults) == sorted(TEN_KINDS)
    assert faults.total() >= 1000  # a tenth of them in each tenth of the seeds


def resident_bytes():
    """What this process has of the machine's memory; what it has freed is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


async def fail(num_early, num_rounds, num_elements=60_000):
    """Rounds of which each has a plan and comes to nothing; gives the memory after some and after all."""
    choice = random.Random(1)
    sizes = []
    async with World(num_elements=num_elements, target_samples=20, minority_after_s=1000.0) as world:
        await world.start_all(4)
        run, num_seen = world.runs[0], 0
        world.fault = lambda *_: "lost" if choice.random() < 0.01 else None
        deadline = Deadline.after(60 * num_rounds)
        while len(sizes) < 2:
            deadline.check("rounds that fail")
            for one in world.runs.values():
                if not one.ledger.num_pending and not one.ledger.num_under_way:
                    one.add(torch.full((num_elements,), float("nan")), 5)  # refused by every reducer
            await asyncio.sleep(5.0)
            world.commits.clear()
            if run.num_failed - num_seen >= 20:
                num_seen = run.num_failed
                gc.collect()
            if run.num_failed >= (num_rounds if sizes else num_early):
                sizes.append(resident_bytes())
        world.check()
        assert all(one.num_failed > 0.8 * num_rounds for one in world.runs.values())
        assert not any(one.state.num_steps for one in world.runs.values())
    return sizes


def check_flat(num_early, num_rounds, caplog):
    caplog.set_level(logging.ERROR, "shoal")  # pytest keeps warnings, with the rounds in their tracebacks
    first, last = virtual(fail(num_early, num_rounds))
    assert abs(last - first) <= 0.02 * first, f"{first:,} bytes became {last:,}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_is_flat_over_failed_rounds(caplog):
    check_flat(40, 70, caplog)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_is_flat_over_2000_failed_rounds(caplog):
    check_flat(200, 2000, caplog)
