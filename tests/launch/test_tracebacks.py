import textwrap

import pytest

from shoal.launch.worker import HOLD_S, LONG_HOLD_S, MAX_HELD_BYTES, Tracebacks, last_error

SIMPLE = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    raise ValueError("boom")
ValueError: boom
  with a second line"""
CHAINED = f"""\
{SIMPLE}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 2, in <module>
    lose()
shoal.core.errors.PeerLost: rank 2 is lost
  Likely cause: its process ended"""
TORCH = "\n".join(f"[rank12]: {line}" if line else "" for line in CHAINED.split("\n"))
SYNTAX = """\
  File "x.py", line 3
    foo(
       ^
SyntaxError: '(' was never closed"""


def lines_of(text):
    return textwrap.dedent(text).encode().split(b"\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SIMPLE, "ValueError: boom"),
        (CHAINED, "shoal.core.errors.PeerLost: rank 2 is lost"),
        (TORCH, "shoal.core.errors.PeerLost: rank 2 is lost"),
        (SYNTAX, "SyntaxError: '(' was never closed"),
        ("only a line", ""),
        ("Traceback (most recent call last):\n  File", ""),
    ],
)
def test_the_last_error_of_a_traceback(text, error):
    assert last_error(lines_of(text)) == error


@pytest.mark.parametrize("text", [SIMPLE, CHAINED, SYNTAX])
def test_a_traceback_is_held_from_its_start_on(text):
    held = Tracebacks()
    assert held.sift([b"a warning", *lines_of(text)], now_s=1.0) == [b"a warning"]
    assert held.sift([b"and more"], now_s=1.5) == []
    assert held.since_s == 1.0
    assert held.release_due(1.0 + HOLD_S / 2) == []
    hold_s = LONG_HOLD_S if "PeerLost" in text else HOLD_S
    assert held.release_due(1.0 + hold_s - 0.1) == []
    assert held.release_due(1.0 + hold_s) == [*lines_of(text), b"and more"]
    assert held.release_due(1.0 + hold_s) == []


def test_the_rank_that_torch_puts_before_lines_is_not_shown():
    held = Tracebacks()
    warning = b"[rank12]:[W1] not of a traceback"
    assert held.sift([warning, *lines_of(TORCH)], now_s=1.0) == [warning]
    assert held.release() == lines_of(CHAINED)


def test_a_traceback_is_remembered_until_something_follows_it():
    held = Tracebacks()
    held.sift(lines_of(SIMPLE), now_s=1.0)
    assert held.release() == lines_of(SIMPLE)
    assert (held.since_s, held.error) == (1.0, "ValueError: boom")
    assert held.sift([b"all is well"], now_s=3.0) == [b"all is well"]
    assert (held.since_s, held.error, held.lines) == (None, "", [])


def test_a_traceback_without_end_is_let_go():
    held = Tracebacks()
    held.sift(lines_of(SIMPLE), now_s=1.0)
    passed = held.sift([b"x" * 1000] * (MAX_HELD_BYTES // 1000 + 1), now_s=1.1)
    assert passed[: len(lines_of(SIMPLE))] == lines_of(SIMPLE)
    assert held.release() == []
