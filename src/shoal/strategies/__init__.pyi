"""What type checkers and editors know of this package: constructors that take options by name.

Written by tools/strategy_files.py from the registry.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.core.run_options import OptionInfo as OptionInfo
from shoal.dht import Swarm
from shoal.group import Group
from shoal.strategies.options import (
    WAITS_FOR_ALL as WAITS_FOR_ALL,
    StrategyOptions as StrategyOptions,
    describe_options as describe_options,
)
from shoal.strategies.registry import (
    BUILT_IN as BUILT_IN,
    StrategyInfo as StrategyInfo,
    all_strategies as all_strategies,
    canonical as canonical,
    find as find,
    from_args as from_args,
    load_class as load_class,
    make_strategy as make_strategy,
)
from shoal.strategies.session import TrainingSession as TrainingSession
from shoal.strategies.strategy import Strategy as Strategy
from shoal.strategies.options import AllReduceOptions
from shoal.strategies.options import ChocoOptions
from shoal.strategies.options import D2Options
from shoal.strategies.options import DDPOptions
from shoal.strategies.options import DiLoCoOptions
from shoal.strategies.options import HierarchicalOptions
from shoal.strategies.options import HorovodOptions
from shoal.strategies.options import LocalSGDOptions
from shoal.strategies.options import MixOptions
from shoal.strategies.options import MomentumOptions
from shoal.strategies.options import NeighborOptions
from shoal.strategies.options import NoLoCoOptions
from shoal.strategies.options import PairOptions
from shoal.strategies.options import ParameterServerOptions
from shoal.strategies.options import PushSumOptions
from shoal.strategies.options import RelayOptions
from shoal.strategies.options import SgpOptions
from shoal.strategies.options import SmaOptions
from shoal.strategies.options import SparseLoCoOptions
from shoal.strategies.options import StalenessAwareOptions
from shoal.strategies.options import SwarmOptions
from shoal.strategies.options import SymmetricOptions
from shoal.strategies.options import WindowOptions
from shoal.strategies.all_reduce import GradientAllReduce as _GradientAllReduce
from shoal.strategies.choco import ChocoSGD as _ChocoSGD
from shoal.strategies.ddp import TorchDDP as _TorchDDP
from shoal.strategies.diloco import DiLoCo as _DiLoCo
from shoal.strategies.exact_diffusion import D2 as _D2
from shoal.strategies.exact_diffusion import ExactDiffusion as _ExactDiffusion
from shoal.strategies.extra import Extra as _Extra
from shoal.strategies.gradient_tracking import GradientTracking as _GradientTracking
from shoal.strategies.horovod import HorovodAllReduce as _HorovodAllReduce
from shoal.strategies.local_sgd import LocalSGD as _LocalSGD
from shoal.strategies.neighbor import HierarchicalAverage as _HierarchicalAverage
from shoal.strategies.neighbor import NeighborAverage as _NeighborAverage
from shoal.strategies.neighbor_momentum import NeighborMomentum as _NeighborMomentum
from shoal.strategies.noloco import NoLoCo as _NoLoCo
from shoal.strategies.pair import PairAverage as _PairAverage
from shoal.strategies.parameter_server import ParameterServer as _ParameterServer
from shoal.strategies.parameter_server import StalenessAwareSGD as _StalenessAwareSGD
from shoal.strategies.relay import RelaySGD as _RelaySGD
from shoal.strategies.sgp import StochasticGradientPush as _StochasticGradientPush
from shoal.strategies.sma import SynchronousModelAverage as _SynchronousModelAverage
from shoal.strategies.sparse_loco import SparseLoCo as _SparseLoCo
from shoal.strategies.swarm import SwarmTraining as _SwarmTraining
from shoal.strategies.window import PushSum as _PushSum
from shoal.strategies.window import WindowAverage as _WindowAverage

class GradientAllReduce(_GradientAllReduce):
    """Averages gradients in buckets while backward runs, so that all workers stay equal.

    By name `all-reduce`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `bucket_mib`: size of the flat buckets of gradients
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: AllReduceOptions | None = None,
        bucket_mib: float = 25.0,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class TorchDDP(_TorchDDP):
    """Runs torch's own DistributedDataParallel, to compare with.

    By name `ddp`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `bucket_mib`: size of the buckets of gradients: torch's bucket_cap_mb
    - `find_unused_parameters`: look for parameters that a backward pass does not use, as in torch
    - `gradient_as_bucket_view`: let gradients be views of the buckets, as in torch
    - `is_uneven`: workers may have different numbers of batches; one small round more a step
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: DDPOptions | None = None,
        bucket_mib: float = 25.0,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        is_uneven: bool = False,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class NeighborAverage(_NeighborAverage):
    """Averages parameters with those of neighbours, after the step or during backward.

    By name `neighbor`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph
    - `order`: exchange after the step, or begun after forward and finished before the step
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: NeighborOptions | None = None,
        topology: Any = 'exponential-2',
        order: Literal["adapt-then-combine", "adapt-while-combine"] = 'adapt-then-combine',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class HierarchicalAverage(_HierarchicalAverage):
    """Averages the mean of each machine with the means of neighbour machines.

    By name `hierarchical`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `topology`: which machines are neighbours: ring, …; in code also a function, matrix or graph
    - `order`: exchange after the step, or begun after forward and finished before the step
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: HierarchicalOptions | None = None,
        topology: Any = 'exponential-2',
        order: Literal["adapt-then-combine", "adapt-while-combine"] = 'adapt-then-combine',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class PairAverage(_PairAverage):
    """Averages with the newest model of a random worker, then steps; nobody waits.

    By name `pair`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `seed`: seed of the choice of peers; the rank is added
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: PairOptions | None = None,
        seed: int = 0,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class SynchronousModelAverage(_SynchronousModelAverage):
    """Moves parameters toward the mean of all by `alpha`, then steps.

    By name `sma`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `alpha`: how far parameters move toward the group's mean in a round
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: SmaOptions | None = None,
        alpha: float = 0.1,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class LocalSGD(_LocalSGD):
    """Steps alone, and every few steps takes the mean of all parameters.

    By name `local-sgd`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `average_momentum`: average the optimizer's state too: momentum, and the moments of Adam
    - `codec`: codec of what is sent: fp16, bf16, int8, top-k:0.01; none: parameters as they are
    - `local_steps`: steps from one average to the next
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: LocalSGDOptions | None = None,
        average_momentum: bool = False,
        codec: str = 'none',
        local_steps: int = 8,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class DiLoCo(_DiLoCo):
    """Steps alone for long, then does an outer step with the mean of all changes.

    By name `diloco`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `outer_lr`: learning rate of the outer step
    - `outer_momentum`: Nesterov momentum of the outer step
    - `fragments`: parts of the model that are sent one after another, evenly spread
    - `overlap_steps`: steps that a fragment may be under way; its outer step comes after them
    - `mixing`: weight of this worker's own parameters after an outer step
    - `codec`: codec of what is sent: none, fp16, bf16, int8, top-k:0.01, …
    - `error_feedback`: add what a codec could not send to what is sent next; one copy more
    - `local_steps`: steps from one outer step to the next
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: DiLoCoOptions | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        overlap_steps: int = 0,
        mixing: float = 0.0,
        codec: str = 'none',
        error_feedback: bool = True,
        local_steps: int = 100,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class NoLoCo(_NoLoCo):
    """Steps alone for long, then does an outer step with one random worker, never with all.

    By name `noloco`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `outer_lr`: learning rate of the outer step
    - `outer_momentum`: momentum of the outer step
    - `pull`: how far partners' slow weights move toward each other; the paper's gamma
    - `seed`: seed of the choice of pairs; the same on all workers
    - `local_steps`: steps from one outer step to the next
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: NoLoCoOptions | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        pull: float = 1.0,
        seed: int = 0,
        local_steps: int = 50,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class SparseLoCo(_SparseLoCo):
    """Steps alone for long, then does an outer step with the largest changes, in two bits each.

    By name `sparse-loco`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `outer_lr`: learning rate of the outer step
    - `density`: share of the values that are sent; 0.01 to 0.03 is usual
    - `error_decay`: share of what was not sent that is kept for the next outer step
    - `local_steps`: steps from one outer step to the next
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: SparseLoCoOptions | None = None,
        outer_lr: float = 1.0,
        density: float = 0.02,
        error_decay: float = 0.95,
        local_steps: int = 30,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class PushSum(_PushSum):
    """Pushes shares of parameters and weight to a neighbour, adds what came; nobody waits.

    By name `push-sum`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: who sends to whom; it may be directed and irregular, as its weights don't count
    - `min_weight`: a worker whose push-sum weight is below this keeps what it has
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: PushSumOptions | None = None,
        topology: Any = 'one-peer-exponential',
        min_weight: float = 1.0,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class WindowAverage(_WindowAverage):
    """Puts parameters into neighbours' windows, and averages with its own; nobody waits.

    By name `window`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph
    - `force_barrier`: all wait for all before parameters are put, and before they are mixed
    - `codec`: codec of the parameters that are put
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: WindowOptions | None = None,
        topology: Any = 'one-peer-exponential',
        force_barrier: bool = False,
        codec: Literal["none", "fp16", "bf16"] = 'none',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class ParameterServer(_ParameterServer):
    """Sends gradients to servers, which hold the model and step, and pulls parameters.

    By name `parameter-server`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `mode`: apply each gradient at once, let no worker lead by too much, or average all of them
    - `staleness`: bounded: rounds by which a worker may lead the slowest; 0: all wait for all
    - `num_aggregate`: sync: gradients that make one update, later ones are dropped; none: all of them
    - `drop_stale`: drop gradients that are more updates behind than this; none: drop nothing
    - `staleness_lr`: divide the learning rate by the updates that a gradient is behind
    - `delay_compensation`: lambda of g + lambda g*g*(w_now - w_then); 0: no compensation
    - `pull_every`: pushes from one pull to the next; between them the worker steps alone
    - `compression`: codec of what is pushed (fp16, bf16, int8, top-k:0.01), with error feedback
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: ParameterServerOptions | None = None,
        mode: Literal["async", "bounded", "sync"] = 'async',
        staleness: int = 4,
        num_aggregate: int | None = None,
        drop_stale: int | None = None,
        staleness_lr: bool = False,
        delay_compensation: float = 0.0,
        pull_every: int = 1,
        compression: str = 'none',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class HorovodAllReduce(_HorovodAllReduce):
    """Averages gradients by Horovod itself, to compare with.

    By name `horovod`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `compression`: compression that Horovod applies to gradients
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: HorovodOptions | None = None,
        compression: Literal["none", "fp16"] = 'none',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class GradientTracking(_GradientTracking):
    """Steps along an estimate of the mean gradient, which neighbours average too.

    By name `gradient-tracking`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `topology`: who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: MixOptions | None = None,
        topology: Any = 'exponential-2',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class ExactDiffusion(_ExactDiffusion):
    """Averages with neighbours, with a correction that removes the bias of unequal data.

    By name `exact-diffusion`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `topology`: a static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: SymmetricOptions | None = None,
        topology: Any = 'ring',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class Extra(_Extra):
    """Corrects as exact diffusion does, and exchanges during backward.

    By name `extra`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `topology`: a static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: SymmetricOptions | None = None,
        topology: Any = 'ring',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class D2(_D2):
    """Corrects as exact diffusion does, and mixes faster.

    By name `d2`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `topology`: a static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …
    - `laziness`: share l in l·I + (1 − l)·W, which mixes in place of W; none: the least that fits
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: D2Options | None = None,
        topology: Any = 'ring',
        laziness: float | None = None,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class NeighborMomentum(_NeighborMomentum):
    """Averages parameters and the optimizer's momentum with neighbours.

    By name `momentum`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: who are neighbours: ring, exponential:3, …; in code also a function, matrix or graph
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: MomentumOptions | None = None,
        topology: Any = 'one-peer-exponential',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class ChocoSGD(_ChocoSGD):
    """Sends compressed differences, and moves toward the public copies of its neighbours.

    By name `choco`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: a static and symmetric graph: ring, torus, star, full, hypercube, random-regular:4, …
    - `codec`: codec of what is sent: top-k:0.1, int8, fp16, low-rank:4, none, …
    - `gamma`: how far to move toward the neighbours' public copies; none: the share of bytes sent
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: ChocoOptions | None = None,
        topology: Any = 'ring',
        codec: str = 'top-k:0.1',
        gamma: float | None = None,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class StochasticGradientPush(_StochasticGradientPush):
    """Sends shares of parameters and weight over directed graphs, and waits for them.

    By name `sgp`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `topology`: who sends to whom; it may be directed and irregular, as its weights don't count
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: SgpOptions | None = None,
        topology: Any = 'one-peer-exponential',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class RelaySGD(_RelaySGD):
    """Passes sums of models along a tree, so that each worker gets the mean of all, late.

    By name `relay`. A lost worker ends it. Options beside those of `StrategyOptions`:

    - `tree`: tree of the workers, in which each waits for 3 others at most, or in a chain for 2
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: RelayOptions | None = None,
        tree: Literal["binary", "chain"] = 'binary',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class StalenessAwareSGD(_StalenessAwareSGD):
    """Corrects late gradients on parameter servers.

    By name `staleness-aware`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `mode`: apply each gradient at once, let no worker lead by too much, or average all of them
    - `staleness`: bounded: rounds by which a worker may lead the slowest; 0: all wait for all
    - `num_aggregate`: sync: gradients that make one update, later ones are dropped; none: all of them
    - `drop_stale`: drop gradients that are more updates behind than this; none: drop nothing
    - `staleness_lr`: divide the learning rate by the updates that a gradient is behind
    - `delay_compensation`: lambda of g + lambda g*g*(w_now - w_then); 0: no compensation
    - `pull_every`: pushes from one pull to the next; between them the worker steps alone
    - `compression`: codec of what is pushed (fp16, bf16, int8, top-k:0.01), with error feedback
    """
    def __init__(
        self,
        group: Group | None = None,
        *,
        options: StalenessAwareOptions | None = None,
        mode: Literal["async", "bounded", "sync"] = 'async',
        staleness: int = 4,
        num_aggregate: int | None = None,
        drop_stale: int | None = None,
        staleness_lr: bool = True,
        delay_compensation: float = 0.04,
        pull_every: int = 1,
        compression: str = 'none',
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...

class SwarmTraining(_SwarmTraining):
    """Trains one model with whoever is there: peers join a run, leave it and fail at any moment.

    By name `swarm`. The others go on without a lost worker. Options beside those of `StrategyOptions`:

    - `run`: name of the run; whoever joins under it trains one model
    - `join`: HOST:PORT of peers of the swarm, with commas; where connect() is not used
    - `listen`: HOST:PORT that others call this peer at; default: any free port
    - `secret_file`: file of the swarm's secret, as `shoal keys secret` writes it
    - `target_samples`: samples of all members that make one step of the optimizer; 0: local steps
    - `outer_lr`: learning rate of the outer step of DiLoCo rounds
    - `outer_momentum`: Nesterov momentum of the outer step of DiLoCo rounds
    - `min_peers`: no round begins with fewer members
    - `patience`: every time-out is this many times as long
    - `max_wait`: seconds that a step waits for a round, before it goes on alone
    - `codec`: codec of what is sent: none, fp16, int8, int4, top-k:0.01, …; with error feedback
    - `robust`: averages that a few liars cannot move far, and audits of those who average
    - `overlap`: DiLoCo rounds: wait for each, train on while it is averaged, or average one fragment after another beside it
    - `fragments`: streaming: parts of the model; each is averaged once in local_steps
    - `bandwidth`: Mbit/s of this peer's line, the slower direction, until rounds have measured it
    - `upload_limit`: Mbit/s that this peer sends at most for the run; 0: no limit
    - `download_limit`: Mbit/s that others send to this peer at most for the run; 0: no limit
    - `minority_after`: seconds without more than half of the members before going on as a fork
    - `local_steps`: DiLoCo rounds: steps of a member from one round to the next
    """
    def __init__(
        self,
        swarm: Swarm | Group | None = None,
        *,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        options: SwarmOptions | None = None,
        run: str = 'run',
        join: str = '',
        listen: str = '',
        secret_file: str = '',
        target_samples: int = 0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        min_peers: int = 1,
        patience: float = 1.0,
        max_wait: float = 30.0,
        codec: str = 'none',
        robust: Literal["none", "centered-clip", "median"] = 'none',
        overlap: Literal["none", "delayed", "streaming"] = 'none',
        fragments: int = 4,
        bandwidth: float = 0.0,
        upload_limit: float = 0.0,
        download_limit: float = 0.0,
        minority_after: float = 120.0,
        local_steps: int = 1,
        warmup_steps: int = 0,
        warmup_factor: float = 0.1,
        decay_every: int = 0,
        decay_factor: float = 0.1,
        global_average_every: int = 0,
        should_broadcast_buffers: bool = False,
        monitor: bool = False,
        on_nonfinite: Literal["warn", "skip", "stop"] = 'warn',
        batch_size: int | None = None,
    ) -> None: ...
