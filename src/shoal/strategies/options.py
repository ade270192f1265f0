"""The options of every strategy: one frozen struct for each, with a description for every field.

A field stands here once. The command line, the documentation, the keyword arguments of constructors and their
signatures all read it from here. Nothing imports torch, so that `shoal run --help` stays quick. A docstring
under a field gives a reason that its description has no room for.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from shoal.core.errors import UsageError
from shoal.core.run_options import OptionInfo, describe_struct

Count = Annotated[int, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=0)]
OnNonfinite: TypeAlias = Literal["warn", "skip", "stop"]
NamedTopology = Annotated[
    Any,
    Meta(description="who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph"),
]
SymmetricTopology = Annotated[
    Any,
    Meta(description="a static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …"),
]
DirectedTopology = Annotated[
    Any, Meta(description="who sends to whom; it may be directed and irregular, as its weights don't count")
]
StalenessRate = Annotated[
    bool, Meta(description="divide the learning rate by the updates that a gradient is behind")
]
DelayCompensation = Annotated[
    float, Meta(ge=0, description="lambda of g + lambda g*g*(w_now - w_then); 0: no compensation")
]


class StrategyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All strategies have these options; a strategy of your own adds fields in a subclass.

    A step is a step of the optimizer; one that was skipped counts, except in a group of one.
    """

    local_steps: Annotated[int, Meta(ge=1, description="steps from one round to the next")] = 1
    """Strategies that share gradients average parameters instead when it is above 1 (local SGD): sharing
    only some of the gradients would let the replicas drift apart for good."""
    warmup_steps: Annotated[
        Count, Meta(description="steps over which the learning rate rises linearly to its full value")
    ] = 0
    warmup_factor: Annotated[Factor, Meta(description="factor on the learning rate where warm-up begins")] = (
        0.1
    )
    decay_every: Annotated[
        Count, Meta(description="steps from one decay of the learning rate to the next; 0: never")
    ] = 0
    decay_factor: Annotated[Factor, Meta(description="factor on the learning rate at each decay")] = 0.1
    global_average_every: Annotated[
        Count, Meta(description="rounds between averages of the whole group, buffers included; 0: never")
    ] = 0
    should_broadcast_buffers: Annotated[
        bool, Meta(description="buffers (BatchNorm) become those of rank 0 after each step, as in DDP")
    ] = False
    monitor: Annotated[
        bool, Meta(description="measure gradient noise scale and variance; all wait for all in each step")
    ] = False
    on_nonfinite: Annotated[
        OnNonfinite, Meta(description="what to do at a NaN or an infinity: warn, skip the step, or stop")
    ] = "warn"
    batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="batch size of one worker; with it the noise scale counts in examples"),
    ] = None

    def rate_factor(self, step: int) -> float:
        """Computes what step number `step` (from 0) multiplies the user's learning rate by.

        Warm-up rises linearly from `warmup_factor` at step 0 to 1 at step `warmup_steps`; decay multiplies by
        `decay_factor` after every `decay_every` steps. A user's scheduler goes on beside it.
        """
        factor = 1.0
        if step < self.warmup_steps:
            factor = self.warmup_factor + (1 - self.warmup_factor) * step / self.warmup_steps
        if self.decay_every:
            factor *= self.decay_factor ** (step // self.decay_every)
        return factor


WAITS_FOR_ALL = ("global_average_every", "should_broadcast_buffers", "monitor")
"""Options that make each worker wait for all others, whatever the strategy; when they are off, they are 0."""


class AllReduceOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say how `all-reduce` averages gradients."""

    bucket_mib: Annotated[float, Meta(gt=0, description="size of the flat buckets of gradients")] = 25.0
    """Smaller ones start earlier in backward, larger ones cost fewer meetings. The first is not smaller than
    the others, as DDP's is: on one machine a reduction is work of this very core, not a wait to be hidden."""


class DDPOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options of `ddp` have torch's names and defaults where torch has them."""

    bucket_mib: Annotated[
        float, Meta(gt=0, description="size of the buckets of gradients: torch's bucket_cap_mb")
    ] = 25.0
    find_unused_parameters: Annotated[
        bool, Meta(description="look for parameters that a backward pass does not use, as in torch")
    ] = False
    gradient_as_bucket_view: Annotated[
        bool, Meta(description="let gradients be views of the buckets, as in torch")
    ] = False
    is_uneven: Annotated[
        bool, Meta(description="workers may have different numbers of batches; one small round more a step")
    ] = False


class HorovodOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options are handed on to Horovod."""

    compression: Annotated[
        Literal["none", "fp16"], Meta(description="compression that Horovod applies to gradients")
    ] = "none"


class MixOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say with whom a strategy mixes: `gradient-tracking`, or one of your own."""

    topology: NamedTopology = "exponential-2"


class NeighborOptions(MixOptions, frozen=True, kw_only=True):
    """These options say with whom, and when, `neighbor` averages parameters."""

    order: Annotated[
        Literal["adapt-then-combine", "adapt-while-combine"],
        Meta(description="exchange after the step, or begun after forward and finished before the step"),
    ] = "adapt-then-combine"


class HierarchicalOptions(NeighborOptions, frozen=True, kw_only=True):
    """These are the options of `neighbor`, with a topology of machines."""

    topology: Annotated[
        Any,
        Meta(description="which machines are neighbours: ring, …; in code also a function, matrix or graph"),
    ] = "exponential-2"


class PairOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say how `pair` draws its peers."""

    seed: Annotated[int, Meta(description="seed of the choice of peers; the rank is added")] = 0


class SmaOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say how near models stay to their mean under `sma`."""

    alpha: Annotated[
        float, Meta(gt=0, le=1, description="how far parameters move toward the group's mean in a round")
    ] = 0.1


class LocalSGDOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say when, and what, `local-sgd` averages."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one average to the next")] = 8
    average_momentum: Annotated[
        bool, Meta(description="average the optimizer's state too: momentum, and the moments of Adam")
    ] = False
    codec: Annotated[
        str,
        Meta(description="codec of what is sent: fp16, bf16, int8, top-k:0.01; none: parameters as they are"),
    ] = "none"
    """With one, what was learned since the last average is sent, with error feedback: it costs two more
    copies of the parameters."""


class DiLoCoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options describe the outer step of `diloco`, and how changes travel to it."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one outer step to the next")] = 100
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step")] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="Nesterov momentum of the outer step")] = (
        0.9
    )
    fragments: Annotated[
        int, Meta(ge=1, description="parts of the model that are sent one after another, evenly spread")
    ] = 1
    """More of them send the same bytes in smaller portions."""
    overlap_steps: Annotated[
        Count, Meta(description="steps that a fragment may be under way; its outer step comes after them")
    ] = 0
    mixing: Annotated[
        float, Meta(ge=0, lt=1, description="weight of this worker's own parameters after an outer step")
    ] = 0.0
    codec: Annotated[
        str, Meta(description="codec of what is sent: none, fp16, bf16, int8, top-k:0.01, …")
    ] = "none"
    error_feedback: Annotated[
        bool, Meta(description="add what a codec could not send to what is sent next; one copy more")
    ] = True


class NoLoCoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options describe the outer step of `noloco`, which a worker does with one peer."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one outer step to the next")] = 50
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step")] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="momentum of the outer step")] = 0.5
    pull: Annotated[
        float,
        Meta(ge=0, description="how far partners' slow weights move toward each other; the paper's gamma"),
    ] = 1.0
    seed: Annotated[int, Meta(description="seed of the choice of pairs; the same on all workers")] = 0


class SparseLoCoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options describe the outer step of `sparse-loco`, and how little travels to it."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one outer step to the next")] = 30
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step")] = 1.0
    density: Annotated[
        float, Meta(gt=0, le=1, description="share of the values that are sent; 0.01 to 0.03 is usual")
    ] = 0.02
    error_decay: Annotated[
        float, Meta(ge=0, le=1, description="share of what was not sent that is kept for the next outer step")
    ] = 0.95


class PushSumOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say to whom `push-sum` gives, and how much a worker must keep."""

    topology: DirectedTopology = "one-peer-exponential"
    min_weight: Annotated[
        float, Meta(ge=0, le=1, description="a worker whose push-sum weight is below this keeps what it has")
    ] = 1.0
    """The step of a worker with weight w is 1/w times as long. A worker that is faster than those that
    should give to it would lose all its weight; at 0 nothing is held back, as in the synchronous rule."""


class SgpOptions(MixOptions, frozen=True, kw_only=True):
    """These options say to whom a worker gives under `sgp`."""

    topology: DirectedTopology = "one-peer-exponential"


class WindowOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say into whose windows `window` puts parameters, and how."""

    topology: NamedTopology = "one-peer-exponential"
    force_barrier: Annotated[
        bool, Meta(description="all wait for all before parameters are put, and before they are mixed")
    ] = False
    codec: Annotated[
        Literal["none", "fp16", "bf16"], Meta(description="codec of the parameters that are put")
    ] = "none"


class SymmetricOptions(MixOptions, frozen=True, kw_only=True):
    """These options are for strategies whose topology is static and symmetric: `exact-diffusion`, `extra`."""

    topology: SymmetricTopology = "ring"


class D2Options(SymmetricOptions, frozen=True, kw_only=True):
    """These options say how `d2` mixes."""

    laziness: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | None,
        Meta(description="share l in l·I + (1 − l)·W, which mixes in place of W; none: the least that fits"),
    ] = None
    """D² needs eigenvalues above −1/3, which W of an even ring, a torus or a hypercube does not have."""


class MomentumOptions(MixOptions, frozen=True, kw_only=True):
    """These options say with whom `momentum` mixes parameters and momentum."""

    topology: NamedTopology = "one-peer-exponential"


class ChocoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say how `choco` compresses what it sends, and how far it moves toward others."""

    topology: SymmetricTopology = "ring"
    codec: Annotated[
        str, Meta(description="codec of what is sent: top-k:0.1, int8, fp16, low-rank:4, none, …")
    ] = "top-k:0.1"
    gamma: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(
            description="how far to move toward the neighbours' public copies; none: the share of bytes sent"
        ),
    ] = None
    """The stronger the compression, the smaller it must be: above some bound parameters fly apart. Without a
    codec, 1 is plain averaging."""


class RelayOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options name the tree of `relay`."""

    tree: Annotated[
        Literal["binary", "chain"],
        Meta(
            description="tree of the workers, in which each waits for 3 others at most, or in a chain for 2"
        ),
    ] = "binary"
    """A model takes as many rounds as it has edges to go: up to 2 log2(n) in the binary tree, n − 1 in the
    chain. The longer, the smaller the learning rate must be."""


class ParameterServerOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say what the servers of `parameter-server` do with gradients.

    With `local_steps` the gradients of so many local steps are summed.
    """

    mode: Annotated[
        Literal["async", "bounded", "sync"],
        Meta(
            description="apply each gradient at once, let no worker lead by too much, or average all of them"
        ),
    ] = "async"
    staleness: Annotated[
        int,
        Meta(ge=0, description="bounded: rounds by which a worker may lead the slowest; 0: all wait for all"),
    ] = 4
    num_aggregate: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="sync: gradients that make one update, later ones are dropped; none: all of them"),
    ] = None
    """With fewer than there are workers, the others are backups: the slowest are not waited for."""
    drop_stale: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="drop gradients that are more updates behind than this; none: drop nothing"),
    ] = None
    staleness_lr: StalenessRate = False
    delay_compensation: DelayCompensation = 0.0
    """Costs the servers one more copy of the model for each worker."""
    pull_every: Annotated[
        int, Meta(ge=1, description="pushes from one pull to the next; between them the worker steps alone")
    ] = 1
    compression: Annotated[
        str, Meta(description="codec of what is pushed (fp16, bf16, int8, top-k:0.01), with error feedback")
    ] = "none"


class StalenessAwareOptions(ParameterServerOptions, frozen=True, kw_only=True):
    """These are the options of `parameter-server`, two of them with other defaults."""

    staleness_lr: StalenessRate = True
    delay_compensation: DelayCompensation = 0.04


class SwarmOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options say which run `swarm` joins, what makes a round, and how long others are waited for.

    Give `target_samples` or `local_steps`. All members of a run give the same two and `robust`,
    and the same optimizer.
    """

    run: Annotated[str, Meta(description="name of the run; whoever joins under it trains one model")] = "run"
    join: Annotated[
        str, Meta(description="HOST:PORT of peers of the swarm, with commas; where connect() is not used")
    ] = ""
    listen: Annotated[
        str, Meta(description="HOST:PORT that others call this peer at; default: any free port")
    ] = ""
    secret_file: Annotated[
        str, Meta(description="file of the swarm's secret, as `shoal keys secret` writes it")
    ] = ""
    target_samples: Annotated[
        Count, Meta(description="samples of all members that make one step of the optimizer; 0: local steps")
    ] = 0
    """Gradients rounds: gradients are averaged by samples, and all members make the same step."""
    local_steps: Annotated[
        int, Meta(ge=1, description="DiLoCo rounds: steps of a member from one round to the next")
    ] = 1
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step of DiLoCo rounds")] = (
        0.7
    )
    outer_momentum: Annotated[
        float, Meta(ge=0, lt=1, description="Nesterov momentum of the outer step of DiLoCo rounds")
    ] = 0.9
    min_peers: Annotated[int, Meta(ge=1, description="no round begins with fewer members")] = 1
    patience: Annotated[float, Meta(gt=0, description="every time-out is this many times as long")] = 1.0
    max_wait: Annotated[
        float, Meta(gt=0, description="seconds that a step waits for a round, before it goes on alone")
    ] = 30.0
    """What was computed meanwhile goes into the next round."""
    codec: Annotated[
        str,
        Meta(description="codec of what is sent: none, fp16, int8, int4, top-k:0.01, …; with error feedback"),
    ] = "none"
    robust: Annotated[
        Literal["none", "centered-clip", "median"],
        Meta(description="averages that a few liars cannot move far, and audits of those who average"),
    ] = "none"
    overlap: Annotated[
        Literal["none", "delayed", "streaming"],
        Meta(
            description="DiLoCo rounds: wait for each, train on while it is averaged, or average one "
            "fragment after another beside it"
        ),
    ] = "none"
    fragments: Annotated[
        int, Meta(ge=2, description="streaming: parts of the model; each is averaged once in local_steps")
    ] = 4
    bandwidth: Annotated[
        float,
        Meta(
            ge=0,
            description="Mbit/s of this peer's line, the slower direction, until rounds have measured it",
        ),
    ] = 0.0
    """0: not known; who has a faster line averages more."""
    upload_limit: Annotated[
        float, Meta(ge=0, description="Mbit/s that this peer sends at most for the run; 0: no limit")
    ] = 0.0
    download_limit: Annotated[
        float, Meta(ge=0, description="Mbit/s that others send to this peer at most for the run; 0: no limit")
    ] = 0.0
    minority_after: Annotated[
        float,
        Meta(gt=0, description="seconds without more than half of the members before going on as a fork"),
    ] = 120.0


O = TypeVar("O", bound=StrategyOptions)  # noqa: E741


def read_options(kind: type[O], values: Mapping[str, Any], strategy: str) -> O:
    """Make options of these values, strings converted; UsageError says which ones there are."""
    known = kind.__struct_fields__
    values = {name.replace("-", "_"): value for name, value in values.items()}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UsageError(
            f"{strategy} has no option {', '.join(map(repr, unknown))}.",
            next_step=f"one of {', '.join(known)}.",
        )
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"an option of {strategy} does not fit: {error}.") from None


def describe_options(kind: type[StrategyOptions]) -> list[OptionInfo]:
    """List the options of such a struct, those of all strategies last."""
    return sorted(describe_struct(kind), key=lambda one: one.name in StrategyOptions.__struct_fields__)


def signature_of(kind: type[StrategyOptions]) -> inspect.Signature:
    """Say how a strategy with such options is called, for `help()`; type checkers read `__init__.pyi`."""
    parameter = inspect.Parameter
    by_name = parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            parameter("group", parameter.POSITIONAL_OR_KEYWORD, annotation="Group"),
            parameter("options", by_name, default=None, annotation=f"{kind.__name__} | None"),
            *(
                parameter(option.name, by_name, default=option.default, annotation=option.type)
                for option in describe_options(kind)
            ),
        ]
    )
