"""`shoal swarm`: a training run of a swarm as its members tell it, live or once.

0 members were found, 1 nobody answered. It asks, and is no member.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import with_flags
from shoal.cli.members import IdentityFile, SecretFile, member_of, passing_identity
from shoal.cli.output import text_stream
from shoal.core.errors import ShoalError
from shoal.core.run_options import flag
from shoal.core.untrusted import visible_line
from shoal.report.tables import Column, Table, show, tell_result

if TYPE_CHECKING:
    from shoal.core import Peer
    from shoal.swarm.facts import MemberFacts

_MAX_NOTE, _MAX_CELL = 200, 40
_CLEAR = "\033[H\033[2J"
_COLUMNS = (
    Column("member", "left"),
    Column("name", "left"),
    Column("samples/s"),
    Column("share"),
    Column("behind"),
    Column("failed"),
    Column("lost"),
    Column("sent MB"),
    Column("loss"),
)


@with_flags()
def swarm(
    join: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="A peer of the swarm, such as any member of the run; may be given several times.",
            show_default=False,
        ),
    ],
    run: Annotated[str, flag("The name of the run.", metavar="NAME")] = "run",
    secret_file: SecretFile = None,
    identity_file: IdentityFile = None,
    every_s: Annotated[float, flag("Seconds from one table to the next.", ge=0.1, metavar="S")] = 2.0,
    once: Annotated[bool, flag("Print one table, and end.")] = False,
) -> None:
    """Show a training run of a swarm: its members, how far each is, and what went wrong.

    Share is the part of the run's samples that a member has computed, behind the rounds that it lacks, failed
    the rounds that came to nothing while it was there, lost its samples that no round took.
    """
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT
    from shoal.swarm.facts import FactsRequest, ask_facts, find_members

    identity = passing_identity(identity_file)
    membership = member_of(identity, secret_file).membership
    dht = DHT(join=join, listen=None, membership=membership, identity=identity)

    async def look() -> dict[Peer, MemberFacts | ShoalError]:
        return await ask_facts(dht.endpoint.streams, await find_members(dht, run), FactsRequest(run))

    out = text_stream(None)
    with Swarm(dht) as peer:
        answers = peer.run(look())
        while not once and out.isatty():
            out.write(_CLEAR)
            show_run(run, answers, out)
            time.sleep(every_s)
            answers = peer.run(look())
    show_run(run, answers, out)
    found = [facts for facts in answers.values() if not isinstance(facts, ShoalError)]
    tell_result(run_result(run, found), out)
    if not found:
        raise typer.Exit(1)


def show_run(run: str, answers: Mapping[Peer, MemberFacts | ShoalError], out: Any) -> None:
    """Prints a row for each member, then what went wrong."""
    found = sorted(
        (facts for facts in answers.values() if not isinstance(facts, ShoalError)),
        key=lambda facts: (not facts.is_member, facts.address),
    )
    newest = max((facts.round for facts in found), default=0)
    result = run_result(run, found)
    title = (
        f"run {run}: round {newest}, {result['steps']} steps, {result['samples']:,} samples, "
        f"{result['samples_per_s']} samples/s"
    )
    table = Table(title, _COLUMNS)
    for facts in found:
        total = max(facts.num_samples, 1)
        table.rows.append(
            (
                visible_line(facts.address)[:_MAX_CELL],
                visible_line(facts.name)[:_MAX_CELL],
                f"{facts.samples_per_s:,.0f}",
                f"{facts.num_committed / total:.0%}",
                str(newest - facts.round) if facts.is_member else "joins",
                str(facts.num_failed),
                str(facts.num_lost),
                f"{facts.num_bytes / 1e6:,.1f}",
                "–" if facts.loss is None else f"{facts.loss:.4g}",
            )
        )
    notes = [f"{facts.address}: {note}" for facts in found for note in facts.notes]
    notes += [
        f"{facts.address}: {num} samples lost: {why}" for facts in found for why, num in facts.lost.items()
    ]
    notes += [
        f"{peer.address} does not answer: {error.what}"
        for peer, error in answers.items()
        if isinstance(error, ShoalError)
    ]
    if len({facts.fork for facts in found if facts.is_member}) > 1:
        notes.append("the run has several forks at the moment; they meet again by themselves")
    show(
        [table, *(visible_line(note)[:_MAX_NOTE] for note in notes)]
        if found
        else [f"Nobody of the run {run!r} answers."],
        out,
    )


def run_result(run: str, found: list[MemberFacts]) -> dict[str, object]:
    """What programs read of a run."""
    furthest = max(found, key=lambda facts: facts.num_samples, default=None)
    losses = [facts.loss for facts in found if facts.loss is not None]
    return {
        "run": run,
        "members": sum(facts.is_member for facts in found),
        "round": max((facts.round for facts in found), default=0),
        "steps": furthest.num_steps if furthest else 0,
        "samples": furthest.num_samples if furthest else 0,
        "samples_per_s": round(sum(facts.samples_per_s for facts in found)),
        "lost": sum(facts.num_lost for facts in found),
        "sent_bytes": sum(facts.num_bytes for facts in found),
        "loss": sum(losses) / len(losses) if losses else None,
    }
