"""Where the workers of a benchmark run: flags for other hosts, and what a launcher has started already."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.host_flags import (
    Hostfile,
    NetworkInterface,
    RemoteCwd,
    RemotePython,
    SshOption,
    SshPort,
    SshUser,
)
from shoal.core import Placement, UsageError
from shoal.core.run_options import RunOptions

if TYPE_CHECKING:
    from shoal.bench.ranks import OnHosts

Hosts = Annotated[
    str | None,
    typer.Option("-H", "--hosts", metavar="HOST:N,…", help="Machines for the workers, reached by ssh."),
]
FLAGS: dict[str, Any] = {
    "hosts": Hosts,
    "hostfile": Hostfile,
    "ssh_port": SshPort,
    "ssh_user": SshUser,
    "ssh_option": SshOption,
    "remote_python": RemotePython,
    "remote_cwd": RemoteCwd,
    "network_interface": NetworkInterface,
}
Command = Callable[..., None]
_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def with_hosts(*, before: str) -> Callable[[Command], Command]:
    """Give a command the flags for hosts, in front of its own parameter `before`.

    They are in the context's `params`, as `where_of` and the others take them, and not arguments.
    """

    def extend(command: Command) -> Command:
        @functools.wraps(command)
        def extended(**named: Any) -> None:
            command(**{name: value for name, value in named.items() if name not in FLAGS})

        own = inspect.signature(command, eval_str=True).parameters
        flags = [
            inspect.Parameter(name, _KIND, default=None, annotation=kind) for name, kind in FLAGS.items()
        ]
        place = list(own).index(before)
        parameters = [*own.values()]
        parameters[place:place] = flags
        # typer takes types from the annotations, and all else from the signature
        extended.__annotations__ = {each.name: each.annotation for each in parameters}
        extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return extended

    return extend


def launched_size() -> int | None:
    """How many processes a launcher has started of this one's kind; None when it is alone."""
    size = Placement.from_environment().size
    return size if size > 1 else None


def is_on_hosts(flags: Mapping[str, Any]) -> bool:
    """Whether hosts were named."""
    return not (flags["hosts"] is flags["hostfile"] is None)


def workers_of(num_workers: int | None, flags: Mapping[str, Any], default: int) -> int:
    """As many as was asked for, as a launcher has started, as the hosts have slots, or else the default."""
    launched = launched_size()
    if launched is not None and num_workers not in (None, launched):
        raise UsageError(
            f"--np {num_workers} is not the {launched} processes that the launcher has started.",
            next_step="leave --np out.",
        )
    if num_workers is not None or launched is not None:
        return num_workers or launched or default
    hosts = _hosts(flags)
    return default if hosts is None else hosts.num_slots


def mates_of(flags: Mapping[str, Any]) -> int | None:
    """How many workers a machine has where there are several; None on this one alone."""
    if launched_size() is not None:
        placed = Placement.from_environment()
        return placed.local_size if placed.local_size < placed.size else None
    hosts = _hosts(flags)
    return None if hosts is None or not hosts.is_elsewhere else int(hosts.slots_of_first)


def where_of(flags: Mapping[str, Any], num_workers: int) -> OnHosts | None:
    """How to start the workers on the hosts that were named; None where they run here."""
    hosts = _hosts(flags)
    if hosts is None or not hosts.is_elsewhere:
        return None
    from shoal.bench.ranks import OnHosts
    from shoal.launch import LaunchSettings, command_of

    if launched_size() is not None:
        raise UsageError("A launcher has started this, and -H starts it again.", next_step="leave -H out.")
    hosts.check(num_workers, 0)
    options = RunOptions(network_interface=flags.get("network_interface"))
    return OnHosts(
        hosts, LaunchSettings(command_of(["shoal.bench.ranks"], is_module=True), num_workers, options)
    )


def _hosts(flags: Mapping[str, Any]) -> Any:
    from shoal.launch.hosts import SshSettings, open_hosts

    named = flags.get("hosts"), flags.get("hostfile")
    if named == (None, None):
        return None
    ssh = SshSettings(
        flags.get("ssh_port"),
        flags.get("ssh_user"),
        tuple(flags.get("ssh_option") or ()),
        flags.get("remote_python"),
        flags.get("remote_cwd"),
    )
    return open_hosts(*named, ssh)
