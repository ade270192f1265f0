"""Flags of `shoal bench dht`, by the names that the document's users type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

Mode = Annotated[
    Literal["experts", "keys"] | None,
    typer.Option(
        help="Declare and look up experts, or store and get keys while peers die.",
        show_default="experts; keys with --virtual",
    ),
]
NumPeers = Annotated[
    int | None,
    typer.Option(min=2, help="Peers in the swarm.", show_default="32, keys: 16, --virtual: 1000"),
]
InitialPeers = Annotated[
    int | None, typer.Option(min=1, help="Peers that a new one joins by.", show_default="1, keys: 4")
]
NumProcesses = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes that peers are spread over; experts: and one for the two that ask (8 peers or more).",
        show_default="the cores",
    ),
]
Expiration = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds that a record lives, a week at most.", show_default="300"),
]
WaitTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.001, help="Seconds after which a request has failed.", show_default="3, the DHT's own"
    ),
]
IncreaseFileLimit = Annotated[
    bool, typer.Option("--increase-file-limit", help="Allow as many open sockets as the peers need.")
]
NumExperts = Annotated[int | None, typer.Option(min=1, help="experts: drawn at random.", show_default="256")]
ExpertBatchSize = Annotated[int | None, typer.Option(min=1, help="experts: at once.", show_default="32")]
WaitAfterRequest = Annotated[
    float | None, typer.Option(min=0, help="experts: seconds after each declared batch.", show_default="0")
]
WaitBeforeRead = Annotated[
    float | None, typer.Option(min=0, help="experts: seconds before the look-ups.", show_default="0")
]
NumKeys = Annotated[
    int | None,
    typer.Option(
        min=1, help="keys: store so many, then kill, then get all; instead of rounds.", show_default=False
    ),
]
TotalNumRounds = Annotated[
    int | None,
    typer.Option(
        min=1, help="keys: one key each, stored and got; peers die along the way.", show_default="16"
    ),
]
NumStorePeers = Annotated[
    int | None,
    typer.Option(min=1, help="keys: store a subkey each.", show_default="8; 1 with --num-keys"),
]
NumGetPeers = Annotated[
    int | None, typer.Option(min=1, help="keys: get each key.", show_default="8; 1 with --num-keys")
]
NumThreads = Annotated[int | None, typer.Option(min=1, help="keys: keys at once.", show_default="10")]
FailureRate = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="keys: share of peers that is killed.", show_default="0.1; --virtual: 0"),
]
Delay = Annotated[
    float | None, typer.Option(min=0, help="keys: seconds between store and get.", show_default="0")
]
WaitAfterIteration = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="keys: seconds of rest after each --num-threads rounds, before the next are stored.",
        show_default="0",
    ),
]
Latest = Annotated[
    bool | None,
    typer.Option(
        "--latest/--no-latest",
        help="keys: ask all replicas; also --latest true, --latest false.",
        show_default="--latest; not with --num-keys",
    ),
]
IsVirtual = Annotated[bool, typer.Option("--virtual", help="In virtual time, on simulated links.")]
NetworkProfile = Annotated[
    str | None,
    typer.Option(help="--virtual: the network, a preset's name or a TOML file.", show_default="wan"),
]
Seed = Annotated[
    int, typer.Option("--seed", "--random-seed", help="Of the first start; each further one adds 1.")
]


class DhtCommand(TyperCommand):
    """A command whose `--latest` may be followed by true or false."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As any command's."""
        return super().parse_args(ctx, with_bare_latest(args))


def with_bare_latest(arguments: Sequence[str]) -> list[str]:
    """The same, with `--latest True` and `--latest=False` as the flags that they mean."""
    bare: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if bare and bare[-1] == "--latest" and argument.lower() in _LATEST:
            bare[-1] = _LATEST[argument.lower()]
        elif name == "--latest" and value.lower() in _LATEST:
            bare.append(_LATEST[value.lower()])
        else:
            bare.append(argument)
    return bare


_LATEST = {"true": "--latest", "false": "--no-latest"}
