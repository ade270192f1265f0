"""Uids are chosen on real peers in virtual time."""

import pytest

from dht.memory_swarm import in_swarm
from shoal.core import Address, Peer, UsageError, run_virtual
from shoal.experts.config import HostingConfig
from shoal.experts.names import ExpertUid, declare_experts
from shoal.experts.server.assignment import choose_uids


def config(**fields):
    return HostingConfig(join=("peer:1",), checkpoint_dir="saved", **fields)


def alone(saved=(), **fields):
    return run_virtual(choose_uids(HostingConfig(checkpoint_dir="saved", **fields), saved, None))


def test_without_a_swarm_uids_are_plain():
    assert alone() == ["expert0"]
    assert alone(num_experts=3) == ["expert0", "expert1", "expert2"]
    assert alone(uid=("mine",)) == ["mine"]
    assert alone(uid=("expert1", "mine"), num_experts=4) == ["expert1", "mine", "expert0", "expert2"]


def test_what_was_saved_comes_before_what_is_new():
    assert alone(["expert1", "expert7"]) == ["expert1", "expert7"]
    assert alone(["expert1", "expert7"], num_experts=3) == ["expert1", "expert7", "expert0"]
    assert alone(["expert1", "expert7"], uid=("expert7",)) == ["expert7"]


def test_saved_experts_are_not_left_out_silently():
    with pytest.raises(UsageError, match="saved has 2 experts, and --num-experts is 1") as refused:
        alone(["expert1", "expert7"], num_experts=1)
    assert "--num-experts 2" in refused.value.next_step


def test_in_a_swarm_uids_are_drawn_that_nobody_serves():
    async def work(swarm, server, other):
        await declare_experts(other, [f"ffn.0.{index}" for index in range(6)], other.in_s(60))
        chosen = await choose_uids(config(num_experts=4, uid_pattern="ffn.[0:1].[0:10]"), [], server)
        assert sorted(chosen) == [f"ffn.0.{index}" for index in range(6, 10)]
        with pytest.raises(UsageError, match="Only 4 of 5 uids like"):
            await choose_uids(config(num_experts=5, uid_pattern="ffn.[0:1].[0:10]"), [], server)
        assert await choose_uids(config(num_experts=2), [], server) == ["expert.0", "expert.1"]
        named = config(uid=("ffn.0.1",), num_experts=2, uid_pattern="ffn.[0:1].[6:7]")
        assert await choose_uids(named, [], server) == ["ffn.0.1", "ffn.0.6"]

    in_swarm(2, work)


def test_saved_experts_that_others_serve_are_left_to_them():
    async def work(swarm, server, other):
        await declare_experts(other, ["ffn.0.1"], other.in_s(60))
        await declare_experts(server, ["ffn.0.3"], server.in_s(60))  # by its own earlier life
        gone = Peer(Address("nowhere", 7), None)
        await declare_experts(other, ["ffn.0.2"], other.in_s(60), addresses=[gone.address])
        saved = ["expert0", "ffn.0.1", "ffn.0.2", "ffn.0.3", "lah.7"]
        chosen = await choose_uids(config(uid_pattern="ffn.[0:4].[0:4]"), saved, server)
        assert sorted(chosen) == ["ffn.0.2", "ffn.0.3"]
        chosen = await choose_uids(config(uid_pattern="ffn.[0:4].[0:4]", num_experts=3), saved, server)
        assert sorted(chosen[:2]) == ["ffn.0.2", "ffn.0.3"]
        assert ExpertUid.of(chosen[2]).name == "ffn"
        assert chosen[2] not in saved
        assert sorted(await choose_uids(config(), saved, server)) == ["ffn.0.2", "ffn.0.3", "lah.7"]

    in_swarm(2, work)


def test_who_adopts_need_not_begin_with_anything():
    async def work(swarm, server, other):
        assert await choose_uids(config(adopt=True), [], server) == []
        saved = ["ffn.1", "ffn.2", "ffn.3"]
        for fields in ({"num_experts": 2}, {"max_experts": 2}):
            chosen = await choose_uids(config(adopt=True, **fields), saved, server)
            assert len(set(chosen) & set(saved)) == 2
        assert len(await choose_uids(config(adopt=True, uid_pattern="lah.[0:9]"), saved, server)) == 1

    in_swarm(2, work)


def test_hosts_that_start_together_choose_apart_and_leave_what_another_has_begun_to_serve():
    async def work(swarm, *servers):
        saved = [f"ffn.{index}" for index in range(40)]
        wanted = config(adopt=True, num_experts=4)
        first, second, third = [await choose_uids(wanted, saved, server) for server in servers]
        assert first != second != third
        await declare_experts(servers[0], first, servers[0].in_s(60))
        again = await choose_uids(wanted, saved, servers[1], held=[*second[:3], first[0]])
        assert again[:3] == second[:3]
        assert len(again) == 4
        assert not set(again) & set(first)

    in_swarm(3, work)
