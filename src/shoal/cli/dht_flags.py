"""Flags of `shoal bench dht`, by the names that the document's users type."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
    typer.Option(min=1, help="Processes that peers are spread over.", show_default="the cores"),
]
Expiration = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds that a record lives.", show_default="300")
]
WaitTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds after which a request has failed.", show_default="the DHT's own"),
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
    float | None, typer.Option(min=0, help="keys: seconds after each round.", show_default="0")
]
Latest = Annotated[
    bool | None,
    typer.Option(
        "--latest/--no-latest", help="keys: ask all replicas.", show_default="--latest; not with --num-keys"
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
