"""What the head and its bridge to Ray tell each other: a `Request` down, `Report`s up, as lines of JSON."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True):
    """What the head wants of the cluster."""

    address: str
    agent: tuple[str, ...]
    """Arguments of Python that run an agent."""
    num_workers: int
    min_workers: int
    """So many are enough where there is no room for all."""
    num_cpus: float
    """Of each worker."""
    num_gpus: float | None
    """Of each worker; None gives one to each where the cluster has enough, else none."""
    start_timeout_s: float


class Place(msgspec.Struct, frozen=True):
    """Where an actor is."""

    node: str
    """Ray's id of it."""
    address: str
    host: str
    python: str
    """The interpreter there."""
    gpus: list[str]
    """Those that Ray has given to this actor."""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the first five is set."""

    is_connected: bool = False
    """The cluster has answered."""
    waiting: str = ""
    """What the cluster lacks for now."""
    places: list[Place] | None = None
    """The agents run, one behind each descriptor, in order; descriptors that are left over are closed."""
    lost: int | None = None
    """The actor behind this descriptor has gone: `what` says why."""
    is_refused: bool = False
    """Nothing runs."""
    what: str = ""
    cause: str = ""
    next_step: str = ""


class Refusal(Exception):
    """The cluster cannot be used."""

    def __init__(self, what: str, cause: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.report = Report(is_refused=True, what=what, cause=cause, next_step=next_step)


def reason_of(error: Exception) -> str:
    """What matters of Ray's many lines: the sentence with the reason, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    because = [line.partition(". ")[0] for line in lines if " because " in line]
    return [*because, *lines, type(error).__name__][0].rstrip(".")
