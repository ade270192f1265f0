import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from shoal._version import __version__
from shoal.cli import doctor as module
from shoal.cli.program import BAD_USAGE, FAILED, INTERRUPTED, app, main, run
from shoal.core import PeerLost
from shoal.doctor.checks import CheckResult
from shoal.report import Report, Row, save

PROGRAM = Path(sys.executable).with_name("shoal")  # the console script lies beside its interpreter
posix_only = pytest.mark.skipif(os.name != "posix", reason="pipes are POSIX")
VERBS = [
    [],
    ["diff"],
    ["report"],
    ["doctor"],
    ["dht"],
    ["serve"],
    ["status"],
    ["bench"],
    ["bench", "transport"],
    ["bench", "collectives"],
    ["bench", "training"],
    ["run"],
    ["keys"],
    ["keys", "show"],
    ["keys", "new"],
    ["keys", "secret"],
]


@pytest.fixture
def saved(tmp_path):
    """Two reports of the same thing."""
    row = Row(key={"size": 1}, metric="t", unit="s", direction="lower", starts=[[0.1]] * 5)
    return [
        str(save(Report(benchmark="b", created="", rows=[row]), tmp_path / f"{name}.json")) for name in "ab"
    ]


def test_the_version_is_told_on_stdout(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"shoal {__version__}\n", "")


def test_without_a_verb_there_is_help(capsys):
    assert run([]) == BAD_USAGE
    out, complaint = capsys.readouterr()
    assert out == ""
    for verb in ("diff", "report", "doctor", "dht", "serve", "status", "bench", "keys", "run"):
        assert f"\n  {verb} " in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["swim"], "No such command 'swim'"),
        (["keys", "swim"], "No such command 'swim'"),
        (["doctor", "--depth", "3"], "No such option: --depth"),
        (["diff", "a.json"], "Missing argument"),
        (["bench", "transport", "--starts", "many"], "Invalid value for '--starts'"),
    ],
)
def test_bad_usage_is_told_on_stderr_alone(capsys, arguments, complaint):
    assert run(arguments) == BAD_USAGE == 2
    out, told = capsys.readouterr()
    assert out == ""
    assert complaint in told


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_verb_has_help(capsys, verb, option):
    assert run([*verb, option]) == 0
    out, complaint = capsys.readouterr()
    assert out.startswith(" ".join(["Usage: shoal", *verb, "[OPTIONS]"]))
    assert complaint == ""


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["keys", "show", "--file", "none.pem"], 1, "The identity file none.pem cannot be read"),
        (["diff", "a.json", "b.json", "--fail-if-slower", "much"], 2, "much"),
        (["bench", "transport", "--starts", "0"], 2, "--starts 0 measures nothing."),
        (["diff", "a.json", "b.json"], 3, "a.json does not exist"),
    ],
)
def test_errors_of_ours_are_a_message_and_an_exit_code(capsys, tmp_path, monkeypatch, arguments, code, told):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == code
    out, complaint = capsys.readouterr()
    assert out == ""
    assert complaint.startswith("shoal: ")
    assert told in complaint
    assert "Try: " in complaint
    assert "Traceback" not in complaint


def test_an_error_that_is_neither_usage_nor_report_is_a_failure(capsys, monkeypatch):
    def lose(_):
        raise PeerLost("The peer is gone.", next_step="look for it.")

    monkeypatch.setattr(module, "run_checks", lose)
    assert run(["doctor"]) == FAILED == 1
    assert capsys.readouterr() == ("", "shoal: The peer is gone.\n  Try: look for it.\n")


def test_an_error_that_nobody_foresaw_is_raised(monkeypatch):
    def stumble(_):
        raise ZeroDivisionError

    monkeypatch.setattr(module, "run_checks", stumble)
    with pytest.raises(ZeroDivisionError):
        run(["doctor"])


def test_a_machine_without_torch_is_told_what_to_install():
    program = "import sys; sys.modules['torch'] = None; from shoal.cli.program import main; main(['compare'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == FAILED
    assert done.stderr.startswith("shoal: torch is not installed.\n  Try: pip install torch")
    assert "Traceback" not in done.stderr


def test_an_interrupt_is_exit_code_130(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_checks", interrupt)
    assert run(["doctor"]) == INTERRUPTED == 130
    assert capsys.readouterr() == ("", "shoal: interrupted\n")


def test_a_verbs_own_exit_code_is_the_programs(capsys, monkeypatch):
    monkeypatch.setattr(module, "run_checks", lambda _: [CheckResult("fail", "Broken.", name="x")])
    assert run(["doctor"]) == 1
    assert '"exit_code":1' in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--fail-if-slower", "--fail_if_slower", "--fail_if-slower"])
def test_underscores_stand_for_hyphens(capsys, saved, option):
    assert run(["diff", *saved, option, "5%"]) == 0
    assert run(["diff", *saved, f"{option}=5%"]) == 0
    out, complaint = capsys.readouterr()
    assert '"exit_code":0' in out.splitlines()[-1]
    assert complaint == ""


def test_underscores_in_values_stay(capsys, tmp_path):
    path = tmp_path / "my_key.pem"
    assert run(["keys", "new", "--file", str(path)]) == 0
    assert path.exists()
    assert str(path) in capsys.readouterr().out


def test_main_exits_with_the_code_of_the_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shoal", "swim"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"


def test_the_module_and_the_console_script_are_one_program():
    for command in ([sys.executable, "-m", "shoal"], [PROGRAM]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"shoal {__version__}\n", "")


@pytest.mark.parametrize(
    "verb",
    [
        "diff",
        "report",
        "keys show",
        "keys secret",
        "doctor",
        "dht --help",
        "serve --help",
        "status --help",
        "run --help",
        "bench --help",
        "bench transport --help",
    ],
)
def test_what_needs_no_torch_does_not_import_it(saved, verb):
    arguments = verb.split()
    if verb in ("diff", "report"):
        arguments += saved
    code = (
        "import sys; from shoal.cli.program import run; code = run(sys.argv[1:]);"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"


def test_a_command_of_bench_imports_no_other_benchmark():
    code = (
        "import sys; from shoal.bench.frame import BENCHMARKS; from shoal.cli.program import run;"
        "code = run(['bench', 'training', '--help']);"
        "modules = {row.scenario.partition(':')[0] for row in BENCHMARKS.values()};"
        "print(*(name for name in modules if f'shoal.bench.{name}' in sys.modules), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.split() == ["training"]


@pytest.fixture(params=["buffered", "unbuffered"])
def _buffering(request, monkeypatch):
    """A closed pipe shows at the first write, or only when Python empties its buffer at the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    if request.param == "unbuffered":
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")


@pytest.fixture
def closed_pipe():
    """A pipe to write to that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@posix_only
@pytest.mark.usefixtures("_buffering")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["keys", "show"], ["doctor"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_reason_for_a_traceback(closed_pipe, arguments):
    done = subprocess.run(
        [PROGRAM, *arguments], stdout=closed_pipe, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


@posix_only
@pytest.mark.usefixtures("_buffering")
def test_the_first_line_can_be_had_alone():
    command = f"'{PROGRAM}' doctor | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["check", "status", "finding"]
    assert done.stderr == ""


@posix_only
@pytest.mark.usefixtures("_buffering")
def test_a_stderr_that_nobody_reads_costs_no_data(closed_pipe):
    done = subprocess.run(
        [PROGRAM, "keys", "secret"], stdout=subprocess.PIPE, stderr=closed_pipe, text=True, check=False
    )
    assert done.returncode == 1
    assert len(done.stdout.strip()) == 43


def test_the_help_has_every_verb_in_a_group_on_one_line(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    groups = dict(
        part.split(":\n", 1) for part in shown.split("\n\n") if not part.startswith(("Usage", " ", "Options"))
    )
    assert list(groups) == ["Train", "Swarm", "Measure", "Look"]
    verbs = [line.split(maxsplit=1) for text in groups.values() for line in text.splitlines()]
    assert {name for name, _ in verbs} == {*typer.main.get_command(app).commands}
    assert all(text.endswith(".") and "..." not in text for _, text in verbs)


@pytest.mark.parametrize("group", ["bench", "keys"])
def test_no_line_of_a_group_s_help_is_cut(capsys, group):
    assert run([group, "--help"]) == 0
    listed = capsys.readouterr().out.split("Commands:\n")[1]
    assert "..." not in listed
    assert "…" not in listed
