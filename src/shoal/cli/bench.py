"""`shoal bench`: run a benchmark, save its report, print its figures.

Commands with many flags have files of their own; what they do is the room `bench`'s.
"""

from __future__ import annotations

import datetime
import sys
from typing import Annotated, Literal

import msgspec
import typer

from shoal.bench import training_by_hand
from shoal.bench.collectives import (
    CollectivesFlags,
    collectives_config,
    collectives_items,
    summarize_collectives,
)
from shoal.bench.frame import RunFlags
from shoal.bench.ranks import HostFlags
from shoal.bench.scaling import ScalingFlags, scaling_config
from shoal.bench.scaling_tables import scaling_items, summarize_scaling
from shoal.bench.training import TrainingConfig, TrainingFlags, training_config
from shoal.bench.training_by_hand import Role, by_hand_config, role_of, summarize_worker, worker_items
from shoal.bench.training_tables import summarize_training, training_items
from shoal.cli import dht_flags as flags
from shoal.cli import experts_flags
from shoal.cli.bench_accuracy import accuracy
from shoal.cli.bench_common import (
    NUM_STARTS,
    Against,
    JsonFile,
    OneStart,
    Outputs,
    Repeats,
    ReportFile,
    Seed,
    Short,
    Starts,
    run_and_tell,
    run_settings,
)
from shoal.cli.bench_convergence import convergence
from shoal.cli.bench_ddp import ddp
from shoal.cli.bench_latency import latency
from shoal.cli.flags import typed_flags, with_flags
from shoal.cli.output import text_stream
from shoal.report import DEFAULT_FOLDER, default_path
from shoal.report.tables import emit, result_line, show

app = typer.Typer(
    help="Measure; every benchmark saves a report.", no_args_is_help=True, rich_markup_mode=None
)

CallKind = Literal["datagram", "stream"]


@app.command()
def transport(
    context: typer.Context,
    starts: Starts = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    short: Short = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Echoes between two processes, by streams, TLS and sealed datagrams, beside bare sockets."""
    from shoal.bench.transport import SHORT, TransportConfig, summarize_transport

    config = SHORT if short else TransportConfig()
    if repeats is not None:
        config = msgspec.structs.replace(config, repeats=repeats)
    if starts is None:
        starts = 1 if short else NUM_STARTS
    settings = run_settings(context, starts, seed)
    run_and_tell("transport", config, settings, summarize_transport, Outputs(report, json_file), against)


@app.command()
def virtual(
    context: typer.Context,
    peers: Annotated[int, typer.Option(min=2, help="Peers in the world.")] = 200,
    calls_per_s: Annotated[int, typer.Option(min=1, help="Calls of each peer in a simulated second.")] = 3,
    seconds: Annotated[int, typer.Option(min=1, help="Simulated seconds.")] = 600,
    profile: Annotated[str, typer.Option(help="The network: a preset's name or a TOML file.")] = "wan",
    kind: Annotated[CallKind, typer.Option(help="How they call.")] = "datagram",
    starts: Annotated[int, typer.Option(help="Worlds, each in a process of its own.")] = 1,
    seed: Seed = 0,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """A world of peers in virtual time; the same seed gives the same digest of all that happened."""
    from shoal.bench.virtual import VirtualConfig, summarize_virtual
    from shoal.transport import Profile

    Profile.load(profile)  # complains before anything is started
    config = VirtualConfig(peers, calls_per_s, seconds, profile, kind)
    settings = run_settings(context, starts, seed)
    run_and_tell("virtual", config, settings, summarize_virtual, Outputs(report, json_file))


@app.command(cls=flags.DhtCommand)
def dht(
    context: typer.Context,
    mode: flags.Mode = None,
    num_peers: flags.NumPeers = None,
    initial_peers: flags.InitialPeers = None,
    num_processes: flags.NumProcesses = None,
    expiration: flags.Expiration = None,
    wait_timeout: flags.WaitTimeout = None,
    increase_file_limit: flags.IncreaseFileLimit = False,
    num_experts: flags.NumExperts = None,
    expert_batch_size: flags.ExpertBatchSize = None,
    wait_after_request: flags.WaitAfterRequest = None,
    wait_before_read: flags.WaitBeforeRead = None,
    num_keys: flags.NumKeys = None,
    total_num_rounds: flags.TotalNumRounds = None,
    num_store_peers: flags.NumStorePeers = None,
    num_get_peers: flags.NumGetPeers = None,
    num_threads: flags.NumThreads = None,
    failure_rate: flags.FailureRate = None,
    delay: flags.Delay = None,
    wait_after_iteration: flags.WaitAfterIteration = None,
    latest: flags.Latest = None,
    virtual: flags.IsVirtual = False,
    profile: flags.NetworkProfile = None,
    starts: OneStart = 1,
    seed: flags.Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Peers of a DHT, each with an identity and a sealed socket of its own, that store and look up."""
    from shoal.bench.dht import config_of, dht_items, summarize_dht
    from shoal.doctor.machine import ensure_open_files

    config = config_of(mode, context.params, is_virtual=virtual)
    if not virtual and (changed := ensure_open_files(config.num_files, should_raise=increase_file_limit)):
        emit(changed, sys.stderr)
    settings = run_settings(context, starts, seed)
    run_and_tell("dht", config, settings, summarize_dht, Outputs(report, json_file, dht_items), against)


@app.command()
def experts(
    context: typer.Context,
    preset: experts_flags.Preset = "default",
    num_experts: experts_flags.NumExperts = None,
    num_clients: experts_flags.NumClients = None,
    client_processes: experts_flags.ClientProcesses = None,
    num_batches_per_client: experts_flags.NumBatches = None,
    batch_size: experts_flags.BatchSize = None,
    max_batch_size: experts_flags.MaxBatchSize = None,
    hidden_dim: experts_flags.HiddenDim = None,
    expert_class: experts_flags.ExpertClass = None,
    backward: experts_flags.Backward = None,
    num_handlers: experts_flags.NumHandlers = None,
    device: experts_flags.Device = None,
    precision: experts_flags.Precision = None,
    increase_file_limit: experts_flags.IncreaseFileLimit = False,
    starts: OneStart = 1,
    seed: Seed = 0,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Clients that send batches to the experts of one server, beside a bare echo and the module alone."""
    from shoal.bench.experts import config_of, ensure_files, experts_items, preset_named, summarize_experts

    should_raise = increase_file_limit or preset_named(preset).should_raise_file_limit
    config = config_of(preset, context.params)
    if changed := ensure_files(config, should_raise=should_raise):
        emit(changed, sys.stderr)
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, experts_items)
    run_and_tell("experts", config, settings, summarize_experts, outputs, against)


@app.command()
@with_flags()
def collectives(context: typer.Context, flags: CollectivesFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Operations of a group in memory that workers share, or between machines, beside gloo's."""
    config = collectives_config(flags, hosts, is_short=run.short)
    where = None
    if hosts.are_named:
        ((num_machines, num_workers),) = config.machines
        where = hosts.starter(num_machines * num_workers)
    settings = run_settings(context, run.starts, run.seed)
    outputs = Outputs(run.report, run.json_file, collectives_items)
    run_and_tell("collectives", config, settings, summarize_collectives, outputs, run.against, where)


@app.command()
@with_flags()
def training(context: typer.Context, flags: TrainingFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Training under each strategy, beside workers that share nothing: what sharing costs.

    With --job-name this process is one parameter server or worker of those that are started by hand.
    """
    role = role_of(flags.ps_hosts, flags.worker_hosts, flags.job_name, flags.task_index)
    if role is not None:
        role = msgspec.structs.replace(role, network_interface=hosts.network_interface)
        _take_role(context, role, by_hand_config(role, flags, hosts, run, typed_flags(context)), run)
        return
    config = training_config(flags, hosts, run)
    settings = run_settings(context, run.starts, run.seed)
    outputs = Outputs(run.report, run.json_file, training_items)
    where = hosts.starter(config.num_workers)
    run_and_tell("training", config, settings, summarize_training, outputs, run.against, where)


def _take_role(context: typer.Context, role: Role, config: TrainingConfig, run: RunFlags) -> None:
    """Be a parameter server until all workers have left, or a worker with a report of its own."""
    out = text_stream(run.json_file)

    def say_there(text: str) -> None:
        emit(text, out)
        out.flush()

    if role.is_server:
        training_by_hand.serve_by_hand(role, config, say_there)
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # workers that share a folder end at the same time: each has a name of its own
    report = run.report or default_path(DEFAULT_FOLDER, f"training-worker-{role.index}", now)
    outputs = Outputs(report, run.json_file, worker_items)
    settings = run_settings(context, 1, run.seed)
    where = training_by_hand.WorkerByHand(role, say_there)
    run_and_tell("training", config, settings, summarize_worker, outputs, where=where)


app.command()(ddp)


@app.command()
@with_flags()
def scaling(context: typer.Context, flags: ScalingFlags, hosts: HostFlags, run: RunFlags) -> None:
    """Images a second from one worker to many, under each strategy: how near to linear it stays."""
    if flags.predict_published:
        from shoal.bench.published import published_items, published_result

        show(published_items(), sys.stdout)
        emit(result_line(published_result()), sys.stdout)
        return
    config = scaling_config(flags, hosts, run)
    settings = run_settings(context, run.starts, run.seed)
    outputs = Outputs(run.report, run.json_file, scaling_items)
    where = hosts.starter(config.crew_size)
    run_and_tell("scaling", config, settings, summarize_scaling, outputs, run.against, where)


app.command()(accuracy)
app.command()(convergence)
app.command()(latency)
