"""How a host of experts is, for Prometheus: its text format, and the server that gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.core import Address
from shoal.experts.status_line import ExpertMoment, Moment
from shoal.transport.pages import Page, PageServer, Site

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(moment: Moment) -> str:
    """In the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP shoal_{name} {about}")
        lines.append(f"# TYPE shoal_{name} {kind}")
        lines.extend(f"shoal_{name}{labels} {value:.10g}" for labels, value in values)

    def each(of: Callable[[ExpertMoment], tuple[float, float]]) -> list[tuple[str, float]]:
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
