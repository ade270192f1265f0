"""`shoal run` starts a program in several workers, on this machine or on several.

Exit codes: 0 if all workers are done, or all that survived a lost worker; the code of the worker that failed
if it is 1 to 125, otherwise 1; 128 + N if signal N ended a worker or the launcher; 124 after --timeout; 2 for
wrong usage.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shoal.cli.flags import assignments, parameter_of, with_flags, with_parameters
from shoal.cli.output import say
from shoal.core import Address, UsageError
from shoal.core.run_options import (
    AllReduceChoice,
    EncryptChoice,
    Env,
    Flag,
    Hostfile,
    NetworkInterface,
    OptionInfo,
    RemoteCwd,
    RemotePython,
    RunOptions,
    SshOption,
    SshPort,
    SshUser,
    flag,
)
from shoal.core.untrusted import decode_json
from shoal.report.tables import emit
from shoal.report.units import counted
from shoal.strategies.options import describe_options, read_options
from shoal.strategies.registry import BUILT_IN, DEFAULT, canonical, find

if TYPE_CHECKING:
    from shoal.transport import SwarmSecret

STRATEGY_FLAGS = (
    *("topology", "local_steps", "warmup_steps", "global_average_every", "decay_every", "alpha", "order"),
    "on_nonfinite",
)
"""Options of strategies that are asked for so often that they have flags; --option gives all others."""
_METAVARS = {"int": "N", "float": "X"}
_MOST_NAMED = 2
_ENGINES = ("ssh", "ray")


def _strategy_flag(name: str) -> inspect.Parameter:
    """Make a flag of an option: its type and help stand in the struct of the first strategy that has it."""
    having = [row for row in BUILT_IN.values() if name in row.options.__struct_fields__]
    option = next(each for each in describe_options(having[0].options) if each.name == name)
    whose = f"For {' and '.join(row.name for row in having)}: " if len(having) <= _MOST_NAMED else ""
    choices = f" ({option.kind.replace('|', ', ')})" if option.choices else ""
    text = f"{whose}{option.description}{choices}."
    kind = {"int": int, "float": float}.get(option.kind, str)
    said = OptionInfo(name, kind, None, text[:1].upper() + text[1:])
    return parameter_of(said, Flag(metavar=_METAVARS.get(option.kind, "NAME")))


def _with_strategy_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the flags, after --strategy; it gets those that were given among its keyword arguments."""
    own = [one for one in inspect.signature(verb, eval_str=True).parameters.values() if one.name != "named"]
    place = 1 + [one.name for one in own].index("strategy")
    own[place:place] = map(_strategy_flag, STRATEGY_FLAGS)
    return with_parameters(verb, own)


@with_flags
@_with_strategy_flags
def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM",
            help="x.py, python x.py, -m module, or any executable. All arguments after it go to the program.",
            show_default=False,
        ),
    ] = None,
    num_workers: Annotated[
        int | None, flag("Number of workers. Default: one for each core or slot.", "-np", "--np", metavar="N")
    ] = None,
    is_module: Annotated[bool, flag("PROGRAM is a module, as in python -m.", "-m", "--module")] = False,
    strategy: Annotated[
        str | None,
        flag(
            "The strategy that shoal.from_args() makes; your own is package.module:Class or file.py:Class. "
            "Default: all-reduce.",
            metavar="NAME",
        ),
    ] = None,
    workers_per_machine: Annotated[
        int | None, flag("Split each machine into several machines of K workers.", metavar="K")
    ] = None,
    option: Annotated[
        list[str] | None, flag("Any other option of the strategy. Can be repeated.", metavar="NAME=VALUE")
    ] = None,
    timeout: Annotated[
        float | None, flag("End the whole run after S seconds, with exit code 124.", metavar="S")
    ] = None,
    peer_timeout: Annotated[
        float | None,
        flag("Wait at most S seconds for a worker that is alive but late. Default: no limit.", metavar="S"),
    ] = None,
    patience: Annotated[
        float, flag("A worker without a heartbeat for X times 5 s counts as lost.", metavar="X")
    ] = 1.0,
    allow_split: Annotated[
        bool,
        flag("After a network cut let every side go on, not only the larger one. The models then differ."),
    ] = False,
    threads: Annotated[
        int | None,
        flag(
            "OMP_NUM_THREADS of each worker. Default: the value in your shell, or cores / workers.",
            metavar="N",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None, flag("Also write the output of rank R to DIR/rank-R.log.", metavar="DIR")
    ] = None,
    timeline: Annotated[Path | None, flag("Write a Chrome trace of all operations.", metavar="FILE")] = None,
    no_prefix: Annotated[bool, flag("Print lines without the rank in front.")] = False,
    hosts: Annotated[
        str | None,
        flag("The machines, and the number of workers on each.", "-H", "--hosts", metavar="HOST:N,…"),
    ] = None,
    hostfile: Hostfile = None,
    num_servers: Annotated[
        int,
        flag(
            "Number of parameter servers, in addition to the workers. They get the first S ranks.",
            metavar="S",
        ),
    ] = 0,
    network_interface: NetworkInterface = None,
    encrypt: Annotated[
        bool,
        flag(
            "Encrypt the tensors that machines send each other. Default: encrypt them unless all "
            "machines are in one private network."
        ),
    ] = False,
    plain: Annotated[
        bool,
        flag(
            "Do not encrypt the tensors that machines send each other. That is faster, but others on "
            "the network can read and change them."
        ),
    ] = False,
    all_reduce: Annotated[
        AllReduceChoice,
        flag(
            "How the machines add up their tensors: around a ring, or each directly with all others. "
            "auto chooses."
        ),
    ] = "auto",
    ssh_port: SshPort = None,
    ssh_user: SshUser = None,
    ssh_option: SshOption = None,
    remote_python: RemotePython = None,
    remote_cwd: RemoteCwd = None,
    variable: Annotated[
        list[str] | None,
        flag("An environment variable for all workers. Can be repeated.", "-x", metavar="NAME[=VALUE]"),
    ] = None,
    start_timeout: Annotated[
        float, flag("Wait S seconds for the other hosts to answer.", metavar="S")
    ] = 30.0,
    elastic: Annotated[
        bool,
        flag(
            "Let workers come and go while the run trains, without a restart: `shoal scale` changes "
            "their number, and the others go on after a loss under every strategy."
        ),
    ] = False,
    join: Annotated[
        str | None,
        flag(
            "Give this machine to a run with --elastic, for -np workers of it, and start no other "
            "run. JOB is its name on this machine, as `shoal top` shows it, or HOST:PORT of its launcher.",
            metavar="JOB",
        ),
    ] = None,
    elastic_port: Annotated[
        int | None,
        flag(
            "With --elastic: other machines join at this port. 0 takes a free one. Without a "
            "secret, only this machine can join.",
            ge=0,
            le=65535,
            metavar="PORT",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        flag(
            "A secret of `shoal keys secret`: with --elastic, machines that have it may join; with "
            "--join, that of the run. Default: SHOAL_SECRET.",
            metavar="FILE",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        flag(
            "Restart at most N times when a worker or a host fails. With --elastic: replace at most N "
            "lost workers.",
            metavar="N",
        ),
    ] = 0,
    min_np: Annotated[
        int | None,
        flag(
            "Start without missing hosts if at least N workers fit. Default: -np. With --elastic: wait "
            "when fewer than N workers are left. Default: 1.",
            metavar="N",
        ),
    ] = None,
    max_np: Annotated[
        int | None,
        flag(
            "A restart has at most N workers. Default: -np. "
            "With --elastic: the most workers at any time. Default: one for each core or slot.",
            metavar="N",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, flag("Save checkpoints in DIR, and resume from them.", metavar="DIR")
    ] = None,
    checkpoint_every: Annotated[int | None, flag("Save a checkpoint every N steps.", metavar="N")] = None,
    track: Annotated[
        str | None,
        flag(
            "Log to tensorboard, wandb, mlflow, or your own class as package.module:Class or file.py:Class. "
            "Default of DIR: shoal-tracked.",
            metavar="NAME[=DIR]",
        ),
    ] = None,
    allow_failures: Annotated[
        bool,
        flag(
            "If the strategy survives a lost worker: go on also without a worker that raises or exits "
            "with an error code."
        ),
    ] = False,
    engine: Annotated[
        str, flag("ssh, or ray to run the workers as actors on a Ray cluster.", metavar="NAME")
    ] = "ssh",
    env: Annotated[
        Env,
        flag(
            "Environment variables that workers see: only Shoal's (SHOAL_RANK, …), or also torchrun's, "
            "for programs that start torch.distributed themselves."
        ),
    ] = "shoal",
    address: Annotated[
        str | None,
        flag(
            "Address of the Ray cluster. Default: RAY_ADDRESS, or the cluster of this machine.",
            metavar="ADDR",
        ),
    ] = None,
    **named: Any,
) -> None:
    """Run a program in several workers, on this machine or on others.

    Each line that a worker prints has its rank in front. When a worker raises an exception, shoal run shows
    its traceback, ends the other workers, and exits with the exit code of that worker.

    When a worker is lost (a signal kills it, or its machine fails), the run ends, too. Under strategies that
    survive a lost worker (neighbor, pair, window, push-sum, local-sgd, diloco and others) the other workers
    go on, and the exit code is 0 when they finish.

    shoal run reaches other hosts by ssh, with a key. They need the same Python, Shoal and program at the same
    paths.
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
    from shoal.launch.head import Engine, LocalEngine
    from shoal.launch.hosts import SshSettings, open_hosts

    settle_own_streams()
    if join is not None:
        _join(join, num_workers or num_cores(), secret_file, program)
        return
    if elastic_port is not None and not elastic:
        raise UsageError("--elastic-port is for runs with --elastic.", next_step="add --elastic.")
    check_engine(engine, address, hosts or hostfile)
    ssh = SshSettings(ssh_port, ssh_user, tuple(ssh_option or ()), remote_python, remote_cwd, start_timeout)
    machines = open_hosts(hosts, hostfile, ssh, is_elastic=elastic)
    options = parse_options(option or [])
    options.update({name: value for name, value in named.items() if value is not None})
    if num_workers is None:
        num_workers = num_cores() if machines is None else machines.num_slots - num_servers
    if machines is not None:
        machines.check(min_np or num_workers, num_servers)
    if elastic:
        check_elastic(strategy, env)
        min_np = min_np or 1
    local_size = machines.slots_of_first if workers_per_machine is None and machines else workers_per_machine
    chosen, options = check_choice(strategy, options, num_workers, local_size)
    settings = LaunchSettings(
        command=command_of(program or (), is_module=is_module),
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
            encrypt=_encrypt_choice(encrypt=encrypt, plain=plain),
            all_reduce=all_reduce,
            checkpoint=None if checkpoint is None else str(checkpoint.absolute()),
            checkpoint_every=checkpoint_every,
            track=_tracked(track),
        ),
        num_threads=threads,
        timeout_s=timeout,
        log_dir=log_dir,
        variables=parse_variables(variable or []),
        allows_failures=allow_failures,
        elastic=Elastic(
            max_restarts, min_np, max_np, elastic, _secret_of(secret_file) if elastic else None, elastic_port
        ),
        env=env,
    )
    if machines is None and engine != "ray" and num_workers > (num_here := num_cores()):
        emit(f"shoal run: {num_workers} workers share {counted(num_here, 'core')}.", sys.stderr)
    output = Terminal(has_prefix=not no_prefix)
    if engine == "ray":
        from shoal.launch.ray_engine import run_on_ray

        outcome = run_on_ray(settings, address, output, start_timeout)
    else:
        source: Engine | None = machines
        if machines is None or not machines.is_elsewhere:
            num_slots = num_cores() if machines is None else machines.num_slots
            most = num_servers + (max_np or max(num_workers, num_slots))
            source = LocalEngine(most) if elastic else None
        outcome = launch(settings, output, source, start_timeout)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` words; a value is a number or true and false where it reads as one."""
    options: dict[str, Any] = {}
    for name, value in assignments(words).items():
        try:
            options[name] = decode_json(value)
        except msgspec.DecodeError:
            options[name] = value
    return options


def check_choice(
    strategy: str | None, options: Mapping[str, Any], num_workers: int, workers_per_machine: int | None
) -> tuple[str | None, dict[str, Any]]:
    """Return the strategy's own name (None: the program chooses), and its options by their names in code.

    UsageError for a name or an option that is none. Of a strategy from outside Shoal the workers check both.
    """
    if workers_per_machine is not None and workers_per_machine < 1:
        raise UsageError(
            f"Machines of {workers_per_machine} workers do no work.",
            next_step="give 1 or more as --workers-per-machine.",
        )
    asked = DEFAULT if strategy is None else strategy
    name = canonical(asked)
    given = {key.replace("-", "_"): value for key, value in options.items()}
    if name not in BUILT_IN:
        # The class from outside would be imported here, and torch with it, and it may lie beside the program
        # or on another machine, where workers alone find it: they check its options when they make it.
        return name, given
    info, implied = find(asked)
    chosen = {**implied, **given}
    read_options(info.options, chosen, name)
    if "topology" in chosen:
        from shoal.topology import make_topology

        local_size = workers_per_machine or num_workers
        if info.needs_machines:
            make_topology(chosen["topology"], -(-num_workers // local_size))
        else:
            make_topology(chosen["topology"], num_workers, local_size)
    return (None if strategy is None else name), chosen


def parse_variables(words: Iterable[str]) -> dict[str, str]:
    """Read words of the form `NAME=VALUE`, or `NAME` for the value that it has here."""
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"-x {word} names no variable.", next_step="write -x NAME or -x NAME=VALUE.")
        if not equals and name not in os.environ:
            raise UsageError(
                f"-x {name}: there is no such variable here.", next_step=f"write -x {name}=VALUE."
            )
        variables[name] = value if equals else os.environ[name]
    return variables


def check_engine(engine: str, address: str | None, hosts: object) -> None:
    """Raise a UsageError for an engine that is none, or flags that are another one's."""
    if engine not in _ENGINES:
        raise UsageError(f"There is no engine {engine}.", next_step=f"give one of {', '.join(_ENGINES)}.")
    if engine == "ray" and hosts:
        raise UsageError(
            "Under --engine ray the cluster has the hosts.", next_step="leave -H and --hostfile out."
        )
    if engine != "ray" and address is not None:
        raise UsageError("--address is a Ray cluster's.", next_step="add --engine ray, or leave it out.")


def check_elastic(strategy: str | None, env: Env) -> None:
    """Raise UsageError for what does not go together with --elastic."""
    name = "" if strategy is None else find(strategy)[0].name
    if name == "swarm":
        raise UsageError(
            "Under swarm peers come and go without --elastic.",
            next_step="leave --elastic out, and start more with --option join=HOST:PORT.",
        )
    if name in ("ddp", "horovod"):
        raise UsageError(
            f"{name} cannot change its number of workers while it trains.",
            next_step="take all-reduce, which computes the same, or leave --elastic out.",
        )
    if env == "torchrun":
        raise UsageError(
            "--env torchrun and --elastic do not go together.",
            cause="torchrun's variables say how many workers there are, which changes.",
            next_step="leave one of them out.",
        )


def _secret_of(path: Path | None) -> SwarmSecret | None:
    """Read the secret that was given, by file or by environment, if any."""
    from shoal.transport import SwarmSecret

    return SwarmSecret.from_environment() if path is None else SwarmSecret.load(path)


def _join(job: str, num_slots: int, secret_file: Path | None, program: list[str] | None) -> None:
    """Be a machine of another run until it, or the user, ends that."""
    from shoal.launch.joining import join_run
    from shoal.launch.live import ask_launcher
    from shoal.transport import SwarmSecret

    if program:
        raise UsageError(
            f"--join {job} starts no program of its own.",
            cause="workers run that of the run which they join.",
            next_step=f"leave {program[0]} out; start in the folder where that program lies.",
        )
    secret = _secret_of(secret_file)
    if ":" in job:
        address = Address.parse(job)
    else:
        answer = ask_launcher(job)
        if not answer.is_done:
            raise UsageError(answer.what, next_step="`shoal top` shows the runs of this machine.")
        address = Address.parse(answer.address)
        secret = SwarmSecret.parse(answer.secret) if answer.secret else secret
    if secret is None:
        raise UsageError(
            f"Without its secret nobody joins the run at {address}.",
            next_step="copy the file that the run was started with, and give it as --secret-file.",
        )
    say(f"joins the run at {address} with {num_slots} slots; Ctrl-C lets its workers leave.")
    join_run(address, secret, num_slots)
    say("has left the run, or the run is over.")


def _encrypt_choice(*, encrypt: bool, plain: bool) -> EncryptChoice:
    """Read two flags that exclude each other."""
    if encrypt and plain:
        raise UsageError(
            "--encrypt and --plain exclude each other.",
            cause="one encrypts the tensors between machines, the other does not.",
            next_step="choose one of them, or leave both out: then Shoal decides by the network.",
        )
    return "always" if encrypt else "never" if plain else "auto"


def scale(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The name of the run, as `shoal top` shows it.")],
    size: Annotated[int, typer.Argument(metavar="N", min=1, help="How many workers it should have.")],
) -> None:
    """Change the number of workers of a run that was started on this machine with --elastic.

    New workers join between two steps, with the model as it is by then. Of workers that leave the newest go
    first, and end with exit code 0.
    """
    from shoal.launch.live import ask_launcher

    answer = ask_launcher(job, size)
    if not answer.is_done:
        raise UsageError(answer.what, next_step="`shoal top` shows the workers of the run.")
    typer.echo(answer.what)


def _tracked(track: str | None) -> str | None:
    """What workers are told of --track, with a whole path: they may be started elsewhere."""
    if track is None:
        return None
    from shoal.integrations.trackers import DEFAULT_FOLDER, check_name

    name, _, folder = track.partition("=")
    check_name(name)
    return f"{name}={Path(folder or DEFAULT_FOLDER).absolute()}"
