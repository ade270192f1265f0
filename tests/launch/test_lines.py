import pytest

from shoal.launch.output import BAR_INTERVAL_S, MAX_LINE_BYTES, LineSplitter


def shown(*pieces):
    """What a terminal gets of a stream that comes in these pieces and then ends."""
    lines = LineSplitter()
    got = [line for piece in pieces for line in lines.shown(lines.feed(piece))]
    return got + lines.shown(lines.take_rest())


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"no end"], [b"no end"]),
        ([b"\n\na\n"], [b"", b"", b"a"]),
        ([b"windows\r\nlines\r\n"], [b"windows", b"lines"]),
        ([b"windows\r", b"\nlines"], [b"windows", b"lines"]),
        ([b"\xff\xfe\x00\n"], [b"\xff\xfe\x00"]),
        ([b"\r 10%\r 50%\r100%\n", b"next\n"], [b"100%", b"next"]),
        ([b"bar\r", b"   \r", b"\n"], []),
        ([b"\x1b[31mred\x1b[0m\x1b[2K\x1b[1A\n"], [b"\x1b[31mred\x1b[0m"]),
        ([], []),
    ],
)
def test_lines_come_whole_and_as_they_look_at_last(pieces, expected):
    assert shown(*pieces) == expected


def test_a_line_without_an_end_is_cut_and_loses_nothing():
    lines = LineSplitter()
    size = 10 * MAX_LINE_BYTES + 17
    whole = b"".join(lines.feed(b"x" * 1000) for _ in range(size // 1000)) + lines.take_rest()
    assert whole == b"x" * (size // 1000 * 1000)
    pieces = shown(*[b"x" * 30_000] * 100)
    assert b"".join(pieces) == b"x" * 3_000_000
    assert max(map(len, pieces)) <= 2 * MAX_LINE_BYTES


def test_a_log_gets_every_byte_of_a_bar():
    lines = LineSplitter()
    data = [b"\r%3d%%" % percent for percent in range(100)]
    assert b"".join(map(lines.feed, [*data, b"\n"])) == b"".join(data) + b"\n"


def test_a_bar_is_shown_now_and_then_and_not_twice():
    lines = LineSplitter()
    lines.feed(b"\r10%")
    assert lines.bar(100.0) == [b"10%"]
    lines.feed(b"\r20%")
    assert lines.bar(100.0 + BAR_INTERVAL_S / 2) == []
    assert lines.bar(100.0 + BAR_INTERVAL_S) == [b"20%"]
    assert lines.bar(100.0 + 2 * BAR_INTERVAL_S) == []
    assert lines.shown(lines.feed(b"\n")) == []


def test_a_line_that_is_only_late_is_no_bar():
    lines = LineSplitter()
    lines.feed(b"loading...")
    assert lines.bar(100.0) == []
    assert lines.shown(lines.feed(b" done\n")) == [b"loading... done"]
