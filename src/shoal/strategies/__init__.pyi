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
