from shoal.report.figures import SHOWN_SERIES, Contest, Figures


def test_contenders_are_told_from_their_settings():
    keys = [
        {"strategy": name, "split": split, "model": "mlp", "num_workers": 4}
        for name in ("pair", "sma")
        for split in ("iid", "dirichlet:0.1")
    ]
    contest = Contest(keys, aside=("num_workers",))
    assert [(contest.contender(key), contest.setting(key)) for key in keys] == [
        ("pair", "split=iid"),
        ("pair", "split=dirichlet:0.1"),
        ("sma", "split=iid"),
        ("sma", "split=dirichlet:0.1"),
    ]


def test_keys_that_name_no_contender_compete_as_they_are():
    keys = [{"size": 1, "mode": "a"}, {"size": 2, "mode": "a"}]
    contest = Contest(keys)
    assert [contest.contender(key) for key in keys] == ["size=1", "size=2"]
    assert contest.setting(keys[0]) == ""


def test_a_legend_switches_and_starts_with_as_many_as_can_be_told_apart():
    figures = Figures()
    number = figures.open_set((f"<{index}>", index) for index in range(SHOWN_SERIES + 3))
    legend = figures.legend(number)
    assert legend.count('aria-pressed="false"') == 3
    assert "&lt;0&gt;" in legend
    assert "<0>" not in legend


def test_one_series_needs_no_legend_and_one_choice_no_tabs():
    figures = Figures()
    number = figures.open_set([("alone", 0)])
    assert figures.legend(number) == figures.tabs(number, "along", ["step"]) == ""
