"""KungFu's words in `shoal bench training`: its optimizers by name, and the line its benchmarks end in."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.bench.contenders import NONE, Spread
from shoal.bench.training_rows import OWN_SPEED
from shoal.core import UsageError
from shoal.report import Report
from shoal.strategies.registry import canonical

OPTIMIZERS = {
    "sync-sgd": "all-reduce",
    "sync-sgd-nccl": "all-reduce",
    "sync-sgd-hierarchical-nccl": "all-reduce",
    "async-sgd": "pair",
    "sma": "sma",
}
"""Our strategy of each. The last word of the NCCL ones is what carries it: here that is the group itself, in
which several machines always reduce inside each of them first."""
_PREFIX = "FIGURE:"
"""In their scripts the line says RESULT; here that is the report's."""


def optimizer_named(name: str) -> str:
    """KungFu's optimizer as it spells it; hyphens and underscores are alike."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in OPTIMIZERS:
        raise UsageError(
            f"KungFu has no optimizer {name!r}.",
            next_step=f"one of {', '.join(OPTIMIZERS)}; --strategies names all that there are here.",
        )
    return plain


def strategy_of(name: str) -> str:
    """Our strategy that KungFu's optimizer of this name is."""
    return OPTIMIZERS[optimizer_named(name)]


def becomes_text(name: str) -> str:
    """What it is measured as, and on what."""
    how = ""
    if name.endswith("-nccl"):
        how = ": the group itself carries it, on GPUs as on CPUs"
    if "hierarchical" in name:
        how += ", inside each machine first"
    return f"{name} is the strategy {strategy_of(name)} here{how}."


def figure_lines(report: Report) -> list[str]:
    """For each strategy one: the first worker's examples/s, the error of 1.96 deviations, and what ran."""
    lines = []
    for row in report.rows:
        if row.metric != OWN_SPEED or row.key.get("rank") != 0 or not row.starts:
            continue
        strategy = str(row.key["strategy"])
        if strategy != NONE:
            speed = Spread.of(row.samples)
            facts = msgspec.json.encode(_facts(strategy, report.config)).decode()
            lines.append(f"{_PREFIX} {speed.mean:f} +-{speed.error:f} {facts}")
    return lines


def _facts(strategy: str, config: dict[str, Any]) -> dict[str, Any]:
    """By the names that KungFu's line has."""
    return {
        "framework": "shoal",
        "np": config.get("num_workers"),
        "strategy": strategy,
        "bs": config.get("batch_size"),
        "model": config.get("model"),
        "xla": False,
        "kf-opt": config.get("kungfu") or _optimizer_of(strategy),
        "fuse": True,
        "nvlink": None,
        "data": "synthetic",
    }


def _optimizer_of(strategy: str) -> str | None:
    """What KungFu calls a strategy, where it has it."""
    own = canonical(strategy)
    return next((name for name, ours in OPTIMIZERS.items() if ours == own), None)
