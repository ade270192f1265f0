"""TOML in and out: what is refused and how, and that nothing is lost on the way."""

import tomllib

import msgspec
import pytest

from shoal.core import UsageError
from shoal.transport.network import documents


class Leaf(msgspec.Struct, tag_field="kind", tag="leaf", forbid_unknown_fields=True):
    colour: str = "green"


class Twig(msgspec.Struct, tag_field="kind", tag="twig", forbid_unknown_fields=True):
    length_m: float = 1.0


class Branch(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str = ""
    end: float | Leaf | Twig | None = None
    is_dry: bool = False
    sizes: list[float] = []


class Tree(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    trunk: Branch = msgspec.field(default_factory=Branch)
    branches: list[Branch] = []
    named: dict[str, Branch] = {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trunck = 3", r"Oak is wrong at its top: 'trunck' is no key, did you mean 'trunk'\?"),
        ("xyz = 3", "'xyz' is no key, known are 'trunk', 'branches', 'named'"),
        ("[trunk]\nnmae = 'a'", r"at trunk: 'nmae' is no key, did you mean 'name'\?"),
        ("[[branches]]\n[[branches]]\nnam = 'a'", r"at branches\[1\]: 'nam' is no key"),
        ("[named.\"a b\"]\nnam = 'a'", r'at named\."a b": \'nam\' is no key'),
        (
            "[trunk]\nend = {kind = 'laef'}",
            r"at trunk\.end\.kind: 'laef' is not known, did you mean 'leaf'\?",
        ),
        ("[trunk]\nend = {colour = 'a'}", r"at trunk\.end: it needs a 'kind', one of 'leaf', 'twig'"),
        (
            "[trunk]\nend = {kind = 'leaf', color = 'a'}",
            r"'color' is no key of 'leaf', did you mean 'colour'\?",
        ),
        ("[trunk]\nend = {kind = 3}", r"at trunk\.end\.kind: 3 is not known"),
        ("[trunk]\nend = nan", r"at trunk\.end: nan is no number"),
        ("[trunk]\nsizes = [1, inf]", r"at trunk\.sizes\[1\]: inf is no number"),
        ("[trunk]\nname = 3", r"at trunk\.name: expected `str`, got `int`"),
        (
            "[named.good]\n[named.\"a b\"]\nend = {kind = 'leaf', colour = 3}",
            r'at named\."a b"\.end\.colour: expected `str`',
        ),
        ("trunk = 3", "at trunk: expected `table`, got `int`"),
        ("branches = {}", "at branches: expected `list`, got `table`"),
        ("\n[trunk\n", "Oak is not TOML: .*line 2"),
    ],
)
def test_refusals_name_the_key_and_the_nearest_name(text, message):
    with pytest.raises(UsageError, match=message):
        documents.read(text, Tree, "Oak")


def test_files(tmp_path):
    path = tmp_path / "tree.toml"
    with pytest.raises(UsageError, match=r"Cannot read the tree '.*tree\.toml': No such file"):
        documents.read_file(path, Tree, "the tree")
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        documents.read_file(path, Tree, "the tree")
    path.write_text("[trunk]\nname = 'oak'")
    assert documents.read_file(path, Tree, "the tree") == Tree(trunk=Branch(name="oak"))


def test_what_is_written_reads_the_same():
    odd = 'a "quoted" \\ back\nslash\tü\x7f\x01 line'
    tree = Tree(
        trunk=Branch(name=odd, end=Leaf(colour=odd), sizes=[1e-9, 1e22, 0.1, 3.0]),
        branches=[Branch(name="a", is_dry=True, end=1.5), Branch(), Branch(end=Twig(2.0))],
        named={"plain": Branch(name="b"), odd: Branch(), "10.0.0.7:31337": Branch(end=Leaf())},
    )
    text = documents.write(tree)
    assert documents.read(text, Tree, "Oak") == tree
    assert tomllib.loads(text)["trunk"]["name"] == odd
    assert documents.read(documents.write(Tree()), Tree, "Oak") == Tree()


def test_suggestions_stay_short():
    assert documents.suggest("zzzz", [f"name{number}" for number in range(100)]).endswith("'name11', …")
    assert documents.suggest("a", []) == "none is known"
