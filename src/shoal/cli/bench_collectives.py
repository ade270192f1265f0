"""`shoal bench collectives`: its flags made into what is measured, on one machine or between several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from shoal.cli import bench_hosts as there
from shoal.cli.bench_common import (
    Against,
    JsonFile,
    OneStart,
    Outputs,
    Quickly,
    ReportFile,
    Seed,
    run_and_tell,
    run_settings,
)
from shoal.cli.bench_trained import device_of
from shoal.cli.flags import listed, numbers
from shoal.core import UsageError

if TYPE_CHECKING:
    from shoal.bench.collectives import CollectivesConfig

_ENCRYPTED = {"both": (False, True), "no": (False,), "yes": (True,)}


@there.with_hosts(before="starts")
def collectives(
    context: typer.Context,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers", "--np", "-np", metavar="N,...", help="Numbers of workers.", show_default="2,4"
        ),
    ] = None,
    machines: Annotated[
        str | None,
        typer.Option(
            metavar="MxN,...",
            help="Between M machines of N workers each, into which this one is split: try 2x1,4x1,2x2.",
        ),
    ] = None,
    encrypted: Annotated[
        Literal["both", "yes", "no"] | None,
        typer.Option(
            help="Between machines: with encryption, without, or both in turn.", show_default="both"
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Between machines: links as slow as these, a preset's name or a TOML file."),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where tensors are; workers may share a GPU.")
    ] = "cpu",
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="Of each worker's tensor.",
            show_default="4KB,64KB,1MB,25MB,100MB; between machines without 64KB",
        ),
    ] = None,
    ops: Annotated[
        str | None,
        typer.Option(
            metavar="OP,...", help="Operations.", show_default="all of them; between machines all_reduce"
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of each kind in a start: of one call on a CPU, of 20 back to back on a GPU.",
            show_default="12 to 180, by size; 6 to 12 on a GPU",
        ),
    ] = None,
    starts: OneStart = 1,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Operations of a group in memory that workers share, or between machines, beside gloo's."""
    from shoal.bench.collectives import collectives_items, summarize_collectives

    config = _config(context.params)
    where = None
    if there.is_on_hosts(context.params):
        ((num_machines, num_workers),) = config.machines
        where = there.where_of(context.params, num_machines * num_workers)
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, collectives_items)
    run_and_tell("collectives", config, settings, summarize_collectives, outputs, against, where)


def _config(flags: Mapping[str, Any]) -> CollectivesConfig:
    from shoal.bench.collectives import BETWEEN_MACHINES, SHORT, CollectivesConfig, parse_size
    from shoal.transport import Profile

    if flags["profile"] is not None:
        Profile.load(flags["profile"])  # complains before anything is started
    config = SHORT if flags["short"] else CollectivesConfig()
    machines = _machines(flags)
    if machines is not None:
        sizes = SHORT.sizes if flags["short"] else BETWEEN_MACHINES.sizes
        config = msgspec.structs.replace(BETWEEN_MACHINES, sizes=sizes, repeats=config.repeats)
    workers, sizes, ops = flags["workers"], flags["sizes"], flags["ops"]
    given = {
        "workers": None if workers is None else tuple(numbers("--workers", workers)),
        "machines": machines,
        "encrypted": _ENCRYPTED.get(flags["encrypted"]),
        "profile": flags["profile"],
        "device": device_of(flags["device"]),
        "sizes": None if sizes is None else tuple(parse_size(size) for size in listed(sizes)),
        "ops": None if ops is None else tuple(op.replace("-", "_") for op in listed(ops)),
        "repeats": flags["repeats"],
    }
    return msgspec.structs.replace(
        config, **{name: value for name, value in given.items() if value is not None}
    )


def _machines(flags: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """Pairs of machines and workers on each, as asked for or as hosts have slots; None on one machine."""
    from shoal.bench.collectives import parse_machines

    machines = None if flags["machines"] is None else parse_machines(flags["machines"])
    if there.is_on_hosts(flags):
        named = _on_hosts(flags)
        if machines not in (None, named):
            raise UsageError(
                f"--machines {flags['machines']} is not what the hosts are.",
                next_step="leave --machines out.",
            )
        machines = named
    if machines is not None and flags["workers"] is not None:
        raise UsageError(
            "--workers is of one machine, and several are to be measured.",
            next_step="leave it out: --machines 2x4 is 2 machines of 4 workers.",
        )
    return machines


def _on_hosts(flags: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The machines that were named; the workers see whether all have as many of them as the first."""
    num_slots, mates = there.workers_of(None, flags, 0), there.mates_of(flags)
    if mates is None:
        raise UsageError(
            "The hosts are this machine alone.", next_step="split it: --machines 2x1, without hosts."
        )
    if num_slots % mates or num_slots == mates:
        raise UsageError(
            f"The first host has {mates} workers, and all have {num_slots}: those are no equal machines.",
            next_step="name 2 or more with as many workers each: -H host1:2,host2:2.",
        )
    return ((num_slots // mates, mates),)
