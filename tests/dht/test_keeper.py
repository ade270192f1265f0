import asyncio
import logging
import math

import pytest

from dht.living_swarm import LivingSwarm
from shoal.core import Deadline, DeadlineExceeded, PeerUnreachable, UsageError, run_virtual
from shoal.dht import replication
from shoal.dht.records import Entry, Stored, Verdict
from shoal.dht.replication import Keeper
from shoal.dht.settings import DHTSettings


class FakeDHT:
    """Remembers what is stored when; `answer` says what becomes of it."""

    settings = DHTSettings()

    def __init__(self):
        self.batches = []
        self.answer = lambda entry: Stored(5, Verdict.STORED)

    def wall_s(self):
        return 1000.0 + asyncio.get_running_loop().time()

    async def store_many(self, entries):
        self.batches.append((asyncio.get_running_loop().time(), list(entries)))
        return [self.answer(entry) for entry in entries]

    def times_of(self, name):
        return [at_s for at_s, entries in self.batches if any(entry.name == name for entry in entries)]


def run_keeper(scenario, limit_s=1e5):
    """Run `scenario(dht, keeper)` while the keeper works."""

    async def main():
        dht = FakeDHT()
        keeper = Keeper(dht, dht.store_many)
        task = asyncio.get_running_loop().create_task(keeper.run())
        try:
            return await scenario(dht, keeper)
        finally:
            task.cancel()

    return run_virtual(main(), limit_s=limit_s)


def only(name):
    return lambda expires_at_s: [Entry(name, 1, expires_at_s)]


def test_it_is_stored_at_once_and_again_after_half_of_its_life():
    async def scenario(dht, keeper):
        keeper.keep(only("x"), 100.0)
        await asyncio.sleep(201)
        assert dht.times_of("x") == [0.0, 50.0, 100.0, 150.0, 200.0]
        assert all(entries[0].expires_at_s == 1000.0 + at_s + 100.0 for at_s, entries in dht.batches)

    run_keeper(scenario)


def test_values_are_made_anew_each_time():
    async def scenario(dht, keeper):
        numbers = iter(range(10))
        keeper.keep(lambda expires_at_s: [Entry("x", next(numbers), expires_at_s)], 100.0)
        await asyncio.sleep(101)
        assert [entries[0].value for _, entries in dht.batches] == [0, 1, 2]

    run_keeper(scenario)


def test_what_is_due_at_about_the_same_time_shares_a_batch():
    async def scenario(dht, keeper):
        for number in range(10):
            keeper.keep(only(number), 100.0)
            await asyncio.sleep(0.2)
        await asyncio.sleep(100)
        assert [len(entries) for at_s, entries in dht.batches if at_s > 2] == [10, 10]

    run_keeper(scenario)


def test_no_batch_is_too_large(monkeypatch):
    monkeypatch.setattr(replication, "MAX_BATCH", 4)

    async def scenario(dht, keeper):
        kept = keeper.keep(lambda at_s: [Entry(number, 1, at_s) for number in range(10)], 100.0)
        assert len(await kept.stored()) == 10
        assert [len(entries) for _, entries in dht.batches] == [4, 4, 2]

    run_keeper(scenario)


def test_after_stop_it_is_left_to_expire():
    async def scenario(dht, keeper):
        kept = keeper.keep(only("x"), 100.0)
        keeper.keep(only("y"), 100.0)
        await asyncio.sleep(60)
        kept.stop()
        await asyncio.sleep(100)
        assert dht.times_of("x") == [0.0, 50.0]
        assert dht.times_of("y") == [0.0, 50.0, 100.0, 150.0]
        assert len(keeper) == 1

    run_keeper(scenario)


def test_one_can_wait_for_the_first_storing():
    async def scenario(dht, keeper):
        kept = keeper.keep(only("x"), 100.0)
        assert kept.last_stored == []
        assert await kept.stored() == kept.last_stored == [Stored(5, Verdict.STORED)]

    run_keeper(scenario)


def test_waiting_for_the_first_storing_ends_at_a_deadline():
    async def scenario():
        with pytest.raises(DeadlineExceeded):
            await Keeper(FakeDHT(), None).keep(only("x"), 100.0).stored(Deadline.after(1.0))

    run_virtual(scenario())


def test_a_storing_that_fails_is_tried_again_soon_and_said_once(caplog):
    async def scenario(dht, keeper):
        dht.answer = lambda entry: Stored(0, Verdict.NOT_ASKED)
        keeper.keep(only("x"), 1000.0)
        await asyncio.sleep(20)
        dht.answer = lambda entry: Stored(1, Verdict.STORED)
        await asyncio.sleep(600)
        assert dht.times_of("x") == [0.0, 2.0, 6.0, 14.0, 30.0, 530.0]

    with caplog.at_level(logging.INFO):
        run_keeper(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "1 of 1 records" in caplog.text


def test_failures_of_what_is_stored_are_no_end_of_it(caplog):
    async def scenario(dht, keeper):
        def fail(entry):
            raise PeerUnreachable("nobody is there")

        dht.answer = fail
        keeper.keep(only("x"), 100.0)
        await asyncio.sleep(10)
        dht.answer = lambda entry: Stored(1, Verdict.STORED)
        await asyncio.sleep(10)
        assert dht.times_of("x")[-1] == 14.0

    run_keeper(scenario)
    assert "nobody is there" in caplog.text


def test_what_is_refused_for_good_is_not_tried_more_often(caplog):
    async def scenario(dht, keeper):
        dht.answer = lambda entry: Stored(0, Verdict.NOT_OWNER)
        keeper.keep(only("x"), 100.0)
        await asyncio.sleep(101)
        assert dht.times_of("x") == [0.0, 50.0, 100.0]

    run_keeper(scenario)
    assert caplog.text.count("NOT_OWNER") == 1


def test_what_is_there_for_longer_is_no_failure(caplog):
    async def scenario(dht, keeper):
        dht.answer = lambda entry: Stored(0, Verdict.NOT_NEWER)
        keeper.keep(only("x"), 100.0)
        await asyncio.sleep(10)

    run_keeper(scenario)
    assert caplog.records == []


def test_a_maker_that_fails_does_not_touch_the_others(caplog):
    async def scenario(dht, keeper):
        keeper.keep(lambda at_s: 1 / 0, 100.0)
        keeper.keep(only("x"), 100.0)
        await asyncio.sleep(51)
        assert dht.times_of("x") == [0.0, 50.0]

    run_keeper(scenario)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        lambda at_s: [Entry("fine", 1, at_s), Entry("bad", object(), at_s)],
        lambda at_s: [Entry("bad", 1, at_s, subkey=1.5)],
        lambda at_s: [Entry("bad", 1, at_s, subkey="x" * 2000)],
        lambda at_s: [Entry(object(), 1, at_s)],
        lambda at_s: [Entry("bad", 1, math.nan)],
    ],
    ids=["value", "subkey", "long subkey", "name", "expiration"],
)
def test_what_cannot_be_encoded_does_not_touch_the_others(bad, caplog):
    async def scenario(dht, keeper):
        keeper.keep(only("x"), 100.0)
        kept = keeper.keep(bad, 100.0)
        keeper.keep(only("y"), 100.0)
        assert not any(await kept.stored())
        await asyncio.sleep(101)
        assert [[entry.name for entry in entries] for _, entries in dht.batches] == [["x", "y"]] * 3
        assert kept.num_failures == 3
        assert {stored.verdict for stored in kept.last_stored} == {Verdict.BAD_VALUE}

    run_keeper(scenario)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_what_breaks_a_batch_is_found_among_those_in_it(caplog):
    async def scenario(dht, keeper):
        def answer(entry):
            if entry.name == "bad":
                raise RuntimeError("something else is wrong")
            return Stored(5, Verdict.STORED)

        dht.answer = answer
        kept = [keeper.keep(only(name), 1000.0) for name in ("x", "bad", "y")]
        outcomes = [await each.stored() for each in kept]
        assert [bool(stored) for (stored,) in outcomes] == [True, False, True]
        await asyncio.sleep(3)
        assert dht.times_of("bad") == [0.0, 0.0, 2.0]
        assert dht.times_of("x") == [0.0, 0.0]

    run_keeper(scenario)
    assert "something else is wrong" in caplog.text


def test_all_are_stored_again_after_being_away():
    async def scenario(dht, keeper):
        keeper.keep(only("x"), 100.0)
        keeper.keep(only("y"), 1000.0)
        await asyncio.sleep(20)
        keeper.store_all_again()
        await asyncio.sleep(1)
        assert dht.times_of("x") == dht.times_of("y") == [0.0, 20.0]

    run_keeper(scenario)


@pytest.mark.parametrize("lifetime_s", [0.0, -1.0, math.nan, math.inf, 8 * 86_400.0])
def test_lifetimes_are_those_that_peers_accept(lifetime_s):
    with pytest.raises(UsageError, match="lifetime"):
        Keeper(FakeDHT(), None).keep(only("x"), lifetime_s)


def test_kept_records_survive_and_others_do_not():
    async def main():
        async with LivingSwarm() as swarm:
            await swarm.start_many(8)
            first, second, *_ = swarm.peers.values()
            kept = first.keeper.keep(
                lambda at_s: [Entry("kept", 1, at_s), Entry("owned", 2, at_s, is_owned=True)], 60.0
            )
            assert all(await kept.stored())
            await first.store("left", 3, first.in_s(60.0))
            await asyncio.sleep(600)
            found = await second.get_many(["kept", "owned", "left"])
            assert [value and value.value for value in found] == [1, 2, None]
            assert found[1].owner == first.peer_id
            kept.stop()
            await asyncio.sleep(61)
            assert await second.get_many(["kept", "owned"]) == [None, None]

    run_virtual(main())
