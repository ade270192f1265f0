"""The pool of workers that other tests stand on: what they see when a worker fails."""

import os
import re
import signal

import pytest

from workers import WorkerFailure


def rank(group, arguments):
    print("this must not mix with what is answered")
    return [group.rank, arguments]


def divide(group, _):
    return 1 / 0


def die_or_hang(group, _):
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        group.progress()


def test_an_exception_comes_back_with_its_traceback(workers):
    with pytest.raises(WorkerFailure, match=r"(?s)rank 0 of 1 \(solo\): .*in divide.*ZeroDivisionError"):
        workers.run(divide, kind="solo")
    assert workers.run(rank, kind="solo", arguments={"x": 1}) == [[0, {"x": 1}]]


def test_workers_that_die_and_hang_are_named_and_replaced(workers):
    with pytest.raises(WorkerFailure) as raised:
        workers.run(die_or_hang, size=2, timeout_s=0.5)
    text = str(raised.value)
    assert re.search(r"rank 0 of 2 \(host\): its process \d+ ended with code -9", text)
    assert re.search(r"(?s)rank 1 of 2 \(host\): its process \d+ ended with code 1;.*in die_or_hang", text)
    assert workers.run(rank, size=2) == [[0, {}], [1, {}]]
