"""Experts that nobody serves are served again from their checkpoints; those that somebody does are left."""

import asyncio

import pytest
import torch

from dht.living_swarm import LivingSwarm
from dht.memory_swarm import in_swarm
from experts.fake_server import FakeServer, FakeThread, small_expert, values
from shoal.core import DeadlineExceeded, Scope, UsageError, run_virtual
from shoal.dht.records import reserved
from shoal.experts.names import declare_experts, get_experts
from shoal.experts.server.assignment import ExpertAdopter
from shoal.experts.server.checkpoints import Checkpoints


def saved(folder, *uids, num_updates=3):
    checkpoints = Checkpoints(folder)
    for uid in uids:
        checkpoints.save(uid, small_expert(uid, num_updates=num_updates).state())
    return checkpoints


def adopting(dht, checkpoints, server=None, every_s=30.0, **options):
    return ExpertAdopter(
        server or FakeServer(),
        dht,
        checkpoints,
        lambda one: small_expert(one.uid, seed=9),
        every_s,
        on_adopted=lambda uid: declare_experts(dht, [uid], dht.in_s(3600)),
        **options,
    )


async def rounds(one, num_rounds):
    found = []
    for _ in range(num_rounds):
        found += await one.look(FakeThread())
        await asyncio.sleep(30)
    return found


def test_an_expert_comes_back_after_its_server_is_gone(tmp_path):
    async def main():
        async with LivingSwarm() as swarm:
            peers = await swarm.start_many(4)
            checkpoints = saved(tmp_path, "ffn.1.2", "ffn.1.3")
            await declare_experts(peers[1], ["ffn.1.2", "ffn.1.3"], peers[1].in_s(100))
            await declare_experts(peers[2], ["ffn.1.3"], peers[2].in_s(1000))
            server = FakeServer()
            one = adopting(peers[3], checkpoints, server)
            await swarm.kill("p1")
            assert await rounds(one, 2) == []
            await asyncio.sleep(60)
            assert await rounds(one, 3) == ["ffn.1.2"]
            (back,) = server.experts.values()
            assert back.num_updates == 3
            assert torch.equal(values(back), values(small_expert("ffn.1.2", num_updates=3)))
            (found,) = await get_experts(peers[0], ["ffn.1.2"], latest=True)
            assert found.peer == peers[3].peer

    run_virtual(main())


def test_what_was_withdrawn_is_free(tmp_path):
    async def work(swarm, server, adopter):
        await declare_experts(server, ["ffn.1"], server.in_s(100))
        one = adopting(adopter, saved(tmp_path, "ffn.1"))
        assert await rounds(one, 2) == []
        await server.store("ffn.1", [], server.in_s(1000), subkey=reserved(server.peer_id), is_owned=True)
        assert await rounds(one, 2) == ["ffn.1"]

    in_swarm(2, work)


def test_once_missed_is_not_enough(tmp_path):
    async def work(swarm, server, adopter):
        one = adopting(adopter, saved(tmp_path, "ffn.1"))
        assert await rounds(one, 1) == []
        await declare_experts(server, ["ffn.1"], server.in_s(45))
        assert await rounds(one, 1) == []
        await asyncio.sleep(30)
        assert await rounds(one, 1) == []  # the one before has seen it
        assert await rounds(one, 1) == ["ffn.1"]

    in_swarm(2, work)


def test_a_look_up_that_fails_is_no_absence(tmp_path, caplog):
    async def main():
        async with LivingSwarm() as swarm:
            _, adopter = await swarm.start_many(2)
            one = adopting(adopter, saved(tmp_path, "ffn.1"))
            await swarm.kill("p0")
            async with Scope() as scope:
                scope.start(one.run())
                await asyncio.sleep(50)
                assert one.num_adopted == 0
                scope.cancel()

    class Threadless(FakeThread):
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.experts.server.assignment.LoopThread", Threadless)
        run_virtual(main())
    assert "could not be found out" in caplog.text


def test_no_more_than_there_is_room_for(tmp_path):
    async def work(swarm, peer):
        uids = [f"ffn.{index}" for index in range(4)]
        server = FakeServer(small_expert("own.1"))
        one = adopting(peer, saved(tmp_path, *uids, "expert0"), server, max_experts=3)
        assert len(await rounds(one, 2)) == 2
        assert await rounds(one, 3) == []
        assert "expert0" not in server.experts  # a plain name is in no grid
        del server.experts["own.1"]
        server.is_leaving = True
        assert await rounds(one, 3) == []
        with pytest.raises(UsageError, match="every 0 s"):
            adopting(peer, Checkpoints(tmp_path), every_s=0)

    in_swarm(1, work)


def test_two_adopters_share_what_there_is(tmp_path):
    async def work(swarm, *peers):
        uids = [f"ffn.{index}" for index in range(8)]
        checkpoints = saved(tmp_path, *uids)
        several = [adopting(peer, checkpoints) for peer in peers]
        async with Scope() as scope:
            adopted = [scope.start(rounds(one, 3)) for one in several]
        first, second = [task.result() for task in adopted]
        assert sorted({*first, *second}) == uids
        assert len(first) + len(second) <= len(uids) + 1
        assert min(len(first), len(second)) > 0

    in_swarm(2, work)


def test_one_that_cannot_be_restored_does_not_hold_up_the_others(tmp_path, caplog):
    async def work(swarm, peer):
        checkpoints = saved(tmp_path, "ffn.1", "ffn.2", "ffn.3")
        checkpoints.save("ffn.1", small_expert("ffn.1", num_features=5).state())
        for path in (tmp_path / "ffn.2").rglob("*.safetensors"):
            path.write_bytes(b"")
        one = adopting(peer, checkpoints)
        assert await rounds(one, 8) == ["ffn.3"]
        assert "ffn.1 could not be adopted: The state does not fit" in caplog.text
        assert "ffn.2 could not be adopted: none of its checkpoints is whole" in caplog.text
        assert caplog.text.count("ffn.1 could not be adopted") < 4  # tried again, ever less often
        checkpoints.save("ffn.2", small_expert("ffn.2").state())
        assert await rounds(one, 16) == ["ffn.2"]
        assert "ffn.2" not in one._not_before

    in_swarm(1, work)


def test_a_round_that_could_not_look_does_not_count(tmp_path, monkeypatch):
    async def work(swarm, peer):
        one = adopting(peer, saved(tmp_path, "ffn.1"))
        assert await rounds(one, 1) == []

        async def fail(*_):
            raise DeadlineExceeded("nobody answers.")

        with monkeypatch.context() as patch:
            patch.setattr("shoal.experts.server.assignment.who_serves", fail)
            with pytest.raises(DeadlineExceeded):
                await rounds(one, 1)
        assert await rounds(one, 1) == ["ffn.1"]
        assert not one._not_before

    in_swarm(1, work)
