"""The flags of all commands that reach other hosts by ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Hostfile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file with one host on each line: host slots=N, or host:N."),
]
SshPort = Annotated[
    int | None, typer.Option("-p", "--ssh-port", metavar="PORT", help="The port of sshd on the other hosts.")
]
SshUser = Annotated[str | None, typer.Option(metavar="NAME", help="The user name on the other hosts.")]
SshOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option for ssh -o. Can be repeated.")
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="The Python interpreter on the other hosts. Default: the same path as here."
    ),
]
RemoteCwd = Annotated[
    str | None, typer.Option(metavar="DIR", help="The folder on the other hosts. Default: the same as here.")
]
NetworkInterface = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The network interface between the machines, for example eth0."),
]
