"""The machines of a run: `-H host1:4,host2:4` or a host file, and the ways to the agents on them.

A host that is this machine is reached without ssh. ssh asks nothing here (BatchMode): a key and a known host
are needed. Nothing secret is in arguments; the run secret goes through the agent's standard input.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import PeerRefused, PeerUnreachable, ShoalError, UsageError
from shoal.core.processes import is_own
from shoal.launch.head import AgentHandle, Engine
from shoal.launch.protocol import AGENT, PipeChannel
from shoal.report.units import counted

_ENTRY = re.compile(r"(?P<name>(?:[^@\s]+@)?(?:\[[^\]\s]+\]|[^:\[\]\s]+))(?::(?P<slots>\d+))?")
_LINE = re.compile(rf"{_ENTRY.pattern}(?:\s+slots\s*=\s*(?P<more>\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?")
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, and how many workers and servers it takes."""

    name: str
    """What ssh is given: a name, an address, or an alias of ~/.ssh/config; perhaps with `user@` before it."""
    slots: int = 1


@dataclass(frozen=True, slots=True)
class SshSettings:
    """Says how hosts are reached, and what is found there."""

    port: int | None = None
    user: str | None = None
    options: tuple[str, ...] = ()
    """Each as after `ssh -o`; they come before Shoal's own, so that they win."""
    remote_python: str | None = None
    """The interpreter there, by default at the path of this one."""
    remote_cwd: str | None = None
    """The folder there, by default at the path of this one."""
    connect_timeout_s: float = 30.0

    @property
    def python(self) -> str:
        """The interpreter of the agents there."""
        return self.remote_python or sys.executable


def parse_hosts(text: str) -> list[Host]:
    """Read 'host1:4,user@host2:4,[fe80::1]:2'; a host without a number has one slot."""
    step = "write -H host1:4,host2:4"
    return merge(_parse_host(_ENTRY, entry.strip(), f"-H {text}", step) for entry in text.split(","))


def read_hostfile(path: Path) -> list[Host]:
    """Read a host a line, 'host slots=4' or 'host:4'; what follows a # is a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The host file {path} cannot be read: {error}.", next_step="check --hostfile."
        ) from None
    told = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, start=1)}
    step = "write `host slots=4` or `host:4`, one a line."
    found = [
        _parse_host(_LINE, words, f"Line {number} of {path}", step) for number, words in told.items() if words
    ]
    if not found:
        raise UsageError(f"The host file {path} names no host.", next_step=step)
    return merge(found)


def _parse_host(pattern: re.Pattern[str], words: str, where: str, next_step: str) -> Host:
    match = pattern.fullmatch(words)
    if match is None:
        raise UsageError(f"{where}: {words or 'an empty place'} is no host.", next_step=next_step)
    own = match.groupdict()
    slots = int(own.get("more") or own["slots"] or 1)
    if slots < 1:
        raise UsageError(
            f"{where}: {own['name']} has no slots.", next_step="give it 1 or more, or leave it out."
        )
    return Host(own["name"], slots)


def merge(hosts: Iterable[Host]) -> list[Host]:
    """Give a host that is named twice the slots of both."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


@functools.cache
def is_here(name: str) -> bool:
    """Say whether a name stands for this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    if "@" in name:
        return False
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError:  # perhaps a name that only ssh knows
        return False
    return all(is_own(str(address[4][0])) for address in found)


def open_hosts(
    text: str | None, hostfile: Path | None, ssh: SshSettings, *, is_elastic: bool = False
) -> Hosts | None:
    """Return the hosts of -H or --hostfile, None without either; nothing is connected yet."""
    if text is not None and hostfile is not None:
        raise UsageError("-H and --hostfile are both given.", next_step="leave one of them out.")
    if hostfile is not None:
        return Hosts(read_hostfile(hostfile), ssh, hostfile, is_elastic=is_elastic)
    return None if text is None else Hosts(parse_hosts(text), ssh, is_elastic=is_elastic)


class Hosts(Engine):
    """Agents on hosts, reached by ssh or, on this machine, as a child process."""

    def __init__(
        self,
        hosts: list[Host],
        ssh: SshSettings,
        hostfile: Path | None = None,
        *,
        is_elastic: bool = False,
    ) -> None:
        self._is_elastic = is_elastic
        self._hosts = _join_here(hosts)
        self._ssh = ssh
        self._hostfile = hostfile

    @property
    def num_slots(self) -> int:
        """The slots of all hosts."""
        return sum(host.slots for host in self._hosts)

    @property
    def slots_of_first(self) -> int:
        """The number of workers that a machine usually has."""
        return self._hosts[0].slots

    @property
    def is_elsewhere(self) -> bool:
        """Whether another machine is needed."""
        return not all(is_here(host.name) for host in self._hosts)

    def check(self, num_workers: int, num_servers: int) -> None:
        """Raise a UsageError when there are too few slots for so many."""
        if num_workers + num_servers <= self.num_slots:
            return
        servers = f" and {counted(num_servers, 'server')}" if num_servers else ""
        named = ", ".join(f"{host.name}:{host.slots}" for host in self._hosts)
        fits = self.num_slots - num_servers
        raise UsageError(
            f"{num_workers} workers{servers} need more than the {self.num_slots} slots of {named}.",
            next_step=f"give {f'-np {fits}, or ' if fits > 0 else ''}more slots to the hosts.",
        )

    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[AgentHandle]:
        """Connect those that are needed when the number is fixed, else all, since some may not answer.

        An elastic run has use for all of them. A restart reads the host file again, so that hosts may come
        and go.
        """
        if is_restart and self._hostfile is not None:
            self._hosts = _join_here(read_hostfile(self._hostfile))
        self.check(min_processes, 0)
        hosts = self._hosts
        if not is_restart and not self._is_elastic and min_processes == max_processes:
            hosts = _first(hosts, max_processes)
        return [self._open(host) for host in hosts]

    def reopen(self, lost: AgentHandle) -> AgentHandle | None:
        """Connect a host of the list once more; None for one that has joined by itself."""
        host = next((host for host in self._hosts if host.name == lost.machine), None)
        return None if host is None else self._open(host)

    def _open(self, host: Host) -> AgentHandle:
        if is_here(host.name):
            # by which this user has logged in here is not how the other hosts come here
            environment = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
            local = PipeChannel(host.name, [sys.executable, *AGENT], environment)
            return AgentHandle(local, host.slots, host.name, has_own_disks=False)
        channel = open_ssh(host.name, self._ssh)
        return AgentHandle(channel, host.slots, host.name, cwd=self._ssh.remote_cwd)


def _first(hosts: list[Host], num_processes: int) -> list[Host]:
    """Return as many hosts as are needed."""
    needed: list[Host] = []
    for host in hosts:
        if sum(one.slots for one in needed) < num_processes:
            needed.append(host)
    return needed


def _join_here(hosts: list[Host]) -> list[Host]:
    """Join the names of this machine, which has one agent."""
    here = next((host.name for host in hosts if is_here(host.name)), "")
    return merge(Host(here if is_here(host.name) else host.name, host.slots) for host in hosts)


def ssh_command(host: str, settings: SshSettings) -> list[str]:
    """Return the command that starts an agent on that host."""
    options = [
        *settings.options,
        *("BatchMode=yes", f"ConnectTimeout={max(1, round(settings.connect_timeout_s))}"),
        *("ServerAliveInterval=1", "ServerAliveCountMax=5", "LogLevel=ERROR"),
        *("ForwardAgent=no", "ForwardX11=no", "RequestTTY=no"),
    ]
    path = os.environ.get("PYTHONPATH")
    agent = [*(["env", f"PYTHONPATH={path}"] if path else []), settings.python, *AGENT]
    # for whatever shell the user has there
    line = f"exec /bin/sh -c {shlex.quote('exec ' + shlex.join(agent))}"
    return [*_connection_words(options, settings), "--", host.replace("[", "").replace("]", ""), line]


def open_ssh(host: str, settings: SshSettings) -> PipeChannel:
    """Start an ssh that leads to an agent; UsageError where there is none."""
    if shutil.which("ssh") is None:
        raise UsageError(
            f"There is no ssh on this machine, by which {host} would be reached.",
            next_step="install the OpenSSH client, or start the program by torchrun on each machine.",
        )
    return PipeChannel(host, ssh_command(host, settings), explain=functools.partial(explain, settings))


def explain(settings: SshSettings, host: str, code: int | None, complaint: str) -> ShoalError:
    """Say what the end of an ssh means, and what to do."""
    try_it = shlex.join([*_connection_words(settings.options, settings), host])
    last = complaint.splitlines()[-1].rstrip(".") if complaint else f"ssh ended with exit code {code}"
    if code == _SSH_FAILED:
        return _connection_error(host, complaint, last, try_it)
    where, refused = f"{settings.python} on {host}", functools.partial(PeerRefused, peer=host)
    if code in _NOT_FOUND or re.search(r"not found|No such file", complaint):
        return refused(
            f"There is no Python at {where}.",
            cause="Shoal's environment lies elsewhere there.",
            next_step="name it by --remote-python, or install it at the same path.",
        )
    if re.search(r"No module named '?shoal\b|No module named '?msgspec\b", complaint):
        return refused(
            f"The Python at {where} has no Shoal: {last}.",
            next_step="install the same version there, or name another interpreter by --remote-python.",
        )
    if "unknown option" in complaint.lower():
        step = "name another interpreter by --remote-python."
        return refused(f"The Python at {where} is older than 3.11.", next_step=step)
    return refused(
        f"The agent on {host} has ended with exit code {code}: {last}.",
        cause="it was killed, or the memory of that machine is full.",
        next_step=f"look into the log of that machine: {try_it} dmesg",
    )


def _connection_error(host: str, complaint: str, last: str, try_it: str) -> ShoalError:
    for pattern, what, cause, next_step in (
        (
            r"Could not resolve|Name or service not known",
            "cannot be found: its name stands for no address",
            "a typing error, or a name that only another machine knows.",
            f"getent hosts {host}, or give its address to -H.",
        ),
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            "shows another host key than ~/.ssh/known_hosts has",
            "the machine was installed anew, or is another one.",
            f"when that is expected: ssh-keygen -R {host}, then {try_it} true",
        ),
        (
            r"Host key verification failed|host key is known",
            "is not known: ssh has never been told its host key",
            "nobody has logged in there from this machine yet.",
            f"{try_it} true, and compare the key that it shows; or ssh-keyscan {host} >> ~/.ssh/known_hosts",
        ),
        (
            r"Permission denied|Too many authentication failures|no matching",
            "lets nobody in without a password: it knows no ssh key of this user",
            "no key, a key that is not in ~/.ssh/authorized_keys there, or another user's name.",
            f"ssh-copy-id {host}; or --ssh-user NAME, --ssh-option IdentityFile=PATH. Then: {try_it} true",
        ),
        (
            r"Connection refused",
            "refuses the connection: no ssh server listens there",
            "sshd does not run, or listens on another port.",
            f"start sshd there, or give its port by --ssh-port; then {try_it} true",
        ),
        (
            r"timed out|No route to host|Network is unreachable|Timeout, server|unreachable",
            "cannot be reached",
            "the machine is down, its network is cut, or a firewall drops what is sent to it.",
            f"ping {host}, then {try_it} true",
        ),
    ):
        if re.search(pattern, complaint):
            return PeerUnreachable(f"{host} {what} ({last}).", peer=host, cause=cause, next_step=next_step)
    return PeerUnreachable(
        f"{host} cannot be reached by ssh: {last}.",
        peer=host,
        cause="the connection has ended; the machine is down, or somebody has ended sshd's session there.",
        next_step=f"{try_it} true",
    )


def _connection_words(options: Sequence[str], settings: SshSettings) -> list[str]:
    words = ["ssh", *(word for option in options for word in ("-o", option))]
    words += [] if settings.port is None else ["-p", str(settings.port)]
    return words + ([] if settings.user is None else ["-l", settings.user])
