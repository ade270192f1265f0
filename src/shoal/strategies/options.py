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

Count = Annotated[int, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=0)]


class CommonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for all strategies.

    A step is a step of the optimizer; one that was skipped counts, except in a group of one.
    """

    local_steps: Annotated[int, Meta(ge=1, description="steps from one round to the next")] = 1
    """Strategies that share gradients average parameters instead when it is above 1 (local SGD): sharing
    only some of the gradients would let the replicas drift apart for good."""
    warmup_steps: Annotated[
        Count, Meta(description="steps over which the learning rate rises linearly to its full value")
    ] = 0
    warmup_factor: Annotated[Factor, Meta(description="of the learning rate, where warm-up begins")] = 0.1
    decay_every: Annotated[Count, Meta(description="steps after which the rate decays again; 0: never")] = 0
    decay_factor: Annotated[Factor, Meta(description="of the learning rate, at each decay")] = 0.1
    global_average_every: Annotated[
        Count, Meta(description="rounds between averages of the whole group, buffers included; 0: never")
    ] = 0
    should_broadcast_buffers: Annotated[
        bool, Meta(description="buffers (BatchNorm) become those of rank 0 after each step, as in DDP")
    ] = False
    monitor: Annotated[
        bool, Meta(description="measure gradient noise scale and variance; all wait for all in each step")
    ] = False
    batch_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="of one worker; without it the noise scale counts in batches of one worker"),
    ] = None


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


WAITS_FOR_ALL = ("global_average_every", "should_broadcast_buffers", "monitor")
"""Options that make each worker wait for all others, whatever the strategy; when they are off, they are 0."""

OPTIONS: dict[str, type[CommonOptions]] = {
    "all-reduce": AllReduceOptions,
    "ddp": DDPOptions,
    "neighbor": NeighborOptions,
    "hierarchical": HierarchicalOptions,
    "pair": PairOptions,
    "sma": SmaOptions,
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
