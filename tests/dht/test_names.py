"""From names to keys."""

import pytest

from shoal.core import Key, UsageError
from shoal.dht.records import NAMESPACE_BYTES, key_of, namespace_of, namespace_tag


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("presence.training", "presence"),
        ("presence/training.1", "presence"),
        ("presence", "presence"),
        ("presence.", "presence"),
        ("ffn.4.12", "ffn"),
        (".hidden", ""),
        ("", ""),
    ],
)
def test_a_key_ends_in_the_tag_of_its_namespace(name, namespace):
    assert namespace_of(name) == namespace
    assert key_of(name).digest.endswith(namespace_tag(namespace))


def test_tags_of_namespaces_differ():
    names = ["ffn", "ffn2", "presence", "", "FFN"]
    assert len({namespace_tag(name) for name in names}) == len(names)
    assert all(len(namespace_tag(name)) == NAMESPACE_BYTES for name in names)


def test_names_that_look_alike_have_keys_of_their_own():
    names = ["a", b"a", ("a",), ["a"], "a.", "a/", 1, "1", 1.0, None, "None"]
    assert len({key_of(name) for name in names}) == len(names)


def test_the_same_name_has_the_same_key_anywhere():
    """The value is a promise to peers of other versions."""
    assert str(key_of("ffn.4.12")) == "839784fe07a77d992a8c7cd0dc39f3dc37018770"
    assert str(key_of(("ffn", 4))) == "9a5f30d091e9e95aea327fa699b7e74d53aac673"


def test_names_of_one_namespace_are_spread():
    assert len({key_of(f"ffn.{number}").digest[:2] for number in range(100)}) > 90


def test_a_key_is_its_own():
    key = Key.of("x")
    assert key_of(key) is key


def test_raw_bytes_have_no_namespace():
    assert key_of(b"ffn.4") == Key.of(b"ffn.4")


def test_a_name_that_cannot_be():
    with pytest.raises(UsageError, match="cannot be stored"):
        key_of(object())
