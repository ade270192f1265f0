"""One trainer's step on an accelerator: recorded once, and replayed by one launch instead of hundreds.

Inputs, outputs and the rows that experts get stand in memory that stays where it is; each replay's are copied
from there. It is recorded again when the pool of rows has grown, and so moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shoal.simulate.mixture_settings import NUM_FEATURES
from shoal.simulate.mixture_steps import Pass, StepGradients

if TYPE_CHECKING:
    from shoal.simulate.mixture_model import MixtureModel

_NUM_REHEARSALS = 3
"""Before a step can be recorded, libraries have to be loaded and buffers allocated."""


class RecordedStep:
    """On the CPU, where there is nothing to record, it is computed anew each time."""

    def __init__(self, model: MixtureModel, generator: torch.Generator) -> None:
        settings = model.settings
        device = torch.device(settings.device)
        self._model = model
        self._generator = generator
        self._x = torch.zeros(1, settings.batch_size, NUM_FEATURES, device=device)
        self._labels = torch.zeros(1, settings.batch_size, dtype=torch.int64, device=device)
        self._num_rows = settings.num_layers * settings.rows_a_layer
        self._staging = model.bank.pool.take(self._num_rows, 0)
        self._address = 0
        self._replay: Callable[[], Pass] | None = None

    def run(self, x: torch.Tensor, labels: torch.Tensor) -> StepGradients:
        """Of one trainer: `[1, batch, features]`."""
        bank, settings = self._model.bank, self._model.settings
        for layer in range(settings.num_layers):
            bank.update(layer)
        self._x.copy_(x)
        self._labels.copy_(labels)
        address = bank.pool.span(0, 1).data_ptr()
        if self._replay is None or self._address != address:
            self._replay, self._address = self._record(), address
        done = self._replay()
        first = bank.pool.take(self._num_rows, bank.num_updates)
        bank.pool.span(first, self._num_rows).copy_(bank.pool.span(self._staging, self._num_rows))
        return StepGradients(
            loss=done.losses[0].clone(),
            trunk=[part[0].clone(memory_format=torch.contiguous_format) for part in done.trunk],
            rows=list(range(first, first + self._num_rows)),
            experts=done.experts[0].clone(),
            num_layers=settings.num_layers,
        )

    def _pass(self) -> Pass:
        settings = self._model.settings
        firsts = range(self._staging, self._staging + self._num_rows, settings.rows_a_layer)
        return self._model.pass_through(self._x, self._labels, list(firsts))

    def _record(self) -> Callable[[], Pass]:
        if self._x.device.type != "cuda":
            return self._pass
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_NUM_REHEARSALS):
                self._pass()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            done = self._pass()

        def replay() -> Pass:
            graph.replay()
            return done

        return replay
