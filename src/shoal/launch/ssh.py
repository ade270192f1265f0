"""The way to an agent on another machine: the ssh command, and what its errors mean.

ssh asks nothing here (BatchMode): a key and a known host are needed. Nothing secret is in arguments; the run
secret goes through the agent's standard input.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.errors import PeerRefused, PeerUnreachable, ShoalError, UsageError
from shoal.launch.protocol import AGENT, PipeChannel

_SSH_FAILED = 255
_NOT_FOUND = (126, 127)


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


def ssh_command(host: str, settings: SshSettings) -> list[str]:
    """Return the command that starts an agent on that host."""
    options = [
        *settings.options,
        "BatchMode=yes",
        f"ConnectTimeout={max(1, round(settings.connect_timeout_s))}",
        "ServerAliveInterval=1",
        "ServerAliveCountMax=5",
        "LogLevel=ERROR",
        "ForwardAgent=no",
        "ForwardX11=no",
        "RequestTTY=no",
    ]
    words = _connection_words(options, settings)
    return [*words, "--", host.replace("[", "").replace("]", ""), _agent_line(settings)]


def _agent_line(settings: SshSettings) -> str:
    """Return a command line for whatever shell the user has there."""
    python = [settings.remote_python or sys.executable, *AGENT]
    path = os.environ.get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}", *python] if path else python
    return f"exec /bin/sh -c {shlex.quote('exec ' + shlex.join(words))}"


class SshChannel(PipeChannel):
    """An ssh that leads to an agent."""

    def __init__(self, host: str, settings: SshSettings) -> None:
        if shutil.which("ssh") is None:
            raise UsageError(
                f"There is no ssh on this machine, by which {host} would be reached.",
                next_step="install the OpenSSH client, or start the program by torchrun on each machine.",
            )
        self._settings = settings
        super().__init__(host, ssh_command(host, settings))

    def explain(self) -> ShoalError:
        """Say it by ssh's exit code and words."""
        code, complaint = self.last_words()
        return explain(self.host, code, complaint, self._settings)


def explain(host: str, code: int | None, complaint: str, settings: SshSettings) -> ShoalError:
    """Say what the end of an ssh means, and what to do."""
    try_it = shlex.join([*_connection_words(settings.options, settings), host])
    last = complaint.splitlines()[-1].rstrip(".") if complaint else f"ssh ended with exit code {code}"
    if code == _SSH_FAILED:
        return _connection_error(host, complaint, last, try_it)
    python = settings.remote_python or sys.executable
    if code in _NOT_FOUND or re.search(r"not found|No such file", complaint):
        return PeerRefused(
            f"There is no Python at {python} on {host}.",
            peer=host,
            cause="Shoal's environment lies elsewhere there.",
            next_step="name it by --remote-python, or install it at the same path.",
        )
    if re.search(r"No module named '?shoal\b|No module named '?msgspec\b", complaint):
        return PeerRefused(
            f"The Python at {python} on {host} has no Shoal: {last}.",
            peer=host,
            next_step="install the same version there, or name another interpreter by --remote-python.",
        )
    if "unknown option" in complaint.lower():
        return PeerRefused(
            f"The Python at {python} on {host} is older than 3.11.",
            peer=host,
            next_step="name another interpreter by --remote-python.",
        )
    return PeerRefused(
        f"The agent on {host} has ended with exit code {code}: {last}.",
        peer=host,
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
