import asyncio

from shoal.core import run_virtual
from shoal.dht.under_way import MAX_IN_FLIGHT, UnderWay


def watch(work, usual_s=0.4):
    """Run `work(under_way)`; whom it told of, and when."""
    slow = []

    async def main():
        under_way = UnderWay(
            lambda: usual_s, lambda one: slow.append((one, asyncio.get_running_loop().time()))
        )
        try:
            await work(under_way)
        finally:
            under_way.close()

    run_virtual(main())
    return slow


def test_who_takes_long_is_told_of_once():
    async def work(under_way):
        under_way.begin("first")
        await asyncio.sleep(0.3)
        under_way.begin("second")
        under_way.begin("third")
        await asyncio.sleep(0.2)
        under_way.end("third")
        await asyncio.sleep(10)
        under_way.end("first")

    slow = watch(work)
    assert [one for one, _ in slow] == ["first", "second"]
    assert 0.4 <= slow[0][1] <= 0.6
    assert 0.7 <= slow[1][1] <= 0.9


def test_it_watches_again_after_a_pause():
    async def work(under_way):
        under_way.begin("first")
        under_way.end("first")
        await asyncio.sleep(5)
        under_way.begin("second")
        await asyncio.sleep(1)

    assert [one for one, _ in watch(work)] == ["second"]


def test_the_slow_take_no_place():
    async def work(under_way):
        for number in range(MAX_IN_FLIGHT):
            assert under_way.has_room
            under_way.begin(number)
        assert not under_way.has_room
        under_way.end(0)
        assert under_way.has_room
        under_way.begin("last")
        await asyncio.sleep(0.7)
        assert under_way.has_room

    assert len(watch(work)) == MAX_IN_FLIGHT


def test_waits_are_never_very_short_nor_long():
    async def work(under_way):
        under_way.begin("one")
        await asyncio.sleep(20)

    assert 0.1 <= watch(work, usual_s=0.0)[0][1] <= 0.2
    assert 1.0 <= watch(work, usual_s=30.0)[0][1] <= 1.6


def test_what_is_sent_when_another_is_slow_is_watched_too():
    told = []

    async def main():
        under_way = UnderWay(
            lambda: 0.4, lambda one: told.append(one) or (one < 3 and under_way.begin(one + 1))
        )
        under_way.begin(0)
        await asyncio.sleep(5)
        under_way.close()

    run_virtual(main())
    assert told == [0, 1, 2, 3]


def test_after_closing_nobody_is_told_of():
    async def work(under_way):
        under_way.begin("one")
        under_way.close()
        await asyncio.sleep(5)

    assert watch(work) == []
