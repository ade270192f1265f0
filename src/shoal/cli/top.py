"""`shoal top`: how far the workers of a running job are, or the peers of a swarm, kept up to date.

Jobs are those that run on this machine, or from it, as their workers note it on the board. 0 it was looked
at, 1 there was nothing to see.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from shoal import __version__
from shoal.cli.flags import with_flags
from shoal.cli.members import (
    AsPage,
    IdentityFile,
    PageAddress,
    SecretFile,
    member_of,
    passing_identity,
)
from shoal.cli.output import JsonFile, ends_by_signal, text_stream, write_json
from shoal.cli.top_view import Matrix, Shot, ShotSource, View, job_metrics, serve, terminal_items, watch
from shoal.core import SYSTEM_CLOCK, Clock, UsageError
from shoal.core.board import VARIABLE, Sighting, folders_to_read, look
from shoal.core.errors import ShoalError
from shoal.core.ids import Address
from shoal.core.run_options import flag
from shoal.report.tables import Column, Table, show, tell_result
from shoal.report.units import counted, digits, percent, scale_for


@with_flags
def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run, or the beginning of its name; by default the only one, or a list of all.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, flag("Print it and end, as without a terminal.")] = False,
    web: AsPage = False,
    listen: PageAddress = None,
    join: Annotated[
        list[str] | None,
        flag(
            "Show the peers of a swarm instead, from this one on, and the experts that they serve; may be "
            "given several times.",
            metavar="HOST:PORT",
            shown=False,
        ),
    ] = None,
    secret_file: SecretFile = None,
    identity_file: IdentityFile = None,
    limit: Annotated[int, flag("With --join: ask at most so many peers.", ge=1, metavar="N")] = 1000,
    interval: Annotated[float, flag("Seconds between two looks.", ge=0.1, metavar="S")] = 1.0,
    json_file: JsonFile = None,
) -> None:
    """Show a running job live: each worker's step, examples/s, loss, bytes, waits and last beat.

    Every strategy that is attached in a group of `shoal.init()` notes this once a second on the machine it
    runs on; `shoal run` brings it together from all hosts on the machine where it was started.
    SHOAL_TOP=0 turns that off. `strategy.log(loss=loss)` adds the loss. Bytes between machines are those that
    were sent; inside a machine, those that a network would have carried, by shoal.Metered's formulas.
    """
    if run is not None and ":" in run:
        raise UsageError(
            f"{run} is an address, and no name of a run.",
            next_step=f"shoal top --web --listen {run} serves there, shoal top --join {run} shows a swarm.",
        )
    if listen is not None and not web:
        raise UsageError("--listen says where --web serves.", next_step="add --web.")
    if web and (once or json_file is not None):
        raise UsageError(
            "--web serves until it is ended; --once and --json end at once.",
            next_step="leave one out; the page's /status.json is what --json writes.",
        )
    if run is not None and join:
        raise UsageError("A swarm has no runs.", next_step="give RUN or --join, not both.")
    address = None if listen is None else Address.parse(listen)
    starts = [Address.parse(text) for text in join or ()]
    is_live = not (once or json_file is not None) and sys.stdout.isatty()
    last: Shot | None = None
    with _source(run, starts, (secret_file, identity_file), limit) as source, ends_by_signal():
        if web:
            with contextlib.suppress(KeyboardInterrupt):
                serve(source, address, interval, SYSTEM_CLOCK)
            return
        last = _look(source, run)
        if is_live:
            last = watch(source, last, interval)
    out = text_stream(json_file)
    show(terminal_items(last.terminal), out)
    write_json({**last.document, "result": last.result}, json_file)
    tell_result(last.result, out)


@contextlib.contextmanager
def _source(
    run: str | None, starts: list[Address], files: tuple[Path | None, Path | None], limit: int
) -> Iterator[ShotSource]:
    if not starts:
        yield JobSource(run)
        return
    from shoal.cli.status import SwarmSource
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT

    secret_file, identity_file = files
    identity = passing_identity(identity_file)
    visitor = DHT(listen=None, membership=member_of(identity, secret_file).membership, identity=identity)
    with Swarm(visitor) as swarm:
        yield SwarmSource(swarm, starts, limit)


def _look(source: ShotSource, run: str | None) -> Shot:
    """ShoalError when there is nothing to see."""
    shot = source.look()
    if shot.is_empty:
        named = "" if run is None else f" whose name begins with {run}"
        where = " or ".join(map(str, folders_to_read())) or "no folder"
        raise ShoalError(
            f"No job{named} is running here.",
            cause="none has a strategy attached yet in a group of shoal.init(), another user started it, or "
            f"{VARIABLE}=0 is set; jobs are noted in {where}.",
            next_step="shoal run -np 2 train.py in another terminal, or look on the machine where it runs; "
            "shoal top --join HOST:PORT shows the peers of a swarm.",
        )
    return shot


# --- jobs ---

_MAX_ROWS = 100
_MAX_VALUES = 3
_MAX_NAMED = 5
_LATE_S = 10.0
"""A worker whose last step is longer ago is told of."""
_NOTICEABLE_SHARE = 0.1
"""Of the others' time, and at least twice as much as for anybody else, before one is named."""
_MAX_COMPARED = 16
"""A matrix of more workers has cells that nobody can read."""
_SHORTEST_SHARE = 0.005
_MOSTLY = 0.5
_DOES = {"starts": "starts", "evaluates": "evaluates", "saves": "saves a checkpoint"}
_NOTHING = "–"
_ABOUT_WORKERS = (
    "One row for each worker, as it last told of itself: steps/s, examples/s and waits are of about the last "
    "second, sent and received of all its training. waits is the share of that second in which it stood "
    "still until another worker came, and for which one most; last beat is how long ago it told."
)
_ABOUT_WAITS = (
    "The share of its time, since training began, that the worker of a row has waited for the worker of a "
    "column. A column of large numbers is a worker that holds the others up."
)
_ABOUT_BYTES = (
    "What the worker of a row has sent to the worker of a column since training began. Each byte counts once "
    "for its sender and once for its receiver, so that both sums agree."
)
_NO_LOSS = "Nothing to draw yet. Give it the loss in your training loop: strategy.log(loss=loss)"


@dataclass(frozen=True)
class RunningJob:
    """One run, with all its workers as they were last seen."""

    run: str
    workers: tuple[Sighting, ...]
    """All that were seen, servers among them."""
    up_s: float
    changes: tuple[str, ...] = ()
    """Who has joined and left an elastic run while it was watched, the last ones."""

    @property
    def generation(self) -> int:
        """The newest group that a worker of an elastic run is in; 0 for other runs."""
        return max(one.note.generation for one in self.workers)

    @property
    def first(self) -> Sighting:
        """The worker of the lowest rank."""
        return self.workers[0]

    @property
    def examples_per_s(self) -> float | None:
        """Examples a second of all workers together."""
        return _sum(one.note.examples_per_s for one in self.live)

    @property
    def live(self) -> list[Sighting]:
        """Workers that are there, without servers; of several strategies of one the first."""
        there = [one for one in self.workers if one.state != "gone" and one.note.role == "worker"]
        return list({one.note.rank: one for one in reversed(there)}.values())[::-1]

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes from one place to another, each counted once.

        What both sides count, the one that noted it later knows more of; what one side alone asks for, as a
        fetch or a put, only that side has counted.
        """
        newest = {one.note.place: one.note for one in self.workers if one.note.generation == self.generation}
        told = [((note.place, to), count) for note in newest.values() for to, count in note.sent_to.items()]
        told += [
            ((source, note.place), count)
            for note in newest.values()
            for source, count in note.received_from.items()
        ]
        moved: dict[tuple[int, int], int] = {}
        for pair, count in told:
            moved[pair] = max(moved.get(pair, 0), count)
        return moved

    @cached_property
    def names(self) -> dict[int, str]:
        """How workers are called, by rank in the newest generation."""
        return {
            one.note.rank: _number_of(one)
            for one in self.workers
            if one.note.role == "worker" and one.note.generation == self.generation
        }

    def sent_bytes(self, one: Sighting) -> int | None:
        """The bytes that a worker has sent, those that others took without asking it among them."""
        taken = [count for (source, _), count in self.traffic.items() if source == one.note.place]
        return max(one.note.sent_bytes or 0, sum(taken)) if taken else one.note.sent_bytes

    def received_bytes(self, one: Sighting) -> int | None:
        """The bytes that a worker has received, those that others left with it unasked among them."""
        left = [count for (_, to), count in self.traffic.items() if to == one.note.place]
        return max(one.note.received_bytes or 0, sum(left)) if left else one.note.received_bytes

    def mean(self, name: str) -> float | None:
        """Average a value over the workers that have logged it."""
        return _mean(one.note.values.get(name) for one in self.live)

    def result(self) -> dict[str, Any]:
        """The numbers of the job, for the RESULT line."""
        note, states = self.first.note, Counter(one.state for one in self.workers)
        return {
            "run": self.run,
            "program": note.program,
            "strategy": note.strategy,
            "size": note.size,
            **({"generation": self.generation} if self.generation else {}),
            "num_workers": len(self.live),
            "num_hosts": len({one.note.host for one in self.workers}),
            "num_stopped": states["stopped"],
            "num_gone": states["gone"],
            "step": max((one.note.step for one in self.live), default=0),
            "steps_per_s": _mean(one.note.steps_per_s for one in self.live),
            "examples_per_s": self.examples_per_s,
            "loss": self.mean("loss"),
            "sent_bytes": _sum(map(self.sent_bytes, self.live)),
            "received_bytes": _sum(map(self.received_bytes, self.live)),
            "up_s": round(self.up_s, 3),
        }


class JobSource:
    """All jobs of this user, or the one whose name begins with `run`."""

    def __init__(self, run: str | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._run = run
        self._clock = clock
        self._seen: dict[str, dict[int, str]] = {}
        """By run, by number: the workers of elastic runs that were there at the last look."""
        self._changes: dict[str, list[str]] = {}

    def look(self) -> Shot:
        """Read the board; UsageError for a name that fits several jobs."""
        jobs = jobs_of(look(self._clock), self._clock.wall_s())
        if self._run is not None:
            jobs = _named(jobs, self._run)
        return shot_of([self._followed(job) if job.generation else job for job in jobs])

    def _followed(self, job: RunningJob) -> RunningJob:
        """Add who has come and gone since the first look."""
        now = {one.note.place: f"worker {one.note.place} on {one.note.host}" for one in job.live}
        before = self._seen.get(job.run, now)
        changes = self._changes.setdefault(job.run, [])
        changes += [f"{before[number]} has left." for number in before if number not in now]
        changes += [f"{now[number]} has joined." for number in now if number not in before]
        del changes[:-_MAX_NAMED]
        self._seen[job.run] = now
        return replace(job, changes=tuple(changes))


def jobs_of(sightings: Iterable[Sighting], wall_s: float) -> list[RunningJob]:
    """The jobs of all sightings, the newest first."""
    by_run: dict[str, list[Sighting]] = {}
    for sighting in sightings:
        by_run.setdefault(sighting.note.run, []).append(sighting.now())
    by_run = {run: _of_present(found) for run, found in by_run.items()}
    jobs = [
        RunningJob(
            run,
            tuple(sorted(found, key=lambda one: (one.note.role == "server", one.note.rank, one.note.number))),
            max(0.0, wall_s - min(one.note.began_s for one in found)),
        )
        for run, found in by_run.items()
    ]
    return sorted(jobs, key=lambda job: (job.up_s, job.run))


def _of_present(found: list[Sighting]) -> list[Sighting]:
    """Leave out workers of an elastic run that are gone and without whom it has gone on since."""
    newest = max(one.note.generation for one in found)
    return [one for one in found if one.state != "gone" or one.note.generation == newest]


def shot_of(jobs: Sequence[RunningJob]) -> Shot:
    """What is shown of them."""
    views = [_view(job) for job in jobs]
    terminal = views[0] if len(views) == 1 else _list(jobs)
    results = [job.result() for job in jobs]
    document = {
        "shoal": __version__,
        "jobs": [
            {
                **result,
                "workers": [
                    {**msgspec.to_builtins(one.note), "state": one.state, "age_s": round(one.age_s, 3)}
                    for one in job.workers
                ],
            }
            for job, result in zip(jobs, results, strict=True)
        ],
    }
    result = results[0] if len(results) == 1 else {"num_jobs": len(jobs), "runs": [job.run for job in jobs]}
    return Shot(views, terminal, document, job_metrics([one for job in jobs for one in job.workers]), result)


def _named(jobs: Sequence[RunningJob], run: str) -> list[RunningJob]:
    found = [job for job in jobs if job.run == run] or [job for job in jobs if job.run.startswith(run)]
    if len(found) > 1:
        raise UsageError(
            f"{run} is the beginning of {', '.join(job.run for job in found)}.",
            next_step="give more of the name.",
        )
    return found


def _view(job: RunningJob) -> View:
    note, shown = job.first.note, job.workers[:_MAX_ROWS]
    steps = [one.note.step for one in job.live]
    figures = [
        ("workers", f"{len(job.live)} of {note.size}"),
        ("generation", str(job.generation) if job.generation else _NOTHING),
        ("step", _span(steps)),
        ("examples/s", _rate(job.examples_per_s)),
        *((name, _number(job.mean(name))) for name in _names(job)),
        ("up", _age(job.up_s)),
    ]
    values = {name: job.mean(name) for name in dict.fromkeys(("loss", *_names(job)))}
    series = {"examples/s": job.examples_per_s, **values}
    if job.examples_per_s is None:
        series = {"steps/s": _mean(one.note.steps_per_s for one in job.live), **series}
    legends = {
        "workers": "are here, of all in the run",
        "generation": "groups until now",
        "step": "of the slowest and the fastest" if len(set(steps)) > 1 else "of every worker",
        "examples/s": "of all workers together",
        "steps/s": "of a worker, on average",
        "up": "since training began",
        **dict.fromkeys(values, "mean of the workers"),
    }
    hosts = list(dict.fromkeys(one.note.host for one in job.workers))
    return View(
        id=job.run,
        title=f"{note.program or 'python'} · {note.strategy}",
        subtitle=f"run {job.run} on {hosts[0] if len(hosts) == 1 else counted(len(hosts), 'host')}",
        about=f"{counted(note.size, 'worker')} {'train' if note.size > 1 else 'trains'} one model"
        f"{' together' if note.size > 1 else ''}, by the strategy {note.strategy}",
        figures=tuple((label, value) for label, value in figures if value != _NOTHING),
        table=_table(job, shown, hosts),
        states=tuple(one.state for one in shown),
        shares=tuple(one.note.wait_share for one in shown),
        notes=tuple(_notes(job)),
        series={name: value for name, value in series.items() if value is not None},
        legends=legends,
        missing={} if "loss" in _names(job) else {"loss": _NO_LOSS},
        about_table=_ABOUT_WORKERS,
        matrices=tuple(_matrices(job)),
    )


def _matrices(job: RunningJob) -> Iterator[Matrix]:
    """What goes on between workers; nothing of a lone one, or of too many."""
    there = {one.note.place: one for one in reversed(job.workers) if one.state != "gone"}
    members = [there[place] for place in sorted(there) if there[place].note.generation == job.generation]
    workers = [one for one in members if one.note.role == "worker"]
    if not 2 <= len(members) <= _MAX_COMPARED:
        return
    if len(workers) > 1:
        ages_s = [max(1.0, one.note.noted_s - one.note.began_s) for one in workers]
        waits = [
            [one.note.waited_s.get(other.note.rank, 0.0) / age_s for other in workers]
            for one, age_s in zip(workers, ages_s, strict=True)
        ]
        yield _matrix("Who waits for whom", _ABOUT_WAITS, workers, waits, _share, most=1.0)
    if job.traffic:
        moved = [
            [float(job.traffic.get((one.note.place, other.note.place), 0)) for other in members]
            for one in members
        ]
        sums = (
            ("sent", tuple(_size(round(sum(row))) for row in moved)),
            ("received", tuple(_size(round(sum(column))) for column in zip(*moved, strict=True))),
            ("in all", (_size(round(sum(map(sum, moved)))),)),
        )
        most = max(map(max, moved))
        shown = _matrix(
            "Who sends to whom", _ABOUT_BYTES, members, moved, lambda count: _size(round(count)), most=most
        )
        yield replace(shown, sums=sums)


def _matrix(
    title: str,
    about: str,
    members: Sequence[Sighting],
    numbers: Sequence[Sequence[float]],
    text_of: Callable[[float], str],
    *,
    most: float,
) -> Matrix:
    diagonal = [[row == column for column in range(len(members))] for row in range(len(members))]
    return Matrix(
        title,
        about,
        tuple(map(_called, members)),
        tuple(
            tuple("" if is_own else text_of(number) for number, is_own in zip(*each, strict=True))
            for each in zip(numbers, diagonal, strict=True)
        ),
        tuple(tuple(number / most if most else 0.0 for number in row) for row in numbers),
    )


def _table(job: RunningJob, shown: Sequence[Sighting], hosts: Sequence[str]) -> Table:
    notes = [one.note for one in shown]
    num_strategies = len({(note.number, note.strategy) for note in notes})
    columns: list[tuple[Column, list[str]]] = [
        (Column("worker", "left"), [_name(one) for one in shown]),
        (Column("rank"), [str(note.rank) for note in notes] if job.generation else []),
        (Column("host", "left"), [note.host for note in notes] if len(hosts) > 1 else []),
        (Column("strategy", "left"), [note.strategy for note in notes] if num_strategies > 1 else []),
        (Column("does", "left"), [_does(one, job) for one in shown]),
        (Column("step"), [f"{note.step:,}" for note in notes]),
        (Column("steps/s"), [_rate(note.steps_per_s) for note in notes]),
        (Column("examples/s"), [_rate(note.examples_per_s) for note in notes]),
        *((Column(name), [_number(note.values.get(name)) for note in notes]) for name in _names(job)),
        (Column("sent"), [_size(job.sent_bytes(one)) for one in shown]),
        (Column("received"), [_size(job.received_bytes(one)) for one in shown]),
        (Column("waits"), [_wait(one, job) for one in shown]),
        (Column("last beat"), [_beat(one) for one in shown]),
    ]
    told = [(column, cells) for column, cells in columns if any(cell != _NOTHING for cell in cells)]
    return Table(
        "", tuple(column for column, _ in told), list(zip(*(cells for _, cells in told), strict=True))
    )


def _notes(job: RunningJob) -> Iterator[str]:
    if len(job.workers) > _MAX_ROWS:
        yield f"The first {_MAX_ROWS} of {len(job.workers)} are shown; --json FILE has all."
    yield from job.changes
    num_there = len({one.note.rank for one in job.workers if one.note.role == "worker"})
    if num_there < job.first.note.size:
        yield (
            f"{num_there} of {job.first.note.size} workers are here: the others have not begun, have left, "
            "or run on other machines, of which the head of `shoal run` knows."
        )
    awaited: dict[int, float] = {}
    for one in job.live:
        if one.note.waits_for is not None and one.note.wait_share is not None:
            share = one.note.wait_share / max(1, len(job.live) - 1)
            awaited[one.note.waits_for] = awaited.get(one.note.waits_for, 0.0) + share
    shares = sorted(awaited.values(), reverse=True)
    if shares and shares[0] >= max(_NOTICEABLE_SHARE, 2 * sum(shares[1:2])):
        worst = max(awaited, key=awaited.__getitem__)
        told = percent(100 * shares[0], signed=False)
        yield f"The others wait most for worker {job.names.get(worst, worst)}: {told} of their time."
    for one in [one for one in job.workers if one.state != "running"][:_MAX_NAMED]:
        what = "is stopped (SIGSTOP)" if one.state == "stopped" else "has ended without leaving the group"
        yield f"Process {one.note.pid} of {_called(one)} on {one.note.host} {what}."
    late = [one for one in job.workers if one.state == "running" and one.age_s > _LATE_S]
    if late:
        names = ", ".join(_called(one) for one in late[:_MAX_NAMED])
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        yield f"No step for {_age(min(one.age_s for one in late))} or longer: {names}{more}."


def _list(jobs: Sequence[RunningJob]) -> View:
    left = [Column(name, "left") for name in ("run", "program", "strategy")]
    right = [Column(name) for name in ("workers", "hosts", "step", "examples/s", "loss", "up")]
    table = Table("", (*left, *right))
    for job in jobs:
        result = job.result()
        table.rows.append(
            (
                job.run,
                result["program"],
                result["strategy"],
                f"{result['num_workers']} of {result['size']}",
                str(result["num_hosts"]),
                f"{result['step']:,}",
                _rate(job.examples_per_s),
                _number(result["loss"]),
                _age(job.up_s),
            )
        )
    notes = (f"{counted(len(jobs), 'job')}; `shoal top RUN` shows one of them.",) if jobs else ()
    return View("", "", table=table if jobs else None, notes=notes)


def _names(job: RunningJob) -> list[str]:
    """What was logged."""
    return list(dict.fromkeys(name for one in job.workers for name in one.note.values))[:_MAX_VALUES]


def _name(one: Sighting) -> str:
    return _number_of(one) if one.note.role == "worker" else _called(one)


def _called(one: Sighting) -> str:
    return f"{one.note.role} {_number_of(one)}"


def _number_of(one: Sighting) -> str:
    """The rank, or the number of a worker of an elastic run, which stays while ranks change."""
    return str(one.note.place if one.note.generation else one.note.rank)


def _does(one: Sighting, job: RunningJob) -> str:
    """What a worker does, as far as its last note tells."""
    note = one.note
    is_waiting = note.phase == "waits" or (note.wait_share or 0.0) >= _MOSTLY
    if one.state != "running":
        return one.state
    if note.phase in _DOES:
        return _DOES[note.phase] if one.is_fresh else f"{_DOES[note.phase]}, {_age(one.age_s)}"
    if not one.is_fresh:
        return f"no step for {_age(one.age_s)}"
    if note.role == "server":
        return "serves"
    if not is_waiting:
        return "trains"
    return "waits" if note.waits_for is None else f"waits for {_awaited(one, job)}"


def _awaited(one: Sighting, job: RunningJob) -> str:
    """The worker that another one waits for most, as it is called."""
    rank = one.note.waits_for
    return str(rank) if rank is None else job.names.get(rank, str(rank))


def _wait(one: Sighting, job: RunningJob) -> str:
    note = one.note
    if note.wait_share is None or note.size == 1:
        return _NOTHING
    share = f"{100 * note.wait_share:.0f}%"
    return share if note.waits_for is None or share == "0%" else f"{share} for {_awaited(one, job)}"


def _beat(one: Sighting) -> str:
    ago = _age(one.age_s)
    return ago if one.state == "running" else f"{one.state}, {ago}"


def _share(value: float) -> str:
    if not math.isfinite(value):
        return _NOTHING
    return f"{100 * value:.0f}%" if value >= _SHORTEST_SHARE else "0"


def _age(seconds: float) -> str:
    if not math.isfinite(seconds):
        return _NOTHING
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _span(steps: Sequence[int]) -> str:
    if not steps:
        return _NOTHING
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _rate(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,.0f}" if value >= 100 else digits(value)


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return digits(value, 4) if math.isfinite(value) else str(value)


def _size(size_bytes: int | None) -> str:
    return _NOTHING if size_bytes is None else scale_for("B", size_bytes).format(size_bytes)


def _sum(values: Iterable[float | None]) -> float | None:
    """None when nothing is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
