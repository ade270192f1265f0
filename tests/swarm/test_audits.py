"""Signatures, and audits of those who average: who lies is banned, who is honest never is."""

import asyncio

import pytest
import torch

from shoal.swarm.reduction import HeldPart, Reduction
from shoal.swarm.wire import SwarmMember, has_signed, part_digest, sign
from shoal.tensors import Plain
from swarm.swarms import World, gradient, identity_of, virtual
from swarm.test_rounds import contribute


def member(number):
    return SwarmMember(identity_of(number).peer_id.digest, 1, f"p{number}", 1)


def test_a_signature_is_of_one_member_and_of_these_facts_alone():
    signature = sign(identity_of(1), "vote", b"fork", 3)
    assert has_signed(member(1), signature, "vote", b"fork", 3)
    assert not has_signed(member(2), signature, "vote", b"fork", 3)
    assert not has_signed(member(1), signature, "vote", b"fork", 4)
    assert not has_signed(member(1), signature, "promise", b"fork", 3)


@pytest.mark.parametrize("wrong", [b"", bytes(96), bytes(95), b"x" * 300])
def test_what_is_no_signature_signs_nothing(wrong):
    assert not has_signed(member(1), wrong, "vote")
    key = sign(identity_of(1), "vote")[:32]
    assert not has_signed(member(1), (key + wrong)[:96], "vote")


LIES = ["scales", "zeroes", "drops one", "leaves one out"]


@pytest.fixture
def lie(monkeypatch):
    """Makes members lie as reducers: `lie[host] = how`.

    It changes what they average, inside of them: no public door makes a member lie.
    """
    liars = {}
    honest = Reduction._average

    def average(self, key, inbox, refused):
        how = liars.get(self._members[self._me].host)
        if how is not None:
            factor = {"scales": 3.0, "zeroes": 0.0}.get(how, 1.0)
            inbox = {place: one._replace(values=one.values * factor) for place, one in inbox.items()}
            victim = next(place for place in sorted(inbox, reverse=True) if place != self._me)
            if how == "drops one":
                inbox[victim] = inbox[victim]._replace(values=inbox[victim].values * 0)
            elif how == "leaves one out":
                del inbox[victim]
        return honest(self, key, inbox, refused)

    monkeypatch.setattr(Reduction, "_average", average)
    return liars


async def rounds_until_banned(world, liar, limit):
    """Has all contribute until every other member has banned the liar; gives the number of rounds."""
    name = world.runs[liar].context.me.id_bytes
    others = [run for number, run in world.runs.items() if number != liar]
    for key in range(limit):
        await contribute(world, key)
        await asyncio.sleep(3.0)  # audits come after the commit
        if all(run.context.bans.has_failed(name) for run in others):
            return key + 1
    raise AssertionError("the liar is not banned")


def nobody_else_is_banned(world, liars):
    honest = [run.context.me.id_bytes for number, run in world.runs.items() if number not in liars]
    return not any(run.context.bans.has_failed(name) for run in world.runs.values() for name in honest)


@pytest.mark.parametrize("how", LIES)
def test_a_lying_reducer_is_banned_and_left_out_for_a_while(lie, how):
    async def main():
        async with World(num_elements=20_000, target_samples=20, robust="centered-clip") as world:
            await world.start_all(5)
            lie["p3"] = how
            await rounds_until_banned(world, 3, 20)
            await contribute_without(world, 3)
            commit, members = world.commits[max(world.commits, key=lambda key: key[1])]
            liars = [place for place, member in enumerate(members) if member.host == "p3"]
            assert liars == [] or not {*commit.plan.reducers, *commit.plan.contributors} & {*liars}
            lie.clear()
            await asyncio.sleep(60)  # it is let in again
            await world.wait(lambda: all(len(run.members) == 5 for run in world.runs.values()))
            await contribute(world, 50)
            assert nobody_else_is_banned(world, [3])
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            world.check()

    virtual(main())


async def contribute_without(world, liar):
    steps = world.runs[0].state.num_steps
    for number, run in world.runs.items():
        if number != liar:
            run.add(gradient(number, world.num_elements), 5)
    await world.wait(lambda: world.runs[0].state.num_steps > steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", LIES)
def test_of_sixteen_a_lying_reducer_is_banned_within_twenty_rounds(lie, how):
    async def main(liar):
        async with World(
            seed=liar, num_elements=16 * 4096, target_samples=16 * 5, robust="centered-clip"
        ) as world:
            await world.start_all(16)
            lie.clear()
            lie[f"p{liar}"] = how
            num = await rounds_until_banned(world, liar, 20)
            assert nobody_else_is_banned(world, [liar])
            return num

    for liar in (3, 9):
        virtual(main(liar))


def test_values_that_nobody_has_signed_ban_a_reducer_at_once(monkeypatch):
    """It names values of its own making as those of others."""
    honest = Reduction._average

    def average(self, key, inbox, refused):
        if self._members[self._me].host == "p1":
            inbox = {place: one._replace(input=bytes(128)) for place, one in inbox.items()}
        return honest(self, key, inbox, refused)

    monkeypatch.setattr(Reduction, "_average", average)

    async def main():
        async with World(num_elements=20_000, target_samples=20, robust="median") as world:
            await world.start_all(5)
            await rounds_until_banned(world, 1, 10)
            assert nobody_else_is_banned(world, [1])

    virtual(main())


def test_a_coordinator_that_lies_as_a_reducer_is_passed_over(lie):
    async def main():
        async with World(num_elements=20_000, target_samples=20, robust="centered-clip") as world:
            await world.start_all(5)
            number = int(world.runs[0].members[0].host[1:])
            lie[f"p{number}"] = "scales"
            await rounds_until_banned(world, number, 20)
            others = [run for key, run in world.runs.items() if key != number]
            steps = [run.state.num_steps for run in others]
            for _ in range(3):
                for run in others:
                    run.add(gradient(1, world.num_elements), 5)
                await asyncio.sleep(3.0)
            assert all(run.state.num_steps > before for run, before in zip(others, steps, strict=True))
            assert len({run.state.fingerprint() for run in others}) == 1
            assert nobody_else_is_banned(world, [number])

    virtual(main())


@pytest.mark.parametrize("lie_of", ["NaN", "too short"])
def test_an_average_that_is_no_average_is_zero_for_all(monkeypatch, lie_of, caplog):
    """Also where nothing is audited: the reducer sends what would spoil or break all others."""
    honest = Reduction._average

    def average(self, key, inbox, refused):
        if self._members[self._me].host != "p1":
            return honest(self, key, inbox, refused)
        held = honest(
            self, key, {place: one._replace(values=one.values * 0) for place, one in inbox.items()}, refused
        )
        values = torch.full((7,) if lie_of == "too short" else (self.plan.size(key[0]),), float("nan"))
        encoded = Plain().encode(values)
        digest = part_digest(encoded.meta, held.bitmap, encoded.buffers)
        wrong = HeldPart(digest, held.bitmap, held.refused, encoded.meta, tuple(encoded.buffers))
        self.held[key[0], digest] = wrong
        return wrong

    monkeypatch.setattr(Reduction, "_average", average)

    async def main():
        async with World(num_elements=20_000, target_samples=20) as world:
            await world.start_all(4)
            await contribute(world, 1)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            state = world.runs[0].state
            assert torch.isfinite(state.parameters).all()
            assert 0 < int((state.parameters == 0).sum()) < state.num_elements

    virtual(main())
    assert any("taken for zero" in line for line in caplog.messages)
