"""Rounds: what members commit together, whoever is slow, broken or gone."""

import asyncio

import pytest
import torch

from shoal.core import Deadline, PeerRefused
from shoal.swarm import CommittedState, SwarmSettings
from shoal.swarm.membership import MemberPresence
from shoal.swarm.wire import ABORT, FOLLOW, PART, FollowRequest
from shoal.tensors import Float16, Int4, Int8, SparseTwoBit, TopK
from shoal.transport import Conditions, Profile
from swarm.swarms import World, gradient, virtual


async def contribute(world, key, samples=5):
    """Has every living member add a gradient, and waits until all have made a step."""
    runs = world.alive()
    steps = {number: run.state.num_steps for number, run in runs.items()}
    for number, run in runs.items():
        run.add(gradient(100 * key + number, world.num_elements), samples)
    await world.wait(lambda: all(run.state.num_steps > steps[number] for number, run in runs.items()))


def now_s():
    return asyncio.get_running_loop().time()


def test_a_swarm_of_one_is_plain_training():
    async def main():
        async with World(target_samples=5) as world:
            run = await world.start(0)
            plain = CommittedState(torch.zeros(world.num_elements), world.optimizer, b"")
            kept = plain.kept
            for key in range(5):
                await world.wait(lambda: run.is_member)
                await contribute(world, key)
                world.optimizer.step(plain.parameters, gradient(100 * key), kept)
            assert torch.allclose(run.state.parameters, plain.parameters, atol=1e-6)
            world.check()

    virtual(main())


def test_members_commit_the_mean_by_samples():
    async def main():
        async with World(target_samples=6) as world:
            await world.start_all(3)
            for number, run in world.runs.items():
                run.add(gradient(number), number + 1)
            await world.wait(lambda: all(run.state.num_steps for run in world.runs.values()))
            mean = sum(gradient(number) * (number + 1) for number in range(3)) / 6
            expected = CommittedState(torch.zeros(world.num_elements), world.optimizer, b"")
            world.optimizer.step(expected.parameters, mean, expected.kept)
            for run in world.runs.values():
                assert torch.allclose(run.state.parameters, expected.parameters, atol=1e-5)
                assert run.state.num_samples == 6
                assert run.ledger.num_pending == 0
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            world.check()

    virtual(main())


@pytest.mark.parametrize("num_elements", [3, 20_000, 40_000])
def test_models_of_any_size_are_cut_into_parts(num_elements):
    async def main():
        async with World(num_elements=num_elements) as world:
            await world.start_all(4)
            await contribute(world, 1)
            world.check()

    virtual(main())


@pytest.mark.parametrize("codec", [Float16(), Int8(), Int4(), TopK(0.1), SparseTwoBit(0.1)])
def test_codecs_leave_all_with_the_same_bits(codec):
    async def main():
        async with World(num_elements=10_000) as world:
            world.codec = codec
            await world.start_all(3)
            for key in range(3):
                await contribute(world, key)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            world.check()

    virtual(main())


def test_averages_of_sparse_values_travel_sparse():
    """And whole: what is left out of them would be lost."""

    async def main():
        size = 100_000
        async with World(num_elements=size, target_samples=15) as world:
            world.codec = TopK(0.01)
            await world.start_all(3)
            before = sum(run.num_sent_bytes for run in world.runs.values())
            await contribute(world, 1)
            sent = sum(run.num_sent_bytes for run in world.runs.values()) - before
            # a value and its place: each sends two thirds of its values, and to two others what is not zero
            # of its third of the average, at most three times as much
            assert sent <= 8 * 0.01 * size * 3 * (2 / 3 + 2 / 3 * 3) * 1.1
            commit = next(commit for commit, _ in world.commits.values() if commit.plan)
            held = world.runs[0].kept.finished[commit.round].held
            for part, result in enumerate(commit.parts):
                assert held[part, result.digest].meta.codec == "top-k"
            world.check()

    virtual(main())


@pytest.mark.parametrize("victim", ["coordinator", "reducer", "other"])
def test_a_kill_costs_others_two_seconds_at_most(victim):
    async def main():
        async with World(num_elements=20_000) as world:
            await world.start_all(5)
            await contribute(world, 0)
            order = [member.host for member in world.runs[0].members]
            number = int(order[{"coordinator": 0, "reducer": 1, "other": 4}[victim]][1:])
            for key, run in world.runs.items():
                run.add(gradient(key, world.num_elements), 5)
            world.kill(number)
            before, steps = now_s(), {key: run.state.num_steps for key, run in world.alive().items()}
            await world.wait(lambda: all(r.state.num_steps > steps[key] for key, r in world.alive().items()))
            assert now_s() - before < 2.5
            assert len({run.state.fingerprint() for run in world.alive().values()}) == 1
            await world.wait(lambda: all(len(run.members) == 4 for run in world.alive().values()))
            world.check()

    virtual(main())


def test_over_lines_on_which_answers_take_longer_than_a_second_nobody_takes_over():
    """Once it is known how long they take."""
    line = Profile.parse('name = "far"\n[ways.default]\ndelay_ms = 700\n')

    async def main():
        async with World(Conditions(line, seed=1), target_samples=15, minority_after_s=1000) as world:
            await world.start_all(3, 600)
            for key in range(6):
                steps, ballots = world.runs[0].state.num_steps, []
                for number, run in world.runs.items():
                    run.add(gradient(10 * key + number), 5)
                while world.runs[0].state.num_steps == steps:
                    ballots += [run.round.ballot for run in world.runs.values()]
                    await asyncio.sleep(0.1)
            assert max(ballots) == 0
            world.check()

    virtual(main())


def test_all_but_one_die_one_after_the_other():
    async def main():
        async with World(target_samples=2) as world:
            await world.start_all(5)
            for key in range(4):
                await contribute(world, key)
                world.kill(next(iter(world.alive())))
                await world.wait(
                    lambda key=key: all(len(r.members) == 4 - key for r in world.alive().values())
                )
            await contribute(world, 9)
            world.check()
            assert [fork for fork, *_ in world.runs[4].history][-1] == world.runs[4].history[0][0]

    virtual(main())


def test_what_is_not_finite_is_refused_and_its_sender_left_out():
    async def main():
        async with World() as world:
            await world.start_all(4)
            broken = world.runs[3]
            for key in range(3):
                for number, run in world.runs.items():
                    values = gradient(key + number)
                    run.add(values * float("nan") if run is broken else values, 5)
                steps = world.runs[0].state.num_steps
                await world.wait(lambda steps=steps: world.runs[0].state.num_steps > steps)
            await asyncio.sleep(1)
            assert broken.ledger.num_committed == 0
            assert bool(torch.isfinite(world.runs[0].state.parameters).all())
            coordinator = next(run for run in world.runs.values() if run.members[0] == run.context.me)
            assert coordinator.context.backoff.is_paused(broken.context.me.id_bytes, now_s())
            world.check()

    virtual(main())


def test_one_huge_gradient_is_clipped():
    async def main():
        async with World() as world:
            await world.start_all(4)
            for number, run in world.runs.items():
                run.add(gradient(number) * (1e6 if number == 3 else 1), 5)
            await world.wait(lambda: all(run.state.num_steps for run in world.runs.values()))
            assert world.runs[0].state.parameters.abs().max() < 20
            world.check()

    virtual(main())


def test_who_is_slow_carries_over():
    async def main():
        async with World(target_samples=15) as world:
            await world.start_all(4)
            for number in range(3):
                world.runs[number].add(gradient(number), 5)
            await world.wait(lambda: all(run.state.num_steps == 1 for run in world.runs.values()))
            world.runs[3].add(gradient(3), 5)
            await asyncio.sleep(2)
            assert world.runs[3].ledger.num_pending == 5
            for number in range(2):
                world.runs[number].add(gradient(number), 5)
            await world.wait(lambda: all(run.state.num_steps == 2 for run in world.runs.values()))
            assert world.runs[3].ledger.num_committed == 5
            world.check()

    virtual(main())


def test_local_steps_begin_a_round_when_half_are_ready():
    async def main():
        async with World(target_samples=0) as world:
            await world.start_all(4)
            for number, run in world.runs.items():
                run.add(gradient(number), 10 + number)
            await asyncio.sleep(3)
            assert not any(run.state.num_steps for run in world.runs.values())
            world.runs[1].set_ready()
            await asyncio.sleep(3)
            assert not any(run.state.num_steps for run in world.runs.values())
            world.runs[2].set_ready()
            await world.wait(lambda: all(run.state.num_steps == 1 for run in world.runs.values()))
            assert world.runs[0].state.num_samples == 46
            world.check()

    virtual(main())


def test_no_round_begins_with_fewer_than_min_peers():
    async def main():
        async with World(min_peers=2, target_samples=5) as world:
            run = await world.start(0)
            await world.wait(lambda: run.is_member)
            run.add(gradient(0), 20)
            await asyncio.sleep(10)
            assert run.state.num_steps == 0
            await world.start(1, may_found=False)
            await world.wait(lambda: run.state.num_steps == 1)
            world.check()

    virtual(main())


def test_the_same_seed_replays_to_the_bit():
    def once():
        async def main():
            async with World(seed=5, num_elements=20_000) as world:
                await world.start_all(4)
                await contribute(world, 0)
                world.kill(2)
                await contribute(world, 1)
                return now_s(), world.num_calls, world.runs[0].history, world.runs[0].state.fingerprint()

        return virtual(main())

    assert once() == once()


def after_a_kill(patience):
    async def main():
        async with World() as world:
            world.settings = SwarmSettings(target_samples=10, patience=patience)
            await world.start_all(4)
            world.kill(int(world.runs[0].members[0].host[1:]))
            before = now_s()
            await contribute(world, 1)
            world.check()
            return now_s() - before

    return virtual(main())


def test_patience_scales_the_time_outs():
    """A process that is gone is noticed after 0.3 s, or as many times as long as the patience says."""
    usual_s, patient_s, very_patient_s = map(after_a_kill, (1.0, 3.0, 9.0))
    assert 0.3 < usual_s < 1.0
    assert 2 * usual_s < patient_s < 10
    assert 2 * patient_s < very_patient_s < 30
    assert very_patient_s > 2


def test_commits_that_only_change_members_are_aborts():
    async def main():
        async with World() as world:
            await world.start_all(3)
            run = world.runs[0]
            assert run.state.round > 0
            assert run.state.num_steps == 0
            assert {one.commit.kind for one in run.kept.finished.values()} == {ABORT}  # how they are kept
            await world.runs[2].leave(Deadline.after(20))
            await world.wait(lambda: len(run.members) == 2)
            assert run.state.num_steps == 0

    virtual(main())


def test_who_ends_its_call_for_a_moment_is_not_dropped():
    """It takes the coordinator for silent and asks the next one, but its connection stands: it is there."""

    async def main():
        async with World() as world:
            await world.start_all(5)
            coordinator = world.runs[0].members[0]
            quiet = next(n for n in world.runs if world.runs[n].context.me == world.runs[0].members[-1])
            until_s = now_s() + 0.3

            def fault(message, sender, method):
                is_quiet = sender == quiet and method == FOLLOW and now_s() < until_s
                return "given up" if is_quiet else None

            world.fault = fault
            other = next(run for run in world.runs.values() if run.context.me == coordinator)
            for _ in range(60):
                await asyncio.sleep(0.1)
                assert len(other.members) == 5
            world.check()

    virtual(main())


def test_what_was_heard_before_a_member_led_says_nothing_of_who_is_gone():
    presence = MemberPresence(heard_s=10.0)
    assert presence.is_gone(100.0, since_s=0.0, patience=1.0)
    assert not presence.is_gone(100.0, since_s=98.0, patience=1.0)
    assert presence.is_gone(103.5, since_s=98.0, patience=1.0)
    presence.closed_s = 11.0
    assert presence.is_gone(13.0, since_s=0.0, patience=1.0)
    assert not presence.is_gone(13.0, since_s=12.0, patience=1.0)


def test_a_member_speaks_for_itself_alone():
    async def main():
        async with World() as world:
            await world.start_all(3)
            coordinator = next(run for run in world.runs.values() if run.members[0] == run.context.me)
            liar, victim = (run for run in world.runs.values() if run is not coordinator)
            state = liar.state
            vote = FollowRequest(state.fork, state.round, state.name, victim.context.me, 0, is_leaving=True)
            with pytest.raises(PeerRefused):
                await liar.transport.call(
                    coordinator.context.me.peer, FOLLOW, vote, deadline=Deadline.after(5)
                )  # by hand: a run never does so
            await asyncio.sleep(3)
            assert victim.is_member

    virtual(main())


def test_the_same_value_is_voted_for_again_under_a_higher_ballot():
    """Who accepted a value under ballot 0 must hear of it under ballot 1, or that has no quorum."""

    async def main():
        async with World() as world:
            await world.start_all(3)
            first, second, third = (int(member.host[1:]) for member in world.runs[0].members)
            voted = []

            def fault(message, sender, method):
                # votes under ballot 0 reach nobody, and then the coordinator is dead
                run = world.runs[sender]
                if run.round.acceptor.accepted_ballot == 0 and method == FOLLOW and run.round.ballot == 0:
                    voted.append(sender)
                    world.kill(first)
                return

            world.fault = fault
            for number, run in world.runs.items():
                run.add(gradient(number), 5)
            survivors = [world.runs[second], world.runs[third]]
            await world.wait(lambda: all(run.state.num_steps == 1 for run in survivors))
            assert voted
            assert survivors[0].state.fingerprint() == survivors[1].state.fingerprint()
            world.check()

    virtual(main())


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stopped_member_costs_others_five_seconds_at_most(place):
    """Its connections stay open and it says nothing, as after SIGSTOP; it comes back when it is let go on."""

    async def main():
        async with World(num_elements=20_000, minority_after_s=1000) as world:
            await world.start_all(5)
            await contribute(world, 0)
            stopped = int(world.runs[0].members[place].host[1:])
            others = {number: run for number, run in world.runs.items() if number != stopped}
            for number, run in world.runs.items():
                run.add(gradient(number, world.num_elements), 5)
            world.cut = lambda caller, host: stopped in (caller, int(host[1:]))
            before = now_s()
            await world.wait(lambda: all(run.state.num_steps == 2 for run in others.values()))
            assert now_s() - before < 5
            await asyncio.sleep(10)
            assert all(len(run.members) == 4 for run in others.values())
            world.cut = None
            await world.wait(lambda: all(len(run.members) == 5 for run in world.runs.values()), 120)
            await world.wait(lambda: len({run.state.name for run in world.runs.values()}) == 1)
            world.check()
            world.check_samples()

    virtual(main())


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_reducer_that_is_stopped_while_parts_are_sent_to_it_costs_others_five_seconds_at_most(place):
    """It leaves the senders' calls open: once it is named lost, they send the same bytes to its backup."""

    async def main():
        async with World(num_elements=13_000, target_samples=25) as world:
            await world.start_all(5)
            stopped = int(world.runs[0].members[place].host[1:])
            others = [run for number, run in world.runs.items() if number != stopped]
            stopped_s = 0.0

            def fault(message, sender, method):
                nonlocal stopped_s
                if method == PART and not stopped_s:
                    stopped_s = now_s()
                    world.cut = lambda caller, host: stopped in (caller, int(host[1:]))

            world.fault = fault
            for number, run in world.runs.items():
                run.add(gradient(number, world.num_elements), 5)
            await world.wait(lambda: all(run.state.num_steps for run in others))
            assert now_s() - stopped_s < 5
            assert [run.ledger.num_committed for run in others] == [5] * 4
            world.check()

    virtual(main())


@pytest.mark.parametrize("many", [64, 2])
def test_a_large_swarm_takes_its_time_and_still_admits_and_drops(many, monkeypatch):
    """With three times as many members as speak often, beats and silences are three times as long."""
    monkeypatch.setattr("shoal.swarm.membership.MANY_MEMBERS", many)

    async def main():
        async with World() as world:
            await world.start_all(6)
            await contribute(world, 0)
            world.num_calls = 0
            await asyncio.sleep(30)
            assert (world.num_calls < 5 * 30 / 0.5) == (many == 2)  # five followers, a call at each beat
            joiner = await world.start(6, may_found=False)
            await world.wait(lambda: joiner.is_member)
            assert joiner.state.num_steps == 1
            world.kill(int(joiner.members[0].host[1:]))
            await world.wait(lambda: all(len(run.members) == 6 for run in world.alive().values()))
            await contribute(world, 1)
            world.check()
            world.check_samples()

    virtual(main())


def events_per_call(num_peers):
    """What the loop does for each call of the protocol while a swarm computes and no round begins."""

    async def main():
        async with World(target_samples=10**6) as world:
            await world.start_all(num_peers)
            loop, num_events = asyncio.get_running_loop(), 0
            call_soon = loop.call_soon

            def counted(callback, *args, context=None):
                nonlocal num_events
                num_events += 1
                return call_soon(callback, *args, context=context)

            loop.call_soon, world.num_calls = counted, 0
            for key, run in enumerate(world.runs.values()):
                run.add(gradient(key), 1)
                await asyncio.sleep(0.01)
            del loop.call_soon
            return num_events / world.num_calls

    return virtual(main())


def test_groups_average_and_then_their_averages(monkeypatch):
    """On two levels the same goes in as on one, whoever does the averaging."""
    monkeypatch.setattr("shoal.swarm.plan.GROUP", 3)

    async def main():
        async with World(num_elements=13_000, target_samples=28) as world:
            await world.start_all(7)
            for number, run in world.runs.items():
                run.add(gradient(number, 13_000), number + 1)
            await world.wait(lambda: all(run.state.num_steps for run in world.runs.values()))
            mean = sum(gradient(number, 13_000) * (number + 1) for number in range(7)) / 28
            expected = CommittedState(torch.zeros(13_000), world.optimizer, b"")
            world.optimizer.step(expected.parameters, mean, expected.kept)
            plans = [commit.plan for commit, _ in world.commits.values() if commit.plan]
            assert [len(plan.leaders) for plan in plans] == [3]
            assert torch.allclose(world.runs[0].state.parameters, expected.parameters, atol=1e-5)
            assert len({run.state.fingerprint() for run in world.runs.values()}) == 1
            assert all(run.ledger.num_committed == number + 1 for number, run in world.runs.items())
            world.check()
            world.check_samples()

    virtual(main())


def test_a_group_without_its_leaders_sends_on_its_own(monkeypatch):
    monkeypatch.setattr("shoal.swarm.plan.GROUP", 3)

    async def main():
        async with World(num_elements=13_000, target_samples=30) as world:
            await world.start_all(7)

            def fault(message, sender, method):
                round_ = world.runs[sender].round
                if method == PART and len(world.alive()) == 7:
                    leaders = [place for place in sum(round_.plan.leaders, ()) if place]
                    victim = next(place for place in leaders if place not in round_.plan.reducers)
                    world.kill(int(round_.members[victim].host[1:]))

            world.fault = fault
            for number, one in world.runs.items():
                one.add(gradient(number, 13_000), 5)
            await world.wait(lambda: all(one.state.num_steps for one in world.alive().values()))
            assert len(world.alive()) == 6
            assert all(one.ledger.num_committed == 5 for one in world.alive().values())
            world.check()
            world.check_samples()

    virtual(main())


def test_a_large_swarm_has_no_more_to_do_for_each_call():
    assert events_per_call(24) < 1.3 * events_per_call(6)
