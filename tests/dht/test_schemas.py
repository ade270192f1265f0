import enum
from typing import Annotated, Any

import msgspec
import pytest

from shoal.core import LimitExceeded, UsageError
from shoal.core.identity import Identity
from shoal.dht import records as module
from shoal.dht.records import (
    PLAIN,
    OwnSubkey,
    Schema,
    Slot,
    Validator,
    Verdict,
    encode_value,
    key_of,
    reserved,
)

NOTHING = object()


class Loss(msgspec.Struct):
    step: int
    loss: Annotated[float, msgspec.Meta(ge=0)]
    shape: tuple[int, int] = (1, 1)


class Pair(msgspec.Struct, array_like=True):
    name: str
    rate: float = 0.5


class Color(enum.Enum):
    RED = "red"


def slot(value, subkey=NOTHING):
    return Slot(PLAIN if subkey is NOTHING else encode_value(subkey), encode_value(value), 1e9)


def fits(schemas, name, value, subkey=NOTHING):
    verdict = schemas.check(key_of(name).digest, slot(value, subkey))
    assert verdict in (None, Verdict.BAD_VALUE)
    return verdict is None


def test_a_namespace_is_held_to_its_type_and_others_are_free():
    schemas = Validator([Schema("loss", float)])
    for name in ("loss", "loss.run1", "loss/run1/3"):
        assert fits(schemas, name, 0.5)
        assert not fits(schemas, name, "0.5")
    for name in ("losses.run1", "run1.loss", "los", b"loss", ("loss", 1)):
        assert fits(schemas, name, "0.5")


GOOD = [
    (float, 1.5),
    (int, 3),
    (str, "x"),
    (bytes, b"x"),
    (list[int], [1, 2]),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str], (1, "a")),
    (dict[str, float], {"a": 1.0}),
    (dict[int, tuple[int, int]], {3: (1, 2)}),
    (int | None, None),
    (Loss, {"step": 1, "loss": 0.5}),
    (Loss, {"loss": 0.5, "shape": (2, 3), "step": 1}),
    (Loss, {"step": 1, "loss": 0.5, "added later": [1]}),
    (Pair, ["a"]),
    (Pair, ["a", 1.0]),
    (Color, "red"),
    (Any, [1, (2.0, {"a": [b"x"]})]),
    (Annotated[int, msgspec.Meta(ge=1)], 1),
]
BAD = [
    (float, 1),
    (float, True),
    (float, "1.5"),
    (int, 3.0),
    (int, True),
    (int, "3"),
    (int, None),
    (str, b"x"),
    (bytes, "eA=="),
    (dict[bytes, int], {"eA==": 1}),
    (list[int], (1, 2)),
    (tuple[int, ...], [1, 2]),
    (tuple[int, str], (1, "a", 2)),
    (list[tuple[int, int]], [[1, 2]]),
    (dict[str, float], {"a": 1}),
    (dict[str, list[float]], {"a": [1.0, 2]}),
    (Loss, {"step": 1}),
    (Loss, {"step": 1, "loss": 1}),
    (Loss, {"step": 1, "loss": -0.5}),
    (Loss, {"step": 1, "loss": 0.5, "shape": [2, 3]}),
    (Pair, ["a", 1]),
    (Pair, ("a", 1.0)),
    (Color, "blue"),
    (Annotated[int, msgspec.Meta(ge=1)], 0),
]


@pytest.mark.parametrize(("kind", "value"), GOOD, ids=repr)
def test_what_fits(kind, value):
    assert fits(Validator([Schema("a", kind)]), "a", value)


@pytest.mark.parametrize(("kind", "value"), BAD, ids=repr)
def test_nothing_is_coerced(kind, value):
    assert not fits(Validator([Schema("a", kind)]), "a", value)


def test_plain_values_or_dictionaries_not_both():
    plain, dictionary = Validator([Schema("a", int)]), Validator([Schema("a", int, subkey_type=str)])
    assert fits(plain, "a", 1)
    assert not fits(plain, "a", 1, subkey="x")
    assert fits(dictionary, "a", 1, subkey="x")
    assert not fits(dictionary, "a", 1)
    assert not fits(dictionary, "a", 1, subkey=3)
    assert not fits(dictionary, "a", 1.0, subkey="x")


def test_a_subkey_that_is_none_is_no_plain_value():
    assert not fits(Validator([Schema("a", int)]), "a", 1, subkey=None)
    assert not fits(Validator([Schema("a", int, subkey_type=str | None)]), "a", 1, subkey=None)


def test_subkeys_of_their_writers_own():
    schema = Schema("presence", str, subkey_type=OwnSubkey)
    mine = reserved(Identity.from_seed(b"a" * 32).peer_id)
    assert schema.fits(mine, "here")
    assert not schema.fits("me", "here")
    assert not schema.fits(("shoal.owner", b"short", None), "here")


def test_one_of_several_that_fits_is_enough():
    schemas = Validator([Schema("a", int), Schema("a", str, subkey_type=int)])
    schemas.add_schema(Schema("a", bytes))
    assert fits(schemas, "a", 1)
    assert fits(schemas, "a", b"x")
    assert fits(schemas, "a", "x", subkey=1)
    assert not fits(schemas, "a", "x")
    assert not fits(schemas, "a", 1, subkey=1)


def test_bytes_that_are_no_messagepack_are_refused_where_there_is_a_schema():
    key = key_of("a").digest
    schemas = Validator([Schema("a", Any), Schema("a", Any, subkey_type=Any)])
    for bad in (Slot(PLAIN, b"", 1.0), Slot(PLAIN, b"\xc1", 1.0), Slot(b"\xc1", b"\x01", 1.0)):
        assert schemas.check(key, bad) is Verdict.BAD_VALUE
        assert bad.subkey != PLAIN or Validator().check(key, bad) is None


def test_deep_nesting_is_refused_not_a_crash():
    deep = Slot(PLAIN, b"\x91" * 900 + b"\x90", 1.0)
    assert Validator([Schema("a", int)]).check(key_of("a").digest, deep) is Verdict.BAD_VALUE
    assert Validator([Schema("a", list[Any])]).check(key_of("a").digest, deep) in (None, Verdict.BAD_VALUE)


@pytest.mark.parametrize("prefix", ["", "ffn.", "ffn.3", "a/b", "."])
def test_a_prefix_is_one_namespace(prefix):
    with pytest.raises(UsageError, match="is no prefix of a schema"):
        Schema(prefix, int)


class Plain:
    pass


@pytest.mark.parametrize("kind", [Plain, "int", 3, dict[list[int], int] | Plain])
def test_a_type_that_cannot_be_checked_is_refused_at_once(kind):
    with pytest.raises(UsageError, match="no type that a schema can check"):
        Schema("a", kind)
    with pytest.raises(UsageError, match="no type that a schema can check"):
        Schema("a", int, subkey_type=kind)


def test_the_number_of_schemas_is_bounded_and_the_same_one_counts_once(monkeypatch):
    monkeypatch.setattr(module, "MAX_SCHEMAS", 2)
    schemas = Validator([Schema("a", int), Schema("a", int), Schema("b", int)])
    with pytest.raises(LimitExceeded, match="at most 2 schemas"):
        schemas.add_schema(Schema("c", int))
