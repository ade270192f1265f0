"""Checks that headlines claim no more than was measured; the exit status is 1 where they do.

    python tools/evidence.py equals [--pairs 20] [--strategy neighbor] [--seeds 3] [FOLDER]
    python tools/evidence.py demos [--runs 10] [FOLDER]

`equals` lets one strategy compete with itself: two whole contests of `shoal.compare`, each with a tuning and
seeds of its own, are read as one contest of two. At most one of twenty may name a winner. `demos` runs the
commands of `make demo` that write a report again and again, and looks whether one run says that `a` is ahead
of `b`, and another the opposite. Reports stay in FOLDER; one that is there is not made again.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import shoal
from shoal.bench.compare import read_config
from shoal.bench.tables.compare import outcomes_of, winners
from shoal.report import Report, save
from shoal.report.views import headline

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "shoal-reports" / "evidence"
SHARE_NAMED = 1 / 20
"""Of contests between equals: so many may name somebody by chance."""
BETWEEN_PAIRS, WITHIN_PAIR = 100, 50
"""How far the first seeds of contests are apart."""
_COMMAND_S = 1200.0

Claim = tuple[str, str, str]
"""By which measure, who is said to be ahead, of whom."""


# --- what a headline claims ---

_WINS = re.compile(r"(?P<what>.+): (?P<ahead>[^:,]+), [^;]*; then (?P<behind>.+)\.")
_TIES = re.compile(r"(?P<what>.+): (?P<ahead>.+) are not told apart, [^;]*\)(?P<rest>;.+)\.")
_BEHIND_ALL = re.compile(r"; behind them (?:is|are) (?P<behind>[^;]+)")
_BEHIND_ONE = re.compile(r"; (?P<behind>[^;]+) (?:is|are) behind (?P<ahead>[^;,]+), but not behind")
_FOLLOWER = re.compile(r"(?:, | and |^)(?P<name>[^(),]+) \(")


def claims_of(sentence: str) -> list[Claim]:
    """All orders that a sentence of `views.contest_line` claims; none where it tells nobody apart."""
    if (won := _WINS.fullmatch(sentence)) is not None:
        # one that follows stands before its figure, each of several before its own in brackets
        behind = _FOLLOWER.findall(won["behind"]) or [won["behind"].partition(", ")[0]]
        return [(won["what"], won["ahead"], other) for other in behind]
    tied = _TIES.fullmatch(sentence)
    if tied is None:
        return []
    claims = []
    if (after := _BEHIND_ALL.search(tied["rest"])) is not None:
        claims += [(one, other) for one in _names(tied["ahead"]) for other in _names(after["behind"])]
    if (between := _BEHIND_ONE.search(tied["rest"])) is not None:
        claims += [(between["ahead"], other) for other in _names(between["behind"])]
    return [(tied["what"], one, other) for one, other in claims]


def _names(listed: str) -> list[str]:
    return re.split(r", | and ", listed)


def winner_of(sentence: str) -> str | None:
    """Who is said to be ahead of everybody."""
    found = _WINS.fullmatch(sentence)
    return found["ahead"] if found is not None else None


def contradictions(runs: Sequence[Sequence[str]]) -> list[str]:
    """Orders that the sentences of one run claim, and those of another the other way round."""
    claimed: dict[Claim, int] = {}
    for number, sentences in enumerate(runs, 1):
        for sentence in sentences:
            for claim in claims_of(sentence):
                claimed.setdefault(claim, number)
    return [
        f"{what}: run {number} has {ahead} ahead of {behind}, run {claimed[what, behind, ahead]} the opposite"
        for (what, ahead, behind), number in claimed.items()
        if ahead < behind and (what, behind, ahead) in claimed
    ]


# --- equals ---


def named_among_equals(first: Report, second: Report) -> list[str]:
    """Sentences that name a winner, where two contests of one strategy alone are read as one of two."""
    config = read_config(first.config)
    (contender,) = config.contenders
    outcomes = {}
    for name, report in (("first", first), ("second", second)):
        (outcomes[name],) = outcomes_of(report).values()
    rivals = tuple(msgspec.structs.replace(contender, name=name) for name in outcomes)
    sentences = winners(msgspec.structs.replace(config, contenders=rivals), outcomes)
    return [sentence for sentence in sentences if claims_of(sentence)]


def equals(strategy: str, num_pairs: int, folder: Path, more: Mapping[str, object]) -> Iterator[list[str]]:
    """For each pair of contests, the sentences that name a winner."""
    for pair in range(num_pairs):
        reports = []
        for seed in (BETWEEN_PAIRS * pair, BETWEEN_PAIRS * pair + WITHIN_PAIR):
            path = folder / f"{strategy}-{seed}.json"
            if not path.exists():
                save(shoal.compare([strategy], seed=seed, **more), path)  # type: ignore[arg-type]
            reports.append(shoal.read_report(path))
        yield named_among_equals(reports[0], reports[1])


# --- demos ---


def demo_commands(folder: Path) -> Iterator[tuple[list[str], Path]]:
    """The commands of `make demo` that write a report into this folder, and where each writes it."""
    printed = subprocess.run(
        ["make", "--dry-run", "demo", f"DEMO={folder}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for line in printed.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if "--report" in words:
            path = Path(words[words.index("--report") + 1])
            yield [sys.executable, "-m", "shoal", *words[1:]], path


def demo(folder: Path) -> dict[str, list[str]]:
    """The headlines of one demo by the name of the report; those that are missing are measured."""
    told = {}
    for command, path in demo_commands(folder):
        if not path.exists():
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=_COMMAND_S)
        told[path.stem] = headline(shoal.read_report(path))
    return told


# --- the program ---


def main(arguments: Sequence[str]) -> int:
    """Run one of the checks, print what it finds, and say whether headlines are to be believed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_equals, of_demos = kinds.add_parser("equals"), kinds.add_parser("demos")
    of_equals.add_argument("--pairs", type=int, default=20)
    of_equals.add_argument("--strategy", default="neighbor")
    of_equals.add_argument("--seeds", type=int, default=3)
    of_demos.add_argument("--runs", type=int, default=10)
    for each in (of_equals, of_demos):
        each.add_argument("folder", type=Path, nargs="?", default=REPORTS)
    given = parser.parse_args(arguments)
    if given.kind == "equals" and not 0 < given.seeds <= WITHIN_PAIR:
        parser.error(f"--seeds is 1 to {WITHIN_PAIR}: the contests of a pair would share some")
    folder = given.folder.absolute() / given.kind
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    if given.kind == "equals":
        is_good = _check_equals(given.strategy, given.pairs, folder, {"seeds": given.seeds})
    else:
        is_good = _check_demos(given.runs, folder)
    print(f"{time.perf_counter() - began_s:.0f} s")
    return 0 if is_good else 1


def _check_equals(strategy: str, num_pairs: int, folder: Path, more: Mapping[str, object]) -> bool:
    num_named = 0
    for number, sentences in enumerate(equals(strategy, num_pairs, folder, more), 1):
        num_named += bool(sentences)
        print(f"pair {number}: {' '.join(sentences) or 'nobody is named'}", flush=True)
    print(f"{num_named} of {num_pairs} contests between equals name somebody.")
    return num_named <= num_pairs * SHARE_NAMED


def _check_demos(num_runs: int, folder: Path) -> bool:
    runs = []
    for number in range(1, num_runs + 1):
        told = demo(folder / f"run-{number}")
        runs.append([f"{name}: {sentence}" for name, sentences in told.items() for sentence in sentences])
        print(*(f"run {number}: {sentence}" for sentence in runs[-1]), sep="\n", flush=True)
    named: dict[str, int] = {}
    for sentence in (sentence for sentences in runs for sentence in sentences):
        winner = winner_of(sentence)
        if winner is not None:
            what = f"{sentence.partition(f': {winner},')[0]}: {winner}"
            named[what] = named.get(what, 0) + 1
    print(*(f"named in {count} of {num_runs} runs: {what}" for what, count in named.items()), sep="\n")
    found = contradictions(runs)
    print(*(found or ["No run contradicts another."]), sep="\n")
    return not found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
