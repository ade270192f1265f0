"""What each strategy does in a step, for all workers at once, and which operations of the group it takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec
import torch

from shoal.simulate.stacked.model import Everybody, MachineRounds, Mix, Rounds, StackedModel
from shoal.simulate.stacked.replay import Ring, Tape
from shoal.simulate.world import World
from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.local_sgd import LocalSGD
from shoal.strategies.sma import SynchronousModelAverage
from shoal.strategies.strategy import Strategy
from shoal.tensors import DEFAULT_BUCKET_BYTES, BucketLayout
from shoal.tensors.dtypes import dtype_name
from shoal.topology import Topology


class StackedSGD:
    """torch.optim.SGD, of all workers."""

    momentum_buffer: torch.Tensor | None = None

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum

    def step(self, model: StackedModel, gradients: torch.Tensor, factor: float) -> None:
        """Parameters move; `factor` is that of the schedule."""
        if self._momentum:
            if self.momentum_buffer is None:
                self.momentum_buffer = gradients.clone()
            else:
                self.momentum_buffer.mul_(self._momentum).add_(gradients)
            gradients = self.momentum_buffer
        model.values.add_(gradients, alpha=-self._learning_rate * factor)


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What rules work on."""

    model: StackedModel
    optimizer: StackedSGD
    strategy: Strategy
    """As one of the workers has it, for its options and topology."""
    world: World
    tape: Tape


class Rule:
    """Workers that share nothing; what others do comes in these places of a step."""

    def __init__(self, stage: RuleContext) -> None:
        self.rounds = 0
        self.is_round = False
        """Whether the step under way is one in which they share."""
        self._model = stage.model
        self._optimizer = stage.optimizer
        self._tape = stage.tape
        self._size = stage.world.num_workers
        self._size_bytes = sum(layout.size_bytes for layout in stage.model.layouts(sys.maxsize))

    def after_forward(self) -> None:
        """Parameters are what gradients are taken at."""

    def after_backward(self, gradients: torch.Tensor) -> torch.Tensor:
        """What `.grad` is when backward returns."""
        self._tape.backward()
        return gradients

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """What the optimizer steps with."""
        return gradients

    def after_step(self) -> None:
        """The optimizer has stepped."""

    def average_all(self) -> None:
        """Averages the parameters of all workers."""

    def _exchange(self, mix: Mix, values: torch.Tensor) -> torch.Tensor:
        """What comes of an exchange that is waited for at once."""
        self._tape.wait(self._tape.exchange(mix.edges, self._size_bytes))
        return mix(values)


class AllReduceRule(Rule):
    """Gradients, bucket after bucket while backward goes on; or parameters after some local steps."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        strategy = stage.strategy
        assert isinstance(strategy, GradientAllReduce)
        self._shares_gradients = strategy.shares_gradients
        max_bytes = round(strategy.options.bucket_mib * 2**20)
        self._buckets = (
            stage.model.layouts(max_bytes, is_reversed=True)
            if self._shares_gradients
            else stage.model.layouts(DEFAULT_BUCKET_BYTES)
        )

    def after_backward(self, gradients: torch.Tensor) -> torch.Tensor:
        """The mean over all workers."""
        if not self._shares_gradients:
            return super().after_backward(gradients)
        numbers = []
        for layout, share in zip(self._buckets, self._model.shares_of_backward(self._buckets), strict=True):
            self._tape.backward(share)
            numbers.append(self._start(layout))
        for number in numbers:
            self._tape.wait(number)
        return gradients.mean(0, keepdim=True).expand_as(gradients)

    def after_step(self) -> None:
        """The mean of parameters, where those are shared."""
        if self._shares_gradients or not self.is_round:
            return
        for number in [self._start(layout) for layout in self._buckets]:
            self._tape.wait(number)
        self._model.values = self._model.values.mean(0).repeat(self._size, 1)

    def _start(self, layout: BucketLayout) -> int:
        return self._tape.issue(Ring(self._size, layout.with_flags().size_bytes))


class ExchangeRule(Rule):
    """One exchange a round, after the step, or begun after forward and finished before the step."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        self._is_overlapped: bool = getattr(stage.strategy, "is_overlapped", stage.strategy.name == "extra")
        self._under_way: int | None = None
        self._everybody = Everybody(self._size)

    def _mix(self) -> Mix:
        """That of this round."""
        return self._everybody

    def after_forward(self) -> None:
        """The exchange begins, where it is overlapped with backward."""
        if self._is_overlapped and self.is_round:
            self._under_way = self._tape.exchange(self._mix().edges, self._size_bytes)

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """What has come takes the parameters' place."""
        if self._under_way is not None:
            self._tape.wait(self._under_way)
            self._under_way = None
            self._model.values = self._mix()(self._model.values)
        return gradients

    def after_step(self) -> None:
        """The exchange, where it is not."""
        if self.is_round and not self._is_overlapped:
            self._model.values = self._exchange(self._mix(), self._model.values)

    def average_all(self) -> None:
        """An exchange of all with all."""
        self._model.values = self._exchange(self._everybody, self._model.values)


class SmaRule(ExchangeRule):
    """Some way towards the mean."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        assert isinstance(stage.strategy, SynchronousModelAverage)
        self._toward_mean = Everybody(self._size, stage.strategy.options.alpha)

    def _mix(self) -> Mix:
        return self._toward_mean


class LocalSGDRule(ExchangeRule):
    """The mean after some local steps, of momentum too if it is asked for."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        assert isinstance(stage.strategy, LocalSGD)
        self._averages_momentum = stage.strategy.options.average_momentum

    def after_step(self) -> None:
        """Averages the parameters first, then the momenta."""
        super().after_step()
        if self.is_round and self._averages_momentum:
            self._average_momentum()

    def average_all(self) -> None:
        """Nothing: a round is one."""

    def _average_momentum(self) -> None:
        """After all have said which state they have."""
        momentum = self._optimizer.momentum_buffer
        dtype = dtype_name(self._model.values.dtype)
        labels = [] if momentum is None else [(name, "momentum_buffer", dtype) for name in self._model.named]
        size_bytes = len(msgspec.msgpack.encode(labels))
        self._tape.wait(self._tape.exchange(self._everybody.edges, size_bytes, is_for_all=True))
        if momentum is not None:
            self._optimizer.momentum_buffer = self._exchange(self._everybody, momentum)


class NeighborRule(ExchangeRule):
    """The rounds of a topology, of workers or of machines."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        self._turns = Rounds(_topology(stage))

    def _mix(self) -> Mix:
        return self._turns[self.rounds]


class HierarchicalRule(NeighborRule):
    """The rounds of a topology of machines."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        machines = [stage.world.machine_of(rank) for rank in range(self._size)]
        self._turns = MachineRounds(_topology(stage), machines)


def _topology(stage: RuleContext) -> Topology:
    topology: Topology = vars(stage.strategy)["topology"]
    return topology


class MomentumRule(NeighborRule):
    """Momentum takes the parameters' ways, with a flag for each parameter."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        self._momentum_bytes = sum(
            layout.with_flags().size_bytes for layout in stage.model.layouts(sys.maxsize)
        )

    def after_step(self) -> None:
        """Mixes parameters and momenta at once."""
        if self.is_round:
            self._share_all(self._mix())

    def average_all(self) -> None:
        """Averages parameters and momenta over all workers."""
        self._share_all(self._everybody)

    def _share_all(self, mix: Mix) -> None:
        momentum = self._optimizer.momentum_buffer
        assert momentum is not None, "an optimizer with momentum that has stepped"
        sizes = (self._size_bytes, self._momentum_bytes)
        for number in [self._tape.exchange(mix.edges, size_bytes) for size_bytes in sizes]:
            self._tape.wait(number)
        self._model.values = mix(self._model.values)
        self._optimizer.momentum_buffer = mix(momentum)


class TrackingRule(NeighborRule):
    """Gradient tracking: trackers take the gradients' place."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        self._tracker = torch.zeros_like(self._model.values)
        self._last = torch.zeros_like(self._model.values)

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """Mixes the trackers, and lets the optimizer step along them."""
        self._tracker = self._tracker + (gradients - self._last)
        self._last = gradients
        if self.is_round:
            self._tracker = self._exchange(self._mix(), self._tracker)
        return self._tracker

    def average_all(self) -> None:
        """Afterwards each tracker is the mean of the last gradients."""
        super().average_all()
        self._tracker = self._exchange(self._everybody, self._last)


class CorrectedRule(NeighborRule):
    """Corrections that sum to zero over the workers; each step gets its share of them."""

    def __init__(self, stage: RuleContext) -> None:
        super().__init__(stage)
        self._correction = torch.zeros_like(self._model.values)
        self._share = 1 / stage.strategy.options.local_steps

    def average_all(self) -> None:
        """Afterwards they sum to zero again."""
        super().average_all()
        self._correction = self._correction - self._exchange(self._everybody, self._correction)

    def _keep(self, correction: torch.Tensor) -> None:
        """Without what rounding adds to their sum: products round otherwise than differences."""
        self._correction = correction - correction.mean(0)


class DiffusionRule(CorrectedRule):
    """Exact diffusion, and D² with other weights."""

    def after_step(self) -> None:
        """Corrects the parameters, then combines them with the neighbours'."""
        stepped = self._model.values.add_(self._correction, alpha=self._share)
        if self.is_round:
            self._model.values = self._exchange(self._mix(), stepped)
            self._keep(self._correction + (self._model.values - stepped))


class ExtraRule(CorrectedRule):
    """The mix of the parameters at which the gradient was taken, less the correction."""

    def before_step(self, gradients: torch.Tensor) -> torch.Tensor:
        """Combines the parameters with the neighbours', then corrects them."""
        old = self._model.values
        gradients = super().before_step(gradients)
        is_mixed = self._model.values is not old
        mixed = self._model.values
        self._model.values = mixed - self._share * self._correction
        if is_mixed:
            self._keep(self._correction + (old - mixed) / 2)
        return gradients
