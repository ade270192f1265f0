import json

import msgspec
import pytest

from shoal.core.untrusted import decode_json, depth_exceeds, visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain µ × é 模型 🐟", "plain µ × é 模型 🐟"),
        ("\x1b[2J\x07", "\\u001b[2J\\u0007"),
        ("\x9b31m\x7f", "\\u009b31m\\u007f"),
        ("a\u202eb\u2066c\u200bd\ufeff", "a\\u202eb\\u2066c\\u200bd\\ufeff"),
        ("\udc80", "\\udc80"),
        ("\U000e0041", "\\udb40\\udc41"),
        ("two\n\tlines", "two\n\tlines"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text, shown):
    assert visible(text) == shown
    assert visible(visible(text)) == shown


def test_a_line_stays_a_line():
    assert visible_line("x\nRESULT: {}\u2028y") == "x\\u000aRESULT: {}\\u2028y"


def test_json_stays_the_same_document():
    document = {"\x9b\u202e": "\x7f\U000e0041\x1b"}
    assert json.loads(visible(msgspec.json.encode(document).decode())) == document


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 5000, b'"\xff"', b"1" * 5000, b"NaN", b""])
@pytest.mark.parametrize("kind", [object, dict[str, int]])
def test_whatever_is_no_json_is_one_error(raw, kind):
    with pytest.raises(msgspec.DecodeError):
        decode_json(raw, kind)


def test_depth_is_counted_without_calling_oneself():
    data = None
    for _ in range(5000):
        data = [data]
    assert depth_exceeds(data)
    assert not depth_exceeds({"a": [[1]]}, 3)
    assert depth_exceeds({"a": [[1]]}, 2)
