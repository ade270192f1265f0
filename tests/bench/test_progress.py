import sys

from shoal.bench.progress import show_progress


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
