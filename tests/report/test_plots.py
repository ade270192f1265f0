""""""

import pytest

from report import samples
from shoal.report import Curve, Row
from shoal.report.html.distributions import percentile_plot
from shoal.report.html.plots import (
    SHOWN_SERIES,
    Chapter,
    Contest,
    PageFigures,
    Shown,
    curves,
    histogram_plots,
    scaling_groups,
    scaling_plots,
    wait_plots,
)
from shoal.report.picture import draw


def test_contenders_are_told_from_their_settings():
    keys = [
        {"strategy": name, "split": split, "model": "mlp", "num_workers": 4}
        for name in ("pair", "sma")
        for split in ("iid", "dirichlet:0.1")
    ]
    contest = Contest(keys, aside=("num_workers",))
    assert [(contest.contender(key), contest.setting(key)) for key in keys] == [
        ("pair", "split iid"),
        ("pair", "split dirichlet:0.1"),
        ("sma", "split iid"),
        ("sma", "split dirichlet:0.1"),
    ]


def test_keys_that_name_no_contender_compete_as_they_are():
    keys = [{"size": 1, "mode": "a"}, {"size": 2, "mode": "a"}]
    contest = Contest(keys)
    assert [contest.contender(key) for key in keys] == ["size 1", "size 2"]
    assert contest.setting(keys[0]) == ""


def test_a_legend_switches_and_starts_with_as_many_as_can_be_told_apart():
    figures = PageFigures()
    number = figures.open_set((f"<{index}>", index) for index in range(SHOWN_SERIES + 3))
    legend = figures.legend(number)
    assert legend.count('aria-pressed="false"') == 3
    assert "&lt;0&gt;" in legend
    assert "<0>" not in legend


def test_one_series_needs_no_legend_and_one_choice_no_tabs():
    figures = PageFigures()
    number = figures.open_set([("alone", 0)])
    assert figures.legend(number) == figures.tabs(number, "along", ["step"]) == ""


def drawn(plots, report, *others):
    figures = PageFigures()
    shown = [
        Shown(item, label, number)
        for number, (item, label) in enumerate(zip((report, *others), "AB", strict=False))
    ]
    content = plots(Chapter(shown, figures))
    return content, figures


def curve_plots(chapter):
    return curves(chapter).content


def plots(figures, kind):
    """The figures of a kind, each with all its choices."""
    found = [plot["figures"] for plot in figures.plots]
    return [each for each in found if each[0]["layout"]["meta"]["kind"] == kind]


def lines(figure):
    """The lines without their bands."""
    return [trace for trace in figure["data"] if "fill" not in trace]


def test_every_metric_and_setting_of_the_curves_is_a_plot_along_every_axis():
    content, figures = drawn(curve_plots, samples.accuracy())
    accuracies = plots(figures, "lines")[:2]
    assert [figure["layout"]["xaxis"]["title"]["text"] for figure in accuracies[0]] == [
        "Seconds",
        "Bytes sent by all workers (MB)",
        "Steps",
    ]
    assert [len(lines(figure)) for figure in accuracies[0]] == [4, 4, 4]
    assert [series["label"] for series in figures.sets[0]["series"]] == [
        "all-reduce", "neighbor", "pair", "local-sgd",
    ]  # fmt: skip
    assert content.count("<h4>Accuracy") == 2
    assert "bytes sent" in content


def test_senders_of_much_and_of_little_are_both_seen():
    _, figures = drawn(curve_plots, samples.accuracy())
    (axes, *_) = plots(figures, "lines")
    assert [figure["layout"]["xaxis"].get("type") for figure in axes] == [None, "log", None]


def test_curves_over_a_delay_are_called_by_it_and_not_by_time():
    starts = [{"value": [3.0, 2.0], "ping_s": [0.0, 0.05]}, {"value": [4.0, 2.0], "ping_s": [0.0, 0.05]}]
    rates = Curve(
        key={"method": "ours"}, metric="throughput", unit="samples/s", direction="higher", starts=starts
    )
    report = samples.report("latency", curves=[rates])
    assert curves(Chapter([Shown(report)])).name == "Over the mean delay of a layer"
    assert curves(Chapter([Shown(samples.accuracy())])).name == "Over time"
    _, figures = drawn(curve_plots, report)
    (figure,) = figures.plots[0]["figures"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "Mean delay of a layer (ms)"
    assert lines(figure)[0]["x"] == [0, 50]


def test_seconds_that_are_shown_in_another_unit_are_called_time():
    starts = [{"value": [0.1, 0.9], "s": [0.0, 0.08]}]
    short = Curve(key={}, metric="accuracy", unit="", direction="higher", starts=starts)
    report = samples.report("accuracy", curves=[short])
    _, figures = drawn(curve_plots, report)
    (figure,) = figures.plots[0]["figures"]
    assert figure["layout"]["xaxis"]["title"]["text"] == "Time (ms)"
    assert "accuracy over time (ms)" in draw(report)


def test_scaling_shows_measured_predicted_and_ideal():
    _, figures = drawn(scaling_plots, samples.scaling())
    speed = lines(figures.plots[0]["figures"][0])
    dashes = [(trace["meta"]["series"], trace["line"]["dash"], trace["mode"]) for trace in speed]
    measured = [(series, "solid", "lines+markers") for series in range(3)]
    assert dashes == [*measured, *((series, "dash", "lines") for series in range(3)), (-1, "dot", "lines")]
    assert speed[0]["x"] == [1, 2, 4]
    assert "error_y" in speed[0]
    ideal = speed[-1]
    assert ideal["x"] == [1, 1024]
    assert ideal["y"][1] == pytest.approx(1024 * max(line["y"][0] for line in speed[:3]), rel=1e-3)
    efficiency = next(
        figure
        for (figure,) in plots(figures, "lines")
        if figure["layout"]["yaxis"]["title"]["text"].startswith("Speed as a fraction of linear")
    )
    assert all(line["line"]["dash"] != "dot" for line in efficiency["data"])


@pytest.mark.parametrize(
    "keys",
    [
        [{"num_workers": 4, "mode": "a"}, {"num_workers": 4, "mode": "b"}],
        [{"num_workers": 1, "rank": 0}, {"num_workers": 2, "rank": 0}],
        [{"num_workers": "one"}, {"num_workers": "two"}],
        [{"num_workers": True}, {"num_workers": False}],
    ],
)
def test_no_scaling_curve_of_one_number_of_ranks_or_of_words(keys):
    rows = [samples.row(key, "speed", "1/s", "higher", [[1.0]]) for key in keys]
    shown = [Shown(samples.report("scaling", rows))]
    assert scaling_groups(shown) == []
    assert scaling_plots(Chapter(shown)) == ""


def test_two_reports_share_the_colours_of_contenders_and_differ_in_dashes():
    content, figures = drawn(curve_plots, samples.accuracy(), samples.accuracy(1))
    found = lines(figures.plots[0]["figures"][0])
    assert sorted((line["meta"]["series"], line["line"]["dash"]) for line in found) == [
        (series, dash) for series in range(4) for dash in ("dash", "solid")
    ]
    assert 'class="dash d1">B' in content


def test_a_lone_contender_gets_the_colours_of_the_reports():
    alone = Curve(
        key={}, metric="loss", unit="", direction="lower", starts=[{"value": [2.0, 1.0], "step": [0, 1]}]
    )
    reports = [samples.report("accuracy", curves=[alone]) for _ in range(2)]
    _, figures = drawn(curve_plots, *reports)
    assert [series["label"] for series in figures.sets[0]["series"]] == ["A", "B"]
    assert [line["meta"]["series"] for line in figures.plots[0]["figures"][0]["data"]] == [0, 1]


def test_values_over_decades_get_a_logarithmic_axis_that_owns_up_to_zeros():
    starts = [{"value": [0.0, 1e-4, 1e-2, 1.0], "step": [0, 1, 2, 3]}]
    apart = Curve(key={}, metric="distance", unit="", direction="lower", starts=starts)
    _, figures = drawn(curve_plots, samples.report("accuracy", curves=[apart]))
    layout = figures.plots[0]["figures"][0]["layout"]
    assert layout["yaxis"]["type"] == "log"
    assert layout["yaxis"]["title"]["text"].endswith("logarithmic, without zeros")


def test_percentiles_are_of_times_with_enough_samples():
    figures = PageFigures()
    times = samples.latencies().rows
    rate = Row(key={}, metric="rate", unit="1/s", direction="higher", starts=[[1.0] * 100])
    few = Row(key={"few": 1}, metric="latency", unit="s", direction="lower", starts=[[1.0] * 5])
    assert percentile_plot([("rate", rate), ("few", few)], figures) == ""
    percentile_plot([("few", few), *((row.label, row) for row in times)], figures)
    (figure,) = figures.plots[0]["figures"]
    assert [line["meta"]["series"] for line in figure["data"]] == [0, 1, 2]
    assert all(line["x"] == sorted(line["x"]) for line in figure["data"])


def test_each_strategy_has_a_map_in_one_scale_and_a_sentence():
    figures = PageFigures()
    content = wait_plots(Chapter([Shown(samples.training())], figures))
    (sync,), (pair,) = plots(figures, "waits")
    assert sync["layout"]["yaxis"]["ticktext"] == ["0", "1", "2", "3"]
    (squares,), (others,) = sync["data"], pair["data"]
    assert squares["marker"]["cmax"] == others["marker"]["cmax"]
    waits = dict(zip(zip(squares["y"], squares["x"], strict=True), squares["marker"]["color"], strict=True))
    assert all((rank, rank) not in waits for rank in range(4))
    assert all(waits[rank, 1] > 10 * waits[rank, 2] for rank in (0, 3))
    assert "of waiting in all, 87% for rank 1" in content


def test_where_nobody_waited_the_map_says_so():
    key = {"rank": 0, "waited_for": 1}
    report = samples.report("training", [samples.row(key, "waited", "s", "lower", [[0.0]])])
    figures = PageFigures()
    assert "Nobody waited." in wait_plots(Chapter([Shown(report)], figures))
    assert figures.plots[0]["figures"][0]["data"][0]["marker"]["color"] == [0]


def test_waits_without_whom_are_no_map():
    report = samples.report("training", [samples.row({"rank": 0}, "waited", "s", "lower", [[1.0]])])
    assert wait_plots(Chapter([Shown(report)], PageFigures())) == ""


def test_waits_that_are_evenly_spread_name_nobody():
    rows = [
        samples.row({"rank": rank, "waited_for": other}, "waited", "s", "lower", [[1.0 + 0.1 * other]])
        for rank in range(3)
        for other in range(3)
        if rank != other and (rank, other) != (0, 1)
    ]
    figures = PageFigures()
    assert "evenly spread" in wait_plots(Chapter([Shown(samples.report("training", rows))], figures))
    squares, dashes = figures.plots[0]["figures"][0]["data"]
    assert (dashes["x"], dashes["y"], dashes["text"]) == ([1], [0], ["–"])
    assert len(squares["text"]) == 5


def test_what_a_logarithmic_plot_cannot_draw_is_named():
    apart = [
        Curve(
            key={"strategy": name},
            metric="consensus_distance",
            unit="",
            direction="lower",
            starts=[{"value": values, "step": [0, 1, 2]}],
        )
        for name, values in (
            ("all-reduce", [0.0] * 3),
            ("pair", [0.1, 10.0, 50.0]),
            ("sma", [1e-4, 1.0, 2.0]),
        )
    ]
    _, figures = drawn(curve_plots, samples.report("compare", curves=apart))
    (note,) = figures.plots[0]["figures"][0]["layout"]["annotations"]
    assert note["text"] == "all-reduce: always 0, not drawn"


def test_what_came_from_one_that_was_ahead_is_a_bar_with_that_name():
    rows = [
        samples.row({"strategy": "pair", "behind": behind}, "staleness", "", "lower", [[10.0]])
        for behind in range(-1, 14)
    ]
    content, figures = drawn(histogram_plots, samples.report("compare", rows))
    axis = figures.plots[0]["figures"][0]["layout"]["xaxis"]
    ticks = dict(zip(axis["tickvals"], axis["ticktext"], strict=True))
    assert (ticks[-1], ticks[0], ticks[13]) == ("ahead", "0", "13")
    assert "pair</h4>" in content
    assert "half were at most 6 behind" in content
    assert "7% came from one that was ahead" in content
