"""What each strategy can be told: one frozen struct for each, with a description for every field.

Nothing here imports torch, so that the command line can offer the options. What they do is left to the
strategies.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from shoal.core.errors import UsageError
from shoal.strategies.common_options import CommonOptions, Count
from shoal.strategies.exact_options import (
    D2Options,
    ExactDiffusionOptions,
    ExtraOptions,
    GradientTrackingOptions,
    MomentumOptions,
)
from shoal.strategies.research_options import (
    ChocoOptions,
    RelayOptions,
    SgpOptions,
    StalenessAwareOptions,
)
from shoal.strategies.server_options import ParameterServerOptions

__all__ = [
    "OPTIONS",
    "WAITS_FOR_ALL",
    "AllReduceOptions",
    "CommonOptions",
    "DDPOptions",
    "DiLoCoOptions",
    "HierarchicalOptions",
    "HorovodOptions",
    "LocalSGDOptions",
    "NeighborOptions",
    "OptionInfo",
    "PairOptions",
    "ParameterServerOptions",
    "PushSumOptions",
    "SmaOptions",
    "WindowOptions",
    "describe_options",
    "read_options",
]


class AllReduceOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `all-reduce`."""

    bucket_mib: Annotated[float, Meta(gt=0, description="size of the flat buckets of gradients")] = 25.0
    """Smaller ones start earlier in backward, larger ones cost fewer meetings. The first is not smaller than
    the others, as DDP's is: on one machine a reduction is work of this very core, not a wait to be hidden."""


class DDPOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `ddp`, by the names and with the defaults of torch where it has them."""

    bucket_mib: Annotated[float, Meta(gt=0, description="torch's bucket_cap_mb")] = 25.0
    find_unused_parameters: Annotated[
        bool, Meta(description="some backward passes do not use all parameters")
    ] = False
    gradient_as_bucket_view: Annotated[bool, Meta(description="as in torch")] = False
    is_uneven: Annotated[
        bool, Meta(description="workers may have different numbers of batches; one small round more a step")
    ] = False


class NeighborOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `neighbor`."""

    topology: Annotated[
        Any, Meta(description="a name ('ring', 'exponential:3'); in code also a function, matrix or graph")
    ] = "exponential-2"
    order: Annotated[
        Literal["adapt-then-combine", "adapt-while-combine"],
        Meta(description="exchange after the step, or begun after forward and finished before the step"),
    ] = "adapt-then-combine"


class HierarchicalOptions(NeighborOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `hierarchical`; the topology is one of machines."""


class PairOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `pair`."""

    seed: Annotated[int, Meta(description="of the choice of peers; the rank is added")] = 0


class SmaOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `sma`."""

    alpha: Annotated[
        float, Meta(gt=0, le=1, description="how far parameters move toward the group's mean in a round")
    ] = 0.1


class LocalSGDOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `local-sgd`."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one average to the next")] = 8
    average_momentum: Annotated[
        bool, Meta(description="average the optimizer's state too: momentum, and the moments of Adam")
    ] = False
    codec: Annotated[
        str, Meta(description="of what is sent (fp16, bf16, int8, top-k:0.01); none: parameters as they are")
    ] = "none"
    """With one, what was learned since the last average is sent, with error feedback: it costs two more
    copies of the parameters."""


class DiLoCoOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `diloco`."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one outer step to the next")] = 100
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step")] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="Nesterov's, of the outer step")] = 0.9
    fragments: Annotated[
        int, Meta(ge=1, description="parts of the model that are sent one after another, evenly spread")
    ] = 1
    """More of them send the same bytes in smaller portions."""
    overlap_steps: Annotated[
        Count, Meta(description="steps that a fragment may be under way; its outer step comes after them")
    ] = 0
    mixing: Annotated[
        float,
        Meta(ge=0, lt=1, description="weight of this worker's own parameters after an outer step"),
    ] = 0.0
    codec: Annotated[str, Meta(description="of what is sent: none, fp16, bf16, int8, top-k:0.01 …")] = "none"
    error_feedback: Annotated[
        bool, Meta(description="add what a codec could not send to what is sent next; one copy more")
    ] = True


class PushSumOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `push-sum`."""

    topology: Annotated[
        Any, Meta(description="who pushes to whom; may be directed and irregular, as its weights don't count")
    ] = "one-peer-exponential"
    min_weight: Annotated[
        float,
        Meta(ge=0, le=1, description="a worker whose push-sum weight is below this keeps what it has"),
    ] = 1.0
    """The step of a worker with weight w is 1/w times as long. A worker that is faster than those that
    should give to it would lose all its weight; at 0 nothing is held back, as in the synchronous rule."""


class WindowOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `window`."""

    topology: Annotated[
        Any, Meta(description="a name ('ring', 'exponential:3'); in code also a function, matrix or graph")
    ] = "one-peer-exponential"
    force_barrier: Annotated[
        bool, Meta(description="all wait for all before parameters are put, and before they are mixed")
    ] = False
    codec: Annotated[Literal["none", "fp16", "bf16"], Meta(description="of the parameters that are put")] = (
        "none"
    )


class HorovodOptions(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `horovod`."""

    compression: Annotated[Literal["none", "fp16"], Meta(description="Horovod's own, of gradients")] = "none"


WAITS_FOR_ALL = ("global_average_every", "should_broadcast_buffers", "monitor")
"""Options that make each worker wait for all others, whatever the strategy; when they are off, they are 0."""

OPTIONS: dict[str, type[CommonOptions]] = {
    "all-reduce": AllReduceOptions,
    "ddp": DDPOptions,
    "neighbor": NeighborOptions,
    "hierarchical": HierarchicalOptions,
    "pair": PairOptions,
    "sma": SmaOptions,
    "local-sgd": LocalSGDOptions,
    "diloco": DiLoCoOptions,
    "push-sum": PushSumOptions,
    "window": WindowOptions,
    "parameter-server": ParameterServerOptions,
    "horovod": HorovodOptions,
    "gradient-tracking": GradientTrackingOptions,
    "exact-diffusion": ExactDiffusionOptions,
    "extra": ExtraOptions,
    "d2": D2Options,
    "momentum": MomentumOptions,
    "choco": ChocoOptions,
    "sgp": SgpOptions,
    "relay": RelayOptions,
    "staleness-aware": StalenessAwareOptions,
}

O = TypeVar("O", bound=CommonOptions)  # noqa: E741


def read_options(kind: type[O], values: Mapping[str, Any], strategy: str) -> O:
    """The options of these values, strings converted; UsageError says which ones there are."""
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


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as a command line shows it."""

    name: str
    """With underscores, as in code."""
    kind: str
    """'int', 'float', 'bool', 'text', or the choices as 'a|b'."""
    default: Any
    description: str


def describe_options(strategy: str) -> list[OptionInfo]:
    """The options of a strategy (its canonical name), its own ones first."""
    kind = OPTIONS[strategy]
    hints = get_type_hints(kind, include_extras=True)
    common = CommonOptions.__struct_fields__
    names = sorted(kind.__struct_fields__, key=lambda name: name in common)
    defaults = kind()
    return [OptionInfo(name, *_unwrap(hints[name], getattr(defaults, name))) for name in names]


def _unwrap(hint: Any, default: Any) -> tuple[str, Any, str]:
    description = ""
    while True:
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            description = next((note.description for note in notes if note.description), description)
        elif get_origin(hint) in (Union, types.UnionType):
            hint = next(part for part in get_args(hint) if part is not type(None))
        else:
            break
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint)), default, description
    return (hint.__name__ if hint in (int, float, bool) else "text"), default, description
