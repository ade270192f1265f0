from shoal.strategies.staleness import MAX_EXACT, Staleness


def noted(*behind):
    staleness = Staleness()
    for each in behind:
        staleness.note(each)
    return staleness


def test_counts_are_exact_and_the_histogram_is_in_powers_of_two():
    staleness = noted(7, 5, 7, 0, 3, -4, None)
    assert staleness.counts == {-1: 1, 0: 1, 3: 1, 5: 1, 7: 2}
    assert staleness.histogram == {-1: 1, 0: 1, 2: 1, 4: 3}
    assert staleness.mean_behind == (7 + 5 + 7 + 3) / 6


def test_a_peer_that_stands_still_adds_no_more_numbers_in_the_end():
    staleness = noted(*range(MAX_EXACT, MAX_EXACT + 100))
    assert staleness.counts == {MAX_EXACT: 100}
    assert staleness.mean_behind == MAX_EXACT + 49.5


def test_a_state_keeps_them():
    staleness = Staleness()
    staleness.load_state_dict(noted(7, 5).state_dict())
    staleness.note(7)
    assert staleness.counts == {5: 1, 7: 2}
