"""The strategy and options that a user asked for, checked before any worker starts, and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.strategies.names import resolve
from shoal.strategies.options import OPTIONS, read_options

DEFAULT_STRATEGY = "all-reduce"


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """`name=value` words as options; a value is a number or true and false where it reads as one."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--option {word} has no value.", next_step="write --option name=value.")
        try:
            options[name.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            options[name.strip()] = value
    return options


def check_choice(
    strategy: str | None, options: Mapping[str, Any], num_workers: int, workers_per_machine: int | None
) -> tuple[str | None, dict[str, Any]]:
    """The strategy's own name (None stays: the program chooses), and its options by their names in code."""
    if workers_per_machine is not None and workers_per_machine < 1:
        raise UsageError(
            f"Machines of {workers_per_machine} workers do no work.",
            next_step="give 1 or more as --workers-per-machine.",
        )
    name, implied = resolve(DEFAULT_STRATEGY if strategy is None else strategy)
    chosen = {**implied, **{key.replace("-", "_"): value for key, value in options.items()}}
    read_options(OPTIONS[name], chosen, name)
    if "topology" in chosen:
        from shoal.topology import make_topology

        local_size = workers_per_machine or num_workers
        if name == "hierarchical":
            make_topology(chosen["topology"], -(-num_workers // local_size))
        else:
            make_topology(chosen["topology"], num_workers, local_size)
    return (None if strategy is None else name), chosen
