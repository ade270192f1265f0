"""Host groups whose members all live in this process: each is asked in turn, none of them waits alone."""

import concurrent.futures
import contextlib
import itertools
import os

from shoal.core import Placement
from shoal.group import GroupSettings, open_host_group

_numbers = itertools.count()


@contextlib.contextmanager
def open_hosts(size, **settings):
    key = f"test {os.getpid()} {next(_numbers)}"
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(size) as threads:
        opening = [
            threads.submit(open_member, rank, size, GroupSettings(key=key, **settings))
            for rank in range(size)
        ]
        groups = [future.result(30) for future in opening]
        for group in groups:
            stack.callback(group.close)
        yield groups


def open_member(rank, size, settings):
    return open_host_group(Placement(rank, size, rank, size, "test"), settings)


def together(groups, work):
    """Do the same on all members at once; results by rank, the first error raised."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as threads:
        return [future.result(30) for future in [threads.submit(work, group) for group in groups]]


def finish(handles):
    """Let all members do their part; the results, errors as values."""
    waiting = list(handles)
    while waiting:
        waiting = [handle for handle in waiting if not handle.is_done()]
    results = []
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:  # noqa: BLE001
            results.append(error)
    return results
