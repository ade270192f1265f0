"""What every group promises, whatever lies between its members."""

import pytest

from contracts import group_checks as checks
from contracts import window_checks as windows
from contracts.groups import EVERY
from workers import WorkerFailure

BARE = ("solo", "host", "torch")
"""Those that wrap no other."""
every_group = pytest.mark.parametrize(("kind", "size"), EVERY)
several = pytest.mark.parametrize(("kind", "size"), [each for each in EVERY if each[1] > 1])


@every_group
def test_reductions(workers, kind, size):
    num_dtypes = len(checks.DTYPES) if kind in BARE else 1
    bits = workers.run(checks.reductions, size, {"num_dtypes": num_dtypes}, kind=kind)
    assert len(set(bits)) == 1


@every_group
def test_copies(workers, kind, size):
    workers.run(checks.copies, size, kind=kind)


@every_group
def test_exchanges(workers, kind, size):
    workers.run(checks.exchanges, size, kind=kind)


@every_group
def test_twins(workers, kind, size):
    for graph in ("one-peer", "directed") if kind in BARE else ("one-peer",):
        workers.run(checks.twins, size, {"graph": graph}, kind=kind)


@several
def test_machines(workers, kind, size):
    workers.run(checks.machines, size, kind=kind, settings={"workers_per_machine": 2})


@every_group
def test_one_sided(workers, kind, size):
    workers.run(checks.one_sided, size, kind=kind)


@several
def test_windows_without_slots_wait_for_nobody(workers, kind, size):
    workers.run(checks.unasked, size, kind=kind)


@every_group
def test_many_in_flight(workers, kind, size):
    workers.run(checks.in_flight, size, kind=kind)


@several
def test_workers_that_differ_are_told_who_called_what(workers, kind, size):
    if size == 2 and kind != "gloo":  # torch.distributed does not tell
        for text in workers.run(checks.mismatch, size, kind=kind):
            for word in ("rank 0", "all_reduce", "rank 1", "broadcast"):
                assert word in text


@several
def test_leaving(workers, kind, size):
    if size > 2:
        assert workers.run(checks.leaving, size, kind=kind) == [2] * (size - 1) + [1]


def test_metered_bytes_are_those_of_the_formula(workers):
    size, size_bytes = 3, 4004
    ring = 2 * (size - 1) * size_bytes // size
    for rank, counted in enumerate(workers.run(checks.metered, size, kind="metered")):
        is_root = rank == 1
        shared = counted.pop("all_gather")
        assert shared[0] == 2  # one by `share`, of a byte from each
        assert shared[1:] == [2 * 4 * (rank + 1) + 2, sum(4 * (r + 1) for r in range(3) if r != rank) + 2]
        assert counted == {
            "all_reduce": [1, ring, ring],
            "broadcast": [1, 2 * size_bytes, 0] if is_root else [1, 0, size_bytes],
            # with both others, with one, in a pair, and with all of its machine
            "exchange": [4, 6 * size_bytes, 6 * size_bytes],
            "empty": [1, 0, 0],
            "publish": [1, 0, 0],
            "barrier": [4, 0, 0],
            "fetch": [1, 0, 44],
            "window": [2, 0, 0],
            "put": [1, size_bytes, 0],
            "add": [1, size_bytes, 0],
            "send": [1, size_bytes, 0],
            "window_wait": [1, 0, 0],
            "read": [2, 0, 44],
            "changing": [1, 0, 0],
        }


# --- windows ---


@every_group
def test_windows(workers, kind, size):
    workers.run(windows.writes, size, kind=kind)


@every_group
def test_accumulated_mass_is_conserved(workers, kind, size):
    workers.run(windows.masses, size, {"num_turns": 30}, kind=kind)


@several
def test_letters_come_in_order_and_none_is_missed(workers, kind, size):
    workers.run(windows.letters, size, {"num_letters": 20}, kind=kind)


@several
def test_writes_wait_for_slots_that_are_held(workers, kind, size):
    workers.run(windows.pending, size, kind=kind)


@every_group
def test_a_mutex_has_one_holder(workers, kind, size):
    workers.run(windows.exclusion, size, {"num_turns": 10}, kind=kind)


@every_group
def test_copies_of_what_changes_are_whole(workers, kind, size):
    workers.run(windows.changes, size, {"num_elements": 100_003, "num_versions": 30}, kind=kind)


@several
def test_windows_outlive_who_leaves(workers, kind, size):
    workers.run(windows.departures, size, kind=kind)


@pytest.mark.parametrize(("kind", "size"), [("host", 3)])
def test_a_killed_worker_frees_what_it_holds(workers, kind, size):
    with pytest.raises(WorkerFailure) as failure:
        workers.run(windows.killed_holder, size, kind=kind)
    assert str(failure.value).count(f" of {size} ({kind})") == 1, failure.value
    assert f"rank {size - 1} of {size}" in str(failure.value)
