""""""

import json
import logging
import signal
import sys

import pytest

from shoal.cli.output import ends_by_signal, live_line, say, text_stream, write_encoded, write_json
from shoal.report.tables import tell_result


def test_json_goes_where_it_was_asked_for(capsys, tmp_path):
    write_json({"a": 1}, None)
    assert capsys.readouterr() == ("", "")
    path = tmp_path / "folder" / "out.json"
    write_json({"a": 1}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert f"Wrote {path}" in capsys.readouterr().out
    write_json({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    write_encoded(b'{"a": 2}\n', "-")
    assert capsys.readouterr().out == '{"a": 2}\n'


def test_text_makes_room_for_json(capsys):
    print("text", file=text_stream("-"))
    print("text", file=text_stream(None))
    say("said")
    assert capsys.readouterr() == ("text\nsaid\n", "text\n")


def test_the_result_is_for_programs_and_not_for_a_terminal(capsys, monkeypatch):
    tell_result({"x": 1}, sys.stdout)
    assert capsys.readouterr().out == 'RESULT: {"x":1}\n'
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tell_result({"x": 1}, sys.stdout)
    assert capsys.readouterr().out == ""


def test_a_line_a_minute_where_there_is_no_terminal(capsys):
    with live_line() as (show, every_s):
        show("1 peer known")
    assert every_s == 60
    assert capsys.readouterr() == ("", "1 peer known\n")


def test_on_a_terminal_the_line_stays_below_what_is_logged(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    stream = sys.stderr
    handler = logging.StreamHandler(stream)
    log = logging.getLogger()
    log.addHandler(handler)
    try:
        with live_line() as (show, every_s):
            show("1 peer known")
            log.warning("something happened")
            show("2 peers known")
    finally:
        log.removeHandler(handler)
    assert every_s == 1
    assert handler.stream is stream
    out, said = capsys.readouterr()
    assert out == ""
    before, _, after = said.partition("something happened\n")
    assert before.endswith("\x1b[2K")  # the old line is wiped, not written into
    assert "1 peer known" in before
    assert "2 peers known" in after


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signals_end_it_once(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with ends_by_signal():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # closing goes on
    assert signal.getsignal(number) is before


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGHUP")
def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_by_signal():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
