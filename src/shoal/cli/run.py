"""`shoal run`: a program in several workers on this machine.

Exit codes: 0 done, by all workers or by those that could do without the others; the failing worker's own if
it is 1 to 125, else 1; 128 + N when a worker or the launcher got signal N; 124 after --timeout; 2 bad usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.core.run_options import RunOptions


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="x.py, python x.py, -m module, or any executable; all that follows is its own.",
            show_default=False,
        ),
    ],
    num_workers: Annotated[
        int | None,
        typer.Option("-np", "--np", metavar="N", help="Workers; by default one for each core."),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="PROGRAM is a module, as for python -m.")
    ] = False,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What shoal.from_args gives the program; all-reduce by default."),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who exchanges with whom: ring, exponential:3, …")
    ] = None,
    workers_per_machine: Annotated[
        int | None,
        typer.Option(metavar="K", help="Split this machine into machines of K workers."),
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps from one round to the next.")
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps over which the learning rate rises to its value.")
    ] = None,
    global_average_every: Annotated[
        int | None, typer.Option(metavar="N", help="Rounds between averages of the whole group.")
    ] = None,
    decay_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps after which the learning rate decays again.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(metavar="A", help="Of sma: how far to move toward the mean in a round.")
    ] = None,
    order: Annotated[
        str | None, typer.Option(metavar="NAME", help="adapt-then-combine or adapt-while-combine.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other option of the strategy; may be given often."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="End the whole run after so many seconds, exit 124.")
    ] = None,
    peer_timeout: Annotated[
        float | None, typer.Option(metavar="S", help="Wait no longer for a peer that is alive but not there.")
    ] = None,
    patience: Annotated[
        float, typer.Option(metavar="X", help="A peer that is silent for 5 s times X is lost.")
    ] = 1.0,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="OMP_NUM_THREADS of each worker; by default as it is set, else cores / workers."
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write all that rank R prints to DIR/rank-R.log."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace of every operation.")
    ] = None,
    no_prefix: Annotated[
        bool, typer.Option("--no-prefix", help="Print lines without their worker's rank.")
    ] = False,
) -> None:
    """Run a program in several workers on this machine, with torchrun's variables set.

    Lines come with their worker's rank before them. When a worker fails, its traceback is shown and the
    others are ended; under neighbor and pair they go on without it, and finishing is exit code 0.
    """
    from shoal.launch import LaunchSettings, Terminal, command_of, launch, num_cores, settle_own_streams
    from shoal.launch.choice import check_choice, parse_options

    settle_own_streams()
    named: dict[str, Any] = {
        "topology": topology,
        "local_steps": local_steps,
        "warmup_steps": warmup_steps,
        "global_average_every": global_average_every,
        "decay_every": decay_every,
        "alpha": alpha,
        "order": order,
    }
    options = parse_options(option or [])
    options.update({name: value for name, value in named.items() if value is not None})
    num_workers = num_cores() if num_workers is None else num_workers
    chosen, options = check_choice(strategy, options, num_workers, workers_per_machine)
    settings = LaunchSettings(
        command=command_of(program, is_module=is_module),
        num_workers=num_workers,
        options=RunOptions(
            strategy=chosen,
            options=options,
            workers_per_machine=workers_per_machine,
            patience=patience,
            timeout_s=peer_timeout,
            timeline=None if timeline is None else str(timeline.absolute()),
        ),
        num_threads=threads,
        timeout_s=timeout,
        log_dir=log_dir,
    )
    outcome = launch(settings, Terminal(has_prefix=not no_prefix))
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
