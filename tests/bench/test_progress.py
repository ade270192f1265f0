import sys

from shoal.bench.frame import show_progress, with_bar


def test_plain_lines_on_stderr_when_it_is_no_terminal(capsys):
    with show_progress("bench x") as tell:
        tell("start 1 of 5: warming up")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "bench x: start 1 of 5: warming up\n"


def test_a_live_line_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress("bench x") as tell:
        tell("start 1 of 5")
    assert capsys.readouterr().out == ""


def test_of_a_count_every_tenth_is_a_line_where_it_is_no_terminal(capsys):
    with show_progress("bench x") as tell:
        for done in range(101):
            tell(f"start 1 of 1: peers created: {done} of 100")
        tell("start 1 of 1: stored: 3 of 3")
        tell("done")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines[:10]] == [
        f"{10 * tenth} of 100" for tenth in range(1, 11)
    ]
    assert lines[10:] == ["bench x: start 1 of 1: stored: 3 of 3", "bench x: done"]


def test_a_count_is_a_bar_on_a_terminal():
    assert with_bar("start 1 of 2") == "start 1 of 2"
    assert with_bar("stored: 0 of 4") == f"stored {'╌' * 30} 0/4"
    assert with_bar("stored: 2 of 4") == f"stored {'━' * 15}{'╌' * 15} 2/4"
    assert with_bar("stored: 4 of 4") == f"stored {'━' * 30} 4/4"
