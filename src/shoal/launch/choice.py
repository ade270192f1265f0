"""The strategy and options that a user asked for, checked before any worker starts, and without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.untrusted import decode_json
from shoal.strategies.options import read_options
from shoal.strategies.registry import BUILT_IN, DEFAULT, canonical, find

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
    """The strategy's own name (None stays: the program chooses), and its options by their names in code.

    UsageError for a name or an option that is none. Of a strategy from outside Shoal the workers check both.
    """
    if workers_per_machine is not None and workers_per_machine < 1:
        raise UsageError(
            f"Machines of {workers_per_machine} workers do no work.",
            next_step="give 1 or more as --workers-per-machine.",
        )
    asked = DEFAULT if strategy is None else strategy
    name = canonical(asked)
    given = {key.replace("-", "_"): value for key, value in options.items()}
    if name not in BUILT_IN:
        # The class from outside would be imported here, and torch with it, and it may lie beside the program
        # or on another machine, where workers alone find it: they check its options when they make it.
        return name, given
    info, implied = find(asked)
    chosen = {**implied, **given}
    read_options(info.options, chosen, name)
    if "topology" in chosen:
        from shoal.topology import make_topology

        local_size = workers_per_machine or num_workers
        if info.needs_machines:
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
