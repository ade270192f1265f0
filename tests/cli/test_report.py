import json
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from report import samples
from shoal.cli.diff import diff
from shoal.cli.report import report
from shoal.core.errors import ReportError, UsageError
from shoal.report import Report, Row, save

app = typer.Typer()
app.command()(diff)
app.command()(report)


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def make(tmp_path):
    def make(name, *rows):
        good = Row(key={"size": 1}, metric="t", unit="s", direction="lower", starts=[[1e-4, 2e-4]] * 2)
        return save(Report(benchmark=name, created="", rows=[good, *rows]), tmp_path / f"{name}.json")

    return make


def test_figures_are_printed_and_the_page_is_written_beside_the_report(make, tmp_path):
    failed = Row(key={"size": 2}, metric="t", unit="s", direction="lower", error="PeerLost: peer 7")
    outcome = run(make("a", failed))
    assert outcome.exit_code == 0, outcome.output
    assert "150 µs" in outcome.stdout
    assert "failed: PeerLost: peer 7" in outcome.stdout
    last = outcome.stdout.splitlines()[-1]
    assert json.loads(last.removeprefix("RESULT: ")) == {
        "html": str(tmp_path / "a.html"), "num_reports": 1, "num_rows": 2, "failed": 1,
    }  # fmt: skip
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "a.json"]


def test_several_reports_go_on_one_page(make, tmp_path):
    outcome = run(make("a"), make("b"), "-o", tmp_path / "out" / "page.html")
    assert outcome.exit_code == 0, outcome.output
    page = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "a.json" in page
    assert "b.json" in page


def test_a_report_is_never_overwritten_by_its_page(make):
    path = make("a")
    before = path.read_bytes()
    assert isinstance(run(path, "-o", path).exception, UsageError)
    assert path.read_bytes() == before


def test_a_file_that_is_no_report_writes_no_page(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert isinstance(run(tmp_path / "x.json").exception, ReportError)
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_picture_is_drawn_of_the_metric_and_axis_that_are_asked_for(tmp_path):
    report_file = save(samples.accuracy(), tmp_path / "a.json")
    outcome = run(report_file, "--picture", tmp_path / "a.svg", "--along", "bytes", "--title", "A < B")
    assert outcome.exit_code == 0, outcome.output
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text(encoding="utf-8"))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "A < B"
    assert "bytes sent" in words[1]
    assert {"all-reduce split iid", "local-sgd split dirichlet:0.1"} <= set(words)
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 8
    points = [tuple(map(float, pair.split(","))) for pair in lines[0].get("points").split()]
    assert points[0][1] > points[-1][1], "a higher accuracy stands higher"


def test_a_picture_of_what_the_report_lacks_says_what_there_is(tmp_path):
    report_file = save(samples.accuracy(), tmp_path / "a.json")
    outcome = run(report_file, "--picture", tmp_path / "a.svg", "--metric", "speed")
    assert isinstance(outcome.exception, ReportError)
    assert "accuracy" in outcome.exception.next_step
    assert not (tmp_path / "a.svg").exists()
    assert isinstance(run(report_file, "--picture", report_file).exception, UsageError)
