import pytest

from shoal.bench.training import Block, StrategyBlocks, strategy_rows, total_speed


def by_key(rows):
    names = ("strategy", "rank", "waited_for")
    return {(row.metric, *(row.key[name] for name in names if name in row.key)): row for row in rows}


def blocks(*times_s):
    return [Block(list(times)) for times in times_s]


def test_the_speed_of_a_block_is_the_sum_over_its_workers():
    assert total_speed(blocks([0.5, 0.5], [0.25, 0.25]), batch_size=10) == pytest.approx(20 + 40)


def test_fractions_are_of_neighbours_in_time():
    lane = StrategyBlocks(
        blocks=[blocks([2.0], [2.0]), blocks([1.0], [1.0])],
        ceilings=[blocks([1.0], [1.0]), blocks([1.0], [0.5])],
        evens=[blocks([1.0], [1.0]), blocks([1.0], [0.5])],
    )
    rows = by_key(strategy_rows("sma", lane, batch_size=4))
    assert rows["fraction_of_ceiling", "sma"].samples == pytest.approx([0.5, 2 / 3])
    assert rows["fraction_of_own_speed", "sma", 0].samples == [0.5, 1.0]
    assert rows["fraction_of_own_speed", "sma", 1].samples == [0.5, 0.5]
    assert rows["examples_per_s_per_worker", "sma", 1].samples == [2.0, 4.0]
    assert rows["seconds_per_iteration", "sma", 1].samples == [2.0, 1.0]
    assert not [key for key in rows if key[0] == "waited"]


def test_waits_are_by_who_waited_and_for_whom():
    first = [Block([1.0], [0.0, 0.7, 0.1]), Block([1.0], [0.2, 0.0, 0.0]), Block([1.0], [0.0, 0.4, 0.0])]
    rows = by_key(strategy_rows("sma", StrategyBlocks([first, first], [first, first]), batch_size=4))
    assert {key[2:]: row.samples[0] for key, row in rows.items() if key[0] == "waited"} == {
        (0, 1): 0.7,
        (0, 2): 0.1,
        (1, 0): 0.2,
        (1, 2): 0.0,
        (2, 0): 0.0,
        (2, 1): 0.4,
    }
    assert rows["waited", "sma", 0, 1].samples == [0.7, 0.7]


def test_what_failed_is_a_row_with_its_error():
    (row,) = strategy_rows("sma", StrategyBlocks(error="it broke"), batch_size=4)
    assert (row.metric, row.key, row.error) == ("examples_per_s", {"strategy": "sma"}, "it broke")
