"""`shoal doctor`: is this machine fit to run a peer, can it reach others and be reached, and what to change.

0 nothing failed (warnings are allowed), 1 a check failed, or a link could not be measured.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal import __version__
from shoal.cli.flags import typed_flags, with_flags
from shoal.cli.members import Insecure, Lists, SecretFile, member_of
from shoal.cli.output import JsonFile, say, say_listening, text_stream, write_json
from shoal.core.errors import UsageError
from shoal.core.identity import Identity
from shoal.core.ids import Address
from shoal.core.run_options import flag
from shoal.doctor.checks import CHECKS, CheckResult, results_table, run_checks, summary_of
from shoal.report.storage import write_atomically
from shoal.report.tables import WIDTH, emit, show, tell_result, wrap

if TYPE_CHECKING:
    from shoal.doctor.joining import Member

_JOIN_LIMIT_S = 20.0  # the steps have limits of their own, 15 s in all
_MAX_LINES = 1000  # the latest about callers, each of which is told once
DEFAULT_PROFILE = Path("recorded.toml")


@with_flags
def doctor(
    context: typer.Context,
    peers: Annotated[
        list[str] | None,
        typer.Argument(metavar="PEER", help="With --record: HOST:PORT of each.", show_default=False),
    ] = None,
    join: Annotated[
        str | None, flag("Call that peer, have it call back, and explain what fails.", metavar="HOST:PORT")
    ] = None,
    serve: Annotated[
        str | None, flag("Be a peer that others can --join, until Ctrl-C.", metavar="HOST:PORT")
    ] = None,
    record: Annotated[bool, flag("Measure the links to the PEERs and write a profile of them.")] = False,
    output: Annotated[
        Path | None,
        flag("With --record: the profile.", "--output", "-o", metavar="FILE", shown=str(DEFAULT_PROFILE)),
    ] = None,
    secret_file: SecretFile = None,
    listen: Annotated[
        str | None, flag("With --join: where this side is to be dialed back.", metavar="HOST:PORT")
    ] = None,
    insecure: Insecure = False,
    allow_file: Annotated[
        Path | None, flag("With --serve: ids of the only peers that may talk, one a line.", metavar="FILE")
    ] = None,
    deny_file: Annotated[
        Path | None, flag("With --serve: ids of peers that may not talk, one a line.", metavar="FILE")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Look at this machine: what is installed, what it allows, and how fast its parts are.

    With --join, at the ways to a running peer and back: firewall, addresses, secret, versions, clocks.
    Exits 1 if something keeps Shoal from working; warnings are advice. Takes two seconds, --join 15 at most.
    """
    given = typed_flags(context).values()
    _check_usage(peers, given, join=join, serve=serve, record=record)
    if join is not None:
        where = Address.parse(listen) if listen is not None else None
        _join(Address.parse(join), _member(secret_file, is_insecure=insecure), where, json_file)
    elif serve is not None:
        lists = (allow_file, deny_file)
        _serve(Address.parse(serve), _member(secret_file, lists, is_insecure=insecure))
    elif record:
        member = _member(secret_file, is_insecure=insecure)
        _record([Address.parse(peer) for peer in peers or ()], member, output or DEFAULT_PROFILE, json_file)
    else:
        findings = run_checks(CHECKS)
        _tell(findings, summary_of(findings), {}, json_file)


def _check_usage(
    peers: list[str] | None, given: Collection[str], *, join: str | None, serve: str | None, record: bool
) -> None:
    modes = [name for name, is_on in (("--join", join), ("--serve", serve), ("--record", record)) if is_on]
    if len(modes) > 1:
        raise UsageError(f"{' and '.join(modes)} cannot be had at once.", next_step="give one of them.")
    if peers and not record:
        raise UsageError(
            f"{' '.join(peers)}: what is to be done with it?",
            next_step=f"--join {peers[0]} to see whether it can be reached, --record to measure the link.",
        )
    if record and not peers:
        raise UsageError(
            "--record needs peers to measure.", next_step="shoal doctor --record HOST:PORT [HOST:PORT]..."
        )
    for option, needs, is_met in (
        ("--listen", "--join", join is not None),
        ("--output", "--record", record),
        ("--json", "something other than --serve", serve is None),
        ("--secret-file", "--join, --serve or --record", bool(modes)),
        ("--insecure", "--join, --serve or --record", bool(modes)),
        ("--allow-file", "--serve", serve is not None),
        ("--deny-file", "--serve", serve is not None),
    ):
        if option in given and not is_met:
            raise UsageError(f"{option} goes with {needs}.", next_step="see: shoal doctor --help")


def _member(secret_file: Path | None, lists: Lists = (None, None), *, is_insecure: bool) -> Member:
    return member_of(Identity.load_or_create(), secret_file, lists, is_insecure=is_insecure)


# --- the verbs ---


def _join(target: Address, member: Member, listen: Address | None, json_file: Path | None) -> None:
    from shoal.bench.frame import show_progress
    from shoal.core import Deadline, LoopThread
    from shoal.doctor.advice import explain, summarize
    from shoal.doctor.joining import join

    with LoopThread() as loop, show_progress(f"doctor --join {target}") as tell:
        tell("calling it, and having it call back")
        facts = loop.run(join(target, member, listen), Deadline.after(_JOIN_LIMIT_S))
    findings = explain(facts)
    result: dict[str, object] = {
        "peer_id": facts.about.peer_id if facts.about else None,
        "seen_as": facts.seen_as.host if facts.seen_as else None,
        "way": next((each.figures["way"] for each in findings if "way" in each.figures), None),
    }
    _tell(findings, summarize(facts, findings), result, json_file)


def _serve(address: Address, member: Member) -> None:
    from shoal.core import LoopThread
    from shoal.doctor.joining import serve
    from shoal.transport.network.sockets import is_wildcard

    told: dict[str, None] = {}
    num_lines = 0

    def on_ready(listens: Address) -> None:
        say_listening(listens, member.peer_id, has_secret=member.membership is not None)
        where = f"THIS-MACHINE:{listens.port}" if is_wildcard(listens.host) else str(listens)
        secret = " --secret-file FILE" if member.membership else ""
        say(f"From the other side: shoal doctor --join {where}{secret}")
        say("Ctrl-C ends it.")

    def on_caller(line: str) -> None:
        nonlocal num_lines
        if line in told:
            return
        if len(told) == _MAX_LINES:
            del told[next(iter(told))]
        told[line] = None
        num_lines += 1
        say(line)

    with LoopThread() as loop:
        try:
            loop.run(serve(address, member, on_ready=on_ready, on_caller=on_caller))
        except KeyboardInterrupt:
            say("")
    tell_result({"num_lines": num_lines}, sys.stdout)


def _record(peers: list[Address], member: Member, output: Path, json_file: Path | None) -> None:
    from shoal.bench.frame import show_progress
    from shoal.core import SYSTEM_CLOCK, LoopThread
    from shoal.doctor.recording import links_table, record, to_profile

    with LoopThread() as loop, show_progress("doctor --record") as tell:
        links = loop.run(record(peers, member, tell=tell))
    failed = [str(link.peer) for link in links if link.error]
    out = text_stream(json_file)
    show([links_table(links)], out)
    path = None
    if len(failed) < len(links):
        profile = to_profile(links, SYSTEM_CLOCK.wall_s())
        path = write_atomically(output, profile.to_toml().encode())
        emit(f"Profile: {path}", out)
    result: dict[str, object] = {
        "profile": None if path is None else str(path),
        "num_links": len(links) - len(failed),
        "failed": failed,
        "exit_code": 1 if failed else 0,
    }
    write_json({"shoal": __version__, "links": links, "result": result}, json_file)
    tell_result(result, out)
    if failed:
        raise typer.Exit(1)


# --- showing ---


def _tell(findings: list[CheckResult], summary: str, more: dict[str, object], json_file: Path | None) -> None:
    names = {
        status: [finding.name for finding in findings if finding.status == status]
        for status in ("ok", "warn", "fail")
    }
    exit_code = 1 if names["fail"] else 0
    result: dict[str, object] = {
        "num_ok": len(names["ok"]),
        "warned": names["warn"],
        "failed": names["fail"],
        **more,
        "exit_code": exit_code,
    }
    out = text_stream(json_file)
    show([results_table(findings), *wrap(summary, WIDTH)], out)
    write_json({"shoal": __version__, "summary": summary, "checks": findings, "result": result}, json_file)
    tell_result(result, out)
    if exit_code:
        raise typer.Exit(exit_code)
