"""Experts are declared, found and drawn on real peers in virtual time."""

import asyncio

import pytest

from dht.memory_swarm import in_swarm
from shoal.core import Address, Deadline, DeadlineExceeded, Peer, UsageError, run_virtual
from shoal.dht.records import Verdict, reserved
from shoal.experts.names import (
    ExpertAddress,
    ExpertUid,
    declare_experts,
    expert_entries,
    get_experts,
    sample_uids,
)

ELSEWHERE = Address("10.0.0.7", 31337)


def test_what_is_declared_is_found_by_others_where_it_is_served():
    async def work(swarm, server, _, client):
        uids = ["ffn.0.1", "ffn.3.14", "ffn.3.15", "lone.7", "deep.1.2.3"]
        expires_at_s = server.in_s(60)
        declared = await declare_experts(server, uids, expires_at_s)
        assert declared == dict.fromkeys(map(ExpertUid.of, uids), True)
        wanted = ["ffn.3.14", "ffn.3.16", "lone.7", "ffn.3.14", "nobody.1", ExpertUid.of("deep.1.2.3")]
        found = await get_experts(client, wanted)
        assert [None if one is None else str(one.uid) for one in found] == [
            "ffn.3.14", None, "lone.7", "ffn.3.14", None, "deep.1.2.3",
        ]  # fmt: skip
        assert found[0] == ExpertAddress(ExpertUid.of("ffn.3.14"), (server.peer,), expires_at_s)
        assert found[0].peer == server.peer

    in_swarm(6, lambda swarm, *peers: work(swarm, peers[1], peers[2], peers[5]))


def test_prefixes_tell_the_coordinates_that_come_next():
    async def work(swarm, server, client):
        uids = ["ffn.3.14", "ffn.3.2", "ffn.0.1", "lone.7", "deep.1.2.3"]
        await declare_experts(server, uids, server.in_s(60))
        names = ["ffn.3.", "ffn.0.", "ffn.1.", "lone.7.", "deep.1.", "deep.1.2.", "ffn.", "deep.1.2.3."]
        assert await client.get_coordinates(names) == [
            (2, 14), (1,), None, (-1,), (2,), (3,), None, None,
        ]  # fmt: skip

    in_swarm(2, work)


@pytest.mark.parametrize(
    ("uids", "num_writes"),
    [
        (["ffn.1"], 2),
        (["ffn.1.2"], 2),
        (["ffn.1.2.3"], 3),
        (["ffn.1.2.3", "ffn.1.2.3"], 3),
        (["ffn.1.2.3", "ffn.1.2.4"], 5),  # ffn.1. leads to 2 for both
        (["ffn.1.2.3", "ffn.1.3.3"], 6),
    ],
)
def test_an_expert_costs_a_write_for_each_coordinate(uids, num_writes):
    async def work(swarm, server):
        entries = expert_entries(server, uids, server.in_s(60))
        assert len(entries) == num_writes
        assert len({(entry.name, entry.subkey) for entry in entries}) == num_writes
        assert [entry.is_owned for entry in entries] == [
            entry.name in uids for entry in entries
        ]  # what leads to experts is everybody's

    in_swarm(1, work)


def test_several_peers_serve_one_expert():
    async def work(swarm, *peers):
        first, second, client = peers[0], peers[1], peers[5]
        assert (await declare_experts(first, ["ffn.1.2"], first.in_s(60)))[ExpertUid.of("ffn.1.2")]
        # the prefix lives longer already: that is no failure of the second one
        assert (await declare_experts(second, ["ffn.1.2"], second.in_s(30)))[ExpertUid.of("ffn.1.2")]
        (found,) = await get_experts(client, ["ffn.1.2"], latest=True)
        assert found.peers == (first.peer, second.peer)
        assert found.expires_at_s == pytest.approx(first.in_s(60), abs=1)

    in_swarm(6, work)


def test_declarations_expire_and_a_later_one_moves_the_expert():
    async def work(swarm, server, client):
        uid = ExpertUid.of("ffn.1.2")
        await declare_experts(server, [uid], server.in_s(10), addresses=[ELSEWHERE])
        (found,) = await get_experts(client, [uid])
        assert found.peers == (Peer(ELSEWHERE, server.peer_id),)
        moved = [Address("10.0.0.8", 1), Address("::1", 2)]
        assert (await declare_experts(server, [uid], server.in_s(20), addresses=moved))[uid]
        assert not (await declare_experts(server, [uid], server.in_s(15), addresses=[ELSEWHERE]))[uid]
        (found,) = await get_experts(client, [uid], latest=True)
        assert found.peers == tuple(Peer(address, server.peer_id) for address in moved)
        await asyncio.sleep(21)
        assert await get_experts(client, [uid], latest=True) == [None]
        assert await client.get_coordinates(["ffn.1."]) == [None]

    in_swarm(2, work)


def test_nobody_speaks_for_another_peer():
    async def work(swarm, server, thief, client):
        name, later_s = "ffn.1.2", server.in_s(600)
        await declare_experts(server, [name], server.in_s(60))
        where = [str(ELSEWHERE)]
        stolen = await thief.store(name, where, later_s, subkey=reserved(server.peer_id), is_owned=True)
        assert (bool(stolen), stolen.verdict) == (False, Verdict.NOT_OWNER)
        unsigned = await thief.store(name, where, later_s, subkey=reserved(server.peer_id))
        assert (bool(unsigned), unsigned.verdict) == (False, Verdict.NOT_OWNER)
        wiped = await thief.store(name, where, later_s)
        assert (bool(wiped), wiped.verdict) == (False, Verdict.NOT_OWNER)
        assert [one.peers for one in await get_experts(client, [name], latest=True)] == [(server.peer,)]

    in_swarm(3, work)


def test_what_others_write_beside_it_does_no_harm():
    async def work(swarm, server, liar, client):
        name, later_s = "ffn.1.2", server.in_s(600)
        await declare_experts(server, [name], server.in_s(60))
        for subkey, value in [
            (7, ["10.0.0.7:1"]),
            ("text", ["10.0.0.7:1"]),
            (b"short", ["10.0.0.7:1"]),
            (("shoal.owner", b"short", None), ["10.0.0.7:1"]),
            (b"1" * 20, "10.0.0.7:1"),
            (b"2" * 20, [7, None, "nowhere", "10.0.0.7:99999", ["10.0.0.7:1"]]),
            (b"3" * 20, []),
            (b"4" * 20, ["1" * 400 + ":1"]),
            (server.peer_id.digest, ["10.0.0.7:1"]),
        ]:
            await liar.store(name, value, later_s, subkey=subkey)
        (found,) = await get_experts(client, [name], latest=True)
        assert found.peers == (server.peer,)
        assert found.expires_at_s < later_s
        await liar.store("plain.1", ["10.0.0.7:1"], later_s)
        assert await get_experts(client, ["plain.1"]) == [None]

    in_swarm(3, work)


def test_unsigned_declarations_are_an_option():
    async def work(swarm, server, client):
        assert all((await declare_experts(server, ["ffn.1.2"], server.in_s(60), is_owned=False)).values())
        (value,) = (await client.get("ffn.1.2")).value.values()
        assert value.owner is None
        (found,) = await get_experts(client, ["ffn.1.2"])
        assert found.peers == (server.peer,)

    in_swarm(2, work)


def test_a_client_declares_only_what_is_served_elsewhere():
    async def work(swarm, server):
        client = await swarm.add(is_client=True)
        with pytest.raises(UsageError, match="cannot be called"):
            await declare_experts(client, ["ffn.1"], client.in_s(60))
        assert all(
            (await declare_experts(client, ["ffn.1"], client.in_s(60), addresses=[ELSEWHERE])).values()
        )
        (found,) = await get_experts(server, ["ffn.1"])
        assert found.peers == (Peer(ELSEWHERE, client.peer_id),)
        with pytest.raises(UsageError, match="at most"):
            await declare_experts(server, ["ffn.1"], server.in_s(60), addresses=[ELSEWHERE] * 9)

    in_swarm(1, work)


def test_what_nobody_takes_is_not_declared():
    async def work(swarm, server, _):
        too_late_s = server.in_s(-1)
        assert await declare_experts(server, ["ffn.1.2"], too_late_s) == {ExpertUid.of("ffn.1.2"): False}
        assert await get_experts(server, ["ffn.1.2"]) == [None]
        assert await declare_experts(server, [], server.in_s(60)) == {}
        assert await get_experts(server, []) == []

    in_swarm(2, work)


def test_a_look_up_that_must_end_tells_absence_from_ignorance():
    async def work(swarm, server, client):
        assert await get_experts(client, ["ffn.1.2"], must_end=True) == [None]
        with pytest.raises(DeadlineExceeded):
            await get_experts(client, ["ffn.1.2"], latest=True, deadline=Deadline.after(0), must_end=True)
        assert await get_experts(client, ["ffn.1.2"], latest=True, deadline=Deadline.after(0)) == [None]

    in_swarm(2, work)


def test_a_declaration_is_kept_alive_with_its_prefixes():
    async def work(swarm, server, client):
        uids = ["ffn.1.2", "lone.3"]
        kept = server.keeper.keep(lambda expires_at_s: expert_entries(server, uids, expires_at_s), 60.0)
        await asyncio.sleep(1000)
        assert all(await get_experts(client, uids))
        assert await client.get_coordinates(["ffn.1.", "lone.3."]) == [(2,), (-1,)]
        kept.stop()
        await asyncio.sleep(61)
        assert await get_experts(client, uids) == [None, None]

    in_swarm(2, work)


# --- drawing ---


def test_drawn_uids_are_free_and_fit_the_pattern():
    async def work(swarm, server, other):
        taken = [f"ffn.{index}.0" for index in range(0, 20, 2)]
        await declare_experts(other, taken, other.in_s(60))
        drawn = await sample_uids(server, "ffn.[0:20].0", 10)
        assert sorted(drawn) == [ExpertUid("ffn", (index, 0)) for index in range(1, 20, 2)]
        several = await sample_uids(server, "ffn.[0:256].[0:256]", 30)
        assert len(set(several)) == 30
        return drawn, several

    assert in_swarm(2, work) == in_swarm(2, work)


def test_too_few_free_uids_are_all_that_there_are(caplog):
    async def work(swarm, server):
        await declare_experts(server, ["ffn.0", "ffn.1"], server.in_s(60))
        assert sorted(await sample_uids(server, "ffn.[0:4]", 3)) == [
            ExpertUid("ffn", (2,)),
            ExpertUid("ffn", (3,)),
        ]

    in_swarm(1, work)
    assert "only 2 of 3 uids like ffn.[0:4] are free" in caplog.text


def test_without_a_pattern_uids_are_counted_from_zero():
    async def work(swarm, server):
        await declare_experts(server, ["expert.0", "expert.2"], server.in_s(60))
        assert list(map(str, await sample_uids(server, None, 3))) == ["expert.1", "expert.3", "expert.4"]
        assert await sample_uids(server, None, 0) == []

    in_swarm(1, work)


def test_what_could_not_be_looked_up_is_not_called_free():
    class Late:
        async def get_many(self, names, *, deadline, must_end):
            assert must_end
            raise DeadlineExceeded("a look-up did not end")

    with pytest.raises(DeadlineExceeded, match="did not end"):
        run_virtual(sample_uids(Late(), None, 3))
