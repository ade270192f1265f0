"""What a contest's samples say: who was first at the target by each measure, and why others were not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from shoal.bench.compare_reasons import shown_score, shown_target
from shoal.bench.compare_rows import (
    BYTES,
    CHOSEN,
    DISTANCE,
    ENDED_EARLY,
    MEAN_STALENESS,
    NOT_REACHED,
    RUN_SECONDS,
    SECONDS,
    SENT,
    STEPS,
    final_of,
    worst_of,
)
from shoal.bench.compare_settings import CompareConfig, read_config
from shoal.report import Report
from shoal.report.units import digits, scale_for
from shoal.simulate.task_facts import facts_of

RANKED = {SECONDS: ("seconds", "s"), BYTES: ("bytes", "B"), STEPS: ("steps", "")}
"""What each ranking goes by, and its unit."""
_MEANS = (SECONDS, BYTES, STEPS, DISTANCE, MEAN_STALENESS, RUN_SECONDS, SENT)
_SAID_EACH = 4
"""More contenders share a sentence."""


class Outcome:
    """The figures of one contender, one for each seed that has them."""

    def __init__(self, num_seeds: int) -> None:
        self.num_seeds = num_seeds
        self.samples: dict[str, list[float]] = {}
        self.rate: float | None = None
        self.reasons: dict[str, int] = {}
        """Why the target was not reached, and in how many runs."""
        self.endings: dict[str, int] = {}
        """Why runs that did reach it ended early, and how many."""
        self.error: str | None = None

    def mean(self, metric: str) -> float:
        """Over seeds."""
        return statistics.fmean(self.samples[metric])

    def is_whole(self, metric: str) -> bool:
        """Whether every seed has it."""
        return len(self.samples.get(metric, ())) == self.num_seeds

    def why(self) -> str:
        """All reasons, each with the number of seeds where they differ; empty where all reached it."""
        return self._joined(self.reasons)

    def why_ended(self) -> str:
        """The same of runs that reached the target, and not their end."""
        return self._joined(self.endings)

    def _joined(self, reasons: Mapping[str, int]) -> str:
        if len(reasons) == 1 and sum(reasons.values()) == self.num_seeds:
            return next(iter(reasons))
        return "; ".join(f"{count} of {self.num_seeds}: {why}" for why, count in reasons.items())


def outcomes_of(report: Report) -> dict[str, Outcome]:
    """By contender, in the order of the contest."""
    config = read_config(report.config)
    outcomes = {contender.name: Outcome(len(config.seeds)) for contender in config.contenders}
    for row in report.rows:
        outcome = outcomes.get(str(row.key.get("strategy")))
        if outcome is None:
            continue
        if row.metric == CHOSEN:
            outcome.rate = float(row.key["learning_rate"])
        elif row.metric == NOT_REACHED:
            outcome.reasons[str(row.key["why"])] = len(row.starts)
        elif row.metric == ENDED_EARLY:
            outcome.endings[str(row.key["why"])] = len(row.starts)
        elif row.error is not None:
            outcome.error = row.error
        elif row.key.keys() == {"strategy"}:
            outcome.samples[row.metric] = row.samples
    return outcomes


def ranking(outcomes: Mapping[str, Outcome], metric: str) -> list[str]:
    """Those that reached the target with every seed, the least first."""
    reached = [name for name, outcome in outcomes.items() if outcome.is_whole(metric)]
    return sorted(reached, key=lambda name: outcomes[name].mean(metric))


def summarize_compare(report: Report) -> dict[str, Any]:
    """The RESULT line: means over seeds of what all seeds have, rankings, and who is not in them."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    facts = facts_of(config.task)
    result: dict[str, Any] = {
        "headline": headline(report),
        "target": config.target,
        "ranking": {name: ranking(outcomes, metric) for metric, (name, _) in RANKED.items()},
        "learning_rate": {name: outcome.rate for name, outcome in outcomes.items()},
    }
    for metric in (final_of(facts), worst_of(facts), *_MEANS):
        result[metric] = {
            name: float(f"{outcome.mean(metric):.9g}")
            for name, outcome in outcomes.items()
            if outcome.is_whole(metric)
        }
    result[NOT_REACHED] = {name: outcome.why() for name, outcome in outcomes.items() if outcome.reasons}
    result[ENDED_EARLY] = {name: outcome.why_ended() for name, outcome in outcomes.items() if outcome.endings}
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def headline(report: Report) -> list[str]:
    """Who won by which measure, who came furthest, who did not arrive, and what was assumed."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    target = shown_target(facts_of(config.task), config.target)
    return [*winners(config, outcomes), *_missing(outcomes, target), *config.notes]


def winners(config: CompareConfig, outcomes: Mapping[str, Outcome]) -> list[str]:
    """Who was first by each measure, and who came furthest, in sentences."""
    facts = facts_of(config.task)
    target = shown_target(facts, config.target)
    sentences = [
        f"By {name} to {target}: {_leaders(outcomes, metric, unit)}."
        for metric, (name, unit) in RANKED.items()
        if ranking(outcomes, metric)
    ]
    if not sentences:
        sentences.append(f"Nobody reached {target} with every seed.")
    final = final_of(facts)
    whole = {name: outcome.mean(final) for name, outcome in outcomes.items() if outcome.is_whole(final)}
    if whole:
        best = facts.best(list(whole.values()))
        leaders = [name for name, value in whole.items() if value == best]
        of = f", the mean of {len(config.seeds)} seeds as all of these" if len(config.seeds) > 1 else ""
        sentences.append(f"Furthest at the end: {_named(leaders)}, {shown_score(facts, best)}{of}.")
    return sentences


def _leaders(outcomes: Mapping[str, Outcome], metric: str, unit: str) -> str:
    """The first, all of them where several are, and else the second too."""
    order = ranking(outcomes, metric)
    amounts = {name: amount(outcomes[name].mean(metric), unit) for name in order}
    first = [name for name in order if amounts[name] == amounts[order[0]]]
    text = f"{_named(first)}, {amounts[order[0]]}{' each' if len(first) > 1 else ''}"
    if len(first) == 1 and len(order) > 1:
        text += f"; then {order[1]}, {amounts[order[1]]}"
    return text


def _named(names: list[str]) -> str:
    """With 'and', and no more than a few of them."""
    if len(names) > _SAID_EACH:
        names = [*names[: _SAID_EACH - 1], f"{len(names) - _SAID_EACH + 1} others"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _missing(outcomes: Mapping[str, Outcome], target: str) -> list[str]:
    missing = {name: outcome for name, outcome in outcomes.items() if outcome.reasons}
    if len(missing) <= _SAID_EACH:
        return [f"{name} did not reach {target}: {outcome.why()}." for name, outcome in missing.items()]
    reasons = "; ".join(f"{name} ({outcome.why()})" for name, outcome in missing.items())
    return [f"{len(missing)} of {len(outcomes)} did not reach {target} with every seed: {reasons}."]


def amount(value: float, unit: str) -> str:
    """Seconds as seconds, bytes in their prefix, steps as a whole number."""
    if unit == "s":
        return f"{digits(value)} s"
    return scale_for(unit, value).format(value) if unit else f"{value:,.0f}"
