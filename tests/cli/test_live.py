import logging
import signal
import sys

import pytest

from shoal.cli.live import ends_by_signal, live_line


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
