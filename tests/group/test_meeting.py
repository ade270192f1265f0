import concurrent.futures
import os
import socket
import uuid

import pytest

from shoal.core import Deadline, DeadlineExceeded, PeerLost, PeerRefused, UsageError
from shoal.group.meeting import Gift, Hello, _address, meet


@pytest.fixture
def key():
    return uuid.uuid4().hex


def attend(key, rank, size, said=None, timeout_s=5.0):
    bell = os.eventfd(0)
    gift = Gift([os.open(os.devnull, os.O_RDONLY)], [(0, 0, 1)]) if rank == 0 else None
    return meet(key, said or Hello(rank, size, 1000 + rank), bell, gift, Deadline.after(timeout_s))


def attend_all(key, *members):
    with concurrent.futures.ThreadPoolExecutor(len(members)) as threads:
        return [threads.submit(attend, key, *member) for member in members]


def test_everybody_learns_of_everybody(key):
    met = [future.result() for future in attend_all(key, (1, 3), (0, 3), (2, 3))]
    for one in met:
        assert one.pids == [1000, 1001, 1002]
        assert len(one.bells) == 3
        assert one.gift.places == [(0, 0, 1)]
        assert not any(os.get_inheritable(descriptor) for descriptor in one.bells)
    os.write(met[0].bells[2], (1).to_bytes(8, "little"))
    assert os.read(met[2].bells[1 + 1], 8) == (1).to_bytes(8, "little")


def test_who_does_not_come_is_named(key):
    with pytest.raises(DeadlineExceeded, match="1 of 3 workers have come; rank 1, 2 is missing"):
        attend(key, 0, 3, None, 0.05)
    with pytest.raises(DeadlineExceeded, match="rank 2 did not find rank 0"):
        attend(key, 2, 3, None, 0.05)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (Hello(1, 3, 1), "expects 3 workers"),
        (Hello(0, 2, 1), "two workers say that they are rank 0"),
        (Hello(1, 2, 1, protocol=99), "another version"),
    ],
)
def test_those_who_do_not_belong_are_refused_on_both_sides(key, said, complaint):
    host, guest = attend_all(key, (0, 2), (1, 2, said))
    for future in (host, guest):
        with pytest.raises(PeerRefused, match=complaint):
            future.result()


def test_two_hosts(key):
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(_address(key))
        with pytest.raises(UsageError, match="Two workers say that they are rank 0"):
            attend(key, 0, 2)


def test_a_host_that_ends_is_named(key):
    with socket.socket(socket.AF_UNIX) as host, concurrent.futures.ThreadPoolExecutor(1) as threads:
        host.bind(_address(key))
        host.listen()
        guest = threads.submit(attend, key, 1, 2)
        connection, _ = host.accept()
        connection.close()
        with pytest.raises(PeerLost, match="rank 0 ended"):
            guest.result()
