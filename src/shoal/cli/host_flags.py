"""Flags of all commands that reach other hosts by ssh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Hostfile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The same as lines: host slots=N, or host:N.")
]
SshPort = Annotated[
    int | None, typer.Option("-p", "--ssh-port", metavar="PORT", help="Of sshd on the other hosts.")
]
SshUser = Annotated[str | None, typer.Option(metavar="NAME", help="On the other hosts.")]
SshOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="As after ssh -o; may be given often.")
]
RemotePython = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="The interpreter on the other hosts; by default the same path."),
]
RemoteCwd = Annotated[
    str | None, typer.Option(metavar="DIR", help="The folder on the other hosts; by default the same.")
]
NetworkInterface = Annotated[
    str | None, typer.Option(metavar="NAME", help="Through which machines talk, as eth0.")
]
