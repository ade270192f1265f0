import concurrent.futures
import contextlib
import errno
import gc
import os
import socket
import uuid
from pathlib import Path

import pytest

from shoal.core import Deadline, DeadlineExceeded, LimitExceeded, PeerLost, PeerRefused, UsageError
from shoal.core.processes import own_socket_address
from shoal.group.host import meeting
from shoal.group.host.meeting import (
    MAX_WORKERS,
    Failed,
    JoinRequest,
    MeetingWelcome,
    SharedFiles,
    meet,
    receive,
    send,
)
from shoal.group.host.memory import MemoryRange


@pytest.fixture
def key():
    return uuid.uuid4().hex


@contextlib.contextmanager
def things(rank):
    """The writing end of a pipe, and what rank 0 has to give; closed again."""
    pipe = os.eventfd(0)
    files = [os.open(os.devnull, os.O_RDONLY)] if rank == 0 else []
    try:
        yield pipe, SharedFiles(files, [MemoryRange(0, 0, 1)]) if rank == 0 else None
    finally:
        for descriptor in (pipe, *files):
            os.close(descriptor)


def attend(key, rank, size, said=None, timeout_s=5.0):
    with things(rank) as (pipe, shared):
        met = meet(key, said or JoinRequest(rank, size, 1000 + rank), pipe, shared, Deadline.after(timeout_s))
        if rank == 0:  # its own are not given back to it: the test wants to keep them
            met = MeetingWelcome(
                met.pids,
                [os.dup(pipe), *met.pipes[1:]],
                SharedFiles([os.dup(shared.files[0])], shared.places),
            )
        return met


def attend_all(key, *members):
    with concurrent.futures.ThreadPoolExecutor(len(members)) as threads:
        return [threads.submit(attend, key, *member) for member in members]


def num_open():
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture
def nothing_stays_open():
    gc.collect()  # what earlier tests have left to the collector is not this one's
    before = num_open()
    yield
    assert num_open() == before


@contextlib.contextmanager
def guest_of(key, said=None, size=2):
    """Rank 0 in another thread, and a connection to it on which nothing or `said` was said."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads, things(1) as (pipe, _):
        host = threads.submit(attend, key, 0, size)
        with socket.socket(socket.AF_UNIX) as guest:
            while guest.connect_ex(own_socket_address(key)):
                assert not host.done()
            if said is not None:
                send(guest, said, [pipe])
            yield guest, host


def test_everybody_learns_of_everybody(key, nothing_stays_open):
    met = [future.result() for future in attend_all(key, (1, 3), (0, 3), (2, 3))]
    for one in met:
        assert one.pids == [1000, 1001, 1002]
        assert len(one.pipes) == 3
        assert one.shared.places == [MemoryRange(0, 0, 1)]
        assert not any(os.get_inheritable(descriptor) for descriptor in one.pipes)
    os.write(met[0].pipes[2], (1).to_bytes(8, "little"))
    assert os.read(met[2].pipes[1 + 1], 8) == (1).to_bytes(8, "little")
    for descriptor in [descriptor for one in met for descriptor in one.pipes + one.shared.files]:
        os.close(descriptor)


def test_who_does_not_come_is_named(key):
    with pytest.raises(DeadlineExceeded, match="1 of 3 workers have come; rank 1, 2 is missing"):
        attend(key, 0, 3, None, 0.05)
    with pytest.raises(DeadlineExceeded, match="rank 2 did not find rank 0"):
        attend(key, 2, 3, None, 0.05)


def test_a_long_wait_says_whom_it_is_for(key, monkeypatch, caplog):
    monkeypatch.setattr("shoal.group.base.LINE_EVERY_S", 0.02)
    attend_all(key, (0, 3, None, 0.1), (1, 3, None, 0.1))
    assert "waiting for rank 2 to come, 0 s" in caplog.text
    assert "waiting for the other workers to come; rank 0 knows which, 0 s" in caplog.text
    with pytest.raises(DeadlineExceeded):
        attend(key, 1, 3, None, 0.1)
    assert "waiting for rank 0 to come, 0 s" in caplog.text


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (JoinRequest(1, 3, 1), "expects 3 workers"),
        (JoinRequest(0, 2, 1), "two workers say that they are rank 0"),
        (JoinRequest(1, 2, 1, protocol=99), "another version"),
    ],
)
def test_those_who_do_not_belong_are_refused_on_both_sides(key, said, complaint, nothing_stays_open):
    host, guest = attend_all(key, (0, 2), (1, 2, said))
    for future in (host, guest):
        with pytest.raises(PeerRefused, match=complaint):
            future.result()


def test_two_hosts(key):
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(own_socket_address(key))
        with pytest.raises(UsageError, match=r"Another process holds the socket of this run(.|\n)*rank 0"):
            attend(key, 0, 2)


def test_a_host_that_ends_is_named(key):
    with socket.socket(socket.AF_UNIX) as host, concurrent.futures.ThreadPoolExecutor(1) as threads:
        host.bind(own_socket_address(key))
        host.listen()
        guest = threads.submit(attend, key, 1, 2)
        connection, _ = host.accept()
        connection.close()
        with pytest.raises(PeerLost, match="rank 0 ended"):
            guest.result()


def test_a_host_of_another_user_is_not_told_anything(key, monkeypatch):
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(own_socket_address(key))
        host.listen()
        monkeypatch.setattr(meeting, "is_own_user", lambda other: False)
        with pytest.raises(PeerRefused, match="another user"):
            attend(key, 1, 2)


def test_one_that_ends_before_it_says_who_it_is_has_not_come(key):
    with guest_of(key) as (guest, host):
        guest.close()
        attend(key, 1, 2)
        assert host.result().pids == [1000, 1001]


def test_one_that_comes_and_ends_is_named_at_once_to_all(key, nothing_stays_open):
    with guest_of(key, JoinRequest(1, 4, 1), size=4) as (guest, host), things(2) as (pipe, _):
        with socket.socket(socket.AF_UNIX) as another, contextlib.ExitStack() as received:
            another.connect(own_socket_address(key))
            send(another, JoinRequest(2, 4, 1), [pipe])
            guest.close()
            with pytest.raises(PeerLost, match="rank 1 ended while the group was made"):
                host.result()
            with contextlib.suppress(ConnectionError, EOFError):  # it may have come too late to be told
                assert receive(another, Failed, received)[0].lost == 1


def test_one_that_speaks_otherwise_is_refused(key, nothing_stays_open):
    with guest_of(key, "what is this?") as (guest, host), contextlib.ExitStack() as received:
        with pytest.raises(PeerRefused, match="another version"):
            host.result()
        assert "another version" in receive(guest, Failed, received)[0].what


def test_one_that_ends_instead_of_answering_is_named(key, nothing_stays_open):
    with guest_of(key, JoinRequest(1, 2, 1)) as (guest, host), contextlib.ExitStack() as received:
        receive(guest, MeetingWelcome, received)
        guest.close()
        with pytest.raises(PeerLost, match="rank 1 ended while the group was made"):
            host.result()


def test_a_host_without_room_for_more_files_names_the_limit(key, nothing_stays_open, monkeypatch):
    def accept(listener):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", accept)
    with guest_of(key, size=2) as (_, host), pytest.raises(LimitExceeded, match="ulimit -n"):
        host.result()


def test_a_guest_without_room_for_more_files_names_the_limit(key, nothing_stays_open):
    """The kernel drops the descriptors that a process may not hold."""
    with socket.socket(socket.AF_UNIX) as host, concurrent.futures.ThreadPoolExecutor(1) as threads:
        host.bind(own_socket_address(key))
        host.listen()
        joining = threads.submit(attend, key, 1, 2)
        guest, _ = host.accept()
        with guest, contextlib.ExitStack() as received:
            _, pipes = receive(guest, JoinRequest, received)
            send(guest, MeetingWelcome([0, 1], [0, 1], SharedFiles([2], [])), pipes)
            with pytest.raises(LimitExceeded, match=r"rank 1 (.|\n)*ulimit -n"):
                joining.result()


def test_more_than_descriptors_can_be_passed_to_are_refused_beforehand(key):
    with pytest.raises(UsageError, match=f"{MAX_WORKERS + 1} workers on one machine"):
        attend(key, 0, MAX_WORKERS + 1)
