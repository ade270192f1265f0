"""`shoal bench`: run a benchmark, save its report, print its figures.

Commands with many flags have files of their own; what they do is the room `bench`'s.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from shoal.bench import training_by_hand
from shoal.bench.accuracy import AccuracyFlags, accuracy_config, fetch_data
from shoal.bench.collectives import (
    CollectivesFlags,
    collectives_config,
    collectives_items,
    summarize_collectives,
)
from shoal.bench.convergence import (
    ConvergenceFlags,
    ConvergenceRunFlags,
    check_memory,
    convergence_config,
    convergence_items,
    free_bytes,
    memory_text,
    summarize_convergence,
)
from shoal.bench.ddp import (
    DdpFlags,
    DdpRunFlags,
    ddp_config,
    ddp_items,
    encode_ddp,
    summarize_ddp,
    take_part,
)
from shoal.bench.dht import DhtFlags, DhtRunFlags
from shoal.bench.dht import config_of as dht_config
from shoal.bench.experts import ExpertsFlags, ensure_files, experts_items, preset_named, summarize_experts
from shoal.bench.experts import config_of as experts_config
from shoal.bench.frame import RunFlags
from shoal.bench.latency import (
    LatencyFlags,
    check_machine,
    latency_config,
    latency_items,
    summarize_latency,
    waiting_text,
)
from shoal.bench.ranks import HostFlags
from shoal.bench.scaling import ScalingFlags, scaling_config
from shoal.bench.swarm import SwarmFlags, summarize_swarm, swarm_config
from shoal.bench.tables.accuracy import accuracy_items, summarize_accuracy
from shoal.bench.tables.dht import dht_items, summarize_dht
from shoal.bench.tables.scaling import scaling_items, summarize_scaling
from shoal.bench.tables.training import summarize_training, training_items
from shoal.bench.training import TrainingConfig, TrainingFlags, training_config
from shoal.bench.training_by_hand import Role, by_hand_config, role_of, summarize_worker, worker_items
from shoal.bench.transport import SHORT as SHORT_TRANSPORT
from shoal.bench.transport import TransportConfig, TransportFlags, TransportRunFlags, summarize_transport
from shoal.bench.virtual import VirtualConfig, VirtualRunFlags, summarize_virtual
from shoal.cli.bench_common import run_and_tell
from shoal.cli.flags import typed_flags, with_flags
from shoal.cli.output import text_stream
from shoal.doctor import machine
from shoal.report import DEFAULT_FOLDER, default_path
from shoal.report.tables import emit, show, tell_result
from shoal.transport import Profile

app = typer.Typer(
    help="Measure; every benchmark saves a report.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
@with_flags()
def transport(context: typer.Context, flags: TransportFlags, run: TransportRunFlags) -> None:
    """Echoes between two processes, by streams, TLS and sealed datagrams, beside bare sockets."""
    config = SHORT_TRANSPORT if run.short else TransportConfig()
    if flags.repeats is not None:
        config = msgspec.structs.replace(config, repeats=flags.repeats)
    starts = 1 if run.short and "starts" not in typed_flags(context) else run.starts
    run = msgspec.structs.replace(run, starts=starts)
    run_and_tell(context, "transport", config, run, summarize_transport)


@app.command()
@with_flags("short")
def virtual(context: typer.Context, config: VirtualConfig, run: VirtualRunFlags) -> None:
    """A world of peers in virtual time; the same seed gives the same digest of all that happened."""
    Profile.load(config.profile)  # complains before anything is started
    run_and_tell(context, "virtual", config, run, summarize_virtual)


@app.command()
@with_flags()
def swarm(context: typer.Context, flags: SwarmFlags, run: RunFlags) -> None:
    """Rounds of a swarm of processes, clean and with a peer killed or stopped, beside the transport alone."""
    run_and_tell(context, "swarm", swarm_config(flags, run), run, summarize_swarm)


_LATEST = {"true": "--latest", "false": "--no-latest"}


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


class DhtCommand(TyperCommand):
    """A command whose `--latest` may be followed by true or false."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as any command does, once `--latest` is alone."""
        return super().parse_args(ctx, with_bare_latest(args))


@app.command(cls=DhtCommand)
@with_flags("short")
def dht(context: typer.Context, flags: DhtFlags, run: DhtRunFlags) -> None:
    """Peers of a DHT, each with an identity and a sealed socket of its own, that store and look up."""
    config = dht_config(flags.mode, msgspec.structs.asdict(flags), is_virtual=flags.virtual)
    if not flags.virtual:
        _tell(machine.ensure_open_files(config.num_files, should_raise=flags.increase_file_limit))
    run_and_tell(context, "dht", config, run, summarize_dht, dht_items)


@app.command()
@with_flags("short")
def experts(context: typer.Context, flags: ExpertsFlags, run: RunFlags) -> None:
    """Clients that send batches to the experts of one server, beside a bare echo and the module alone."""
    should_raise = flags.increase_file_limit or preset_named(flags.preset).should_raise_file_limit
    config = experts_config(flags.preset, msgspec.structs.asdict(flags))
    _tell(ensure_files(config.num_files, should_raise=should_raise))
    run_and_tell(context, "experts", config, run, summarize_experts, experts_items)


def _tell(line: str | None) -> None:
    if line:
        emit(line, sys.stderr)


@app.command()
@with_flags()
def collectives(context: typer.Context, flags: CollectivesFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Operations of a group in memory that workers share, or between machines, beside gloo's."""
    config = collectives_config(flags, hosts, is_short=run.short)
    where = None
    if hosts.are_named:
        ((num_machines, num_workers),) = config.machines
        where = hosts.starter(num_machines * num_workers)
    run_and_tell(context, "collectives", config, run, summarize_collectives, collectives_items, where=where)


@app.command()
@with_flags()
def training(context: typer.Context, flags: TrainingFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Training under each strategy, beside workers that share nothing: what sharing costs.

    With --job-name this process is one parameter server or worker of those that are started by hand.
    """
    if flags.is_by_hand:
        role = role_of(flags, hosts)
        _take_role(context, role, by_hand_config(role, flags, hosts, run, typed_flags(context)), run)
        return
    config = training_config(flags, hosts, run)
    where = hosts.starter(config.num_workers)
    run_and_tell(context, "training", config, run, summarize_training, training_items, where=where)


def _take_role(context: typer.Context, role: Role, config: TrainingConfig, run: RunFlags) -> None:
    """Be a parameter server until all workers have left, or a worker with a report of its own."""
    out = text_stream(run.json_file)

    def say_there(text: str) -> None:
        emit(text, out)
        out.flush()

    if role.is_server:
        tell_result(training_by_hand.serve_by_hand(role, config, say_there), out)
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # workers that share a folder end at the same time: each has a name of its own
    report = run.report or default_path(DEFAULT_FOLDER, f"training-worker-{role.index}", now)
    run = msgspec.structs.replace(run, starts=1, against=None, report=report)
    where = training_by_hand.WorkerByHand(role, say_there)
    run_and_tell(context, "training", config, run, summarize_worker, worker_items, where=where)


@app.command(short_help="The sweep of PyTorch's DDP benchmark, from one worker to whole machines.")
@with_flags("short")
def ddp(context: typer.Context, flags: DdpFlags, hosts: HostFlags, run: DdpRunFlags) -> None:
    """The sweep of PyTorch's DDP benchmark: no wrapper, then 1, 2, 4, ... workers, then whole machines."""
    take_part(flags)
    config = ddp_config(flags, hosts, run)
    where = hosts.starter(config.num_workers)
    run_and_tell(context, "ddp", config, run, summarize_ddp, ddp_items, where=where, encode=encode_ddp)


@app.command()
@with_flags()
def scaling(context: typer.Context, flags: ScalingFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Images a second from one worker to many, under each strategy: how near to linear it stays."""
    if flags.predict_published:
        from shoal.bench.forecast.published import published_items, published_result

        show(published_items(), sys.stdout)
        tell_result(published_result(), sys.stdout)
        return
    config = scaling_config(flags, hosts, run)
    where = hosts.starter(config.crew_size)
    run_and_tell(context, "scaling", config, run, summarize_scaling, scaling_items, where=where)


@app.command()
@with_flags("starts")
def accuracy(context: typer.Context, flags: AccuracyFlags, hosts: HostFlags, run: RunFlags) -> None:
    """To which accuracy workers come under each strategy: over steps, seconds and bytes.

    Without --strategies: BlueFog's tricks. Neighbour averaging in both orders, each plain, with a smaller
    warm-up, a periodic global average, a faster decay, and all three; all-reduce as the reference.
    """
    config = accuracy_config(flags, hosts, run)
    run = msgspec.structs.replace(run, starts=flags.num_starts(hosts, is_short=run.short))
    where = hosts.starter(config.num_workers)
    if where is None:
        fetch_data(flags)
    run_and_tell(context, "accuracy", config, run, summarize_accuracy, accuracy_items, where=where)


@app.command()
@with_flags("starts", "against")
def convergence(context: typer.Context, flags: ConvergenceFlags, run: ConvergenceRunFlags) -> None:
    """How well MNIST is learned when every update comes late: Learning@home's experiment in virtual time.

    Trainers share one model. Each computes a gradient, waits for the network, and updates what others have
    changed meanwhile. Nobody sleeps: the delays pass in virtual time, and two runs with one seed are equal.
    """
    from shoal.data import mnist

    config = convergence_config(flags, run, typed_flags(context))
    available_bytes = free_bytes(config.device)
    _tell(f"Memory: {memory_text(config, config.num_seeds, available_bytes)}")
    if not flags.force:
        check_memory(config, available_bytes)
    # found or fetched once, before every process looks for it
    for is_training in (True, False):
        mnist(train=is_training, folder=flags.data_dir)
    run_and_tell(context, "convergence", config, run, summarize_convergence, convergence_items)


@app.command()
@with_flags("short")
def latency(
    context: typer.Context,
    flags: LatencyFlags,
    run: RunFlags,
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="N|HOST:PORT")] = None,
) -> None:
    """Throughput under latency: model parallelism without delays, with them, and expert servers.

    A model is a row of layers. 'fast' holds neighbouring layers on one device and waits for nothing; 'slow'
    waits after every layer, ping × Exp(1); 'ours' are expert servers, which many clients ask at once, each
    waiting as long after every layer. After Learning@home's throughput scripts; forward only, as they are.
    """
    config = latency_config(flags, more or ())
    if not flags.virtual:
        _tell(check_machine(config, should_raise_limit=flags.increase_file_limit))
        _tell(waiting_text(config))
    run_and_tell(context, "latency", config, run, summarize_latency, latency_items)
