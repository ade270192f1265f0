"""Clocks that are an hour wrong, either way: who has one is told, and harms nobody else's records."""

import pytest

from dht.worlds import in_world, opened
from shoal.core import UsageError
from shoal.dht.records import Entry, Verdict
from shoal.dht.settings import DHTSettings
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript, Skew

HOUR_S = 3600.0
NUM_PEERS, NUM_WRONG = 24, 6
LENIENT = DHTSettings(is_strict=False)


def skewed(offset_s):
    """The clocks of the peers that are called wrong."""
    names = ["wrong", *(f"wrong{at}" for at in range(NUM_WRONG))]
    return Conditions(script=FaultScript(fault=[Skew(peer=f"{name}:*", offset_s=offset_s) for name in names]))


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_who_joins_with_a_wrong_clock_is_told_so(offset_s):
    async def work(swarm, first, *others):
        with pytest.raises(UsageError, match=r"3600\.\d s apart") as error:
            async with opened(swarm, "wrong", join=[first.peer.address]):
                pass
        assert "NTP" in error.value.next_step
        assert await first.store("name", 1, first.in_s(60.0))

    in_world(work, 4, conditions=skewed(offset_s))


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_others_records_are_found_among_peers_with_wrong_clocks(offset_s):
    """Those who take what lives for expired hold nothing of it; the others do."""

    async def work(swarm, *peers):
        for at in range(NUM_WRONG):
            await swarm.start(f"wrong{at}", settings=LENIENT)
        for lifetime_s in (60.0, 6 * HOUR_S):
            until_s = peers[0].in_s(lifetime_s)
            entries = [Entry(f"{lifetime_s} {at}", at, until_s, None, True) for at in range(200)]
            assert all(await peers[0].store_many(entries))
            for reader in peers[1::6]:
                found = await reader.get_many([entry.name for entry in entries])
                assert [one.value for one in found] == list(range(200))

    in_world(work, NUM_PEERS, conditions=skewed(offset_s))


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_what_a_peer_with_a_wrong_clock_stores_ends_by_the_clocks_of_others(offset_s):
    """Ahead: it lives an hour longer, as long as records may live so long. Behind: it is over at once."""

    async def work(swarm, *peers):
        writer = await swarm.start("wrong", settings=LENIENT)
        short = await writer.store("short", 1, writer.in_s(60.0))
        long = await writer.store("long", 2, writer.in_s(2 * HOUR_S))
        assert long
        until_s = peers[1].in_s(2 * HOUR_S + offset_s)
        assert (await peers[1].get("long")).expires_at_s == pytest.approx(until_s, abs=5)
        if offset_s > 0:
            assert short
            until_s = peers[1].in_s(60.0 + offset_s)
            assert (await peers[1].get("short")).expires_at_s == pytest.approx(until_s, abs=5)
        else:
            assert not short or short.num_stored == 1, "nobody but itself"
            assert short.verdict in (Verdict.EXPIRED, Verdict.STORED)
            assert await peers[1].get("short") is None

    in_world(work, NUM_PEERS, conditions=skewed(offset_s))


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_readers_with_wrong_clocks_take_nothing_that_is_over_by_their_own(offset_s):
    async def work(swarm, *peers):
        reader = await swarm.start("wrong", settings=LENIENT)
        await peers[0].store("short", 1, peers[0].in_s(60.0))
        await peers[0].store("long", 2, peers[0].in_s(2 * HOUR_S))
        assert (await reader.get("long")).value == 2
        found = await reader.get("short")
        assert (found is None) == (offset_s > 0)

    in_world(work, NUM_PEERS, conditions=skewed(offset_s))
