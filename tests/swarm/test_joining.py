"""Joining and leaving: the state comes whole, from several, and only a commit admits."""

import asyncio
import functools
import itertools
import logging

import msgspec
import pytest
import torch

from shoal.core import Deadline, fanout
from shoal.swarm import CommittedSGD
from shoal.swarm.wire import ABORT, COMMITS, JOIN, CommitsRequest, JoinRunRequest
from shoal.tensors.transfer import LEAF_BYTES, HeldState
from shoal.transport import Conditions, Profile, Reply
from swarm.swarms import NUM_ELEMENTS, World, gradient, virtual
from swarm.test_rounds import contribute, now_s

SLOW_LINE = """
name = "one slow line"
[places.fast]
up_mbit_s = 1000
down_mbit_s = 1000
[places.slow]
up_mbit_s = 10
down_mbit_s = {down}
[ways.default]
delay_ms = 5
[peers]
"p0:*" = "fast"
"p1:*" = "fast"
"p2:*" = "fast"
"p8:*" = "fast"
"p9:*" = "slow"
"""


LINES = """
name = "lines of 1/{scale} of 200 Mbit/s"
[places.peer]
up_mbit_s = {mbit_s}
down_mbit_s = {mbit_s}
[ways.default]
delay_ms = 5
"""


class HeavyState:
    """Plain steps by an optimizer that keeps much, so that a state takes long and a round does not."""

    def __init__(self, num_kept):
        self._num_kept = num_kept
        self._rule = CommittedSGD(0.1)

    def start(self, num_elements):
        return {"history": torch.ones(self._num_kept)}

    def step(self, parameters, gradient, kept, begin=0):
        kept["history"][0] += 1
        self._rule.step(parameters, gradient, {})


async def train(world, run, every_s):
    for key in itertools.count():
        run.add(gradient(key, world.num_elements), 5)
        await asyncio.sleep(every_s)


async def join_over_a_slow_line(world, every_s, until):
    """Has three members make rounds quickly while a fourth joins; ends once `until(joiner)`."""
    await world.start_all(3)
    tasks = [asyncio.ensure_future(train(world, run, every_s)) for run in world.runs.values()]
    joiner = await world.start(9, may_found=False)
    before = world.runs[0].state.round
    await world.wait(lambda: until(joiner), 3000)
    num_rounds = world.runs[0].state.round - before
    for task in tasks:
        task.cancel()
    return joiner, num_rounds


def test_a_joiner_takes_the_state_of_a_run_in_progress():
    async def main():
        async with World() as world:
            await world.start_all(3)
            for key in range(4):
                await contribute(world, key)
            joiner = await world.start(3, may_found=False)
            await world.wait(lambda: joiner.is_member)
            await contribute(world, 5)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            assert joiner.state.num_samples == world.runs[0].state.num_samples
            assert joiner.ledger.num_committed == 5
            world.check()

    virtual(main())


def test_a_joiner_comes_in_while_rounds_go_on():
    async def main():
        async with World(target_samples=15) as world:
            await world.start_all(3)

            async def train(run):
                key = 0
                while not run.has_left:
                    run.add(gradient(key), 5)
                    key += 1
                    await asyncio.sleep(0.3)

            tasks = [asyncio.ensure_future(train(run)) for run in world.runs.values()]
            await asyncio.sleep(5)
            joiner = await world.start(3, may_found=False)
            await world.wait(lambda: joiner.is_member)
            tasks.append(asyncio.ensure_future(train(joiner)))
            await asyncio.sleep(5)
            for task in tasks:
                task.cancel()
            assert joiner.ledger.num_committed > 0
            world.check()

    virtual(main())


def test_one_that_was_just_listed_is_waited_for_by_a_member_that_needs_nobody():
    """It would be a quorum alone, and go on faster than the other can follow."""

    async def main():
        async with World(target_samples=5) as world:
            await world.start_all(1)
            joiner = await world.start(1, may_found=False)
            await world.wait(lambda: len(world.runs[0].members) == 2)
            for key in range(10):
                known = world.runs[0].num_commits
                world.runs[0].add(gradient(key), 5)
                await world.wait(lambda known=known: world.runs[0].num_commits > known)
            assert joiner.is_member
            assert joiner.context.me in world.runs[0].members
            assert world.runs[0].state.round - joiner.state.round <= 1
            world.check()

    virtual(main())


def test_the_state_comes_from_several_donors_and_a_liar_is_named():
    async def main():
        async with World(num_elements=LEAF_BYTES // 4) as world:
            await world.start_all(3)
            first = world.runs[0].members[0].host  # the first of those who are asked
            liar = world.runs[int(first[1:])].transport  # it answers with wrong bytes from now on

            def lie(head, buffers):
                return Reply(buffers=[b"\x01" * LEAF_BYTES])

            liar.routes.remove("state.leaf")
            liar.handle("state.leaf", lie, payload_type=tuple[str, int])
            joiner = await world.start(5, may_found=False)
            await world.wait(lambda: joiner.is_member)
            assert [peer.address.host for peer in joiner.blamed] == [first]
            assert joiner.state.fingerprint() == world.runs[0].state.fingerprint()
            world.check()

    virtual(main())


def test_a_joiner_never_starts_over_however_many_rounds_its_transfer_takes():
    num_elements, num_kept = 4096, 2 * LEAF_BYTES
    num_bytes = 4 * (num_elements + num_kept)
    names = {}

    async def main():
        conditions = Conditions(Profile.parse(SLOW_LINE.format(down=4)), seed=1)
        async with World(conditions, num_elements=num_elements, target_samples=15) as world:
            world.optimizer = HeavyState(num_kept)

            def is_member(joiner):
                if joiner.taker.taking:
                    names[joiner.taker.taking] = joiner.taker.num_bytes
                return joiner.is_member

            joiner, num_rounds = await join_over_a_slow_line(world, 0.5, is_member)
            assert num_rounds > 30
            assert len(names) == 1  # one state was pinned for it and taken, and no other
            assert num_bytes / 2 < names.popitem()[1] <= num_bytes
            await world.wait(lambda: joiner.state.name == world.runs[0].state.name)
            assert not joiner.problem
            await asyncio.sleep(30)
            await contribute(world, 7)
            for run in world.runs.values():  # nothing is kept for nobody
                assert len(run.kept.finished) <= 3
                assert not run.kept.pins
            world.check()

    virtual(main())


def test_a_joiner_whose_line_is_too_slow_for_the_rounds_says_so(caplog):
    async def main():
        conditions = Conditions(Profile.parse(SLOW_LINE.format(down=0.5)), seed=1)
        async with World(conditions, num_elements=1 << 16, target_samples=15) as world:
            joiner, _ = await join_over_a_slow_line(world, 0.5, lambda joiner: "too slow" in joiner.problem)
            assert not joiner.is_member
            assert "codec" in joiner.problem

    with caplog.at_level(logging.ERROR):
        virtual(main())


def test_rounds_go_on_while_all_lines_are_full_of_a_joiners_state():
    """Answers come so late that ballots go on, and promises arrive while a value is being fetched."""
    line = SLOW_LINE.replace("up_mbit_s = 1000", "up_mbit_s = 8").format(down=1000)

    async def main():
        conditions = Conditions(Profile.parse(line), seed=1)
        async with World(conditions, num_elements=2 * LEAF_BYTES, target_samples=15) as world:
            world.optimizer = HeavyState(6 * LEAF_BYTES)
            await world.start_all(3, 600)
            for key in range(3):
                if key == 1:
                    joiner = await world.start(9, may_found=False)
                    await world.wait(lambda joiner=joiner: joiner.taker.num_bytes)
                for number in range(3):
                    world.runs[number].add(gradient(key, world.num_elements), 5)
                await world.wait(lambda key=key: world.runs[0].state.num_steps > key, 600)
            world.check()

    virtual(main())


def joining_s(monkeypatch, num_donors, event=None, num_bytes=400_000_000, scale=10):
    """Seconds of joining a run whose state has so many bytes, over lines of 200 Mbit/s, and who is blamed.

    State, lines and leaves are a tenth of that: the same course. `event` happens when half of it has come.
    """
    leaves = functools.partial(HeldState, leaf_bytes=LEAF_BYTES // scale)
    monkeypatch.setattr("shoal.tensors.transfer.HeldState", leaves)

    async def main():
        conditions = Conditions(Profile.parse(LINES.format(scale=scale, mbit_s=200 / scale)), seed=1)
        async with World(conditions, target_samples=5 * num_donors, num_elements=1 << 14) as world:
            world.optimizer = HeavyState(num_bytes // scale // 4)
            await world.start_all(num_donors, 60)
            loop = asyncio.get_running_loop()
            joiner = await world.start(9, may_found=False)
            await world.wait(lambda: joiner.taker.num_bytes)
            began_s = loop.time()
            if event is not None:
                await world.wait(lambda: joiner.taker.num_bytes > num_bytes / scale / 2)
                event(world)
            await world.wait(lambda: joiner.is_member, 600)
            assert joiner.state.fingerprint() == world.runs[0].state.fingerprint()
            return loop.time() - began_s, list(joiner.blamed)

    return virtual(main())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_joining_fills_the_joiners_line_and_a_killed_donor_costs_little(monkeypatch):
    ideal_s = 400_000_000 * 8 / 200e6

    def lie(world):
        liar = world.runs[2].transport  # it answers with wrong bytes from now on
        liar.routes.remove("state.leaf")
        liar.handle(
            "state.leaf",
            lambda head, buffers: Reply(buffers=[bytes(LEAF_BYTES // 10)]),
            payload_type=tuple[str, int],
        )

    clean_s, _ = joining_s(monkeypatch, 4)
    assert ideal_s / clean_s >= 0.9
    one_s, _ = joining_s(monkeypatch, 1)
    assert ideal_s / one_s >= 0.85
    killed_s, _ = joining_s(monkeypatch, 4, lambda world: world.kill(2))
    assert killed_s < 1.1 * clean_s
    lied_s, blamed = joining_s(monkeypatch, 4, lie)
    assert [peer.address.host for peer in blamed] == ["p2"]
    assert lied_s < 1.1 * clean_s
    shares = [ideal_s / each for each in (clean_s, one_s, killed_s, lied_s)]
    print(
        "of the joiner's line: four donors {:.3f}, one {:.3f}, one of four killed {:.3f}, lies {:.3f}".format(
            *shares
        )
    )


def test_joiners_get_less_of_the_lines_while_values_are_averaged(monkeypatch):
    line = SLOW_LINE.replace("up_mbit_s = 1000", "up_mbit_s = 6.25").format(down=1000)
    line_bytes_per_s = 6.25e6 / 8
    leaves = functools.partial(HeldState, leaf_bytes=LEAF_BYTES // 16)
    monkeypatch.setattr("shoal.tensors.transfer.HeldState", leaves)

    def taken_bytes_per_s(**settings):
        async def main():
            conditions = Conditions(Profile.parse(line), seed=1)
            async with World(conditions, num_elements=1 << 19, target_samples=15, **settings) as world:
                world.optimizer = HeavyState(96 << 16)
                await world.start_all(3, 600)
                joiner = await world.start(9, may_found=False)
                await world.wait(lambda: joiner.taker.num_bytes)
                began_s, num_before = now_s(), joiner.taker.num_bytes
                for number in range(3):
                    world.runs[number].add(gradient(number, world.num_elements), 5)
                await world.wait(lambda: world.runs[0].state.num_steps, 600)
                return (joiner.taker.num_bytes - num_before) / (now_s() - began_s)

        return virtual(main())

    limited, full = taken_bytes_per_s(bandwidth=6.25), taken_bytes_per_s()
    # of three lines a quarter each, and what was on its way when the round began
    assert limited < 0.4 * 3 * line_bytes_per_s
    assert limited < 0.85 * full


def test_who_joins_while_another_one_takes_long_gets_a_newer_state():
    async def main():
        conditions = Conditions(Profile.parse(SLOW_LINE.format(down=2)), seed=1)
        async with World(conditions, num_elements=64, target_samples=15) as world:
            world.optimizer = HeavyState(2 * LEAF_BYTES)
            first = world.runs
            slow, _ = await join_over_a_slow_line(world, 0.5, lambda _: first[0].state.round > 20)
            assert not slow.is_member
            for number in range(3):
                first[number].add(gradient(number), 5)
            quick = await world.start(8, may_found=False)
            await world.wait(lambda: quick.is_member)
            assert quick.history[0][1] > 20  # the first round that it had to apply itself
            assert not slow.is_member
            await world.wait(lambda: slow.is_member, 1000)
            assert slow.history[0][1] < 10
            world.check()

    virtual(main())


def test_members_that_are_listed_for_long_say_what_the_state_is_and_not_newcomers_that_are_more():
    async def main():
        async with World() as world:
            await world.start_all(2)
            for key in range(12):
                await contribute(world, key)
            fake = HeldState({**world.runs[0].state.snapshot(), "num_samples": 10**9})
            for number in (2, 3, 4):
                liar = await world.start(number, may_found=False)
                await world.wait(lambda liar=liar: liar.is_member)
                # a member whose program was changed: it holds a state of its own making, and names that
                liar.kept.donor.hold(fake)
                transport, honest = liar.transport, liar._serve_join

                async def lie(head, buffers, honest=honest):
                    reply = await honest(head.payload, buffers)
                    return Reply(msgspec.structs.replace(reply, pinned_state=fake.name))

                transport.routes.remove(JOIN)
                transport.handle(JOIN, lie, payload_type=JoinRunRequest)
            joiner = await world.start(5, may_found=False)
            await world.wait(lambda: joiner.is_member)
            assert joiner.state.num_samples == world.runs[0].state.num_samples
            assert joiner.state.fingerprint() == world.runs[0].state.fingerprint()

    virtual(main())


def test_leaving_in_order_is_a_commit():
    async def main():
        async with World() as world:
            await world.start_all(4)
            coordinator = next(run for run in world.runs.values() if run.members[0] == run.context.me)
            await coordinator.leave(Deadline.after(30))
            others = [run for run in world.runs.values() if run is not coordinator]
            await world.wait(lambda: all(len(run.members) == 3 for run in others))
            for run in others:
                run.add(gradient(1), 5)
            await world.wait(lambda: all(run.state.num_steps == 1 for run in others))
            world.check()

    virtual(main())


def test_the_last_one_leaves():
    async def main():
        async with World() as world:
            run = await world.start(0)
            await world.wait(lambda: run.is_member)
            await run.leave(Deadline.after(10))
            assert run.has_left

    virtual(main())


@pytest.mark.parametrize(("away_s", "num_rounds"), [(3.0, 1), (30.0, 3)])
def test_who_was_away_comes_back(away_s, num_rounds):
    """Cut off for a moment it is the same member; dropped by a commit it comes back as another one."""

    async def main():
        async with World(target_samples=5, minority_after_s=1000) as world:
            await world.start_all(4)
            *others, last = (world.runs[int(one.host[1:])] for one in world.runs[0].members)
            gone, away = last, int(last.context.me.host[1:])  # the last one that would lead a ballot itself
            world.fault = lambda message, number, method: "lost" if number == away else None
            number_before = gone.context.me.start_number
            for key in range(num_rounds):
                for run in others:
                    run.add(gradient(key), 5)
                await asyncio.sleep(away_s / num_rounds)
            world.fault = None
            await world.wait(lambda: gone.is_member and gone.state.name == others[0].state.name, 200)
            assert (gone.context.me.start_number != number_before) == (away_s > 10)
            await contribute(world, 9)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            world.check()

    virtual(main())


@pytest.mark.parametrize("num", [2, 4, 5])
def test_members_that_all_leave_at_once_and_end_all_leave_in_order(num):
    """Who has decided it first must not end before the others know: those that are left have no quorum."""

    async def main():
        far = Conditions(Profile.parse("[ways.default]\ndelay_ms = { kind = 'exponential', mean = 30 }"))
        async with World(far, minority_after_s=1000) as world:
            await world.start_all(num)

            async def leave(number, run):
                await run.leave(Deadline.after(20))
                world.kill(number)

            outcomes = await fanout(
                [leave(number, run) for number, run in world.runs.items()], Deadline.after(30)
            )
            assert outcomes == [None] * num
            assert all(run.has_left for run in world.runs.values())

    virtual(main())


def test_a_commit_adds_at_most_as_many_as_it_keeps():
    async def main():
        async with World() as world:
            await world.start(0)
            for number in range(1, 6):
                await world.start(number, may_found=False)
            sizes = []
            while len(world.runs[0].members) < 6:
                if not sizes or sizes[-1] != len(world.runs[0].members):
                    sizes.append(len(world.runs[0].members))
                await asyncio.sleep(0.01)
            sizes = [size for size in [*sizes, 6] if size]
            assert all(after <= 2 * before for before, after in itertools.pairwise(sizes))
            world.check()

    virtual(main())


def test_another_model_cannot_join():
    async def main():
        async with World() as world:
            await world.start_all(2)
            world.num_elements = 10
            joiner = await world.start(2, may_found=False)
            await asyncio.sleep(20)
            assert not joiner.is_member
            assert torch.count_nonzero(joiner.state.parameters) == 0

    virtual(main())


def test_a_peer_that_starts_anew_replaces_the_member_it_was():
    async def main():
        async with World(target_samples=1000, minority_after_s=1000) as world:
            await world.start_all(3)
            old = world.runs[2].context.me
            world.kill(2)
            again = await world.start(12, identity=2, may_found=False)
            await world.wait(lambda: again.is_member)
            for run in world.alive().values():
                assert old not in run.members
                assert len({member.id_bytes for member in run.members}) == len(run.members)
            world.check()

    virtual(main())


def test_who_was_joining_when_the_last_member_died_goes_on_from_its_state():
    async def main():
        async with World(target_samples=5) as world:
            first = await world.start(0)
            await world.wait(lambda: first.is_member)
            for key in range(3):
                await contribute(world, key)

            async def find():
                return [first.context.me.peer]

            joiner = await world.start(1, contacts=[], find=find)
            joiner.may_found = False
            await world.wait(lambda: joiner.state.fork)
            assert not joiner.is_member
            world.kill(0)
            joiner.may_found = True
            await world.wait(lambda: joiner.is_member)
            assert joiner.state.fork != first.state.fork
            assert joiner.state.fingerprint() == first.state.fingerprint()
            assert joiner.state.num_samples == 15
            joiner.add(gradient(9), 5)
            await world.wait(lambda: joiner.state.num_steps == 4)
            world.check()

    virtual(main())


def test_a_coordinator_that_leaves_says_so_before_it_goes():
    """Of two the one that stays is no quorum alone, unless it knows that the other has left."""

    async def main():
        for seed in range(4):
            conditions = Conditions(Profile.load("home"), seed=seed)
            async with World(conditions, target_samples=10, minority_after_s=1000, seed=seed) as world:
                await world.start_all(2)
                leader = next(run for run in world.runs.values() if run.members[0] == run.context.me)
                await leader.leave(Deadline.after(30))
                world.kill(next(number for number, run in world.runs.items() if run is leader))
                (stays,) = (run for run in world.runs.values() if run is not leader)
                stays.add(gradient(1), 10)
                await world.wait(lambda run=stays: run.state.num_steps == 1)

    virtual(main())


def answers_otherwise(run, method, change):
    """Has a member's program be changed: what it answers to a method goes through `change` first."""
    transport, honest = run.transport, run.calls.handlers[method]

    async def lie(head, buffers):
        answer = await honest(head.payload, buffers)
        return Reply(change(answer))

    transport.routes.remove(method)
    transport.handle(method, lie, payload_type={JOIN: JoinRunRequest, COMMITS: CommitsRequest}[method])


def invented_fork(world, liars, fake):
    """Says that the run is a larger one, whose members are the liars."""
    members = tuple(run.context.me for run in liars)
    return lambda reply: msgspec.structs.replace(
        reply,
        fork=b"larger",
        samples=10**9,
        members=members,
        pinned_state=fake.name,
        pinned_round=reply.round,
    )


def invented_members(world, liars, fake):
    """Says that the liars are all members of the run."""
    members = tuple(run.context.me for run in liars)
    places = tuple(range(len(members)))
    return lambda reply: msgspec.structs.replace(
        reply, members=members, trusted=places, pinned_state=fake.name, round=reply.round + 100
    )


def invented_state(world, liars, fake):
    """Says that the state is another one."""
    return lambda reply: msgspec.structs.replace(reply, pinned_state=fake.name)


@pytest.mark.parametrize("lie", [invented_fork, invented_members, invented_state])
@pytest.mark.parametrize("num_members", [3, 5])
def test_fewer_than_half_cannot_give_a_joiner_a_false_state(lie, num_members):
    async def main():
        async with World() as world:
            await world.start_all(num_members)
            for key in range(12):
                await contribute(world, key)
            fake = HeldState({**world.runs[0].state.snapshot(), "parameters": torch.ones(NUM_ELEMENTS)})
            liars = [world.runs[number] for number in range((num_members - 1) // 2)]
            for liar in liars:  # a joiner asks them first
                liar.kept.donor.hold(fake)
                answers_otherwise(liar, JOIN, lie(world, liars, fake))
            joiner = await world.start(9, may_found=False)
            honest = world.runs[num_members - 1]
            for key in range(100, 200):
                if joiner.is_member and len(honest.members) == num_members + 1:
                    break
                await asyncio.sleep(1)
                honest.add(gradient(key), 20)
            await world.wait(lambda: joiner.state.name == honest.state.name)
            assert joiner.state.fingerprint() == honest.state.fingerprint()

    virtual(main())


@pytest.mark.parametrize("how", ["other samples", "more rounds"])
def test_fewer_than_half_cannot_give_a_joiner_false_commits(how):
    def change(commits):
        if how == "more rounds" and commits:
            last = commits[-1]
            following = msgspec.structs.replace(
                last, round=last.round + 1, previous=last.state_name, kind=ABORT, plan=None, parts=()
            )
            return [*commits, following]
        return [msgspec.structs.replace(one, tenure=one.tenure + 1) for one in commits]

    async def main():
        async with World() as world:
            await world.start_all(5)
            for key in range(12):
                await contribute(world, key)
            for number in (0, 1):
                answers_otherwise(world.runs[number], COMMITS, change)
            joiner = await world.start(9, may_found=False)
            honest = world.runs[4]
            for key in range(100, 200):
                if joiner.is_member:
                    break
                await asyncio.sleep(0.3)
                for number in range(5):
                    world.runs[number].add(gradient(key), 5)
            await world.wait(lambda: joiner.state.name == honest.state.name)
            assert joiner.state.fingerprint() == honest.state.fingerprint()
            names = {(fork, number): name for fork, number, name in honest.history}
            for fork, number, name in joiner.history:
                assert names.get((fork, number), name) == name

    virtual(main())


def test_a_state_that_one_of_two_keeps_does_not_keep_a_joiner_waiting():
    """Two are listed for long, and most of them must keep what is believed; no round is made meanwhile."""

    async def main():
        async with World(target_samples=20) as world:
            await world.start_all(2)
            for key in range(11):
                steps = world.runs[0].state.num_steps
                for number, run in world.runs.items():
                    run.add(gradient(10 * key + number), 10)
                await world.wait(lambda steps=steps: world.runs[1].state.num_steps > steps)
            for number in (0, 1):  # as if one that has joined meanwhile had asked only this one
                await asyncio.sleep(20.0)
                world.runs[number].kept.pin()
                joiner = await world.start(2 + number, may_found=False)
                await world.wait(lambda joiner=joiner: joiner.is_member, 30)
            world.check()

    virtual(main())
