"""Workers see each other alone, and everybody beside."""

import contextlib

import pytest
import torch

from group.hosts import open_hosts, together
from shoal.core import UsageError
from shoal.group import SoloGroup
from shoal.group.opening import WithServers, check_servers


@contextlib.contextmanager
def open_with_server():
    """One server and two workers."""
    with open_hosts(3) as everybody, open_hosts(2) as workers:
        inner = [SoloGroup(), *workers]
        yield [WithServers(*groups, 1) for groups in zip(inner, everybody, strict=True)]


def test_workers_count_themselves_alone():
    with open_with_server() as groups:
        _server, *workers = groups
        assert [(group.role, group.rank, group.size) for group in groups] == [
            ("server", 0, 1),
            ("worker", 0, 2),
            ("worker", 1, 2),
        ]
        assert [group.everybody.rank for group in groups] == [0, 1, 2]
        assert all(group.num_servers == 1 for group in groups)
        sums = together(workers, lambda group: group.all_reduce(torch.ones(1), "sum").wait().item())
        assert sums == [2.0, 2.0]
        everybody = [group.everybody for group in groups]
        sums = together(everybody, lambda group: group.all_reduce(torch.ones(1), "sum").wait().item())
        assert sums == [3.0, 3.0, 3.0]


def test_a_worker_that_leaves_leaves_both():
    with open_with_server() as (server, first, second):
        second.leave()
        assert list(first.members) == [0]
        assert list(server.everybody.members) == [0, 1]
        first.close()
        assert list(server.everybody.members) == [0]


@pytest.mark.parametrize(("num_servers", "size"), [(1, 1), (3, 2), (-1, 2)])
def test_some_must_work(num_servers, size):
    with pytest.raises(UsageError):
        check_servers(num_servers, size)
