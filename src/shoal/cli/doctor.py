"""`shoal doctor`: is this machine fit to run a peer, and what to change where it is not.

0 nothing failed (warnings are allowed), 1 a check failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal import __version__
from shoal.bench.findings import Finding, run_checks
from shoal.bench.health import CHECKS
from shoal.report.storage import write_atomically
from shoal.report.tables import Column, Line, Table, emit, result_line, show

_STYLES = {"warn": "yellow", "fail": "bold red"}


def doctor(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON; - is stdout.")
    ] = None,
) -> None:
    """Look at this machine: what is installed, what it allows, and how fast its parts are.

    Exits 1 if something keeps Shoal from working; warnings are advice. Takes about two seconds.
    """
    findings = run_checks(CHECKS)
    names = {
        status: [finding.name for finding in findings if finding.status == status]
        for status in ("ok", "warn", "fail")
    }
    summary = _summary(names["warn"], names["fail"])
    exit_code = 1 if names["fail"] else 0
    result: dict[str, object] = {
        "num_ok": len(names["ok"]),
        "warned": names["warn"],
        "failed": names["fail"],
        "exit_code": exit_code,
    }
    to_stdout = json_file is not None and str(json_file) == "-"
    out = sys.stderr if to_stdout else sys.stdout

    show([_table(findings), summary], out)
    if json_file is not None:
        document = {"shoal": __version__, "summary": summary, "checks": findings, "result": result}
        encoded = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
        if to_stdout:
            emit(encoded.decode().rstrip(), sys.stdout)
        else:
            emit(f"Wrote {write_atomically(json_file, encoded)}", out)
    emit(result_line(result), out)
    if exit_code:
        raise typer.Exit(exit_code)


def _table(findings: list[Finding]) -> Table:
    table = Table(
        "", (Column("check", "left"), Column("status", "left"), Column("finding", "left", wraps=True))
    )
    for index, finding in enumerate(findings):
        table.rows.append((finding.name, finding.status, finding.says))
        if finding.status != "ok":
            note: Line = (f"Next: {finding.next_step}", _STYLES[finding.status])
            table.notes[index] = note
    return table


def _summary(warned: list[str], failed: list[str]) -> str:
    if failed:
        return f"Shoal cannot work here yet: see {', '.join(failed)}." + (
            f" Advice on {', '.join(warned)}." if warned else ""
        )
    if warned:
        return f"Shoal works here; there is advice on {', '.join(warned)}."
    return "Shoal works here."
