"""What a benchmark measured: its schema, storage, statistics, diff, tables and HTML, without torch."""

from shoal.report.diff import Diff, Judgement, RowDiff, RowVerdict, compare
from shoal.report.schema import Code, Curve, Report, Row
from shoal.report.statistics import Summary, noise_floor, percentile, percentiles, summarize
from shoal.report.storage import DEFAULT_FOLDER, default_path, load, save
from shoal.report.storage import load as read_report

__all__ = [
    "DEFAULT_FOLDER",
    "Code",
    "Curve",
    "Diff",
    "Judgement",
    "Report",
    "Row",
    "RowDiff",
    "RowVerdict",
    "Summary",
    "compare",
    "default_path",
    "load",
    "noise_floor",
    "percentile",
    "percentiles",
    "read_report",
    "save",
    "summarize",
]
