"""What constructors of strategies take by name, for editors and type checkers.

Written by tools/strategy_files.py from `options`, which says what each means and what it is without it.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class StrategyKeywords(TypedDict, total=False):
    """These are the keyword arguments for `StrategyOptions`."""

    local_steps: int
    """Steps from one round to the next."""
    warmup_steps: int
    """Steps over which the learning rate rises linearly to its full value."""
    warmup_factor: float
    """Factor on the learning rate where warm-up begins."""
    decay_every: int
    """Steps from one decay of the learning rate to the next; 0: never."""
    decay_factor: float
    """Factor on the learning rate at each decay."""
    global_average_every: int
    """Rounds between averages of the whole group, buffers included; 0: never."""
    should_broadcast_buffers: bool
    """Buffers (BatchNorm) become those of rank 0 after each step, as in DDP."""
    monitor: bool
    """Measure gradient noise scale and variance; all wait for all in each step."""
    on_nonfinite: Literal["warn", "skip", "stop"]
    """What to do at a NaN or an infinity: warn, skip the step, or stop."""
    batch_size: int | None
    """Batch size of one worker; with it the noise scale counts in examples."""


class AllReduceKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `AllReduceOptions`."""

    bucket_mib: float
    """Size of the flat buckets of gradients."""


class DDPKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `DDPOptions`."""

    bucket_mib: float
    """Size of the buckets of gradients: torch's bucket_cap_mb."""
    find_unused_parameters: bool
    """Look for parameters that a backward pass does not use, as in torch."""
    gradient_as_bucket_view: bool
    """Let gradients be views of the buckets, as in torch."""
    is_uneven: bool
    """Workers may have different numbers of batches; one small round more a step."""


class HorovodKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `HorovodOptions`."""

    compression: Literal["none", "fp16"]
    """Compression that Horovod applies to gradients."""


class NeighborKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `NeighborOptions`."""

    topology: Any
    """Who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph."""
    order: Literal["adapt-then-combine", "adapt-while-combine"]
    """Exchange after the step, or begun after forward and finished before the step."""


class HierarchicalKeywords(NeighborKeywords, total=False):
    """These are the keyword arguments for `HierarchicalOptions`."""


class PairKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `PairOptions`."""

    seed: int
    """Seed of the choice of peers; the rank is added."""


class SmaKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `SmaOptions`."""

    alpha: float
    """How far parameters move toward the group's mean in a round."""


class LocalSGDKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `LocalSGDOptions`."""

    average_momentum: bool
    """Average the optimizer's state too: momentum, and the moments of Adam."""
    codec: str
    """Codec of what is sent: fp16, bf16, int8, top-k:0.01; none: parameters as they are."""


class DiLoCoKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `DiLoCoOptions`."""

    outer_lr: float
    """Learning rate of the outer step."""
    outer_momentum: float
    """Nesterov momentum of the outer step."""
    fragments: int
    """Parts of the model that are sent one after another, evenly spread."""
    overlap_steps: int
    """Steps that a fragment may be under way; its outer step comes after them."""
    mixing: float
    """Weight of this worker's own parameters after an outer step."""
    codec: str
    """Codec of what is sent: none, fp16, bf16, int8, top-k:0.01, …"""
    error_feedback: bool
    """Add what a codec could not send to what is sent next; one copy more."""


class NoLoCoKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `NoLoCoOptions`."""

    outer_lr: float
    """Learning rate of the outer step."""
    outer_momentum: float
    """Momentum of the outer step."""
    pull: float
    """How far partners' slow weights move toward each other; the paper's gamma."""
    seed: int
    """Seed of the choice of pairs; the same on all workers."""


class SparseLoCoKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `SparseLoCoOptions`."""

    outer_lr: float
    """Learning rate of the outer step."""
    density: float
    """Share of the values that are sent; 0.01 to 0.03 is usual."""
    error_decay: float
    """Share of what was not sent that is kept for the next outer step."""


class PushSumKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `PushSumOptions`."""

    topology: Any
    """Who sends to whom; it may be directed and irregular, as its weights don't count."""
    min_weight: float
    """A worker whose push-sum weight is below this keeps what it has."""


class SgpKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `SgpOptions`."""

    topology: Any
    """Who sends to whom; it may be directed and irregular, as its weights don't count."""


class WindowKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `WindowOptions`."""

    topology: Any
    """Who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph."""
    force_barrier: bool
    """All wait for all before parameters are put, and before they are mixed."""
    codec: Literal["none", "fp16", "bf16"]
    """Codec of the parameters that are put."""


class MixKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `MixOptions`."""

    topology: Any
    """Who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph."""


class SymmetricKeywords(MixKeywords, total=False):
    """These are the keyword arguments for `SymmetricOptions`."""


class D2Keywords(SymmetricKeywords, total=False):
    """These are the keyword arguments for `D2Options`."""

    laziness: float | None
    """Share l in l·I + (1 − l)·W, which mixes in place of W; none: the least that fits."""


class MomentumKeywords(MixKeywords, total=False):
    """These are the keyword arguments for `MomentumOptions`."""


class ChocoKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `ChocoOptions`."""

    topology: Any
    """A static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …"""
    codec: str
    """Codec of what is sent: top-k:0.1, int8, fp16, low-rank:4, none, …"""
    gamma: float | None
    """How far to move toward the neighbours' public copies; none: the share of bytes sent."""


class RelayKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `RelayOptions`."""

    tree: Literal["binary", "chain"]
    """Tree of the workers, in which each waits for 3 others at most, or in a chain for 2."""


class ParameterServerKeywords(StrategyKeywords, total=False):
    """These are the keyword arguments for `ParameterServerOptions`."""

    mode: Literal["async", "bounded", "sync"]
    """Apply each gradient at once, let no worker lead by too much, or average all of them."""
    staleness: int
    """Bounded: rounds by which a worker may lead the slowest; 0: all wait for all."""
    num_aggregate: int | None
    """Sync: gradients that make one update, later ones are dropped; none: all of them."""
    drop_stale: int | None
    """Drop gradients that are more updates behind than this; none: drop nothing."""
    staleness_lr: bool
    """Divide the learning rate by the updates that a gradient is behind."""
    delay_compensation: float
    """Lambda of g + lambda g*g*(w_now - w_then); 0: no compensation."""
    pull_every: int
    """Pushes from one pull to the next; between them the worker steps alone."""
    compression: str
    """Codec of what is pushed (fp16, bf16, int8, top-k:0.01), with error feedback."""


class StalenessAwareKeywords(ParameterServerKeywords, total=False):
    """These are the keyword arguments for `StalenessAwareOptions`."""
