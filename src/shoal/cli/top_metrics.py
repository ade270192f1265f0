"""What `shoal top --web` gives to Prometheus: its text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.core.board import Sighting

if TYPE_CHECKING:
    from shoal.dht.crawl import Crawl, Visited
    from shoal.dht.wire import About

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, object]


class Lines:
    """The text, metric by metric."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, about: str, values: Iterable[tuple[Labels, float | None]]) -> None:
        """One metric; values that are not known are left out, and so is a metric without any."""
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            self._lines += [f"# HELP shoal_{name} {about}", f"# TYPE shoal_{name} {kind}"]
            self._lines += [f"shoal_{name}{_labels(labels)} {_number(value)}" for labels, value in known]

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines)


def look_metrics(age_s: float, *, is_failing: bool) -> str:
    """Of `shoal top` itself."""
    lines = Lines()
    lines.add("top_up", "gauge", "0 while shoal top cannot look.", [({}, not is_failing)])
    lines.add("top_last_look_seconds", "gauge", "Since its last look that succeeded.", [({}, age_s)])
    return lines.text()


def job_metrics(workers: Sequence[Sighting]) -> str:
    """Of the workers of all jobs."""
    lines = Lines()

    def each(of: Callable[[Sighting], float | None]) -> list[tuple[Labels, float | None]]:
        return [(_of(one), of(one)) for one in workers]

    lines.add("jobs", "gauge", "Jobs that run.", [({}, len({one.note.run for one in workers}))])
    lines.add("worker_up", "gauge", "1 while its process runs.", each(lambda one: one.state == "running"))
    lines.add("worker_steps_total", "counter", "Steps of the optimizer.", each(lambda one: one.note.step))
    lines.add("worker_steps_per_second", "gauge", "Steps a second.", each(lambda one: one.note.steps_per_s))
    lines.add("worker_examples_total", "counter", "Examples taken.", each(lambda one: one.note.num_examples))
    lines.add(
        "worker_examples_per_second", "gauge", "Examples a second.", each(lambda one: one.note.examples_per_s)
    )
    values = [
        ({**_of(one), "name": name}, value) for one in workers for name, value in one.note.values.items()
    ]
    lines.add("worker_value", "gauge", "What the program has logged, such as the loss.", values)
    lines.add("worker_sent_bytes_total", "counter", "Bytes sent.", each(lambda one: one.note.sent_bytes))
    lines.add(
        "worker_received_bytes_total", "counter", "Bytes received.", each(lambda one: one.note.received_bytes)
    )
    lines.add("worker_wait_ratio", "gauge", "Share of time waited.", each(lambda one: one.note.wait_share))
    waits = [({**_of(one), "for": rank}, wait) for one in workers for rank, wait in one.note.waited_s.items()]
    lines.add("worker_waited_seconds_total", "counter", "Seconds waited for a rank.", waits)
    lines.add("worker_last_beat_seconds", "gauge", "Since its last note.", each(lambda one: one.age_s))
    return lines.text()


def swarm_metrics(seen: Crawl) -> str:
    """Of the peers of a swarm."""
    lines = Lines()

    def each(of: Callable[[About], float]) -> list[tuple[Labels, float | None]]:
        return [(_peer(one), of(one.about)) for one in seen.peers if one.about is not None]

    lines.add("swarm_peers", "gauge", "Peers that answered.", [({}, len(seen.peers))])
    lines.add("swarm_silent_peers", "gauge", "Peers that did not answer.", [({}, len(seen.silent))])
    lines.add("swarm_swarms", "gauge", "Swarms that do not know of each other.", [({}, seen.num_swarms)])
    lines.add("peer_records", "gauge", "Records held.", each(lambda about: about.num_records))
    lines.add("peer_record_bytes", "gauge", "Bytes of them.", each(lambda about: about.record_bytes))
    lines.add("peer_contacts", "gauge", "Peers known.", each(lambda about: about.num_contacts))
    lines.add("peer_up_seconds", "gauge", "Since it began.", each(lambda about: about.uptime_s))
    lines.add(
        "peer_round_trip_seconds",
        "gauge",
        "Of a call to it.",
        [(_peer(one), one.round_trip_s) for one in seen.peers],
    )
    return lines.text()


def _peer(one: Visited) -> Labels:
    return {"peer": one.peer.id, "address": one.peer.address}


def _of(one: Sighting) -> Labels:
    note = one.note
    labels: Labels = {"run": note.run, "role": note.role, "rank": note.rank, "host": note.host}
    return {**labels, "strategy": note.strategy, "number": note.number}


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Prometheus has its own words for what is none."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"
