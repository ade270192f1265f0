import pytest
import torch

from shoal.data import text_set
from shoal.data.errors import DataError
from shoal.data.text_set import NUM_CHARACTERS, is_known, next_characters, pages


def written(codes):
    return "".join("\n" if code == 0 else chr(code + 31) for code in codes.tolist())


def test_what_is_learned_is_the_next_character_of_the_documentation():
    x, y = next_characters(12)
    assert x.dtype == torch.uint8
    assert x.shape == (len(y), 12)
    assert int(x.max()) < NUM_CHARACTERS
    assert int(y.max()) < NUM_CHARACTERS
    # windows of one page follow each other by one character
    assert torch.equal(x[1, :-1], x[0, 1:])
    assert x[1, -1] == y[0]
    page = written(y[:2000])
    assert "Shoal" in page
    assert all(map(is_known, page))


def test_tests_are_of_pages_ends_and_no_window_crosses_into_them():
    train, test = next_characters(16), next_characters(16, train=False)
    num_pages = int(pages(16).max()) + 1
    num_characters = sum(len(part[1]) for part in (train, test)) + 2 * 16 * num_pages
    assert len(pages(16)) == len(train[1])
    assert 0.09 < (len(test[1]) + 16 * num_pages) / num_characters < 0.11


def test_another_text_is_refused(tmp_path, monkeypatch):
    import gzip

    other = tmp_path / "text.gz"
    other.write_bytes(gzip.compress(b"Once upon a time"))
    monkeypatch.setattr(text_set, "FILE", other)
    with pytest.raises(DataError, match="not the text"):
        next_characters(4)
