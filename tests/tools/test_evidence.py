import sys

import pytest

import evidence
from bench.sample_contests import config_of, record_of, report_of
from shoal.report.statistics import lead_of
from shoal.report.views import contest_line


def around(mean):
    return [mean - 0.01, mean, mean + 0.01]


def line(what="By seconds to 90 %", **means):
    lead = lead_of({name: around(mean) for name, mean in means.items()}, "lower", 3)
    return contest_line(what, lead, lambda mean: f"{mean:.2f} s")


def test_claims_are_read_from_the_sentences_that_make_them():
    what = "iid: By seconds to 90 %"
    assert evidence.claims_of(line(what, a=1.0, b=2.0)) == [(what, "a", "b")]
    assert evidence.claims_of(line(what, a=1.0, b=2.0, c=2.0)) == [(what, "a", "b"), (what, "a", "c")]
    assert evidence.claims_of(line(what, a=1.0, b=1.0, c=2.0)) == [(what, "a", "c"), (what, "b", "c")]
    three = [(what, "a", name) for name in "bcd"]
    assert evidence.claims_of(line(what, a=1.0, b=2.0, c=3.0, d=4.0)) == three
    assert (
        evidence.winner_of(line(what, a=1.0, b=2.0)) == evidence.winner_of(line(what, a=1, b=2, c=2)) == "a"
    )
    lead = lead_of({"a": [1.0] * 3, "b": [1.0, 2.0, 3.0], "c": [3.0] * 3}, "lower", 3, {"a": 0.1, "c": 0.1})
    assert lead.between == ("c",)
    assert evidence.claims_of(contest_line(what, lead, lambda mean: f"{mean:.2f} s")) == [(what, "a", "c")]
    for nobody in (line(a=1.0, b=1.0), line(a=1.0), "Nobody reached 90 % with every seed."):
        assert evidence.claims_of(nobody) == []
        assert evidence.winner_of(nobody) is None


def test_runs_contradict_each_other_where_orders_are_reversed():
    first, second, tied = line(a=1.0, b=2.0), line(a=2.0, b=1.0), line(a=1.0, b=1.0)
    assert evidence.contradictions([[first], [tied], [first]]) == []
    assert evidence.contradictions([[first], [line("By bytes to 90 %", a=2.0, b=1.0)]]) == []
    (found,) = evidence.contradictions([[first], [tied], [second]])
    assert found == "By seconds to 90 %: run 1 has a ahead of b, run 3 the opposite"


def contest(*late):
    records = [record_of(0.1, *[0.5] * each, 0.9) for each in late]
    return report_of({"pair": records}, config_of("pair", seeds=(1, 2, 3)))


def test_equals_are_read_as_one_contest_of_two():
    assert evidence.named_among_equals(contest(3, 4, 5), contest(4, 5, 5)) == []
    named = evidence.named_among_equals(contest(3, 3, 3), contest(30, 30, 30))
    assert [evidence.winner_of(sentence) for sentence in named] == ["first"] * 3


def test_the_reports_of_a_demo_are_those_of_the_makefile(tmp_path, monkeypatch, capsys):
    found = list(evidence.demo_commands(tmp_path))
    assert [path.parent for _, path in found] == [tmp_path] * len(found)
    assert next(command[:4] for command, _ in found) == [sys.executable, "-m", "shoal", "bench"]
    assert any(command[3] == "compare" for command, _ in found)
    told = iter([line(a=1.0, b=2.0), line(a=1.0, b=2.0), line(a=2.0, b=1.0)])
    monkeypatch.setattr(evidence, "demo", lambda folder: {"1-training": [next(told)]})
    assert evidence.main(["demos", "--runs", "3", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "named in 2 of 3 runs: 1-training: By seconds to 90 %: a" in out
    assert "1-training: By seconds to 90 %: run 1 has a ahead of b, run 3 the opposite" in out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_equals_are_told_apart_in_one_of_twenty_contests_at_most(tmp_path):
    more = {"num_workers": 4, "seeds": 3}
    named = [sentences for sentences in evidence.equals("neighbor", 20, tmp_path, more) if sentences]
    assert len(named) <= 1, named
