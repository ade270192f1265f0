"""`shoal swarm`: a training run of a swarm as its members tell it, live, once, or as a web page.

0 members were found, 1 nobody answered. It asks, and is no member; with --lend it is one that only averages,
with --checkpoint it saves the run's state every so many steps.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shoal.cli.flags import with_flags
from shoal.cli.members import (
    AsPage,
    IdentityFile,
    PageAddress,
    SecretFile,
    member_of,
    passing_identity,
)
from shoal.cli.output import ends_by_signal, say, text_stream
from shoal.cli.top_view import MetricLines, Shot, View, serve, watch
from shoal.core import SYSTEM_CLOCK, Address, Deadline
from shoal.core.errors import PeerUnreachable, ShoalError, UsageError
from shoal.core.identity import Identity
from shoal.core.run_options import flag
from shoal.core.untrusted import visible_line
from shoal.report.tables import Column, Table, show, tell_result

if TYPE_CHECKING:
    from shoal.core import Peer
    from shoal.dht.blocking import Swarm
    from shoal.swarm.blocking import BlockingSwarmRun
    from shoal.swarm.facts import MemberFacts

    Answers = Mapping[Peer, MemberFacts | ShoalError]

_MAX_NOTE, _MAX_CELL = 200, 40
_AVERAGED_AS_SENT = ("fp16", "bf16", "int8", "int4", "top-k", "sparse-2bit")
"""Codecs that averages travel by, too."""
_TAKE_S = 600.0
_COLUMNS = (
    Column("member", "left"),
    Column("name", "left"),
    Column("reached", "left"),
    Column("samples/s"),
    Column("share"),
    Column("behind"),
    Column("failed"),
    Column("lost"),
    Column("sent MB"),
    Column("loss"),
)


@with_flags
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
    once: Annotated[bool, flag("Print one table, and end; with --checkpoint: save once, and end.")] = False,
    web: AsPage = False,
    listen: PageAddress = None,
    checkpoint: Annotated[
        Path | None,
        flag("Save the run's state in this folder, from which strategy.load goes on.", metavar="DIR"),
    ] = None,
    every: Annotated[int, flag("With --checkpoint: steps between two.", ge=1, metavar="N")] = 100,
    lend: Annotated[
        bool, flag("Average for the members of the run, without training; others must reach this peer.")
    ] = False,
    port: Annotated[
        int, flag("With --lend: where others call this peer; 0: any free port.", ge=0, le=65535)
    ] = 0,
    bandwidth: Annotated[
        float, flag("With --lend: Mbit/s of this peer's line, the slower direction.", ge=0.1)
    ] = 100.0,
) -> None:
    """Show a training run of a swarm: its members, how far each is, and what went wrong.

    Reached says how others call a member: they dial it, or go through a relay. Share is the part of the
    run's samples that a member has computed, behind the rounds that it lacks, failed
    the rounds that came to nothing while it was there, lost its samples that no round took.
    """
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT

    if listen is not None and not web:
        raise UsageError("--listen says where --web serves.", next_step="add --web.")
    if once and (web or lend):
        raise UsageError("--web and --lend go on until they are ended.", next_step="leave --once out.")
    address = None if listen is None else Address.parse(listen)
    identity = Identity.generate() if lend and identity_file is None else passing_identity(identity_file)
    membership = member_of(identity, secret_file).membership
    # without a secret a peer listens to this machine alone
    where = Address("127.0.0.1" if membership is None else "0.0.0.0", port) if lend else None
    dht = DHT(join=join, listen=where, membership=membership, identity=identity)
    out = text_stream(None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ends_by_signal())
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        peer = stack.enter_context(Swarm(dht))
        source = RunSource(peer, run)
        if checkpoint is not None:
            source.saver = CheckpointSaver(peer, run, checkpoint, every)
        if lend:
            lent = stack.enter_context(lend_to(peer, run, bandwidth))
            source.own = lent
            say(f"This peer averages for the run {run!r} as {peer.address}. Ctrl-C ends it.")
        if web:
            serve(source, address, every_s, SYSTEM_CLOCK)
        else:
            last = source.look()
            if out.isatty() and not once:
                watch(source, last, every_s, ends_when_empty=False)
            while not out.isatty() and not once and (lend or checkpoint is not None):
                time.sleep(every_s)
                source.look()
    show_run(run, source.answers, out)
    found = members_in(source.answers)
    saved = {} if source.saver is None else {"saved_step": source.saver.step}
    tell_result({**run_result(run, found), **saved}, out)
    if not found or (source.saver is not None and source.saver.problem):
        raise typer.Exit(1)


class RunSource:
    """Asks all members of a run whenever it is asked, and saves what is due."""

    def __init__(self, peer: Swarm, run: str) -> None:
        self.answers: Answers = {}
        self.saver: CheckpointSaver | None = None
        self.own: BlockingSwarmRun | None = None
        """This peer's own membership, where it lends."""
        self._peer = peer
        self._run = run

    def look(self) -> Shot:
        """Sees what there is now; takes longer where a checkpoint is due."""
        self.answers = ask_members(self._peer, self._run)
        if self.own is not None and self._peer.address is not None:
            self.answers = {**self.answers, self._peer.dht.peer: self.own.current_facts()}
        if self.saver is not None:
            self.saver.save_if_due(self.answers)
        found = members_in(self.answers)
        view = run_view(self._run, self.answers)
        result = run_result(self._run, found)
        document = {**result, "peers": [msgspec.to_builtins(facts) for facts in found]}
        return Shot([view] if found else [], view, document, run_metrics(self._run, found), result)


def ask_members(peer: Swarm, run: str, *, with_model: bool = False) -> Answers:
    """Asks all that are found in a run."""
    from shoal.swarm.facts import FactsRequest, ask_facts, find_members

    async def ask() -> Answers:
        found = await find_members(peer.dht, run)
        return await ask_facts(peer.dht.endpoint.streams, found, FactsRequest(run, with_model))

    return peer.run(ask())


def members_in(answers: Answers) -> list[MemberFacts]:
    """Lists those that answered, members first."""
    return sorted(
        (facts for facts in answers.values() if not isinstance(facts, ShoalError)),
        key=lambda facts: (not facts.is_member, facts.address),
    )


def furthest_member(peer: Swarm, run: str) -> MemberFacts:
    """Asks for what the run's model is made of; PeerUnreachable where no member answers."""
    found = [
        facts for facts in members_in(ask_members(peer, run, with_model=True)) if facts.model is not None
    ]
    furthest = max(
        (facts for facts in found if facts.is_member), key=lambda one: one.num_samples, default=None
    )
    if furthest is None:
        raise PeerUnreachable(
            f"No member of the run {run!r} answers.",
            cause="nobody trains under that name, or the members cannot be reached from here.",
            next_step="look at the run with `shoal swarm --once`, and check --run and --secret-file.",
        )
    return furthest


class CheckpointSaver:
    """Takes a run's committed state every so many steps, and writes it as a checkpoint."""

    def __init__(self, peer: Swarm, run: str, folder: Path, every: int) -> None:
        self.step = -1
        """The latest step that was saved; -1 for none."""
        self.problem = ""
        """Why the latest attempt came to nothing."""
        self._peer = peer
        self._run = run
        self._folder = folder
        self._every = every

    def save_if_due(self, answers: Answers) -> None:
        """Saves if the run has made enough steps since; tells of failures, and tries again the next time."""
        steps = max((facts.num_steps for facts in members_in(answers) if facts.is_member), default=0)
        if not steps or (self.step >= 0 and steps // self._every <= self.step // self._every):
            return
        try:
            self._save(list(answers))
        except ShoalError as error:
            if self.problem != error.what:
                say(f"No checkpoint was saved: {error}")
            self.problem = error.what

    def _save(self, peers: Sequence[Peer]) -> None:
        from shoal.strategies.swarm import save_committed
        from shoal.swarm.joining import take_committed
        from shoal.swarm.wire import AUXILIARY, SwarmMember

        model = furthest_member(self._peer, self._run).model
        assert model is not None
        # it asks for a state to be kept, and is never listed
        me = SwarmMember(self._peer.peer_id.digest, secrets.randbits(62), "", 0, False, AUXILIARY)
        streams = self._peer.dht.endpoint.streams
        taking = take_committed(streams, self._run, peers, me, Deadline.after(_TAKE_S))
        state = self._peer.run(taking)
        path = save_committed(self._folder, model, state)
        self.step, self.problem = int(state["num_steps"]), ""
        say(f"Saved step {self.step} in {path}.")


def lend_to(peer: Swarm, run: str, bandwidth: float) -> BlockingSwarmRun:
    """Makes the membership of a peer that only averages; PeerUnreachable where nobody trains."""
    import torch

    from shoal.swarm.blocking import BlockingSwarmRun
    from shoal.swarm.membership import SwarmSettings
    from shoal.swarm.wire import AUXILIARY
    from shoal.tensors.codecs import codec_from_name

    facts = furthest_member(peer, run)
    assert facts.model is not None
    num_elements = sum(math.prod(shape) for _, shape in facts.model.tensors)
    return BlockingSwarmRun(
        peer,
        run,
        torch.empty(num_elements),
        settings=SwarmSettings(bandwidth=bandwidth, robust=facts.model.robust),
        codec=codec_from_name(facts.codec) if facts.codec in _AVERAGED_AS_SENT else None,
        model=facts.model,
        kind=AUXILIARY,
    )


def show_run(run: str, answers: Answers, out: Any) -> None:
    """Prints a row for each member, then what went wrong."""
    view = run_view(run, answers)
    show([*([] if view.table is None else [view.table]), *view.notes], out)


def run_view(run: str, answers: Answers) -> View:
    """Gives what is shown of a run."""
    from shoal.swarm.facts import ways_in_words

    found = members_in(answers)
    newest = max((facts.round for facts in found), default=0)
    result = run_result(run, found)
    title = (
        f"run {run}: round {newest}, {result['steps']} steps, {result['samples']:,} samples, "
        f"{result['samples_per_s']} samples/s"
    )
    table = Table(title, _COLUMNS)
    for facts in found:
        name = facts.name if facts.kind == "trainer" else f"{facts.name} (lends)"
        table.rows.append(
            (
                visible_line(facts.address)[:_MAX_CELL],
                visible_line(name)[:_MAX_CELL],
                visible_line(facts.way)[:_MAX_CELL],
                f"{facts.samples_per_s:,.0f}",
                f"{_share(facts):.0%}",
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
    furthest = max((facts for facts in found if facts.is_member), key=lambda one: one.round, default=None)
    if furthest is not None and any(way != "dialed" for way in furthest.ways):
        notes.append(f"members: {ways_in_words(furthest.ways)}; who is a client cannot be asked")
        links = ", ".join(f"{num} {kind}" for kind, num in sum_links(found).items())
        notes.append(f"connections with other members, of all that answer: {links or 'none'}")
    notes += [
        f"{peer.address} does not answer: {error.what}"
        for peer, error in answers.items()
        if isinstance(error, ShoalError)
    ]
    if len({facts.fork for facts in found if facts.is_member}) > 1:
        notes.append("the run has several forks at the moment; they meet again by themselves")
    if not found:
        return View(id=run, title=f"Run {run}", notes=(f"Nobody of the run {run!r} answers.",))
    series = {"samples/s": float(sum(facts.samples_per_s for facts in found)), "members": float(len(found))}
    if result["loss"] is not None:
        series["loss"] = float(str(result["loss"]))
    return View(
        id=run,
        title=f"Run {run}",
        figures=tuple((name, f"{result[name]:,}") for name in ("members", "round", "steps", "samples")),
        table=table,
        states=tuple("running" if facts.is_member else "stopped" for facts in found),
        shares=tuple(None for _ in found),
        notes=tuple(visible_line(note)[:_MAX_NOTE] for note in notes),
        series=series,
    )


def sum_links(found: Sequence[MemberFacts]) -> dict[str, int]:
    """Counts connections with other members by their kind, over all that answer."""
    from shoal.transport.streams.transport import CONNECTION_KINDS

    return {
        kind: num for kind in CONNECTION_KINDS if (num := sum(facts.links.get(kind, 0) for facts in found))
    }


def _share(facts: MemberFacts) -> float:
    return facts.num_committed / max(facts.num_samples, 1)


def run_metrics(run: str, found: Sequence[MemberFacts]) -> str:
    """Tells Prometheus how a run and its members are."""
    lines = MetricLines()

    def told(name: str) -> list[tuple[dict[str, object], float | None]]:
        return [({"run": run, "address": one.address}, getattr(one, name)) for one in found]

    lines.add(
        "run_members", "gauge", "Members listed.", [({"run": run}, sum(one.is_member for one in found))]
    )
    lines.add("run_member_round", "gauge", "The round that a member is in.", told("round"))
    lines.add("run_member_samples_total", "counter", "Samples that were committed.", told("num_committed"))
    lines.add("run_member_lost_samples_total", "counter", "Samples that no round took.", told("num_lost"))
    lines.add("run_member_failed_rounds_total", "counter", "Rounds that came to nothing.", told("num_failed"))
    lines.add("run_member_samples_per_second", "gauge", "Samples computed a second.", told("samples_per_s"))
    lines.add("run_member_sent_bytes_total", "counter", "Bytes of parts sent.", told("num_bytes"))
    lines.add("run_member_loss", "gauge", "The latest loss.", told("loss"))
    return lines.text()


def run_result(run: str, found: list[MemberFacts]) -> dict[str, object]:
    """What programs read of a run."""
    furthest = max(found, key=lambda facts: facts.num_samples, default=None)
    ways = () if furthest is None else furthest.ways
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
        "ways": {way: ways.count(way) for way in dict.fromkeys(ways)},
        "links": sum_links(found),
        "loss": sum(losses) / len(losses) if losses else None,
    }
