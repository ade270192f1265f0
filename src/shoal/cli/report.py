"""`shoal report`: reports as tables on the terminal, and as one HTML page with plots."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.diff import refuse_to_overwrite
from shoal.cli.flags import with_flags
from shoal.core.run_options import flag
from shoal.report.html import write_reports
from shoal.report.picture import draw
from shoal.report.storage import load, write_atomically
from shoal.report.tables import emit, show, tell_result
from shoal.report.views import report_items


@with_flags
def report(
    files: Annotated[list[Path], typer.Argument(help="Reports to show side by side.", show_default=False)],
    output: Annotated[
        Path | None,
        flag("The page; by default the first report's name with .html.", "--output", "-o", metavar="FILE"),
    ] = None,
    picture: Annotated[
        Path | None, flag("Also draw one metric of the first report as an SVG image.", metavar="FILE.svg")
    ] = None,
    metric: Annotated[
        str | None, flag("The metric of --picture.", shown="the first that has a curve")
    ] = None,
    along: Annotated[str | None, flag("The axis of --picture: step, s or bytes.", shown="s")] = None,
    title: Annotated[str | None, flag("The title of --picture.")] = None,
) -> None:
    """Write one self-contained HTML page of the reports, and print their figures."""
    path = output if output is not None else files[0].with_suffix(".html")
    refuse_to_overwrite("-o", path, tuple(files))
    if picture is not None:
        refuse_to_overwrite("--picture", picture, (*files, path))
    reports = [load(file) for file in files]
    drawing = draw(reports[0], metric, along, title) if picture is not None else ""
    write_reports(reports, path, [str(file) for file in files])
    for file, item in zip(files, reports, strict=True):
        if len(files) > 1:
            emit(f"{file}", sys.stdout)
        show(report_items(item), sys.stdout)
    emit(f"Wrote {path}", sys.stdout)
    if picture is not None:
        write_atomically(picture, drawing.encode())
        emit(f"Wrote {picture}", sys.stdout)
    result = {
        "html": str(path),
        "num_reports": len(reports),
        "num_rows": sum(len(item.rows) for item in reports),
        "failed": sum(len(item.failed) for item in reports),
    }
    tell_result(result, sys.stdout)
