"""A process of `shoal bench dht` that hosts a share of the peers, and follows orders."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.bench.children import Parent
from shoal.bench.crew import serve
from shoal.bench.dht_hosting import Host, SocketGround
from shoal.core import LoopThread
from shoal.dht.settings import DHTSettings


def host(arguments: dict[str, Any], parent: Parent) -> None:
    """Host peers until there are no more orders."""
    ground = SocketGround(arguments["secret"])
    peers = Host(ground, dht_settings(arguments["wait_timeout_s"]), has_deaths=arguments["has_deaths"])
    with LoopThread() as loop, contextlib.ExitStack() as closing:
        closing.callback(lambda: loop.run(peers.close()))
        orders: dict[str, Callable[..., Any]] = {
            name: functools.partial(_run, loop, getattr(peers, name))
            for name in ("create", "declare", "fetch", "store", "get", "kill", "bury", "totals")
        }
        serve(parent, {**orders, "settle": settle, "memory": memory_bytes})


def _run(loop: LoopThread, order: Callable[..., Coroutine[Any, Any, Any]], **details: Any) -> Any:
    return loop.run(order(**details))


def dht_settings(wait_timeout_s: float | None) -> DHTSettings:
    """What the DHT ships with, but for the time after which a request has failed."""
    return DHTSettings() if wait_timeout_s is None else DHTSettings(call_s=wait_timeout_s)


def settle() -> None:
    """Peers have been made: hundreds of them are not garbage that is worth looking through again."""
    gc.collect()
    gc.freeze()


def memory_bytes() -> int:
    """Memory of this process: its proportional share (PSS) on Linux, else the most that it ever had (RSS)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    except (OSError, StopIteration):
        return _peak_rss_bytes()


def _peak_rss_bytes() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
