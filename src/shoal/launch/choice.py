"""The strategy and options that a user asked for, checked before any worker starts, and without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.untrusted import decode_json
from shoal.strategies.names import resolve
from shoal.strategies.options import OPTIONS, read_options

DEFAULT_STRATEGY = "all-reduce"
ENGINES = ("ssh", "ray")


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """`name=value` words as options; a value is a number or true and false where it reads as one."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--option {word} has no value.", next_step="write --option name=value.")
        try:
            options[name.strip()] = decode_json(value)
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


def parse_variables(words: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` with the value that it has here."""
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"-x {word} names no variable.", next_step="write -x NAME or -x NAME=VALUE.")
        if not equals and name not in os.environ:
            raise UsageError(
                f"-x {name}: there is no such variable here.", next_step=f"write -x {name}=VALUE."
            )
        variables[name] = value if equals else os.environ[name]
    return variables


def check_engine(engine: str, address: str | None, hosts: object) -> None:
    """UsageError for an engine that is none, or flags that are another one's."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine}.", next_step=f"give one of {', '.join(ENGINES)}.")
    if engine == "ray" and hosts:
        raise UsageError(
            "Under --engine ray the cluster has the hosts.", next_step="leave -H and --hostfile out."
        )
    if engine != "ray" and address is not None:
        raise UsageError("--address is a Ray cluster's.", next_step="add --engine ray, or leave it out.")
