"""`shoal compare`: every strategy at the same task, in the same world."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from shoal.bench.comparison import CompareFlags, contest_of
from shoal.bench.frame import RunFlags
from shoal.cli.bench_common import run_and_tell
from shoal.cli.flags import with_flags
from shoal.core.run_options import flag
from shoal.report import Report
from shoal.report.storage import write_atomically
from shoal.report.tables import emit
from shoal.report.views import Items


class CompareRunFlags(RunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark; a contest is one start with several seeds."""

    seed: Annotated[int, flag("The first; each further one adds 1.")] = 0


@with_flags("starts", "against")
def compare(context: typer.Context, flags: CompareFlags, run: CompareRunFlags) -> None:
    """Every strategy at the same task, in the same world: by steps, by seconds, by bytes.

    In virtual time: worlds larger than this machine, and equal figures for equal seeds. The model, its
    initial weights, the division of the data, the batches and the number of steps are the same for all, and
    each has the same budget to choose its learning rate.
    """
    from shoal.bench.compare import check_contest
    from shoal.bench.tables.compare import compare_items, latex_of, summarize_compare

    config = contest_of(flags, run.seed, is_short=run.short)
    slow = check_contest(config)
    for note in slow:
        emit(note, sys.stderr)
    config = msgspec.structs.replace(config, notes=(*config.notes, *slow))

    def told(latest: Report) -> Items:
        items = compare_items(latest)
        if flags.latex is not None:
            items.append(f"LaTeX: {write_atomically(flags.latex, latex_of(latest).encode())}")
        return items

    run_and_tell(context, "compare", config, run, summarize_compare, told)
