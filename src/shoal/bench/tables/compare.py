"""What a contest's samples say: who was first at the target by each measure, as sentences and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from shoal.bench.compare import (
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
    CompareConfig,
    read_config,
    score_of,
    shown_score,
    shown_target,
    with_rates,
)
from shoal.report import Report
from shoal.report.curves import resolution_of
from shoal.report.schema import label_of, with_failed
from shoal.report.statistics import MIN_SEEDS, MIN_TIMED_STARTS, Lead, half_interval, lead_of
from shoal.report.tables import Column, LatexColumn, Table, latex_table
from shoal.report.units import counted, digits, scale_for
from shoal.report.views import (
    DEVIATION,
    Items,
    contest_line,
    rarely_averaging,
    runs_of,
    title_line,
    with_every_seed,
)
from shoal.simulate.task_facts import TaskFacts, facts_of
from shoal.simulate.world import World
from shoal.transport import Profile

RANKED = {SECONDS: ("seconds", "s"), BYTES: ("bytes", "B"), STEPS: ("steps", "")}
"""What each ranking goes by, and its unit."""
_MEANS = (SECONDS, BYTES, STEPS, DISTANCE, MEAN_STALENESS, RUN_SECONDS, SENT)
_SAID_EACH = 4
"""More contenders share a sentence."""


class ContestOutcome:
    """The figures of one contender, one for each seed that has them."""

    def __init__(self, num_seeds: int) -> None:
        self.num_seeds = num_seeds
        self.samples: dict[str, list[float]] = {}
        self.resolution: dict[str, float] = {}
        """By metric, what two samples differ by at least unless they are equal: evaluations are apart."""
        self.rate: float | None = None
        self.reasons: dict[str, int] = {}
        """Why the target was not reached, and in how many runs."""
        self.endings: dict[str, int] = {}
        """Why runs that did reach it ended early, and how many."""
        self.error: str | None = None

    def mean(self, metric: str) -> float:
        """The mean of one metric over all seeds that have it."""
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


def outcomes_of(report: Report) -> dict[str, ContestOutcome]:
    """Collect the figures by contender, in the order of the contest."""
    config = read_config(report.config)
    outcomes = {contender.name: ContestOutcome(len(config.seeds)) for contender in config.contenders}
    scores = _resolution_of_scores(facts_of(config.task))
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
            outcome.resolution[row.metric] = scores.get(row.metric) or resolution_of(report, row)
    return outcomes


def _resolution_of_scores(facts: TaskFacts) -> dict[str, float]:
    return {score_of(facts, which): facts.resolution for which in ("final", "worst_final")}


def _config_of(report: Report) -> CompareConfig:
    """The contest as it was run: with the rates that were tried beyond those that were asked for."""
    tried = {float(row.key["learning_rate"]): True for row in report.rows if "learning_rate" in row.key}
    config = read_config(report.config)
    return with_rates(config, tried) if config.is_tuned else config


def ranking(outcomes: Mapping[str, ContestOutcome], metric: str) -> list[str]:
    """Those that reached the target with every seed, the least first."""
    reached = [name for name, outcome in outcomes.items() if outcome.is_whole(metric)]
    return sorted(reached, key=lambda name: outcomes[name].mean(metric))


def summarize_compare(report: Report) -> dict[str, Any]:
    """The RESULT line: means over seeds of what all seeds have, rankings, and who is not in them."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    facts = facts_of(config.task)
    result: dict[str, Any] = {
        "headline": headline(report),
        "conditions": conditions(config),
        "target": config.target,
        "resolution": {metric: step for metric, step in _resolution_of_scores(facts).items() if step},
        "ranking": {name: ranking(outcomes, metric) for metric, (name, _) in RANKED.items()},
        "learning_rate": {name: outcome.rate for name, outcome in outcomes.items()},
    }
    for metric in (score_of(facts, "final"), score_of(facts, "worst_final"), *_MEANS):
        result[metric] = {
            name: float(f"{outcome.mean(metric):.9g}")
            for name, outcome in outcomes.items()
            if outcome.is_whole(metric)
        }
    result[NOT_REACHED] = {name: outcome.why() for name, outcome in outcomes.items() if outcome.reasons}
    result[ENDED_EARLY] = {name: outcome.why_ended() for name, outcome in outcomes.items() if outcome.endings}
    return with_failed(report, result)


def headline(report: Report) -> list[str]:
    """Who won by which measure, who came furthest, who did not arrive, and what was assumed."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    target = shown_target(facts_of(config.task), config.target)
    return [*winners(config, outcomes), *_missing(outcomes, target), *config.notes]


def winners(config: CompareConfig, outcomes: Mapping[str, ContestOutcome]) -> list[str]:
    """Who was first by each measure, and who came furthest, in sentences; nobody where seeds do not tell."""
    facts = facts_of(config.task)
    target = shown_target(facts, config.target)

    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        metric: (f"By {name} to {target}", partial(amount, unit=unit))
        for metric, (name, unit) in RANKED.items()
    }
    shown[score_of(facts, "final")] = ("At the end", partial(shown_score, facts))
    sentences = []
    for metric, (what, written) in shown.items():
        lead = leaders(config, outcomes, metric)
        if lead is not None:
            missing = [name for name in outcomes if name not in lead.means]
            sentences.append(contest_line(what, lead, written, missing))
    if not any(ranking(outcomes, metric) for metric in RANKED):
        sentences.insert(0, f"Nobody reached {target} {with_every_seed(len(config.seeds))}.")
    return sentences


def leaders(config: CompareConfig, outcomes: Mapping[str, ContestOutcome], metric: str) -> Lead | None:
    """Who is ahead by one measure, as far as the seeds tell; None where nobody has it with every seed."""
    whole = [name for name, outcome in outcomes.items() if outcome.is_whole(metric)]
    if not whole:
        return None
    facts = facts_of(config.task)
    samples = {name: outcomes[name].samples[metric] for name in whole}
    resolution = {name: outcomes[name].resolution.get(metric, 0.0) for name in whole}
    direction = "lower" if metric in RANKED else facts.direction
    return lead_of(samples, direction, seeds_needed(config, metric), resolution)


def seeds_needed(config: CompareConfig, metric: str) -> int:
    """With how many seeds somebody may be named: more where the seconds are those of a real machine."""
    return MIN_TIMED_STARTS if config.is_real and metric == SECONDS else MIN_SEEDS


def _missing(outcomes: Mapping[str, ContestOutcome], target: str) -> list[str]:
    missing = {name: outcome for name, outcome in outcomes.items() if outcome.reasons}
    num_seeds = next(iter(outcomes.values())).num_seeds
    every = with_every_seed(num_seeds)
    if len(missing) <= _SAID_EACH:
        sentences = []
        for name, outcome in missing.items():
            in_none = num_seeds > 1 and SECONDS not in outcome.samples
            when = "with any seed" if in_none else every
            sentences.append(f"{name} did not reach {target} {when}: {outcome.why()}.")
        return sentences
    reasons = "; ".join(f"{name} ({outcome.why()})" for name, outcome in missing.items())
    return [f"{len(missing)} of {len(outcomes)} did not reach {target} {every}: {reasons}."]


def amount(value: float, unit: str) -> str:
    """Seconds as seconds, bytes in their prefix, steps as a whole number."""
    if unit == "s":
        return f"{digits(value)} s"
    return scale_for(unit, value).format(value) if unit else f"{value:,.0f}"


# --- tables ---


def compare_items(report: Report) -> Items:
    """What was equal for all, the figures of each contender, the rankings, and the headline."""
    config, outcomes = _config_of(report), outcomes_of(report)
    items: Items = [title_line(report), ""]
    items += [*conditions(config)]
    if config.is_tuned:
        items.append("≤ or ≥ before a rate: it was the smallest or the largest that was tried.")
    items += [*[DEVIATION] * (len(config.seeds) > 1), ""]
    items += [_figures_table(config, outcomes), *_troubles(outcomes)]
    if any(ranking(outcomes, metric) for metric in RANKED):
        items.append(_ranking_table(config, outcomes))
    for row in report.failed:
        if "strategy" not in row.key:
            items += [(f"The contest broke off: {' '.join(str(row.error).split())}", "red"), ""]
    return [*items, *winners(config, outcomes), *config.notes, ""]


def conditions(config: CompareConfig) -> list[str]:
    """What holds for all contenders alike."""
    facts, world = facts_of(config.task), config.world
    network = world.profile.name or ("ideal" if world.profile == Profile() else "a profile without a name")
    kind = "real processes under shaped links" if config.is_real else "virtual time"
    where = f"{world.num_workers} workers, {kind}; network between {world.between}: {network}"
    where += _network(world.profile)
    how_long = f"each worker does {config.steps} steps of batch {config.batch_size}"
    target = f"The target is {facts.score} {shown_target(facts, config.target)}"
    lines = [
        f"{config.task}: {facts.description}.",
        f"{where}; split {config.split}.",
        f"A step costs a worker {_cost(world)}.",
        f"{runs_of(config.seeds)}; {how_long}; SGD with momentum {config.momentum:g}.",
        "Equal for all with one seed: first weights, division of data, batches, links, number of steps.",
        f"{target}, looked at every {counted(config.eval_every, 'step')}.",
    ]
    rates = ", ".join(f"{rate:g}" for rate in config.learning_rates)
    if config.is_tuned:
        lines += [
            f"Learning rate: each tried {rates} once, with another seed ({config.tuning_seed}), and took the",
            "fastest to the target among the most accurate.",
        ]
        first = sorted(facts.learning_rates)
        if set(first) < set(config.learning_rates):
            lines.append(
                f"The grid was {', '.join(f'{rate:g}' for rate in first)}, and was made wider for all while "
                "the best of one was at its end."
            )
    else:
        lines.append(f"Learning rate: {rates} for all, not tuned.")
    lines += rarely_averaging(msgspec.to_builtins(config.contenders))
    lines.append("The score is that of the mean of all models.")
    return lines


def _network(profile: Profile) -> str:
    """What its lines and ways let through, in numbers; '' where it limits nothing that all have alike."""
    told = []
    for place, line in profile.places.items():
        speeds = [
            f"{mbit_s:g} Mbit/s {way}"
            for way, mbit_s in (("up", line.up_mbit_s), ("down", line.down_mbit_s))
            if mbit_s is not None
        ]
        if speeds:
            told.append((f"each {place} has " if len(profile.places) > 1 else "") + " and ".join(speeds))
    way = profile.ways.default
    if way.delay_ms is not None:
        delay: Any = msgspec.to_builtins(way.delay_ms)
        told.append(f"a one-way delay of {_delay(delay)}")
    if way.mbit_s is not None:
        told.append(f"{way.mbit_s:g} Mbit/s between two")
    if way.loss:
        told.append(f"{digits(100 * way.loss, 1)} % of packets lost")
    if profile.ways.between:
        told.append("other values on some ways")
    return f" ({', '.join(told)})" if told else ""


def _delay(delay: Any) -> str:
    """A distribution of delays in words."""
    if not isinstance(delay, dict):
        return f"{delay:g} ms"
    kind = delay.get("kind")
    if kind in {"normal", "exponential"}:
        return f"{delay['mean']:g} ms on average"
    return f"{delay['floor']:g} ms or more" if kind == "pareto" else "as long as it was recorded"


def _cost(world: World) -> str:
    """Of a step, with those whose steps cost more, and what goes wrong."""
    step_ms: Any = msgspec.to_builtins(world.compute.step_ms)
    text = f"{step_ms:g} ms" if isinstance(step_ms, int | float) else f"a time drawn from {label_of(step_ms)}"
    slow = [f"rank {rank} {factor:g} times that" for rank, factor in world.compute.factors.items()]
    faults = f"; faults: {world.faults.name or len(world.faults.fault)}" if world.faults is not None else ""
    return ", ".join([text, *slow]) + faults


def _figures_table(config: CompareConfig, outcomes: Mapping[str, ContestOutcome]) -> Table:
    facts = facts_of(config.task)
    target = shown_target(facts, config.target)
    sign = " %" if facts.score == "accuracy" else ""
    scores = f"{facts.score}{sign}", f"worst worker{sign}"
    heads = ("rate", *scores, f"s to {target}", f"bytes to {target}", "steps", "consensus distance")
    columns = (Column("strategy", "left", wraps=True), *(Column(head, wraps=True) for head in heads))
    table = Table("", columns)
    for name, outcome in outcomes.items():
        rate = "-" if outcome.rate is None else _rate(config, outcome.rate)
        cells = (
            rate,
            _spread(facts, outcome.samples.get(score_of(facts, "final"), [])),
            _spread(facts, outcome.samples.get(score_of(facts, "worst_final"), [])),
            *(_to_target(outcome, metric, unit).removesuffix(" s") for metric, (_, unit) in RANKED.items()),
            digits(outcome.mean(DISTANCE), 2) if DISTANCE in outcome.samples else "-",
        )
        table.rows.append((name, *cells))
    return table


def _ranking_table(config: CompareConfig, outcomes: Mapping[str, ContestOutcome]) -> Table:
    """All rankings beside each other, with the places that each contender may have."""
    target = shown_target(facts_of(config.task), config.target)
    columns: list[Column] = []
    rankings = []
    for metric, (name, unit) in RANKED.items():
        columns += [Column(""), Column(f"by {name}", "left", wraps=True), Column("")]
        rankings.append(_placed(config, outcomes, metric, unit))
    seeds = counted(len(config.seeds), "seed")
    how = "mean ± half of its 95 % interval; 1-3 may be any of these places"
    if len(config.seeds) < MIN_SEEDS:
        how = f"in no order, {MIN_SEEDS} may tell one"
    table = Table(
        f"Who reached {target} {with_every_seed(len(config.seeds))}, {seeds}: {how}", tuple(columns)
    )
    for cells in zip(*rankings, strict=True):
        table.rows.append(tuple(cell for three in cells for cell in three))
    return table


def _placed(
    config: CompareConfig, outcomes: Mapping[str, ContestOutcome], metric: str, unit: str
) -> list[tuple[str, str, str]]:
    """Place, name and amount of each that arrived; in the contest's order where nothing tells a place."""
    lead = leaders(config, outcomes, metric)
    if lead is None:
        return []
    if not lead.is_enough:
        arrived = [name for name in outcomes if name in lead.means]
        return [("", name, amount(lead.means[name], unit)) for name in arrived]
    cells = []
    for name in ranking(outcomes, metric):
        first, last = lead.places[name]
        half = half_interval(outcomes[name].samples[metric], outcomes[name].resolution.get(metric, 0.0))
        mean = lead.means[name]
        spread = f" ±{digits(100 * half / mean, 2)} %" if mean else ""
        cells.append((f"{first}" if first == last else f"{first}-{last}", name, amount(mean, unit) + spread))
    return cells


def _troubles(outcomes: Mapping[str, ContestOutcome]) -> Items:
    """A line for each contender that failed, or did not reach the target."""
    lines: Items = []
    for name, outcome in outcomes.items():
        if outcome.error is not None:
            lines.append((f"{name} failed: {' '.join(outcome.error.split())}", "red"))
        if outcome.reasons:
            lines.append((f"{name}, not reached: {outcome.why()}", "yellow"))
        if outcome.endings:
            lines.append((f"{name}, reached: then {outcome.why_ended()}", "yellow"))
    return [*lines, ""] if lines else []


def latex_of(report: Report) -> str:
    """The contest as a table for a paper, in the order of seconds to the target."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    facts = facts_of(config.task)
    first = ranking(outcomes, SECONDS)
    names = [*first, *(name for name in outcomes if name not in first)]
    percent = ("%", 100.0) if facts.score == "accuracy" else ("", 1.0)
    target = shown_target(facts, config.target)

    def column(head: str, metric: str, unit: str = "", factor: float = 1.0) -> LatexColumn:
        direction = facts.direction if facts.score in metric else "lower"
        samples = [
            [factor * sample for sample in outcomes[name].samples.get(metric, ())]
            if outcomes[name].is_whole(metric)
            else []
            for name in names
        ]
        resolution = [factor * outcomes[name].resolution.get(metric, 0.0) for name in names]
        return LatexColumn(head, unit, direction, samples, resolution, seeds_needed(config, metric))

    columns = [
        column(facts.score, score_of(facts, "final"), *percent),
        column("worst worker", score_of(facts, "worst_final"), *percent),
        column("time", SECONDS, "s"),
        column("traffic", BYTES, "B"),
        column("steps", STEPS),
    ]
    network = config.world.profile.name or "ideal"
    caption = (
        f"{config.task}, {config.world.num_workers} workers, {network} network, split {config.split}: "
        f"{facts.score} after {config.steps} steps, and time, traffic and steps to {target}. "
        f"Mean ± standard deviation over {counted(len(config.seeds), 'seed')}."
    )
    return latex_table(names, columns, caption, f"tab:{config.task}")


def _rate(config: CompareConfig, rate: float) -> str:
    """With an arrow where the grid ended before the best rate may have come."""
    if not config.is_tuned:
        return f"{rate:g}"
    edges = {min(config.learning_rates): "≤", max(config.learning_rates): "≥"}
    return f"{edges.get(rate, '')}{rate:g}"


def _to_target(outcome: ContestOutcome, metric: str, unit: str) -> str:
    samples = outcome.samples.get(metric, [])
    if outcome.is_whole(metric):
        return amount(statistics.fmean(samples), unit)
    return f"in {len(samples)}/{outcome.num_seeds}" if samples else "-"


def _spread(facts: TaskFacts, samples: list[float]) -> str:
    if not samples:
        return "-"
    mean = statistics.fmean(samples)
    if facts.score != "accuracy":
        return digits(mean) + (f" ±{digits(statistics.stdev(samples), 1)}" if len(samples) > 1 else "")
    return f"{100 * mean:.1f}" + (f" ±{100 * statistics.stdev(samples):.1f}" if len(samples) > 1 else "")
