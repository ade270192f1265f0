"""Makes the tables of docs/which-strategy.md, and the README's picture, from contests in virtual time.

    python tools/figures.py [FOLDER]

Six contests: three networks, and data that is divided evenly or by label. Each takes minutes on two cores;
one whose report is in FOLDER already is not run again. How long it took is printed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from shoal import read_report
from shoal.bench.compare import BYTES, SECONDS, read_config, score_of
from shoal.bench.tables.compare import amount, leaders, outcomes_of, ranking
from shoal.report import Report
from shoal.report.picture import draw
from shoal.report.statistics import Lead, half_interval, mean_of
from shoal.simulate.task_facts import facts_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "which-strategy.md"
DRAWING = ROOT / "docs" / "images" / "home-network.svg"
BEGIN, END = "<!-- made by `make figures` from here -->", "<!-- to here -->"
_DIGEST = "<!-- these tables are as they were written: sha256 "
NETWORKS = {
    "lan": "one room (`lan`)",
    "home": "homes with 20 Mbit/s up (`home`)",
    "three-continents": "three continents (`three-continents`)",
}
SPLITS = {"iid": "evenly", "dirichlet:0.1": "by label"}
PICTURE = ("home", "iid", "Eight workers behind simulated 20 Mbit/s lines learn to read digits")
PICTURED = ("all-reduce", "neighbor", "pair", "local-sgd")


def command(network: str, split: str) -> list[str]:
    """What a reader types to get the same figures."""
    words = ["shoal", "compare", "--task", "digits", "--workers", "8", "--strategies", "all"]
    return [*words, "--profile", network, "--split", split, "--seeds", "5"]


def contest(network: str, split: str, folder: Path) -> Report:
    """The report of one contest, which is run unless it is there."""
    path = folder / f"{network}-{split.replace(':', '-')}.json"
    if not path.exists():
        subprocess.run(
            [sys.executable, "-m", *command(network, split), "--report", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return read_report(path)


def summary(reports: Mapping[tuple[str, str], Report]) -> Iterator[str]:
    """A line for each contest: who was first by seconds, and who by bytes."""
    yield "| network | data is divided | first at 90 % by time | least data sent until then |"
    yield "|---|---|---|---|"
    for (network, split), report in reports.items():
        config, outcomes = read_config(report.config), outcomes_of(report)
        cells = [_first(leaders(config, outcomes, metric)) for metric in (SECONDS, BYTES)]
        yield f"| {NETWORKS[network]} | {SPLITS[split]} | {cells[0]} | {cells[1]} |"


def _first(lead: Lead | None) -> str:
    if lead is None:
        return "nobody"
    names = ", ".join(f"`{name}`" for name in lead.names)
    if not lead.is_enough:
        return f"{names} ({lead.why_not()})"
    return f"{names}, the only one there" if len(lead.means) == 1 else names


def spread(samples: list[float], unit: str, resolution: float = 0.0) -> str:
    """A mean and half of its 95 % interval."""
    mean, half = mean_of(samples), half_interval(samples, resolution)
    if unit == "%":
        return f"{100 * mean:.1f} ± {100 * half:.1f} %"
    return f"{amount(mean, unit)} ± {100 * half / mean:.0f} %"


def details(network: str, split: str, report: Report) -> Iterator[str]:
    """One contest, whole: in the order of seconds, and those that did not arrive behind."""
    config, outcomes = read_config(report.config), outcomes_of(report)
    final = score_of(facts_of(config.task), "final")
    first = ranking(outcomes, SECONDS)
    yield f"### {NETWORKS[network][0].upper()}{NETWORKS[network][1:]}, data divided {SPLITS[split]}"
    yield ""
    yield f"`{' '.join(command(network, split))}`"
    yield ""
    yield "| strategy | learning rate | time to 90 % | data sent until then | accuracy at the end |"
    yield "|---|---|---|---|---|"
    for name in [*first, *(name for name in outcomes if name not in first)]:
        outcome = outcomes[name]
        cells = [
            spread(outcome.samples[metric], unit, outcome.resolution[metric]) if name in first else "-"
            for metric, unit in ((SECONDS, "s"), (BYTES, "B"))
        ]
        is_whole = outcome.is_whole(final)
        accuracy = spread(outcome.samples[final], "%", outcome.resolution[final]) if is_whole else "-"
        rate = "-" if outcome.rate is None else f"{outcome.rate:g}"
        why = f" ({outcome.why()})" if outcome.reasons else ""
        yield f"| `{name}` | {rate} | {cells[0]}{why} | {cells[1]} | {accuracy} |"
    yield ""


def with_tables(page: str, tables: str) -> str:
    """The page with these tables between its marks, and their digest, by which a test knows them again."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables}\n\n{_mark(tables)}\n{END}{after}"


def are_tables_as_written(page: str) -> bool:
    """Whether the tables of a page are those that `with_tables` put there."""
    between = page.partition(BEGIN)[2].partition(END)[0]
    tables, begin, _ = between.strip().rpartition(_DIGEST)
    return bool(begin) and with_tables(page, tables.strip()) == page


def _mark(tables: str) -> str:
    return f"{_DIGEST}{hashlib.sha256(tables.encode()).hexdigest()[:16]} -->"


def main(folder: Path) -> None:
    """Run what is missing, and write the page's tables and the picture."""
    began_s = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    reports = {}
    for network in NETWORKS:
        for split in SPLITS:
            reports[network, split] = contest(network, split, folder)
            print(f"{network}, {split}: after {time.perf_counter() - began_s:.0f} s", flush=True)
    lines = [*summary(reports), "", "## All figures", ""]
    for (network, split), report in reports.items():
        lines += details(network, split, report)
    PAGE.write_text(with_tables(PAGE.read_text(), "\n".join(lines).rstrip()))
    network, split, title = PICTURE
    report = reports[network, split]
    curves = [curve for curve in report.curves if curve.key.get("strategy") in PICTURED]
    drawing = draw(msgspec.structs.replace(report, curves=curves), None, None, title)
    DRAWING.write_text(drawing)
    print(f"Tables in {PAGE}, picture in {DRAWING}: {(time.perf_counter() - began_s) / 60:.1f} minutes.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "shoal-reports" / "figures")
