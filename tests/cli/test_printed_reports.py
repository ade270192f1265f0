"""What each benchmark prints of a report, and its RESULT, are what `printed.json` lists.

The reports are of small runs, kept in `reports`; `recorded` says how the file is written anew.
"""

import json
from pathlib import Path

import msgspec
import pytest

from recorded import check_recorded
from shoal.bench.forecast.published import published_items
from shoal.cli import bench, program
from shoal.report.storage import load
from shoal.report.tables import lines_of

RECORDED = Path(__file__).parent / "printed.json"
REPORTS = sorted((Path(__file__).parent / "reports").glob("*.json"))
FLAGS = {
    "accuracy": ["--device", "cpu"],
    "collectives": [],
    "ddp": ["--device", "cpu", "--model", "small-mlp"],
    "dht": [],
    "experts": ["--device", "cpu"],
    "latency": ["--device", "cpu", "--virtual"],
    "scaling": ["--device", "cpu", "--model", "small-mlp"],
    "training": ["--device", "cpu"],
    "transport": [],
    "virtual": [],
}
"""So that the command has nothing to ask of the machine; what it would run, is not run."""


class Told(Exception):
    """What a command has handed to `run_and_tell`."""


def texts_of(items):
    return [f"{line}  [{style}]" if style else line for line, style in lines_of(items, 100, "-")]


def printed_of(benchmark, report, monkeypatch):
    """The lines and the RESULT, by the functions that the command itself uses."""

    def capture(typed, name, plan):
        raise Told(plan.summarize, plan.items)

    monkeypatch.setattr(bench, "run_and_tell", capture)
    command = ["compare"] if benchmark == "compare" else ["bench", benchmark, *FLAGS[benchmark]]
    with pytest.raises(Told) as told:
        program.run(command)
    summarize, items = told.value.args
    result = json.loads(msgspec.json.encode(summarize(report)))
    return {"result": result, "lines": texts_of(items(msgspec.structs.replace(report, result=result)))}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_is_printed_as_before(path, monkeypatch):
    report = load(path)
    check_recorded(RECORDED, path.stem, printed_of(report.benchmark, report, monkeypatch))


def test_the_published_figures_are_printed_as_before():
    check_recorded(RECORDED, "published figures", texts_of(published_items()))
