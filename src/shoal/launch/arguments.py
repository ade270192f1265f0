"""What a user asks for on the command line, checked before any worker starts, and without torch."""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.run_options import Env
from shoal.core.untrusted import decode_json
from shoal.strategies.options import read_options
from shoal.strategies.registry import BUILT_IN, DEFAULT, canonical, find

ENGINES = ("ssh", "ray")


def command_of(words: Sequence[str], *, is_module: bool = False) -> tuple[str, ...]:
    """Return the command of `x.py args`, `python x.py args` or another program; `is_module`: `python -m`.

    A plain `python` is the interpreter that runs Shoal: in another one workers would not find it.
    """
    if not words:
        raise UsageError("There is no program to run.", next_step="shoal run -np 2 train.py")
    first, *arguments = words
    if is_module:
        _require_module(first)
        return (sys.executable, "-m", *words)
    if first in ("python", "python3"):
        _require_what_python_runs(arguments)
        return (sys.executable, *arguments)
    path = Path(first)
    if path.suffix == ".py" or (path / "__main__.py").is_file():
        _require_file(first)
        return (sys.executable, *words)
    found = shutil.which(first)
    if found is None:
        raise UsageError(
            f"There is no program {first} in {Path.cwd()} or on the path.",
            cause="a typing error, another working folder, or a file that may not be executed.",
            next_step="name a Python file (x.py), `python x.py`, `-m module`, or an executable.",
        )
    if re.fullmatch(r"python[\d.]*", Path(found).name):
        _require_what_python_runs(arguments)
    return tuple(words)


def _require_what_python_runs(arguments: Sequence[str]) -> None:
    """Check what comes first; where that is an option of Python, it is Python's to understand."""
    if not arguments:
        raise UsageError("python alone is no program to run.", next_step="shoal run -np 2 python train.py")
    if arguments[0] == "-m" and len(arguments) > 1:
        _require_module(arguments[1])
    elif not arguments[0].startswith("-"):
        _require_file(arguments[0])


def _require_file(name: str) -> None:
    if not Path(name).exists():
        raise UsageError(
            f"There is no file {name} in {Path.cwd()}.",
            cause="a typing error, or another working folder.",
            next_step="give the path of the program.",
        )


def _require_module(name: str) -> None:
    """Look without importing: the packages on the way may take seconds, or expect to be workers."""
    places: Sequence[str] | None = None
    known = ""
    for part in name.split("."):
        full_name = f"{known}.{part}" if known else part
        spec = _find(full_name, places)
        if spec is None:
            raise UsageError(
                f"There is no module {full_name}.",
                cause=f"a typing error, another working folder than {Path.cwd()}, or it is not installed.",
                next_step="give the name that `python -m` takes, or the path of a file without -m.",
            )
        known, places = full_name, spec.submodule_search_locations
    if places is not None and _find(f"{name}.__main__", places) is None:
        raise UsageError(
            f"{name} is a package without __main__.py, which cannot be run.",
            next_step="name one of its modules.",
        )


def _find(name: str, places: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    if places is None:
        here = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        if here is not None:
            return here
    for finder in sys.meta_path:  # not PathFinder alone: packages installed as editable have their own
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return None


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` words; a value is a number or true and false where it reads as one."""
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
    """Return the strategy's own name (None: the program chooses), and its options by their names in code.

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
    """Read words of the form `NAME=VALUE`, or `NAME` for the value that it has here."""
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
    """Raise a UsageError for an engine that is none, or flags that are another one's."""
    if engine not in ENGINES:
        raise UsageError(f"There is no engine {engine}.", next_step=f"give one of {', '.join(ENGINES)}.")
    if engine == "ray" and hosts:
        raise UsageError(
            "Under --engine ray the cluster has the hosts.", next_step="leave -H and --hostfile out."
        )
    if engine != "ray" and address is not None:
        raise UsageError("--address is a Ray cluster's.", next_step="add --engine ray, or leave it out.")


def check_elastic(strategy: str | None, env: Env) -> None:
    """Raise UsageError for what does not go together with --elastic."""
    name = "" if strategy is None else find(strategy)[0].name
    if name == "swarm":
        raise UsageError(
            "Under swarm peers come and go without --elastic.",
            next_step="leave --elastic out, and start more with --option join=HOST:PORT.",
        )
    if name in ("ddp", "horovod"):
        raise UsageError(
            f"{name} cannot change its number of workers while it trains.",
            next_step="take all-reduce, which computes the same, or leave --elastic out.",
        )
    if env == "torchrun":
        raise UsageError(
            "--env torchrun and --elastic do not go together.",
            cause="torchrun's variables say how many workers there are, which changes.",
            next_step="leave one of them out.",
        )
