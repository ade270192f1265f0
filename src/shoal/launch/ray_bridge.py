"""The process through which a head reaches Ray: `python -m shoal.launch.ray_bridge FD FD …`.

It has one actor placed for each worker and copies bytes between the actors and the sockets that it was given,
so that a head polls plain descriptors, and what Ray prints never comes between the lines of workers. When the
head closes a socket its agent ends; when all have ended, the bridge ends, and with it the Ray job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.launch.ray_link import Link
from shoal.launch.ray_placing import Placing
from shoal.launch.ray_reports import Place, Refusal, Report, Request, reason_of

_TICK_S = 0.5
_CONNECT_S = 5.0
_WAKE_BYTES = 4096


class Bridge:
    """Of one start."""

    def __init__(self, ray: Any, request: Request, report: Callable[[Report], None]) -> None:
        self._ray = ray
        self._request = request
        self._report = report
        self._wakes, self._wake_end = os.pipe()
        for end in (self._wakes, self._wake_end):
            os.set_blocking(end, False)

    def run(self, descriptors: list[int]) -> None:
        """Place the actors, start the agents, and copy until all have ended."""
        placing = Placing(
            self._ray, self._request, lambda text: self._report(Report(waiting=text)), _check_head
        )
        actors, places = placing.place()
        for descriptor in descriptors[len(actors) :]:
            os.close(descriptor)
        variables = [variables_of(place, places) for place in places]
        starts = [
            actor.start.remote(self._request.agent, own) for actor, own in zip(actors, variables, strict=True)
        ]
        self._ray.get(starts, timeout=self._request.start_timeout_s)
        self._report(Report(places=places))
        self._copy([Link(i, descriptors[i], actor, self._wake) for i, actor in enumerate(actors)])

    def _wake(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_end, b".")

    def _copy(self, links: list[Link]) -> None:
        while links:
            poll = select.poll()
            poll.register(self._wakes, select.POLLIN)
            for link in links:
                if link.events is not None:
                    poll.register(link.descriptor, link.events)
            ready = dict(poll.poll(_TICK_S * 1000))
            if self._wakes in ready:
                os.read(self._wakes, _WAKE_BYTES)
            for link in links:
                link.step(is_hung_up=bool(ready.get(link.descriptor, 0) & select.POLLHUP))
                if link.is_finished:
                    if link.why_lost:
                        self._report(Report(lost=link.index, what=link.why_lost))
                    link.close()
            links = [link for link in links if not link.is_finished]


def variables_of(place: Place, places: list[Place]) -> dict[str, str]:
    """As under other launchers, a worker sees its machine's GPUs; the one of its local rank is its own."""
    gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus))} if gpus else {}


def _check_head() -> None:
    if select.select([0], [], [], 0)[0]:
        raise SystemExit(0)


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise Refusal("Ray is not installed.", next_step="pip install 'shoal[ray]'") from None
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise Refusal(
            f"The Ray cluster {address} cannot be used: {reason_of(error)}.",
            "it does not run, this machine is none of its nodes, or Ray or Python is another version there.",
            "run it on a node of the cluster; `ray status` says whether this is one.",
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """Ray itself would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise Refusal(
            f"There is no Ray cluster at {address}: {error.strerror or error}.",
            "it does not run, or this is not its address.",
            "`ray start --head` starts one and says its address.",
        ) from None


def main(descriptors: list[int]) -> int:
    """Run until the head or all agents have gone."""
    reports = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no report

    def report(message: Report) -> None:
        with contextlib.suppress(OSError):  # the head has gone
            os.write(reports, msgspec.json.encode(message) + b"\n")

    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    try:
        ray = _connect(request.address)
        report(Report(is_connected=True))
        try:
            Bridge(ray, request, report).run(descriptors)
        finally:
            ray.shutdown()
    except Refusal as refusal:
        report(refusal.report)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
