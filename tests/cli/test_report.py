import json

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.diff import diff
from shoal.cli.report import report
from shoal.core.errors import ReportError, UsageError
from shoal.report import Report, Row, save

pytest.importorskip("plotly")

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
