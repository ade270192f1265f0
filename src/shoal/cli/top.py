"""`shoal top`: how far the workers of a running job are, or the peers of a swarm, kept up to date.

0 it was looked at, 1 there was nothing to see.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.live import ends_by_signal
from shoal.cli.members import IdentityFile, SecretFile, member_of, passing_identity
from shoal.cli.output import JsonFile, say, text_stream, write_json
from shoal.cli.top_jobs import JobSource
from shoal.cli.top_view import Shot, Source, View
from shoal.core import SYSTEM_CLOCK
from shoal.core.board import VARIABLE, folders_to_read
from shoal.core.errors import ShoalError, UsageError
from shoal.core.ids import Address
from shoal.core.untrusted import visible
from shoal.report.tables import Line, Table, emit, result_line, show, wrap


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run, or the beginning of its name; by default the only one, or a list of all.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it and end, as without a terminal.")] = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="Serve it as a web page, with /metrics for Prometheus and /status.json."),
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --web: where; whoever reaches it can read it. Port 0 takes a free one.",
            show_default="127.0.0.1:8470",
        ),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Show the peers of a swarm instead, from this one on; may be given several times.",
            show_default=False,
        ),
    ] = None,
    secret_file: SecretFile = None,
    identity_file: IdentityFile = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --join: ask at most so many peers.")
    ] = 1000,
    interval: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds between two looks.")] = 1.0,
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
            _serve(source, address, interval)
            return
        last = _look(source, run)
        if is_live:
            last = _watch(source, last, interval)
    out = text_stream(json_file)
    show(_items(last.terminal), out)
    write_json({**last.document, "result": last.result}, json_file)
    emit(result_line(last.result), out)


@contextlib.contextmanager
def _source(
    run: str | None, starts: list[Address], files: tuple[Path | None, Path | None], limit: int
) -> Iterator[Source]:
    if not starts:
        yield JobSource(run)
        return
    from shoal.cli.top_peers import SwarmSource
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT

    secret_file, identity_file = files
    identity = passing_identity(identity_file)
    visitor = DHT(listen=None, membership=member_of(identity, secret_file).membership, identity=identity)
    with Swarm(visitor) as swarm:
        yield SwarmSource(swarm, starts, limit)


def _look(source: Source, run: str | None) -> Shot:
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


def _watch(source: Source, last: Shot, interval_s: float) -> Shot:
    """Until interrupted, or until there is nothing left to see; the last shot."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=Console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        error = ""
        while True:
            lines = [*_lines(last), (visible(error), "red")]
            whole = Text("\n").join(Text(line, style=style, no_wrap=True) for line, style in lines)
            live.update(whole, refresh=True)
            time.sleep(interval_s)
            try:
                now, error = source.look(), ""
            except ShoalError as failure:
                error = failure.what
                continue
            if now.is_empty:
                break
            last = now
    return last


def _serve(source: Source, address: Address | None, interval_s: float) -> None:
    from shoal.cli.top_web import serve

    def tell(at: Address) -> None:
        say(f"http://{at}/ shows it, /metrics is for Prometheus, /status.json for programs.")
        say("Ctrl-C ends it.")

    with contextlib.suppress(KeyboardInterrupt):
        serve(source, address, interval_s, SYSTEM_CLOCK, tell)


def _items(view: View) -> list[Table | Line | str]:
    return [
        line for item in view.items() for line in (wrap(item, _width()) if isinstance(item, str) else [item])
    ]


def _lines(shot: Shot) -> list[Line]:
    lines: list[Line] = []
    for item in _items(shot.terminal):
        if isinstance(item, Table):
            lines += [*item.lines(_width(), "─"), ("", "")]
        else:
            line, style = (item, "") if isinstance(item, str) else item
            lines.append((visible(line), style))
    return [*lines, ("", ""), ("Ctrl-C ends it.", "dim")]


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns
