"""Flags of `shoal bench experts`; what is not given is the preset's."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

PRESET_DEFAULT = "the preset's"
Preset = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="default (also ffn_forward_backward), ffn_forward, ffn_small_batch, ffn_small_batch_512clients, "
        "ffn_small_batch_512clients_32handlers, ffn_massive, minimalistic or nop.",
    ),
]
NumExperts = Annotated[
    int | None, typer.Option(min=1, help="That the server serves.", show_default=PRESET_DEFAULT)
]
NumClients = Annotated[
    int | None,
    typer.Option(min=1, help="Each with a connection and a thread of its own.", show_default=PRESET_DEFAULT),
]
ClientProcesses = Annotated[
    int | None,
    typer.Option(min=1, help="That clients are spread over.", show_default="4 for each core, or the clients"),
]
NumBatches = Annotated[
    int | None, typer.Option("--num-batches-per-client", min=1, help="One after another.", show_default="16")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Samples of a client's call.", show_default=PRESET_DEFAULT)
]
MaxBatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples that the server computes at once.",
        show_default="the preset's; 4 times --batch-size",
    ),
]
HiddenDim = Annotated[int | None, typer.Option(min=1, help="Of a sample.", show_default="1024")]
ExpertClass = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="ffn, transformer, nop, …, or package.module:factory.",
        show_default=PRESET_DEFAULT,
    ),
]
Backward = Annotated[
    bool | None,
    typer.Option("--backward/--no-backward", help="Train, or only ask.", show_default=PRESET_DEFAULT),
]
NumHandlers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Network loop threads of the server.",
        show_default="the preset's, at most 8 and half the cores",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Of the server: cpu, cuda, cuda:1.", show_default="cuda where there is one")
]
Precision = Annotated[
    Literal["fp32", "tf32", "bf16"] | None,
    typer.Option(help="That the server computes in.", show_default="fp32"),
]
IncreaseFileLimit = Annotated[
    bool,
    typer.Option(
        "--increase-file-limit",
        help="Allow as many open sockets as clients need; ffn_massive does so anyway.",
    ),
]
