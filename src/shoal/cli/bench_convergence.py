"""`shoal bench convergence`: its flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.bench.contenders import Device, device_of
from shoal.cli.bench_common import (
    JsonFile,
    Outputs,
    Quickly,
    ReportFile,
    run_and_tell,
    run_settings,
)
from shoal.cli.flags import with_flags
from shoal.core import UsageError
from shoal.report.tables import emit

Model = Literal["dmoe", "large-ffn"]
LAYER_DIMS = {"dmoe": 512, "large-ffn": 1024}
NUM_SEEDS, SEED = 3, 1337
STEPS, SHORT_STEPS = 20_480, 1024
MIXTURE_ONLY = (
    "num_experts",
    "num_active",
    "failure_rate",
    "backward_failure_rate",
    "update_every_inputs",
    "update_every_steps",
)


@with_flags()
def convergence(
    context: typer.Context,
    model: Annotated[
        Model, typer.Option(help="A mixture of experts in each layer, or one large network.")
    ] = "dmoe",
    num_experts: Annotated[int, typer.Option(min=1, help="In each layer.")] = 64,
    num_layers: Annotated[int, typer.Option(min=1, help="Mixtures, or blocks of the large network.")] = 4,
    num_active: Annotated[
        int, typer.Option(min=1, help="Experts that a sample goes through in a layer.")
    ] = 4,
    layer_dim: Annotated[
        int | None,
        typer.Option(min=1, help="Of what goes from layer to layer.", show_default="512; large-ffn 1024"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of each trainer.")] = 4,
    num_trainers: Annotated[int, typer.Option(min=1, help="That share the model.")] = 64,
    delay_ms: Annotated[
        float,
        typer.Option(min=0, help="Mean delay of an update, exponential (Weibull of shape 1) once a step."),
    ] = 1000.0,
    compute_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Virtual time from a trainer's update to its next gradient; of a step under the lock of "
            "--faithful.",
            show_default="14200; large-ffn 1900; --faithful 240 and 45",
        ),
    ] = None,
    window_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Trainers whose computing ends within it read the same parameters; 0: none do.",
            show_default="so long that about twelve do, three without a delay",
        ),
    ] = None,
    failure_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Chance that an expert does not answer for a sample.")
    ] = 0.0,
    backward_failure_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Chance that its gradient does not reach it.")
    ] = 0.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of all trainers together.", show_default=f"{STEPS}")
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(min=1, help="Updates from one evaluation to the next.", show_default="1024"),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option("--lr", "--learning-rate", min=0, help="Of Adam with AMSGrad.")
    ] = 1e-3,
    update_every_inputs: Annotated[
        int | None,
        typer.Option(min=1, help="Inputs after which an expert updates.", show_default="--batch-size"),
    ] = None,
    update_every_steps: Annotated[
        int, typer.Option(min=1, help="Training steps after which an expert updates with fewer inputs.")
    ] = 10,
    faithful: Annotated[
        bool,
        typer.Option(
            "--faithful",
            help="As the original: gate not trained, experts' gradients not delayed, failures in "
            "evaluation too, one lock.",
        ),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Independent runs.", show_default=f"{NUM_SEEDS}")
    ] = None,
    device: Device = "auto",
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Has the files of MNIST.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first run; each further one adds 1.")] = SEED,
    short: Quickly = False,
    force: Annotated[bool, typer.Option("--force", help="Try it even if memory seems too small.")] = False,
    report: ReportFile = None,
    json_file: JsonFile = None,
) -> None:
    """How well MNIST is learned when every update comes late: Learning@home's experiment in virtual time.

    Trainers share one model. Each computes a gradient, waits for the network, and updates what others have
    changed meanwhile. Nobody sleeps: the delays pass in virtual time, and two runs with one seed are equal.
    """
    from shoal.bench.convergence import (
        ConvergenceConfig,
        check_memory,
        convergence_items,
        free_bytes,
        memory_text,
        summarize_convergence,
    )
    from shoal.data import mnist

    if model == "large-ffn":
        _check_large(context)
    steps = steps or (SHORT_STEPS if short else STEPS)
    config = ConvergenceConfig(
        model=model,
        num_experts=num_experts,
        num_layers=num_layers,
        num_active=num_active,
        layer_dim=layer_dim or LAYER_DIMS[model],
        batch_size=batch_size,
        num_trainers=num_trainers,
        delay_ms=delay_ms,
        compute_ms=compute_ms,
        window_ms=window_ms,
        failure_rate=failure_rate,
        backward_failure_rate=backward_failure_rate,
        steps=steps,
        eval_every=eval_every or min(1024, max(1, steps // 4)),
        learning_rate=learning_rate,
        is_faithful=faithful,
        update_every_inputs=update_every_inputs,
        update_every_steps=update_every_steps,
        seed=seed,
        device=device_of(device),
        num_seeds=seeds or (1 if short else NUM_SEEDS),
        data_dir=None if data_dir is None else str(data_dir.absolute()),
    ).resolved()
    available_bytes = free_bytes(config.device)
    emit(f"Memory: {memory_text(config, config.num_seeds, available_bytes)}", sys.stderr)
    if not force:
        check_memory(config, available_bytes)
    # found or fetched once, before every process looks for it
    for is_training in (True, False):
        mnist(train=is_training, folder=data_dir)
    outputs = Outputs(report, json_file, convergence_items)
    settings = run_settings(context, 1, seed)
    run_and_tell("convergence", config, settings, summarize_convergence, outputs)


def _check_large(context: typer.Context) -> None:
    """UsageError for flags that mean nothing to the large network."""
    for name in MIXTURE_ONLY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"--{name.replace('_', '-')} is of mixtures of experts, and large-ffn has none.",
                next_step="leave it out, or say --model dmoe.",
            )
