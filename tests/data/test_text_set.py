import pytest
import torch

from shoal.core.errors import UsageError
from shoal.data import text_set
from shoal.data.errors import DataError
from shoal.data.text_set import NUM_CHARACTERS, decode, encode, is_known, next_characters, pages


def test_what_is_learned_is_the_next_character_of_the_documentation():
    x, y = next_characters(12)
    assert x.dtype == torch.uint8
    assert x.shape == (len(y), 12)
    assert int(x.max()) < NUM_CHARACTERS
    assert int(y.max()) < NUM_CHARACTERS
    # windows of one page follow each other by one character
    assert torch.equal(x[1, :-1], x[0, 1:])
    assert x[1, -1] == y[0]
    page = decode(y[:2000])
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


def test_a_text_of_ones_own_has_the_same_numbers():
    text = "Once upon a time,\n~ and more ~"
    assert decode(encode(text)) == text
    assert int(encode(text).max()) < NUM_CHARACTERS
    assert len(encode("")) == 0
    with pytest.raises(UsageError, match="character 'é', which has no number"):
        encode("caf\u00e9")
