"""What a benchmark is about is drawn before all tables: targets, calls of the DHT, an expert server."""

import pytest

from report import samples
from shoal.report.html.plots import Chapter, PageFigures, Shown, drawn_sections, wilson


def drawn(*reports):
    figures = PageFigures()
    labels = "AB" if len(reports) > 1 else [""]
    shown = [
        Shown(report, label, number)
        for number, (report, label) in enumerate(zip(reports, labels, strict=True))
    ]
    every = drawn_sections(Chapter(shown, figures))
    sections = {section.name: section for section in every if section.content}
    return sections, [plot["figures"][0] for plot in figures.plots]


def labels(figure):
    return figure["layout"]["meta"]["labels"]


def compared(values):
    """Seconds to the target of each strategy over three seeds; those without a value did not reach it."""
    rows = []
    for name, seconds in values.items():
        key = {"strategy": name}
        rows.append(samples.row(key, "final_accuracy", "", "higher", [[0.9]] * 3))
        if seconds:
            rows.append(samples.row(key, "seconds_to_target", "s", "lower", [[each] for each in seconds]))
    return samples.report("compare", rows)


def test_who_reached_the_target_has_a_bar_with_its_interval_and_the_others_say_why_not():
    sections, (figure,) = drawn(compared({"slow": [8, 9, 10], "fast": [1, 2, 3], "never": [], "once": [4]}))
    assert "What it took to reach the target" in sections
    assert [label.partition(":")[0] for label in labels(figure)] == ["fast", "slow", "never", "once"]
    assert "2.00 s ± 2.48" in labels(figure)[0]
    assert "± 6.83" in labels(figure)[1], "its deviation is at least the usual share of its mean"
    assert labels(figure)[2:] == ["never: not reached in 3 runs", "once: reached in 1 of 3 runs only"]
    fast, slow = figure["data"]
    assert (fast["x"], slow["x"]) == ([2], [9])
    assert fast["error_x"]["array"][0] == pytest.approx(4.303 / 3**0.5, rel=1e-2)
    assert fast["error_x"]["arrayminus"] == [2], "cut at zero, where the bar begins"


def test_an_interval_is_as_wide_as_is_usual_so_that_bars_and_headlines_agree():
    _, (figure,) = drawn(compared({"a": [4, 4, 4], "b": [4, 5, 6], "c": [4, 6, 8]}))
    widths = {bar["name"]: bar["error_x"]["array"][0] for bar in figure["data"]}
    assert widths["a"] / 4 == pytest.approx(widths["b"] / 5, rel=1e-2)
    assert widths["b"] / 5 < widths["c"] / 6


def test_a_single_run_has_no_interval():
    one = samples.report(
        "compare",
        [
            samples.row({"strategy": "a"}, "final_accuracy", "", "higher", [[0.9]]),
            samples.row({"strategy": "a"}, "seconds_to_target", "s", "lower", [[3.0]]),
        ],
    )
    _, (figure,) = drawn(one)
    assert "error_x" not in figure["data"][0]
    assert "one run" in labels(figure)[0]


def dht(get_success=0.75, survival=0.5):
    key = {"scenario": "experts", "num_peers": 16}
    figures = {
        "store_success": ([[1.0]], ""), "get_success": ([[get_success]], ""), "survival": ([[survival]], ""),
        "get_hops": ([[0, 1, 1, 2]], ""), "store_replicas": ([[5.0] * 8], ""),
        "store_messages": ([[2.0]], ""), "get_messages": ([[1.0]], ""), "get_latency": ([[0.01] * 30], "s"),
    }  # fmt: skip
    rows = [
        samples.row(key, metric, unit, "lower" if unit == "s" else "higher", starts)
        for metric, (starts, unit) in figures.items()
    ]
    return samples.report("dht", rows)


def test_the_pictures_of_the_dht_are_success_hops_traffic_and_times():
    sections, figures = drawn(dht())
    assert list(sections) == [
        "Did stores and reads succeed?", "Hops of a look-up", "Time of a call", "Traffic for one record",
    ]  # fmt: skip
    assert "50 % of the peers were dead" in sections["Did stores and reads succeed?"].content
    success, hops, times, messages = figures
    assert labels(success) == [
        "stores: 100 % (67.6 to 100) · 8 of 8",
        "reads: 75.0 % (30.1 to 95.4) · 3 of 4",
    ]
    assert (hops["data"][0]["x"], hops["data"][0]["y"]) == ([0, 1, 2], [25, 50, 25])
    assert len(messages["data"]) == 2
    assert times["data"][0]["x"] == ["p50", "p75", "p90", "p95"]


def test_a_share_has_an_interval_within_zero_and_one():
    assert wilson(0, 10) == (0.0, pytest.approx(0.278, abs=1e-3))
    assert wilson(10, 10) == (pytest.approx(0.722, abs=1e-3), 1.0)


def experts(num_clients, num_calls=16):
    key = {"scenario": "default", "num_clients": num_clients, "batch_size": 8}
    rows = [
        samples.row(key, "samples_per_s", "1/s", "higher", [[100.0 * num_clients]]),
        samples.row(key, "local_samples_per_s", "1/s", "higher", [[900.0, 1000.0]]),
        samples.row(key, "forward_latency", "s", "lower", [[0.01] * num_calls]),
    ]
    return samples.report("experts", rows)


def test_an_expert_server_stands_beside_its_bounds_and_shows_the_percentiles_that_it_has_calls_for():
    sections, (speed, times) = drawn(experts(1))
    assert list(sections) == ["Throughput", "Time of a call"]
    assert [label.partition(":")[0] for label in labels(speed)] == [
        "the expert server",
        "the module alone, without a network",
    ]
    assert times["data"][0]["x"] == ["p50", "p75", "p90"]
    _, (_, more) = drawn(experts(1, 20))
    assert more["data"][0]["x"] == ["p50", "p75", "p90", "p95"]


def test_reports_of_several_numbers_of_clients_are_a_line():
    sections, figures = drawn(experts(1), experts(4))
    assert "Throughput by number of clients" in sections
    (line,) = [figure for figure in figures if figure["layout"]["meta"]["kind"] == "lines"]
    assert (line["data"][0]["x"], line["data"][0]["y"]) == ([1, 4], [100, 400])


def test_hops_that_no_lookup_can_have_are_not_drawn():
    wild = samples.row({}, "get_hops", "", "lower", [[1e12]])
    assert drawn(samples.report("dht", [wild]))[0] == {}


def test_bars_of_a_single_run_are_in_no_order_and_titles_name_the_target():
    rows = [
        samples.row({"strategy": name}, metric, unit, direction, [[value]])
        for name, value in (("slow", 3.0), ("fast", 1.0))
        for metric, unit, direction, value in (
            ("final_accuracy", "", "higher", 0.9),
            ("seconds_to_target", "s", "lower", value),
        )
    ]
    report = samples.report("compare", rows, config={"target": 0.8, "eval_every": 5})
    sections, (figure,) = drawn(report)
    assert [label.partition(":")[0] for label in labels(figure)] == ["slow", "fast"]
    section = sections["What it took to reach the target"]
    assert "Time to reach the target (80 %)" in section.content
    assert "in no order" in section.about
    assert "every 5 steps" in section.about


def test_an_echo_that_is_far_ahead_is_told_in_words_so_that_the_other_bars_are_seen():
    told = experts(1)
    echo = samples.row(told.rows[0].key, "echo_samples_per_s", "1/s", "higher", [[50_000.0]])
    sections, (speed, _) = drawn(samples.report("experts", [*told.rows, echo]))
    assert len(labels(speed)) == 2
    assert "the echo, without computing: 50,000 /s" in sections["Throughput"].content
    assert "900 to 1,000" in labels(speed)[1], "a few measurements of one run reach so far"
