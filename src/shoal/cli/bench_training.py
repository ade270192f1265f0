"""`shoal bench training`: its flags made into what is measured, or into a process that is started by hand."""

from __future__ import annotations

import datetime
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from shoal.cli import bench_hosts as there
from shoal.cli import training_flags as flags
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
from shoal.cli.bench_trained import (
    Device,
    DeviceKind,
    NoCuda,
    NumServers,
    StrategyOption,
    WorkersPerMachine,
    device_of,
    servers_of,
    tell_slow_images,
    workers_device,
)
from shoal.cli.flags import assignments, listed
from shoal.core import UsageError
from shoal.report import DEFAULT_FOLDER, default_path
from shoal.report.tables import emit, result_line
from shoal.strategies.registry import canonical

if TYPE_CHECKING:
    from shoal.bench.training import TrainingConfig
    from shoal.bench.training_roles import Role


@there.with_hosts(before="starts")
def training(
    context: typer.Context,
    model: flags.Model = "mlp",
    image_size: flags.ImageSize = None,
    strategies: flags.Strategies = None,
    kungfu: flags.KungFu = None,
    no_ddp: flags.NoDdp = False,
    num_workers: flags.NumWorkers = None,
    option: StrategyOption = None,
    workers_per_machine: WorkersPerMachine = None,
    num_servers: NumServers = None,
    batch_size: flags.BatchSize = None,
    device: Device = "auto",
    no_cuda: NoCuda = False,
    fuse: flags.Fuse = False,
    num_warmup: flags.NumWarmup = None,
    pairs: flags.Pairs = None,
    block_seconds: flags.BlockSeconds = None,
    iterations: flags.Iterations = None,
    num_batches_per_iter: flags.NumBatches = None,
    slow_worker: flags.SlowWorker = None,
    ps_hosts: flags.PsHosts = None,
    worker_hosts: flags.WorkerHosts = None,
    job_name: flags.JobName = None,
    task_index: flags.TaskIndex = 0,
    starts: OneStart = 1,
    seed: Seed = 0,
    short: Quickly = False,
    against: Against = None,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """Training under each strategy, beside workers that share nothing: what sharing costs.

    With --job-name this process is one parameter server or worker of those that are started by hand.
    """
    from shoal.bench.training_roles import role_of
    from shoal.bench.training_summary import summarize_training
    from shoal.bench.training_tables import training_items

    role = role_of(ps_hosts, worker_hosts, job_name, task_index)
    if role is not None:
        _take_role(context, role)
        return
    size = there.workers_of(num_workers, context.params, default=2)
    config = _config(context.params, size)
    settings = run_settings(context, starts, seed)
    outputs = Outputs(report, json_file, training_items)
    where = there.where_of(context.params, size)
    run_and_tell("training", config, settings, summarize_training, outputs, against, where)


def contenders(named: tuple[str, ...], *, with_ddp: bool) -> tuple[str, ...]:
    """What is measured beside 'none': each that was named once, and the baseline in the same run."""
    from shoal.bench.contenders import beside_none, is_ddp

    chosen = beside_none(named if with_ddp else [name for name in named if not is_ddp(name)])
    return chosen if any(map(is_ddp, chosen)) or not with_ddp else (*chosen, "ddp")


def _config(given: dict[str, Any], num_workers: int) -> TrainingConfig:
    from shoal.bench.contenders import options_of
    from shoal.bench.training_kungfu import optimizer_named

    is_short = given["short"]
    device = workers_device(given, num_workers)
    chosen = _chosen(given)
    return msgspec.structs.replace(
        _common(given, device),
        strategies=chosen,
        options=options_of(chosen, assignments(given["option"])),
        num_workers=num_workers,
        workers_per_machine=given["workers_per_machine"],
        num_servers=servers_of(given["num_servers"], chosen),
        num_pairs=given["pairs"] or (3 if is_short else 10),
        block_s=given["block_seconds"] or (0.3 if is_short else 1.0),
        iterations=flags.one_of(
            {
                "--iterations": given["iterations"],
                "--num-batches-per-iter": given["num_batches_per_iter"],
            }
        ),
        kungfu=None if given["kungfu"] is None else optimizer_named(given["kungfu"]),
        **_slow(given),
    )


def _common(given: dict[str, Any], device: DeviceKind, usual_batch_size: int | None = None) -> TrainingConfig:
    """What workers train, whoever starts them."""
    from shoal.bench.training import DEFAULT_WARMUP, TrainingConfig
    from shoal.models import model_named

    entry = model_named(given["model"]).at(given["image_size"])
    if given["image_size"] is None:
        tell_slow_images(entry.image_side, device)
    return TrainingConfig(
        model=entry.name,
        image_size=entry.image_side,
        device=device,
        batch_size=given["batch_size"] or usual_batch_size or entry.batch_size,
        num_warmup=given["num_warmup"] or DEFAULT_WARMUP,
        seed=given["seed"],
    )


def _chosen(given: dict[str, Any]) -> tuple[str, ...]:
    from shoal.bench.training import DEFAULT_STRATEGIES
    from shoal.bench.training_kungfu import strategy_of

    if given["kungfu"] is not None:
        if given["strategies"] is not None:
            raise UsageError(
                "--kungfu and --strategies both say what is measured.", next_step="leave one of them out."
            )
        return (strategy_of(given["kungfu"]),)
    named: tuple[str, ...] = DEFAULT_STRATEGIES
    if given["strategies"] is not None:
        named = tuple(listed(given["strategies"]))
    elif given["workers_per_machine"] is not None:
        named = (*named, "hierarchical")
    return contenders(named, with_ddp=not given["no_ddp"])


def _slow(given: dict[str, Any]) -> dict[str, Any]:
    if given["slow_worker"] is None:
        return {}
    rank, factor = flags.slow_worker(given["slow_worker"])
    return {"slow_rank": rank, "slow_factor": factor}


def _take_role(context: typer.Context, role: Role) -> None:
    """Be a parameter server until all workers have left, or a worker with a report of its own."""
    from shoal.bench.contenders import options_of
    from shoal.bench.training_by_hand import WorkerByHand, serve
    from shoal.bench.training_roles import (
        DEFAULT_BATCH_SIZE,
        STRATEGY,
        config_of,
        summarize_worker,
        worker_items,
    )

    given = context.params
    device = _check_role(context, role)
    role = msgspec.structs.replace(role, network_interface=given["network_interface"])
    config = config_of(
        role,
        _common(given, device, DEFAULT_BATCH_SIZE),
        num_iterations=flags.one_of({"--num-iters": given["pairs"], "--iterations": given["iterations"]}),
        num_warmup=given["num_warmup"],
    )
    options = options_of((STRATEGY,), assignments(given["option"]))
    config = msgspec.structs.replace(config, options=options, **_slow(given))
    say = partial(_say, sys.stderr if str(given["json_file"]) == "-" else sys.stdout)
    if role.is_server:
        counted = serve(role, config, say)
        say(f"All workers have left: {counted['num_applied']} gradients of {counted['num_pushes']} applied.")
        say(result_line({"strategy": STRATEGY, "job_name": role.job, "task_index": role.index, **counted}))
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # workers that share a folder end at the same time: each has a name of its own
    report: Path = given["report"] or default_path(DEFAULT_FOLDER, f"training-worker-{role.index}", now)
    run_and_tell(
        "training",
        config,
        run_settings(context, 1, given["seed"]),
        summarize_worker,
        Outputs(report, given["json_file"], worker_items),
        where=WorkerByHand(role, say),
    )


def _check_role(context: typer.Context, role: Role) -> DeviceKind:
    """Where a process computes that is started by hand; UsageError for what is of no meaning to it."""
    given = context.params
    if there.launched_size() is not None:
        raise UsageError(
            "A launcher has started this process, which is to be started by hand.",
            next_step="start it without one, or leave --job-name out.",
        )
    named = given["strategies"]
    if given["kungfu"] is not None or (named is not None and canonical(named) != "parameter-server"):
        raise UsageError(
            "Servers and workers that are started by hand train with parameter-server.",
            next_step="leave --strategies and --kungfu out.",
        )
    flags.check_by_hand(_typed(context), is_server=role.is_server)
    return device_of(given["device"], no_cuda=given["no_cuda"])


def _typed(context: typer.Context) -> dict[str, str]:
    """The flags that were given on the command line, by parameter."""
    typed = {}
    for parameter in context.command.params:
        source = None if parameter.name is None else context.get_parameter_source(parameter.name)
        if parameter.name is not None and source is not None and source.name == "COMMANDLINE":
            typed[parameter.name] = parameter.opts[0]
    return typed


def _say(stream: Any, text: str) -> None:
    emit(text, stream)
    stream.flush()
