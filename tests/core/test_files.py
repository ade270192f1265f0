import pytest

from shoal.core.files import sha256_of, written


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "file"
    with written(path) as temporary:
        temporary.write_bytes(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"

    def fail():
        with written(path) as temporary:
            temporary.write_bytes(b"tw")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"one"
    assert sha256_of(path).startswith("7692c3ad")
