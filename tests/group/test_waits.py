"""That a worker which waits for long is heard of while it does, and for whom it waits."""

import pytest

from group.clusters import open_cluster
from group.hosts import open_hosts
from shoal.group import Metered


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("shoal.group.base.WAIT_HEARD_EVERY_S", 0.0)


def ranks_heard(waiting, late):
    """Which ranks one group says that it waits for, in a barrier to which another comes once it is heard."""
    heard, came = [], []

    def hear(rank):
        heard.append(rank)
        if rank == late.rank and not came:
            came.append(late.barrier())

    # strategies see a group through wrappers
    Metered(waiting).on_wait.append(hear)
    waiting.barrier().wait()
    came[0].wait()
    return heard


def test_of_one_machine_the_other_is_named():
    with open_hosts(2) as groups:
        assert ranks_heard(*groups)[0] == 1


@pytest.mark.parametrize("machines", [[[0], [1]], [[0, 1]]])
def test_so_it_is_between_machines_and_inside_one_of_several(machines):
    with open_cluster([*machines]) as groups:
        assert 1 in ranks_heard(*groups)
