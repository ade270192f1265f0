"""`shoal run`: a program in several workers, on this machine or on several.

Exit codes: 0 done, by all workers or by those that could do without lost ones; the failing worker's own if
it is 1 to 125, else 1; 128 + N when a worker or the launcher got signal N; 124 after --timeout; 2 bad usage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
from shoal.core.run_options import Env, RunOptions


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
        typer.Option("-np", "--np", metavar="N", help="Workers; by default one for each core or slot."),
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
        typer.Option(metavar="K", help="Split each machine into machines of K workers."),
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
    on_nonfinite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="At a NaN or an infinity: warn (by default), skip, or stop."),
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
    allow_split: Annotated[
        bool,
        typer.Option(
            "--allow-split", help="Let each side of a cut network go on, not only the larger; models differ."
        ),
    ] = False,
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
    hosts: Annotated[
        str | None,
        typer.Option("-H", "--hosts", metavar="HOST:N,…", help="Machines, and how many workers each takes."),
    ] = None,
    hostfile: Hostfile = None,
    num_servers: Annotated[
        int, typer.Option(metavar="S", help="Parameter servers besides the workers: the first S ranks.")
    ] = 0,
    network_interface: NetworkInterface = None,
    ssh_port: SshPort = None,
    ssh_user: SshUser = None,
    ssh_option: SshOption = None,
    remote_python: RemotePython = None,
    remote_cwd: RemoteCwd = None,
    variable: Annotated[
        list[str] | None,
        typer.Option("-x", metavar="NAME[=VALUE]", help="A variable for all workers; may be given often."),
    ] = None,
    start_timeout: Annotated[float, typer.Option(metavar="S", help="For the other hosts to answer.")] = 30.0,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", help="Start anew so often when a worker or a host fails.")
    ] = 0,
    min_np: Annotated[
        int | None, typer.Option(metavar="N", help="Start with fewer hosts if so many workers fit; -np.")
    ] = None,
    max_np: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many workers in a restart; -np.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where strategies save, and resume from.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="N", help="Steps from one saving to the next.")
    ] = None,
    allow_failures: Annotated[
        bool,
        typer.Option(
            "--allow-failures",
            help="Where workers go on without a lost one: also without one that raises or exits with a code.",
        ),
    ] = False,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="ssh, or ray: workers as actors on a Ray cluster.")
    ] = "ssh",
    env: Annotated[
        Env,
        typer.Option(
            help="Variables that tell workers their place: SHOAL_RANK and the like alone, or torchrun's too, "
            "for programs that bring up torch.distributed themselves."
        ),
    ] = "shoal",
    address: Annotated[
        str | None, typer.Option(metavar="ADDR", help="Of the Ray cluster; RAY_ADDRESS, or this machine's.")
    ] = None,
) -> None:
    """Run a program in several workers, on this machine or on others.

    Lines come with their worker's rank before them. When a worker raises, its traceback is shown, the others
    are ended, and the exit code is that worker's. When one is lost (killed by a signal, or with its machine),
    the run ends, too; under neighbor, pair, window, push-sum, local-sgd, diloco and other strategies that
    outlive a loss the rest go on without it, and finishing is exit code 0. Other hosts are reached by ssh,
    with a key; they need the same Python, Shoal and program at the same paths.
    """
    from shoal.launch import (
        Elastic,
        LaunchSettings,
        Terminal,
        command_of,
        launch,
        num_cores,
        settle_own_streams,
    )
    from shoal.launch.choice import check_choice, check_engine, parse_options, parse_variables
    from shoal.launch.hosts import open_hosts
    from shoal.launch.ssh import SshSettings

    settle_own_streams()
    check_engine(engine, address, hosts or hostfile)
    ssh = SshSettings(ssh_port, ssh_user, tuple(ssh_option or ()), remote_python, remote_cwd, start_timeout)
    machines = open_hosts(hosts, hostfile, ssh)
    named: dict[str, Any] = {
        "topology": topology,
        "local_steps": local_steps,
        "warmup_steps": warmup_steps,
        "global_average_every": global_average_every,
        "decay_every": decay_every,
        "alpha": alpha,
        "order": order,
        "on_nonfinite": on_nonfinite,
    }
    options = parse_options(option or [])
    options.update({name: value for name, value in named.items() if value is not None})
    if num_workers is None:
        num_workers = num_cores() if machines is None else machines.num_slots - num_servers
    if machines is not None:
        machines.check(min_np or num_workers, num_servers)
    local_size = machines.slots_of_first if workers_per_machine is None and machines else workers_per_machine
    chosen, options = check_choice(strategy, options, num_workers, local_size)
    settings = LaunchSettings(
        command=command_of(program, is_module=is_module),
        num_workers=num_workers,
        options=RunOptions(
            strategy=chosen,
            options=options,
            workers_per_machine=workers_per_machine,
            patience=patience,
            timeout_s=peer_timeout,
            allow_split=allow_split,
            timeline=None if timeline is None else str(timeline.absolute()),
            num_servers=num_servers,
            network_interface=network_interface,
            checkpoint=None if checkpoint is None else str(checkpoint.absolute()),
            checkpoint_every=checkpoint_every,
        ),
        num_threads=threads,
        timeout_s=timeout,
        log_dir=log_dir,
        variables=parse_variables(variable or []),
        allows_failures=allow_failures,
        elastic=Elastic(max_restarts, min_np, max_np),
        env=env,
    )
    output = Terminal(has_prefix=not no_prefix)
    if engine == "ray":
        from shoal.launch.ray_engine import RaySettings, run_on_ray

        outcome = run_on_ray(settings, address, output, RaySettings(start_timeout_s=start_timeout))
    else:
        is_elsewhere = machines is not None and machines.is_elsewhere
        outcome = launch(settings, output, machines if is_elsewhere else None, start_timeout)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
