"""`shoal diff`: two reports compared, and an exit code for scripts.

0 fine, 1 slower than allowed or failed, 2 bad usage, 3 not comparable, unreadable or not judged.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.flags import with_flags
from shoal.cli.output import text_stream, write_encoded
from shoal.core.errors import UsageError
from shoal.core.run_options import flag
from shoal.report import pytorch
from shoal.report.diff import EFFECT_PERCENT, UNDECIDED, Gate, check_gate, compare, parse_limit
from shoal.report.storage import load
from shoal.report.tables import emit, show, tell_result
from shoal.report.views import diff_items, unpaired_lines


@with_flags
def diff(
    baseline: Annotated[Path, typer.Argument(help="The report to compare with.", show_default=False)],
    test: Annotated[Path, typer.Argument(help="The report of the change.", show_default=False)],
    fail_if_slower: Annotated[
        str | None, flag("Exit 1 if a row is judged worse by more than this: 5% or 5.", metavar="PERCENT")
    ] = None,
    json_file: Annotated[
        Path | None, flag("Write the comparison as JSON; - is stdout.", "--json", metavar="FILE")
    ] = None,
    html_file: Annotated[
        Path | None, flag("Write the comparison as one HTML page.", "--html", metavar="FILE")
    ] = None,
) -> None:
    """Compare two reports row by row; negative is worse.

    Reads Shoal's reports and the JSON of PyTorch's DDP benchmark. A row is judged by its process starts:
    fewer than five on a side are too few.
    """
    limit = None if fail_if_slower is None else parse_limit(fail_if_slower)
    for name, path in (("--json", json_file), ("--html", html_file)):
        refuse_to_overwrite(name, path, (baseline, test))
    comparison = compare(load(baseline), load(test), effect_percent=limit or EFFECT_PERCENT)
    gate = Gate(0) if limit is None else check_gate(comparison, limit)
    result = {**comparison.result(), "exit_code": gate.exit_code}
    out = text_stream(json_file)
    if comparison.baseline.benchmark == pytorch.BENCHMARK:
        show([*pytorch.diff_lines(comparison), *unpaired_lines(comparison)], out)
    else:
        show(diff_items(comparison), out)
    if html_file is not None:
        from shoal.report.html import write_diff

        emit(f"Wrote {write_diff(comparison, html_file, sources=(str(baseline), str(test)))}", out)
    if json_file is not None:
        files = {"baseline_file": str(baseline), "test_file": str(test)}
        document = {**comparison.document(), **files, "result": result}
        write_encoded(msgspec.json.encode(document) + b"\n", json_file)
    for reason in gate.reasons:
        emit(f"{'Not judged' if gate.exit_code == UNDECIDED else 'Failed'}: {reason}", sys.stderr)
    tell_result(result, out)
    if gate.exit_code:
        raise typer.Exit(gate.exit_code)


def refuse_to_overwrite(option: str, path: Path | None, inputs: tuple[Path, ...]) -> None:
    """Raise UsageError when an output would replace one of the reports that it is made from."""
    if path is not None and str(path) != "-" and any(path.resolve() == source.resolve() for source in inputs):
        raise UsageError(
            f"{option} {path} would replace the report itself", next_step="give another file name"
        )
