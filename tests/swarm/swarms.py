"""Runs in virtual time: peers on a network in memory, every call of theirs counted, and faults at any of
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random

import torch

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    ShoalError,
    StandingScope,
    run_virtual,
)
from shoal.core.identity import Identity
from shoal.swarm import CommittedSGD, SwarmRun, SwarmSettings
from shoal.swarm.state import credited_samples
from shoal.transport import MemoryNetwork, StreamTransport

NUM_ELEMENTS = 64


@functools.cache
def identity_of(number):
    return Identity.from_seed(bytes([number % 256, number // 256]) * 16)


def peer_id(number):
    return identity_of(number).peer_id


class World:
    """A network and the peers on it; `fault(message)` is asked before each call of the protocol."""

    make_transport = staticmethod(lambda *where: CountedTransport(*where))

    def __init__(self, conditions=None, seed=0, num_elements=NUM_ELEMENTS, **settings):
        self.network = MemoryNetwork(conditions, seed)
        self.settings = SwarmSettings(**({"target_samples": 10, "minority_after_s": 20.0} | settings))
        self.num_elements = num_elements
        self.seed = seed
        self.runs = {}
        self.commits = {}
        self.num_calls = 0
        self.fault = None
        self.cut = None
        self.codec = None
        self.start_values = None
        self.optimizer = CommittedSGD(learning_rate=0.5, momentum=0.9)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        await self._stack.__aenter__()
        standing = StandingScope("late messages")
        self.scope = await standing.open()
        self._stack.push_async_callback(standing.close)
        return self

    async def __aexit__(self, *error):
        await self._stack.aclose()

    async def start(self, number, contacts=None, find=None, identity=None, is_client=False, **options):
        host = f"p{number}"
        transport = self.make_transport(self, number, self.network.host(host), peer_id(identity or number))
        await self._stack.enter_async_context(transport)
        address = Address(host, 0) if is_client else await transport.listen(Address(host, 0))
        if contacts is None:
            contacts = [run.context.me.peer for run in self.runs.values() if run.context.me.is_callable]
        run = SwarmRun(
            transport,
            address,
            "test",
            torch.zeros(self.num_elements) if self.start_values is None else self.start_values,
            self.optimizer,
            settings=options.pop("settings", self.settings),
            codec=self.codec,
            contacts=contacts,
            find=find,
            choice=random.Random(self.seed * 1000 + number),
            identity=identity_of(identity or number),
            **options,
        )
        self.runs[number] = run
        self._record(run)
        await self._stack.enter_async_context(run)
        return run

    async def start_all(self, num, timeout_s=60, clients=()):
        """Starts so many, some of them as clients, and waits until all are members of one list."""
        for number in range(num):
            await self.start(number, may_found=number == 0, is_client=number in clients)
        await self.wait(lambda: all(len(run.members) == num for run in self.runs.values()), timeout_s)

    async def wait(self, condition, timeout_s=60):
        deadline = Deadline.after(timeout_s)
        while not condition():
            deadline.check("a condition of the test")
            await asyncio.sleep(0.02)

    def _record(self, run):
        """Notes every commit with its round's list: what is in them must be what the ledgers say."""
        apply = run._apply

        def recorded(commit, held, place):
            if place >= 0:
                self.commits[commit.fork, commit.round] = commit, run.round.members
            apply(commit, held, place)

        run._apply = recorded

    def check_samples(self):
        """All hold one state: every sample in it was added once, and its owner, if it lives, says so."""
        state = next(iter(self.alive().values())).state
        counted = dict.fromkeys(self.runs, 0)
        for (fork, number), (commit, members) in self.commits.items():
            if commit.plan is not None and state.descends_from(fork, number):
                for place, samples in zip(commit.plan.contributors, credited_samples(commit), strict=True):
                    counted[int(members[place].host[1:])] += samples
        assert sum(counted.values()) == state.num_samples
        for number, run in self.runs.items():
            assert counted[number] <= run.ledger.num_added
        for number, run in self.alive().items():
            unknown = sum(num for why, num in run.ledger.lost if "not known" in why)
            assert run.ledger.num_committed <= counted[number] <= run.ledger.num_committed + unknown

    def kill(self, number):
        self.network.host(f"p{number}").kill()

    def alive(self):
        return {
            number: run for number, run in self.runs.items() if not self.network.host(f"p{number}").is_dead
        }

    def check(self, runs=None):
        """One state for each (name, round); every sample committed, pending, under way or lost, once."""
        names = {}
        for run in (self.runs if runs is None else runs).values():
            for fork, number, name in run.history:
                assert names.setdefault((fork, number), name) == name, f"two states of round {number}"
            assert run.ledger.is_balanced
            assert not run.context.proofs, "an honest member was named a liar"
        prints = {}
        for run in [run for run in self.runs.values() if run.state.has_values]:
            known = prints.setdefault(run.state.name, run.state.fingerprint())
            assert known == run.state.fingerprint(), "two states of one name"


class CountedTransport(StreamTransport):
    """Numbers the protocol's calls, and does to each what the world's fault says."""

    def __init__(self, world, number, network, peer):
        super().__init__(network=network, peer_id=peer)
        self._world = world
        self._number = number

    async def call(self, peer, method, payload=None, buffers=(), *, deadline, into=None):
        if self._world.cut is not None and self._world.cut(self._number, peer.address.host):
            await asyncio.sleep(deadline.remaining_s)
            raise DeadlineExceeded("cut")
        if not method.startswith("swarm."):
            return await super().call(peer, method, payload, buffers, deadline=deadline, into=into)
        world = self._world
        message = world.num_calls
        world.num_calls += 1
        what = world.fault(message, self._number, method) if world.fault else None
        if what == "lost":
            await asyncio.sleep(deadline.remaining_s)
            raise DeadlineExceeded("lost")
        if what == "late":
            # it arrives long after its sender has given up
            await asyncio.sleep(deadline.remaining_s)
            resend = functools.partial(super().call, peer, method, payload, buffers)
            world.scope.start_soon(_resend(resend), name="late")
            raise DeadlineExceeded("late")
        if what == "given up":
            # it arrives, and its sender ends it soon and makes no other one for a while
            with contextlib.suppress(ShoalError):
                await super().call(peer, method, payload, buffers, deadline=Deadline.after(0.1), into=into)
            await asyncio.sleep(deadline.remaining_s)
            raise DeadlineExceeded("given up")
        if what == "before":
            world.kill(self._number)
        if what == "twice":
            await super().call(peer, method, payload, buffers, deadline=deadline, into=into)
        reply = await super().call(peer, method, payload, buffers, deadline=deadline, into=into)
        if what == "after":
            world.kill(self._number)
        if what == "answer lost":
            await asyncio.sleep(deadline.remaining_s)
            raise DeadlineExceeded("lost")
        return reply


async def _resend(call):
    await asyncio.sleep(30)
    with contextlib.suppress(ShoalError):
        await call(deadline=Deadline.after(10))


def virtual(main, limit_s=100_000):
    return run_virtual(main, limit_s=limit_s)


def gradient(number, num_elements=NUM_ELEMENTS):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(num_elements, generator=generator)
