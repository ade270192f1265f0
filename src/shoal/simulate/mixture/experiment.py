"""Learning@home's convergence experiment in virtual time: trainers whose gradients arrive late."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from shoal.core import UsageError
from shoal.data.seeds import mix
from shoal.simulate.mixture.model import MixtureModel, StepGradients
from shoal.simulate.mixture.settings import (
    MixtureEvaluation,
    MixtureResult,
    MixtureRunSettings,
    TrainLoss,
)
from shoal.transport.network.distributions import Draws

MEAN, DEVIATION = 0.1307, 0.3081
"""The mean and deviation of MNIST's pixels."""
LOSS_WINDOW = 64
"""Updates whose training losses make one point."""

Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Images from 0 to 1 and labels, for training and for tests, as `shoal.data.mnist` gives them."""


_Event = tuple[float, int, int]
"""When, of which trainer, and how far its gradients have come: layers, the last first, then the update."""


def run_mixture(
    settings: MixtureRunSettings,
    data: Data,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> MixtureResult:
    """Train until `steps` updates were made; `tell` hears how many were, and how many there will be."""
    if len(data[0]) < settings.batch_size:
        raise UsageError(
            f"{len(data[0])} images do not make a batch of {settings.batch_size}.",
            next_step="give more images, or a smaller batch.",
        )
    device = torch.device(settings.device)
    train_x, test_x = (_prepared(images).to(device) for images in (data[0], data[2]))
    train_y, test_y = (labels.to(device) for labels in (data[1], data[3]))
    run = _Run(settings, train_x, train_y)
    evaluations: list[MixtureEvaluation] = []
    told = 0
    for num_updates in run.updates():
        if num_updates % settings.eval_every == 0 or num_updates == settings.steps:
            loss, accuracy = run.model.evaluate(test_x, test_y)
            evaluations.append(
                MixtureEvaluation(num_updates=num_updates, virtual_s=run.now_s, loss=loss, accuracy=accuracy)
            )
        if num_updates >= told + LOSS_WINDOW or num_updates == settings.steps:
            tell(num_updates, settings.steps)
            told = num_updates
    return MixtureResult(
        evaluations=evaluations,
        train_loss=run.train_loss,
        staleness=dict(sorted(run.staleness.items())),
        expert_staleness=dict(sorted(run.model.bank.staleness.items())),
        virtual_s=run.now_s,
        num_touched_experts=run.model.bank.num_touched(),
        num_lost=run.num_lost,
    )


class _Trainer:
    """One of those that share the model: its own order of the images, its own delays."""

    def __init__(self, settings: MixtureRunSettings, index: int, num_images: int) -> None:
        self.index = index
        self.batches = _batches(settings, index, num_images)
        self.gradients: StepGradients | None = None
        self.computed_at = 0
        self._draws = Draws(settings.seed, "delay", str(index))
        self._mean_s = settings.delay_ms / 1000

    def next_delay_s(self) -> float:
        return -self._mean_s * math.log(self._draws.uniform())


class _Run:
    """The trainers' events: each computes, waits for its delay, updates, and computes again."""

    def __init__(self, settings: MixtureRunSettings, train_x: torch.Tensor, train_y: torch.Tensor) -> None:
        self.model = MixtureModel(settings)
        self.now_s = 0.0
        self.staleness: Counter[int] = Counter()
        self.train_loss: list[TrainLoss] = []
        self.num_lost = 0
        self._settings = settings
        self._train_x, self._train_y = train_x, train_y
        self._trainers = [_Trainer(settings, index, len(train_x)) for index in range(settings.num_trainers)]
        self._num_updates = 0
        self._losses: list[torch.Tensor] = []
        self._has_instant_experts = settings.is_faithful and settings.has_gate
        """Whose gradients do not wait for the network."""
        self._shares = settings.delivery_shares
        """Of a delay, when the experts of the last layer, the one before, … get their gradients."""

    def updates(self) -> Iterator[int]:
        """Their count, after some of them: after each that ends an evaluation's stretch, in any case."""
        return self._under_lock() if self._settings.is_faithful else self._in_parallel()

    def _in_parallel(self) -> Iterator[int]:
        """Trainers read the parameters when their computing ends, so only the delay makes them stale.

        They begin one after another. What falls into one window is applied, and then computed, together.
        """
        settings, trainers = self._settings, self._trainers
        apart_s = settings.compute_s / len(trainers)
        computed = [(settings.compute_s + index * apart_s, index, 0) for index in range(len(trainers))]
        arriving: list[_Event] = []
        end_s = 0.0
        while self._num_updates < settings.steps:
            until_evaluation = settings.eval_every - self._num_updates % settings.eval_every
            most = min(until_evaluation, settings.steps - self._num_updates)
            end_s = max(end_s, min(computed[:1] + arriving[:1])[0]) + settings.window_s
            num_before = self._num_updates
            has_news = False
            while arriving and arriving[0][0] <= end_s and self._num_updates - num_before < most:
                at_s, index, stage = heapq.heappop(arriving)
                has_news = True
                if stage < len(self._shares):
                    self._deliver(trainers[index], stage)
                else:
                    self.now_s = at_s
                    self._update(trainers[index])
                    heapq.heappush(computed, (at_s + settings.compute_s, index, 0))
            if has_news:
                self.model.bank.decide()
            if self._num_updates > num_before:
                yield self._num_updates
            computing = _before(end_s, computed)
            if computing:
                self._compute([trainers[index] for _, index, _ in computing])
            for at_s, index, _ in computing:
                delay_s = trainers[index].next_delay_s()
                for stage, share in enumerate((*self._shares, 1.0)):
                    heapq.heappush(arriving, (at_s + share * delay_s, index, stage))

    def _under_lock(self) -> Iterator[int]:
        """First come, first served: half of a step's time for forward and backward, half for the update."""
        held_s = self._settings.compute_s / 2
        free_s = 0.0
        requests = [(0.0, index, trainer) for index, trainer in enumerate(self._trainers)]
        num_requests = len(requests)
        while self._num_updates < self._settings.steps:
            at_s, _, trainer = heapq.heappop(requests)
            free_s = max(at_s, free_s) + held_s
            next_s = free_s
            if trainer.gradients is None:
                self.model.bank.decide()
                self._compute([trainer])
                next_s += trainer.next_delay_s()
            else:
                self.now_s = free_s
                self._update(trainer)
                yield self._num_updates
            heapq.heappush(requests, (next_s, num_requests, trainer))
            num_requests += 1

    def _compute(self, trainers: list[_Trainer]) -> None:
        chosen = torch.stack([next(trainer.batches) for trainer in trainers])
        for trainer, gradients in zip(
            trainers, self.model.gradients(self._train_x[chosen], self._train_y[chosen]), strict=True
        ):
            trainer.gradients, trainer.computed_at = gradients, self._num_updates
            self.model.bank.count_step()
            if self._has_instant_experts:
                for stage in range(self._settings.num_layers):
                    self._deliver(trainer, stage)

    def _update(self, trainer: _Trainer) -> None:
        gradients = trainer.gradients
        assert gradients is not None
        self.model.update_trunk(gradients.trunk)
        if not self._settings.has_gate:
            for stage in range(self._settings.num_layers):
                self._deliver(trainer, stage)
            self.model.bank.decide()
        trainer.gradients = None
        self.staleness[self._num_updates - trainer.computed_at] += 1
        self._num_updates += 1
        self._losses.append(gradients.loss)
        if len(self._losses) == LOSS_WINDOW or self._num_updates == self._settings.steps:
            loss = torch.stack(self._losses).mean().item()
            self.train_loss.append(TrainLoss(num_updates=self._num_updates, virtual_s=self.now_s, loss=loss))
            self._losses = []

    def _deliver(self, trainer: _Trainer, stage: int) -> None:
        """To the experts of one layer, the last one first."""
        assert trainer.gradients is not None
        rows, experts = trainer.gradients.of_layer(self._settings.num_layers - 1 - stage)
        self.num_lost += sum(one < 0 for one in experts)
        self.model.bank.deliver(rows, experts)


def _before(end_s: float, events: list[_Event]) -> list[_Event]:
    """Take events out of a heap."""
    taken: list[_Event] = []
    while events and events[0][0] <= end_s:
        taken.append(heapq.heappop(events))
    return taken


def _batches(settings: MixtureRunSettings, trainer: int, num_images: int) -> Iterator[torch.Tensor]:
    """Each epoch in another order; what is left over at its end is dropped."""
    size, device = settings.batch_size, torch.device(settings.device)
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(mix(settings.seed, trainer, epoch))
        order = torch.randperm(num_images, generator=generator).to(device)
        for start in range(0, num_images - size + 1, size):
            yield order[start : start + size]
        epoch += 1


def _prepared(images: torch.Tensor) -> torch.Tensor:
    return ((images - MEAN) / DEVIATION).flatten(1)
