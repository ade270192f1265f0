"""How a host of experts is at a moment: as numbers, as its status line, and as text for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from shoal.core import Address
from shoal.report.units import digits
from shoal.transport.pages import Page, PageServer, Site


class ExpertStatus(msgspec.Struct, frozen=True):
    """One expert, since it is served here."""

    uid: str
    num_forward_batches: int
    num_forward_samples: int
    num_backward_batches: int
    num_backward_samples: int
    num_updates: int
    busy_s: float
    num_clipped: int = 0
    """Steps whose gradient was far above what is usual for the expert."""


class HostStatus(msgspec.Struct, frozen=True):
    """A host; numbers only grow, but for those of what is there now."""

    up_s: float
    num_waiting: int
    num_failed: int
    """Requests that were accepted and ended in an error."""
    num_peers: int
    """That the DHT knows."""
    is_leaving: bool
    experts: tuple[ExpertStatus, ...]
    num_averaged: int = 0
    """Averages with other replicas that this host began."""
    num_copied: int = 0
    """Experts that have become copies of other replicas."""
    num_adopted: int = 0

    @property
    def num_samples(self) -> int:
        """Computed so far, forward and backward."""
        return sum(expert.num_forward_samples + expert.num_backward_samples for expert in self.experts)

    @property
    def num_batches(self) -> int:
        """That these were computed in."""
        return sum(expert.num_forward_batches + expert.num_backward_batches for expert in self.experts)

    def line(self, before: HostStatus) -> str:
        """In words; rates and batches are those since `before`."""
        took_s = self.up_s - before.up_s
        num_samples = self.num_samples - before.num_samples
        num_batches = self.num_batches - before.num_batches
        rate = num_samples / took_s if took_s > 0 else 0.0
        mean = f" of {digits(num_samples / num_batches)}" if num_batches else ""
        parts = [
            f"{digits(rate)} samples/s",
            f"{self.num_waiting:,} waiting",
            f"{len(self.experts):,} expert{'' if len(self.experts) == 1 else 's'}",
            f"{num_batches:,} batch{'' if num_batches == 1 else 'es'}{mean}",
        ]
        if num_clipped := sum(expert.num_clipped for expert in self.experts):
            parts.append(f"{num_clipped:,} clipped")
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        if self.is_leaving:
            parts.append("leaving")
        return ", ".join(parts)


PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(moment: HostStatus) -> str:
    """In the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP shoal_{name} {about}")
        lines.append(f"# TYPE shoal_{name} {kind}")
        lines.extend(f"shoal_{name}{labels} {value:.10g}" for labels, value in values)

    def each(of: Callable[[ExpertStatus], tuple[float, float]]) -> list[tuple[str, float]]:
        found = [(_escaped(expert.uid), of(expert)) for expert in moment.experts]
        return [
            (f'{{expert="{uid}",kind="{kind}"}}', value)
            for uid, values in found
            for kind, value in zip(("forward", "backward"), values, strict=True)
        ]

    def alone(value: float) -> list[tuple[str, float]]:
        return [("", value)]

    add("up_seconds", "gauge", "Seconds since this server is ready.", alone(moment.up_s))
    add("experts", "gauge", "Experts that are served.", alone(len(moment.experts)))
    add("waiting_requests", "gauge", "Requests that wait for the device.", alone(moment.num_waiting))
    add("is_leaving", "gauge", "1 when no new work is taken.", alone(moment.is_leaving))
    add("dht_peers", "gauge", "Peers of the swarm that are known.", alone(moment.num_peers))
    add("samples_total", "counter", "Samples computed by all experts.", alone(moment.num_samples))
    add("batches_total", "counter", "Batches computed by all experts.", alone(moment.num_batches))
    add("failed_requests_total", "counter", "Accepted requests that failed.", alone(moment.num_failed))
    add("averages_total", "counter", "Averages with other replicas begun here.", alone(moment.num_averaged))
    add("copies_total", "counter", "Experts copied from other replicas.", alone(moment.num_copied))
    add("adoptions_total", "counter", "Experts that nobody served any more.", alone(moment.num_adopted))
    add(
        "expert_samples_total",
        "counter",
        "Samples computed.",
        each(lambda one: (one.num_forward_samples, one.num_backward_samples)),
    )
    add(
        "expert_batches_total",
        "counter",
        "Batches computed.",
        each(lambda one: (one.num_forward_batches, one.num_backward_batches)),
    )
    names = [f'{{expert="{_escaped(expert.uid)}"}}' for expert in moment.experts]
    updates = [expert.num_updates for expert in moment.experts]
    busy = [expert.busy_s for expert in moment.experts]
    add("expert_updates_total", "counter", "Steps of the optimizer.", zip(names, updates, strict=True))
    add(
        "expert_clipped_updates_total",
        "counter",
        "Steps whose gradient was clipped, being far above the usual norm.",
        zip(names, [expert.num_clipped for expert in moment.experts], strict=True),
    )
    add("expert_busy_seconds_total", "counter", "Seconds of computing.", zip(names, busy, strict=True))
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer(PageServer):
    """Answers `GET /metrics` with what `text` gives, on the loop that it is opened on."""

    def __init__(self, address: Address, text: Callable[[], str]) -> None:
        super().__init__(address, Site({PATH: Page(text, CONTENT_TYPE)}, "Metrics", "--metrics-port"))

    @property
    def url(self) -> str:
        """Where to read it."""
        return f"http://{self.address}{PATH}"
