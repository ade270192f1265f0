import json

from shoal.cli.output import counted, say, text_stream, write_encoded, write_json


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


def test_counts_agree_with_their_nouns():
    assert [counted(number, "peer") for number in (0, 1, 1234)] == ["0 peers", "1 peer", "1,234 peers"]
