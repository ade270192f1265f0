import json
import random
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.diff import diff
from shoal.cli.report import report
from shoal.core.errors import NotComparable, ReportError, UsageError
from shoal.report import Report, Row, save

app = typer.Typer()
app.command()(diff)
app.command()(report)


@pytest.fixture
def run():
    def run(*arguments):
        return CliRunner().invoke(app, ["diff", *map(str, arguments)])

    return run


@pytest.fixture
def make(tmp_path):
    """Save a report whose rows are 0.1 s times `factor`, spread by 1 % between starts."""

    def make(name, factor=1.0, num_starts=6, error=None, **fields):
        rng = random.Random(name)
        rows = []
        for size in (1, 2):
            starts = [[0.1 * factor * rng.lognormvariate(0, 0.01)] * 3 for _ in range(num_starts)]
            key = {"scenario": "echo", "size": size}
            failed = error if size == 2 else None
            rows.append(
                Row(
                    key=key,
                    metric="t",
                    unit="s",
                    direction="lower",
                    starts=[] if failed else starts,
                    error=failed,
                )
            )
        made = Report(**{"benchmark": "transport", "created": "", "rows": rows} | fields)
        return save(made, tmp_path / f"{name}.json")

    return make


def result_of(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_equal_reports_exit_zero_and_end_in_a_result(run, make):
    outcome = run(make("a"), make("b"), "--fail-if-slower", "5%")
    assert outcome.exit_code == 0, outcome.output
    result = result_of(outcome.stdout)
    assert (result["judged"], result["worse"], result["exit_code"]) == (2, 0, 0)
    assert "no difference found" in outcome.stdout


@pytest.mark.parametrize(
    ("slower", "limit", "code"),
    [(1.2, "5%", 1), (1.2, "5", 1), (1.2, "30%", 0), (1.2, None, 0), (0.8, "5%", 0)],
)
def test_slower_than_allowed_exits_one(run, make, slower, limit, code):
    options = [] if limit is None else ["--fail-if-slower", limit]
    outcome = run(make("a"), make("b", slower), *options)
    assert outcome.exit_code == code
    assert result_of(outcome.stdout)["exit_code"] == code
    assert ("Failed: row 'scenario=echo size=1 t' is worse by" in outcome.stderr) == (code == 1)


def test_too_few_starts_exit_three_when_they_look_slower(run, make):
    outcome = run(make("a"), make("b", 1.2, num_starts=2), "--fail-if-slower", "5%")
    assert outcome.exit_code == 3
    assert "too few repeats to judge" in outcome.stderr
    assert run(make("a"), make("b", 1.0, num_starts=2), "--fail-if-slower", "5%").exit_code == 0
    assert run(make("a"), make("b", 1.2, num_starts=2)).exit_code == 0


def test_a_row_that_failed_in_the_test_exits_one_with_the_flag(run, make):
    good, bad = make("a"), make("b", error="PeerLost: peer 7")
    assert run(good, bad, "--fail-if-slower", "5%").exit_code == 1
    assert run(bad, good, "--fail-if-slower", "5%").exit_code == 0
    without = run(good, bad)
    assert without.exit_code == 0
    assert "failed in test: PeerLost: peer 7" in without.stdout


def test_bad_usage_and_unreadable_files_raise_what_the_command_line_translates(run, make, tmp_path):
    good = make("a")
    assert isinstance(run(good, good, "--fail-if-slower", "0.05").exception, UsageError)
    assert isinstance(run(good, tmp_path / "none.json").exception, ReportError)
    assert isinstance(run(good, make("b", benchmark="dht")).exception, NotComparable)
    assert run(good).exit_code == 2


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_report_is_never_overwritten_by_its_comparison(run, make, option):
    path = make("a")
    before = path.read_bytes()
    assert isinstance(run(path, make("b"), option, path).exception, UsageError)
    assert path.read_bytes() == before


def test_json_on_stdout_is_alone_there(run, make):
    outcome = run(make("a"), make("b", 1.2), "--json", "-", "--fail-if-slower", "5%")
    document = json.loads(outcome.stdout)
    assert [row["verdict"] for row in document["rows"]] == ["worse", "worse"]
    assert document["result"] == result_of(outcome.stderr)
    assert outcome.exit_code == document["result"]["exit_code"] == 1


def test_json_and_html_files_are_written_and_named(run, make, tmp_path):
    outcome = run(make("a"), make("b"), "--json", tmp_path / "d.json", "--html", tmp_path / "d.html")
    assert json.loads((tmp_path / "d.json").read_bytes())["schema"] == "shoal-diff"
    assert "Change of the median" in (tmp_path / "d.html").read_text(encoding="utf-8")
    for name in ("d.json", "d.html"):
        assert f"Wrote {tmp_path / name}" in outcome.stdout
    result_of(outcome.stdout)


def pytorch_file(path, seconds):
    runs = [{"ranks": [0], "measurements": [1.0]}, {"ranks": [0, 1], "measurements": [seconds] * 20}]
    results = [{"model": "resnet50", "batch_size": 32, "result": runs}]
    path.write_text(json.dumps({"bucket_size": 25, "benchmark_results": results}))
    return path


def test_pytorch_files_keep_their_layout_and_then_a_result(run, tmp_path, make):
    old, new = pytorch_file(tmp_path / "a.json", 0.1), pytorch_file(tmp_path / "b.json", 0.125)
    outcome = run(old, new)
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[:-1] == [
        "                                 baseline                      test",
        "                     --------------------      --------------------",
        "bucket_size:                           25  vs                    25",
        "",
        "Benchmark: resnet50 with batch size 32",
        "",
        "                  sec/iter    ex/sec      diff        sec/iter    ex/sec      diff",
        "   2 GPUs:  p75:    0.125s     256/s    -25.0%  p95:    0.125s     256/s    -25.0%",
        "",
    ]
    result_of(outcome.stdout)
    assert run(old, new, "--fail-if-slower", "5%").exit_code == 3
    assert isinstance(run(old, make("shoal")).exception, NotComparable)


def test_the_verb_starts_without_torch_or_plotly():
    code = "import sys, shoal.cli.diff; print(sorted({'torch', 'numpy', 'plotly'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
