"""Processes that work through a list of tasks: each imports torch once, and takes the next task when free.

For simulated benchmarks, whose runs don't depend on each other nor on the machine. Results come in the order
of the tasks, whoever was first.
"""

from __future__ import annotations

import contextlib
import importlib
import selectors
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from shoal.bench.children import Child, Parent, child, end_with_parent
from shoal.bench.frame import Tell
from shoal.core import BenchmarkError, UsageError
from shoal.launch.settings import TUNING


def run_tasks(
    function: str, tasks: Sequence[dict[str, Any]], *, num_processes: int, tell: Tell
) -> Iterator[Any | BenchmarkError]:
    """What `module:name` returns for each task, by JSON; a task that fails gives its BenchmarkError.

    It is called as `function(task, tell)` in a process that has one thread for torch. What it tells is told
    here with the number of the task before it, when there are several.
    """
    if num_processes < 1:
        raise UsageError(f"{num_processes} processes do nothing.", next_step="give 1 or more.")
    waiting = list(enumerate(tasks))[::-1]
    done: dict[int, Any | BenchmarkError] = {}
    num_told = 0
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:

        def start() -> None:
            name = f"The process that runs {function}"
            entered = stack.enter_context(
                child("shoal.bench.pool:work", {"function": function}, name=name, variables=TUNING)
            )
            give(entered)

        def give(worker: Child) -> None:
            if not waiting:
                worker.end()
                return
            number, task = waiting.pop()
            worker.order(task=task)
            selector.register(worker, selectors.EVENT_READ, number)

        for _ in range(min(num_processes, len(tasks))):
            start()
        while num_told < len(tasks):
            for key, _ in selector.select():
                worker, number = cast(Child, key.fileobj), int(key.data)
                label = f"{number + 1}/{len(tasks)} " if len(tasks) > 1 else ""
                try:
                    answer = _heard(worker, partial(_tell_after, label, tell))
                except BenchmarkError as error:
                    selector.unregister(worker)
                    done[number] = error
                    if waiting:
                        start()
                    continue
                if answer is not None:
                    selector.unregister(worker)
                    done[number] = answer["answer"]
                    give(worker)
            while num_told in done:
                yield done.pop(num_told)
                num_told += 1


def _tell_after(label: str, tell: Tell, text: str) -> None:
    tell(f"{label}{text}")


def _heard(worker: Child, tell: Tell) -> dict[str, Any] | None:
    """Pass on all that a worker has said about its progress; its answer, if that was among it."""
    while True:
        message = worker.expect()
        if "progress" not in message:
            return message
        tell(message["progress"])
        if not worker.has_more:
            return None


def work(arguments: dict[str, Any], parent: Parent) -> None:
    """What a process of the pool does: one task after another, until there are no more."""
    end_with_parent()
    import torch

    torch.set_num_threads(1)
    module, _, name = arguments["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    while (order := parent.receive()) is not None:
        parent.tell(answer=function(order["task"], lambda text: parent.tell(progress=text)))
    parent.leave()
