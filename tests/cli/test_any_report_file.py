"""Whatever stands in a report's file: `shoal diff` and `shoal report` show it safely or say what is wrong."""

import copy
import json
import random

import msgspec
import pytest

from report import samples
from shoal.cli.program import run

NUM_FILES = 150
ALLOWED_CODES = (0, 3)
"""Done, or a file that cannot be read or compared."""
UNSAFE = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x200B, 0x202E, 0x2066, 0xFEFF)]
TEXTS = (
    "",
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31mred",
    "a\u202eb\u2066c\u200bd\ufeff",
    "two\nlines\r\n\tthree\x00\x7f",
    "<script>alert(1)</script>",
    "[red]x[/red]",
    "\U000e0041tag",
    "x" * 5000,
)
NUMBERS = (
    0, -0.0, -1, 1, 5e-324, -5e-324, 1e-300, 1e300, 1.7e308, -1.7e308, 2**31, 2**53 + 1, 2**63, -(2**63),
    2**64, 10**30, -(10**400), 10**4000, 1e18, 10**18,
)  # fmt: skip
OTHERS = (None, True, False, [], {}, [[]], [None], {"": {}}, [{}], [{"a": 1}, {"b": []}], "higher", "lower")
PARTS = ("rows", "curves", "config", "environment", "result", "benchmark_results")
NAMES = ("value", "step", "num_workers", "behind", "rank", "waited_for", "strategy", "cores", "has_ddp")


def pytorch_document(seed):
    rng = random.Random(seed)
    runs = [
        {"ranks": list(range(n)), "measurements": [rng.uniform(0.1, 0.2) for _ in range(6)]} for n in (1, 2)
    ]
    results = [{"model": "resnet50", "batch_size": 32, "result": runs}]
    return {"pytorch_version": "2.7", "distributed_backend": "gloo", "benchmark_results": results}


def shortened(report):
    """Fewer rows, for speed; of every kind there is one left."""
    document = msgspec.to_builtins(report)
    document["rows"] = [
        {**row, "starts": [start[:8] for start in row["starts"]]}
        for number, row in enumerate(document["rows"])
        if number < 12 or number % 7 == 0
    ]
    for curve in document["curves"]:
        curve["starts"] = [{name: points[:6] for name, points in start.items()} for start in curve["starts"]]
    document["curves"] = document["curves"][:6]
    return document


KINDS = {
    "accuracy": shortened(samples.accuracy()),
    "scaling": shortened(samples.scaling()),
    "training": shortened(samples.training()),
    "transport": shortened(samples.latencies()),
    "convergence": shortened(samples.convergence(delay_ms=200)),
    "pytorch": pytorch_document(0),
}


def nested(depth, inner=None):
    for number in range(depth):
        inner = [inner] if number % 2 else {"deeper": inner}
    return inner


def some_value(rng, instead_of=None):
    """Mostly of the same type, for another type is soon refused."""
    kind = rng.randrange(10)
    if isinstance(instead_of, int | float):
        kind = rng.choice((0, 0, 0, kind))
    elif isinstance(instead_of, str):
        kind = rng.choice((5, 5, 5, kind))
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    deep = nested(rng.choice((3, 50, 150, 400)), rng.choice(TEXTS))
    return copy.deepcopy(rng.choice((*OTHERS, deep)))


def mutate(rng, node):
    """Change one place in the document, found by a walk from its root."""
    while True:
        if isinstance(node, dict):
            places = list(node)
        elif isinstance(node, list):
            places = list(range(len(node)))
        else:
            return
        if not places:
            return
        place = rng.choice(places)
        if isinstance(node[place], dict | list) and node[place] and rng.random() < 0.85:
            node = node[place]
            continue
        how = rng.randrange(8)
        if how == 0 and isinstance(node, dict):
            node[rng.choice((*TEXTS, *NAMES))] = node.pop(place)
        elif how == 1 and isinstance(node, dict):
            node[rng.choice((*TEXTS, *NAMES))] = some_value(rng)
        elif how == 1:
            node.insert(place, copy.deepcopy(rng.choice(node)))
        elif how == 2:
            del node[place]
        elif how == 3 and isinstance(node, list) and all(isinstance(item, int | float) for item in node):
            node[:] = [rng.choice(NUMBERS) for _ in node]
        elif how == 4 and isinstance(node[place], int | float):
            node[place] = float(min(abs(node[place]), 1e300)) * rng.choice((-1, 0, 1e300, 1e-300, 1e20))
        else:
            node[place] = some_value(rng, node[place])
        return


def spoil(rng, encoded):
    """Change the text itself: what no encoder would write."""
    how = rng.randrange(30)
    if how == 0:
        return encoded[: rng.randrange(len(encoded))]
    if how == 1:
        depth = rng.choice((900, 5000, 200_000))
        return encoded.replace(
            '"config":', f'"config": {{"deep": {"[" * depth}{"]" * depth}}}, "config2":', 1
        )
    if how == 2:
        return encoded.replace("0.", rng.choice(("NaN, 0.", "Infinity, 0.", "-Infinity, 0.", "1e999, 0.")), 1)
    if how == 3:
        return encoded.replace('"', '"\\ud800', rng.randrange(9)).replace("\\ud800,", ",")
    if how == 4:
        return encoded.replace('"key": {', '"key": {"strategy": 1, "strategy": 2, ')
    if how == 5:
        middle = rng.randrange(len(encoded))
        added = rng.choice(("\x1b", "\x00", "\x9b", "}", "[", '"', "\udcff", "é"))
        return encoded[:middle] + added + encoded[middle:]
    return encoded


def some_file(seed):
    rng = random.Random(seed)
    document = copy.deepcopy(rng.choice(list(KINDS.values())))
    if rng.random() < 0.3 and "rows" in document:
        scale = rng.choice((-1, 0, 1e-310, 1e300, 1.7e308))
        for row in document["rows"]:
            row["starts"] = [[scale * rng.choice((1, 0.5, -1, 1)) for _ in start] for start in row["starts"]]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        mutate(rng, rng.choice([document, *(document[name] for name in PARTS if name in document)]))
    encoded = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    return spoil(rng, encoded).encode(errors="surrogateescape")


def without_control(text):
    return not any(character in text for character in UNSAFE)


def try_file(folder, capsys, seed):
    """Show one file, and compare it with a good one, with another of its kind and with itself."""
    changed, other = folder / "changed.json", folder / "other.json"
    changed.write_bytes(some_file(seed))
    other.write_bytes(json.dumps(random.Random(seed).choice(list(KINDS.values()))).encode())
    page, as_json = folder / "page.html", folder / "diff.json"
    for arguments in (
        ["report", str(changed), "-o", str(page)],
        ["report", str(other), str(changed), "-o", str(page)],
        ["diff", str(other), str(changed), "--html", str(page), "--json", str(as_json)],
        ["diff", str(changed), str(other), "--json", "-"],
        ["diff", str(changed), str(changed), "--fail-if-slower", "5%", "--html", str(page)],
    ):
        code = run(arguments)
        said = capsys.readouterr()
        assert code in ALLOWED_CODES or (code == 1 and "--fail-if-slower" in arguments), said.err
        assert without_control(said.out + said.err)
        if code == 3:
            assert said.err.strip()
        elif page.exists():
            shown = page.read_text()
            assert without_control(shown)
            assert "<script>alert" not in shown
            page.unlink()
        if "-" in arguments and code == 0:
            json.loads(said.out)


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch):
    # the drawing program is megabytes of text that do not depend on the report
    monkeypatch.setattr("shoal.report.html.page._plotly", lambda: "")


def test_any_file_is_shown_safely_or_refused(tmp_path, capsys):
    for seed in range(NUM_FILES):
        try:
            try_file(tmp_path, capsys, seed)
        except Exception as error:
            raise AssertionError(f"the file of seed {seed}") from error
