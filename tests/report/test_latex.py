import pytest

from shoal.report.latex import Figures, escape, latex_table, plus_minus


def test_what_latex_reads_otherwise_is_escaped():
    assert escape("a_b & 90 % of {x} \\ #1 $2 ~ ^") == (
        r"a\_b \& 90 \% of \{x\} \textbackslash{} \#1 \$2 \textasciitilde{} \textasciicircum{}"
    )
    assert escape("5 µs ± 1") == r"5 $\mu$s $\pm$ 1"


@pytest.mark.parametrize(
    ("samples", "shown"),
    [
        ([12.34], "12.3"),
        ([0.5, 0.5], r"0.500 \pm 0.000"),
        ([10.0, 12.0], r"11.0 \pm 1.4"),
        ([95.0, 95.02], r"95.01 \pm 0.01"),
        ([1234.0, 1236.0], r"1235 \pm 1"),
        ([0.0, 0.0], r"0 \pm 0"),
    ],
)
def test_means_have_as_many_digits_as_their_deviation(samples, shown):
    assert plus_minus(samples) == shown


def test_a_table_has_rules_units_and_the_best_in_bold():
    columns = [
        Figures("accuracy", "%", "higher", [[90.0, 92.0], [95.0, 95.0], []]),
        Figures("traffic", "B", "lower", [[2e6], [4e6], [3e6]]),
    ]
    table = latex_table(["all-reduce", "local_sgd", "d2"], columns, "100 % of it", "tab:x")
    lines = table.splitlines()
    assert r"\caption{100 \% of it}" in lines
    assert r"\label{tab:x}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    assert r" & accuracy (\%) & traffic (MB) \\" in lines
    assert r"all-reduce & $91.0 \pm 1.4$ & $\mathbf{2.00}$ \\" in lines
    assert r"local\_sgd & $\mathbf{95.0 \pm 0.0}$ & $4.00$ \\" in lines
    assert r"d2 & -- & $3.00$ \\" in lines
    assert [lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")] == sorted(
        lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")
    )


def test_who_is_alone_has_not_won():
    assert "mathbf" not in latex_table(["a"], [Figures("x", "", "higher", [[1.0]])], "")
    assert "mathbf" not in latex_table(["a", "b"], [Figures("x", "", None, [[1.0], [2.0]])], "")
