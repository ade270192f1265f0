"""A process of `shoal bench dht` that hosts a share of the peers, and follows orders."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.bench.dht_config import dht_settings
from shoal.bench.dht_grounds import SocketGround
from shoal.bench.dht_hosting import Host
from shoal.bench.workers import Parent, end_with_parent, serve
from shoal.core import LoopThread


def host(arguments: dict[str, Any], parent: Parent) -> None:
    """Host peers until there are no more orders."""
    end_with_parent()
    ground = SocketGround(arguments["secret"])
    peers = Host(ground, dht_settings(arguments["wait_timeout_s"]), has_deaths=arguments["has_deaths"])
    with LoopThread() as loop, contextlib.ExitStack() as closing:
        closing.callback(lambda: loop.run(peers.close()))
        orders: dict[str, Callable[..., Any]] = {
            name: functools.partial(_run, loop, getattr(peers, name))
            for name in (
                "create",
                "declare",
                "fetch",
                "store",
                "get",
                "kill",
                "bury",
                "round_trips",
                "totals",
            )
        }
        serve(parent, {**orders, "settle": settle, "memory": memory})


def _run(loop: LoopThread, order: Callable[..., Coroutine[Any, Any, Any]], **details: Any) -> Any:
    return loop.run(order(**details))


def settle() -> None:
    """Peers have been made: hundreds of them are not garbage that is worth looking through again."""
    gc.collect()
    gc.freeze()


def memory() -> tuple[int, int]:
    """Bytes of this process: its proportional share of memory (PSS) now, and the most that it ever had (RSS).

    Where the system tells no PSS, both are the RSS. Pages that processes share are in the RSS of each.
    """
    try:
        return _kibibytes("smaps_rollup", "Pss:") << 10, _kibibytes("status", "VmHWM:") << 10
    except (OSError, StopIteration):
        peak_bytes = _peak_rss_bytes()
        return peak_bytes, peak_bytes


def _kibibytes(file: str, field: str) -> int:
    lines = Path("/proc/self", file).read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _peak_rss_bytes() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
