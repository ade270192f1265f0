import msgspec
import pytest

import figures
from bench.sample_contests import config_of, record_of, report_of


def arrival(*late):
    return [record_of(0.1, *[0.5] * each, 0.95) for each in late]


def contest(**runs):
    config = config_of(*runs, seeds=(0, 1, 2), target=0.9, learning_rates=(0.1, 0.2, 0.3))
    return report_of(runs, config)


@pytest.fixture
def reports():
    """Of each network and split: one is first on even data, nobody arrives by label in one room."""
    even = contest(
        **{"all-reduce": arrival(1, 2, 2), "neighbor": arrival(20, 21, 22), "pair": arrival(21, 20, 23)}
    )
    lone = contest(**{"all-reduce": arrival(1, 2, 2), "pair": [record_of(0.1, 0.2)] * 3})
    nobody = contest(**{"all-reduce": [record_of(0.1, 0.2)] * 3, "pair": [record_of(0.1, 0.2)] * 3})
    return {
        (network, split): even if split == "iid" else nobody if network == "lan" else lone
        for network in figures.NETWORKS
        for split in figures.SPLITS
    }


def test_the_summary_names_those_that_are_first_as_far_as_seeds_tell(reports):
    head, line, *lines = figures.summary(reports)
    assert head.count("|") == line.count("|")
    cells = [[cell.strip() for cell in each.split("|")[1:-1]] for each in lines]
    assert [row[0] for row in cells] == [words for words in figures.NETWORKS.values() for _ in range(2)]
    assert cells[0][1:] == ["evenly", "`all-reduce`", "`all-reduce`"]
    assert cells[1][1:] == ["by label", "nobody", "nobody"]
    assert cells[3][2:] == ["`all-reduce`, the only one there"] * 2


def test_the_details_have_everybody_with_intervals_and_reasons(reports):
    text = "\n".join(figures.details("home", "dirichlet:0.1", reports["home", "dirichlet:0.1"]))
    assert "`shoal compare --task digits --workers 8 --strategies all --profile home" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    first, last = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    # steps 20, 30 and 30, a second for ten: the deviation is 0.577 s, and Student's t with two 4.303
    assert first == ["`all-reduce`", "0.2", "2.67 s ± 54 %", "2.67 kB ± 54 %", "95.0 ± 0.2 %"]
    assert last[:2] == ["`pair`", "0.3"]
    assert last[2].startswith("- (")
    assert last[3:] == ["-", "20.0 ± 0.2 %"]


def test_all_is_written_and_the_time_is_told(reports, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{figures.BEGIN}\nold\n{figures.END}\nAfter\n")
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "DRAWING", tmp_path / "drawing.svg")
    monkeypatch.setattr(figures, "contest", lambda network, split, folder: reports[network, split])
    figures.main(tmp_path / "reports")
    text = page.read_text()
    assert text.startswith(f"Before\n{figures.BEGIN}\n\n| network |")
    assert text.endswith(f"{figures.END}\nAfter\n")
    assert "old" not in text
    assert text.count("### ") == 6
    assert figures.are_tables_as_written(text)
    assert not figures.are_tables_as_written(text.replace("2.67 s", "2.66 s"))
    assert (tmp_path / "drawing.svg").read_text().startswith("<svg")
    assert " minutes." in capsys.readouterr().out.splitlines()[-1]


def test_a_report_that_is_there_is_not_measured_again(reports, tmp_path):
    report = reports["lan", "iid"]
    (tmp_path / "lan-iid.json").write_bytes(msgspec.json.encode(report))
    assert figures.contest("lan", "iid", tmp_path).rows == report.rows


def test_the_tables_of_the_documentation_are_what_was_written():
    assert figures.are_tables_as_written(figures.PAGE.read_text())
