""""""

import base64
import gzip
import json
import random
import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from report import samples
from shoal.core.errors import UsageError
from shoal.report import Curve, Report, Row, compare
from shoal.report.html import write_diff, write_reports
from shoal.report.html.distributions import closer, distribution, group_reports
from shoal.report.html.figures import PALETTE, thin
from shoal.report.html.page import best_cells, glance_section
from shoal.report.html.plots import MAX_SAMPLES, PageFigures, Shown

EVIL = "</script><script>alert('x')</script><img src=http://evil>"


class Page(HTMLParser):
    """The tags with their attributes, the visible text, and what each script holds."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.text, self.scripts, self.stack = [], "", [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self.stack:
            self.scripts[-1] += data
        elif "style" not in self.stack:
            self.text += data

    @property
    def data(self):
        return json.loads(self.scripts[0])

    def plots(self, kind):
        """The figures of a kind; of those with a choice the first."""
        first = [plot["figures"][0] for plot in self.data["plots"]]
        lists = self.data["lists"]
        for figure in first:
            for trace in figure["data"]:
                trace |= {
                    name: lists[value["list"]]
                    for name, value in trace.items()
                    if isinstance(value, dict) and "list" in value
                }
        return [figure for figure in first if figure["layout"]["meta"]["kind"] == kind]


def row(seconds=1e-4, key=None, num_starts=6, **fields):
    starts = [[seconds + seconds * (i + j) / 100 for j in range(9)] for i in range(num_starts)]
    key = key or {"scenario": EVIL, "size": 100}
    return Row(
        **{"key": key, "metric": "latency", "unit": "s", "direction": "lower", "starts": starts} | fields
    )


def huge():
    """Forty rows of four thousand samples each, which do not repeat."""
    rng = random.Random(0)
    rows = [
        samples.row({"size": size}, "latency", "s", "lower", samples.around(rng, 1e-3 * size, 0.1, 5, 800))
        for size in range(1, 41)
    ]
    return samples.report("transport", rows)


def contest_of_all():
    """Seventeen strategies over five seeds: four figures along three axes."""
    rng = random.Random(0)
    steps = [5.0 * number for number in range(40)]
    curves = [
        Curve(
            key={"strategy": f"strategy-{number}"},
            metric=metric,
            unit="",
            direction="higher",
            starts=[
                {
                    "value": [rng.random() for _ in steps],
                    "step": steps,
                    "s": [step * rng.random() for step in steps],
                    "bytes": [step * 1e5 * (number + 1) for step in steps],
                }
                for _ in range(5)
            ],
        )
        for metric in ("accuracy", "worst_accuracy", "loss", "consensus_distance")
        for number in range(17)
    ]
    return samples.report("compare", curves=curves)


def report(*rows, **fields):
    fields = {
        "command": ["shoal", "bench", EVIL],
        "config": {"model": EVIL, "net": {"delay_s": 0.1}},
        "environment": {"machine": EVIL, "cores": 2},
        "result": {"calls_per_s": 3.5},
    } | fields
    return Report(benchmark="transport", created="2026-03-02T10:00:00Z", rows=list(rows), **fields)


@pytest.fixture
def plotly(monkeypatch, request):
    """A stand-in of a few bytes, except where a test asks for the real one."""
    if "real_plotly" not in request.fixturenames:
        monkeypatch.setattr("shoal.report.html.page._plotly", lambda: "const Plotly = {};")


@pytest.fixture
def real_plotly():
    """The program that draws, as users get it."""


@pytest.mark.usefixtures("plotly")
def test_one_page_holds_everything_and_asks_for_nothing(tmp_path, real_plotly):
    page = Page(write_reports([report(row())], tmp_path / "r.html", ["r.json"]))
    assert not [tag for tag, attributes in page.tags if "src" in attributes or tag == "link"]
    assert all(attributes["href"].startswith("#") for _, attributes in page.tags if "href" in attributes)
    assert len(page.scripts) == 3
    assert b"Licensed under the MIT license" in gzip.decompress(base64.b64decode(page.scripts[1]))
    assert "MIT license" in (tmp_path / "r.html").read_text(encoding="utf-8")
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


@pytest.mark.usefixtures("plotly")
@pytest.mark.parametrize(
    "makers", [[contest_of_all], [huge], [samples.accuracy, samples.training, samples.convergence, huge]]
)
def test_no_page_is_larger_than_one_and_a_half_megabytes(tmp_path, makers, real_plotly):
    names = [f"{number}.json" for number in range(len(makers))]
    page = write_reports([make() for make in makers], tmp_path / "r.html", names)
    assert page.stat().st_size < 1_500_000


def test_the_colours_of_figures_are_those_of_the_light_theme():
    css = resources.files("shoal.report").joinpath("assets", "page.css").read_text()
    light = css.partition("@media")[0]
    for name, colour in PALETTE.items():
        assert f"--{name}: {colour};" in light


@pytest.mark.usefixtures("plotly")
def test_every_section_begins_with_a_sentence_that_says_what_it_shows(tmp_path):
    for number, make in enumerate((samples.accuracy, samples.scaling, samples.training, samples.latencies)):
        page = write_reports([make()], tmp_path / f"{number}.html", ["a"]).read_text(encoding="utf-8")
        sections = re.findall(r"<section[^>]*><h[23][^>]*>[^<]*</h[23]>(.*?)</p>", page)
        assert len(sections) == page.count("<section") > 2
        assert all(re.match(r'<p class="lead">[^<]{20,}[.]$', each) for each in sections)


@pytest.mark.usefixtures("plotly")
def test_a_page_says_on_what_it_was_measured_before_anything_is_shown(tmp_path):
    told = report(row(), result={"conditions": ["Two processes.", "One start."], "headline": ["It is fast."]})
    text = Page(write_reports([told], tmp_path / "a.html", ["a"])).text
    assert text.index("On what: Two processes. One start.") < text.index("Configuration")
    assert text.count("Two processes.") == 1


@pytest.mark.usefixtures("plotly")
@pytest.mark.parametrize(
    ("benchmark", "config", "words"),
    [
        ("compare", {"is_real": True}, "seconds are of the clock"),
        ("compare", {"is_real": False}, "Time is virtual"),
        ("dht", {"profile": "wan"}, "Time is virtual"),
        ("dht", {"profile": None}, "real sockets"),
    ],
)
def test_a_page_says_whether_time_was_virtual(tmp_path, benchmark, config, words):
    made = samples.report(benchmark, [row()], config=config)
    assert words in Page(write_reports([made], tmp_path / "a.html", ["a"])).text


@pytest.mark.usefixtures("plotly")
def test_plots_come_before_tables(tmp_path):
    for make in (samples.accuracy, samples.scaling, samples.latencies, huge):
        page = write_reports([make()], tmp_path / "a.html", ["a"]).read_text(encoding="utf-8")
        assert 0 < page.index("data-plot=") < page.index("<table")


@pytest.mark.usefixtures("plotly")
def test_nothing_from_a_report_becomes_markup(tmp_path):
    failed = row(key={"scenario": "bulk"}, num_starts=0, error=EVIL)
    alone = report(
        row(),
        failed,
        row(key={EVIL: EVIL}, metric=EVIL, unit=EVIL),
        row(key={"strategy": EVIL, "num_workers": 1}, metric=EVIL + "2", unit="1/s"),
        row(key={"strategy": EVIL, "num_workers": 2}, metric=EVIL + "2", unit="1/s"),
        row(key={"strategy": EVIL, "rank": EVIL, "waited_for": 1}, metric="waited"),
        curves=[
            Curve(
                key={"contender": EVIL, "split": EVIL + str(number)},
                metric=EVIL,
                unit=EVIL,
                direction="higher",
                starts=[{"value": [1.0], EVIL: [0.0], "step": [0.0]}],
            )
            for number in range(2)
        ],
        result={"headline": [EVIL], EVIL: EVIL},
    )
    pages = [
        write_reports([alone], tmp_path / "one.html", [EVIL]),
        write_reports([alone, report(row())], tmp_path / "two.html", [EVIL, "b"]),
        write_diff(
            compare(alone, report(row(), failed, row(key={EVIL: 1}))), tmp_path / "d.html", [EVIL, "b"]
        ),
    ]
    for path in pages:
        page = Page(path)
        assert [tag for tag, _ in page.tags].count("script") == 3
        assert "img" not in [tag for tag, _ in page.tags]
        assert EVIL in page.text
        assert EVIL in json.dumps(page.data)


@pytest.mark.usefixtures("plotly")
def test_failed_rows_are_seen_in_table_and_notice(tmp_path):
    failed = row(key={"scenario": "bulk"}, num_starts=0, error="PeerLost: 7")
    page = Page(write_reports([report(row(), failed)], tmp_path / "r.html", ["r.json"]))
    assert page.text.count("PeerLost: 7") == 2
    assert page.plots("rows")[0]["layout"]["meta"]["labels"][1] == "bulk: failed"


@pytest.mark.usefixtures("plotly")
def test_figures_config_environment_and_command_are_in_the_page(tmp_path):
    path = write_reports(
        [report(row(), row(key={"scenario": "b", "size": 10**6}))], tmp_path / "r.html", ["file.json"]
    )
    text = Page(path).text
    for words in (
        "file.json",
        "106",
        "µs",
        "noise floor",
        "net.delay_s",
        "machine",
        "shoal bench",
        "1,000,000",
        "3.5",
    ):
        assert words in text


@pytest.mark.usefixtures("plotly")
def test_several_reports_line_up_by_row_and_mark_what_differs(tmp_path):
    first = report(row(), row(key={"only": "a"}), config={"bucket": 25})
    second = report(row(2e-4), row(key={"only": "b"}), config={"bucket": 1})
    path = write_reports([first, second], tmp_path / "r.html", ["a", "b"])
    figure = Page(path).plots("rows")[0]
    dots = [trace["y"] for trace in figure["data"] if trace["mode"] == "markers"]
    assert [[int(y) for y in of_report] for of_report in dots] == [[0, 1], [0, 2]]
    assert '<tr class="differs"><th scope="row">bucket</th>' in path.read_text(encoding="utf-8")


@pytest.mark.usefixtures("plotly")
def test_a_comparison_shows_verdicts_intervals_and_lone_rows(tmp_path):
    old = report(row(), row(key={"a": 1}), row(key={"a": 2}, num_starts=2), row(key={"a": 3}))
    new = report(row(2e-4), row(key={"a": 1}, num_starts=0, error="lost"), row(key={"a": 2}))
    page = Page(write_diff(compare(old, new), tmp_path / "d.html", ["a", "b"]))
    for words in (
        "1 worse",
        "1 failed in test",
        "too few repeats to judge",
        "only in baseline",
        "−100.0%",
        "lost",
    ):
        assert words in page.text
    interval, worse, unsure = page.plots("changes")[0]["data"]
    assert interval["x"][0] < worse["x"][0] < interval["x"][1] < 0
    assert worse["meta"]["verdict"] == "worse"
    assert unsure["meta"]["verdict"] == "too-few-starts"
    assert unsure["marker"]["color"] == PALETTE["paper"]
    assert len(page.plots("changes")[0]["layout"]["meta"]["labels"]) == 3


@pytest.mark.usefixtures("plotly")
def test_a_comparison_leaves_out_percentiles_of_too_few_samples(tmp_path):
    few, many = row(num_starts=1), row(num_starts=6)
    for each, missing in ((few, 2), (many, 0)):  # 9 samples have no p90, 54 have all
        path = write_diff(compare(report(each), report(each)), tmp_path / "d.html", ["a", "b"])
        table = path.read_text(encoding="utf-8").partition('class="verdicts"')[2].partition("</table>")[0]
        assert table.count("quiet-text") == missing


@pytest.mark.usefixtures("plotly")
def test_several_benchmarks_are_chapters_with_contents_and_headlines_first(tmp_path):
    reports = [samples.accuracy(), samples.training(), samples.latencies()]
    page = Page(write_reports(reports, tmp_path / "r.html", ["a", "b", "c"]))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    links = [attributes["href"][1:] for tag, attributes in page.tags if tag == "a"]
    assert set(links) <= set(ids)
    assert len(links) > 10
    assert len(ids) == len(set(ids))
    assert page.text.index("was the fastest") < page.text.index("At a glance")


@pytest.mark.usefixtures("plotly")
def test_every_plot_of_the_data_has_one_place_in_the_page(tmp_path):
    path = write_reports([samples.accuracy(), samples.scaling()], tmp_path / "r.html", ["a", "b"])
    page = Page(path)
    places = [int(attributes["data-plot"]) for _, attributes in page.tags if "data-plot" in attributes]
    assert sorted(places) == list(range(len(page.data["plots"])))


@pytest.mark.usefixtures("plotly")
def test_a_comparison_draws_both_sides_of_curves_and_percentiles(tmp_path):
    diff = compare(samples.accuracy(), samples.accuracy(1, 1.3))
    page = Page(write_diff(diff, tmp_path / "d.html", ["a", "b"]))
    step = page.plots("lines")[0]
    drawn = [trace for trace in step["data"] if "fill" not in trace]
    assert sorted((line["meta"]["series"], line["line"]["dash"]) for line in drawn) == [
        (series, dash) for series in range(4) for dash in ("dash", "solid")
    ]
    times = Page(
        write_diff(compare(samples.latencies(), samples.latencies(1, 1.1)), tmp_path / "t.html", ["a", "b"])
    )
    baseline, test = times.plots("percentiles")[0]["data"]
    assert all(new > old for old, new in zip(baseline["y"], test["y"], strict=True))


@pytest.mark.usefixtures("plotly")
def test_units_are_never_mixed_in_one_chart():
    rate = row(key={"a": 1}, metric="rate", unit="1/s", direction="higher")
    other = Report(benchmark="dht", created="", rows=[row()])
    groups = group_reports([report(row(), rate), other])
    assert [(group.benchmark, group.metric) for group in groups] == [
        ("transport", "latency"), ("transport", "rate"), ("dht", "latency"),
    ]  # fmt: skip


FIELDS = {"key": {"a": 2}, "metric": "latency", "unit": "s", "direction": "lower"}


@pytest.mark.usefixtures("plotly")
@pytest.mark.parametrize(("seconds", "is_log"), [(1e-3, False), (1.0, True), (0.0, False)])
def test_far_apart_rows_get_a_logarithmic_axis_where_there_is_one(seconds, is_log):
    shown = [Shown(report(row(1e-3), row(seconds, key={"a": 1})))]
    (group,), figures = group_reports([item.report for item in shown]), PageFigures()
    distribution(group, shown, figures)
    assert (figures.plots[0]["figures"][0]["layout"]["xaxis"].get("type") == "log") is is_log


@pytest.mark.usefixtures("plotly")
def test_thinning_keeps_order_ends_and_extremes():
    rng = random.Random(0)
    samples = [rng.random() for _ in range(1000)]
    kept = thin(samples, 50)
    places = [samples.index(sample) for sample in kept]
    assert len(kept) <= 50
    assert places == sorted(places)
    assert {samples[0], samples[-1], min(samples), max(samples)} <= set(kept)
    assert thin(samples[:50], 50) == samples[:50]


@pytest.mark.usefixtures("plotly")
def test_huge_reports_stay_small_enough_to_draw():
    huge = Row(key={}, metric="m", unit="s", direction="lower", starts=[[1.0] * 20_000] * 20)
    figures = PageFigures()
    shown = [Shown(report(huge))]
    closer(*group_reports([shown[0].report]), shown, figures)
    (trace,) = figures.plots[0]["figures"][0]["data"]
    assert len(trace["x"]) <= MAX_SAMPLES


@pytest.mark.usefixtures("plotly")
def test_no_reports_are_refused(tmp_path):
    with pytest.raises(UsageError):
        write_reports([], tmp_path / "r.html", [])


def speed(value, spread=0.0, metric="speed", direction="higher", **key):
    starts = [[value * (1 + spread * number)] for number in (-2, -1, 0, 1, 2)]
    return samples.row(key, metric, "1/s", direction, starts)


def places(*rows):
    best = best_cells([(0, row) for row in rows], [samples.report("training")])
    return ["best" if (0, row.identity) in best else None for row in rows]


def test_the_best_of_each_setting_is_marked_in_the_direction_of_its_metric():
    rows = [
        speed(value, strategy=name, split=split) for split in "ab" for name, value in (("x", 2), ("y", 3))
    ]
    assert places(*rows) == [None, "best", None, "best"]
    rows = [speed(value, direction="lower", strategy=name) for name, value in (("x", 2), ("y", 3))]
    assert places(*rows) == ["best", None]


def test_nobody_is_best_where_noise_or_few_starts_may_have_decided():
    rows = [speed(100, 0.02, strategy="x"), speed(99, 0.02, strategy="y"), speed(50, 0.02, strategy="z")]
    assert places(*rows) == [None, None, None]
    assert places(rows[0], rows[2]) == ["best", None]
    few = [samples.row(row.key, row.metric, row.unit, row.direction, row.starts[:4]) for row in rows]
    assert places(few[0], few[2]) == [None, None]


def test_real_seconds_need_more_starts_than_computed_ones_and_evaluations_are_apart():
    def best_of(apart_s, **config):
        rows = [
            samples.row({"strategy": name}, "seconds_to_target", "s", "lower", [[second]] * 3)
            for name, second in (("x", 2.0), ("y", 3.0))
        ]
        curves = [
            Curve(
                key=row.key,
                metric="accuracy",
                unit="",
                direction="higher",
                starts=[{"value": [0.1, 0.9], "s": [0.0, apart_s]}],
            )
            for row in rows
        ]
        told = samples.report("compare", rows, curves=curves, config=config)
        return [
            row.key["strategy"]
            for row in rows
            if (0, row.identity) in best_cells([(0, r) for r in rows], [told])
        ]

    assert best_of(0.1) == ["x"]
    assert best_of(1.0) == []
    assert best_of(0.1, is_real=True) == []


def test_the_ceiling_and_equals_win_nothing():
    assert places(speed(9, strategy="none"), speed(2, strategy="x"), speed(1, strategy="y")) == [
        None,
        "best",
        None,
    ]
    assert places(speed(2, strategy="x"), speed(2, strategy="y")) == [None, None]


def test_sizes_do_not_compete():
    assert places(speed(1, size=1), speed(2, size=2)) == [None, None]
    assert places(speed(1, mode="a"), speed(2, mode="b")) == [None, "best"]


def test_metrics_of_the_same_keys_share_a_table_without_the_ranks():
    table = glance_section([Shown(samples.training())]).content
    assert table.count("<table") == 1
    for words in ("examples_per_s", "fraction_of_ceiling", "pair-averaging", "failed"):
        assert words in table
    assert "seconds_per_iteration" not in table


def test_one_metric_alone_has_no_table():
    assert glance_section([Shown(samples.latencies())]).content == ""


def test_what_is_called_none_competes_unless_it_is_who_competes():
    def row(codec, value):
        return Row(
            key={"compression": codec}, metric="speed", unit="1/s", direction="higher", starts=[[value]] * 5
        )

    rows = [row("none", 300.0), row("fp16", 200.0)]
    assert best_cells([(0, each) for each in rows], [samples.report("training")]) == {(0, rows[0].identity)}


def test_the_glance_tells_means_with_intervals_and_few_samples_of_one_run_with_their_reach():
    rows = [
        row
        for name, value in (("a", 1.0), ("b", 5.0))
        for row in (
            samples.row(
                {"strategy": name}, "seconds_to_target", "s", "lower", [[value], [value], [value + 3]]
            ),
            samples.row({"strategy": name}, "calls_per_s", "1/s", "higher", [[100.0, 300.0]]),
            samples.row({"strategy": name}, "num_samples", "", "higher", [[7.0]]),
        )
    ]
    table = glance_section([Shown(samples.report("compare", rows))]).content
    assert "2.00<br><small>± 4.30</small>" in table
    assert "200<br><small>100 to 300</small>" in table
    assert "<small>/s ↑</small>" in table
    head = table.partition("</thead>")[0]
    assert head.count("↑") == 1, "a count is no result, and has no arrow"


def test_calls_without_a_way_share_the_table_of_those_that_name_it():
    rows = [
        samples.row({"size": size, **via}, metric, "s", "lower", [[1.0]])
        for size in (1, 2)
        for via in ({}, {"via": "udp"})
        for metric in ("latency", "wall_time")
    ]
    table = glance_section([Shown(samples.report("transport", rows))]).content
    assert table.count("<table") == 1
    assert table.count(">stream<") == table.count(">datagram<") == 2


def test_a_busy_machine_is_explained_and_does_not_matter_to_virtual_time(tmp_path):
    busy = {"cores": 2, "before": {"load_average": 6.0}}
    for is_real in (True, False):
        told = Report(
            benchmark="compare", created="", rows=[row()], environment=busy, config={"is_real": is_real}
        )
        text = Page(write_reports([told], tmp_path / "r.html", ["a"])).text
        assert ("Other programs ran on this machine" in text) is is_real
        assert ("load average" in text.partition("Environment")[0]) is is_real


def test_a_page_explains_the_words_that_it_uses_and_no_others(tmp_path):
    page = write_reports([samples.accuracy()], tmp_path / "r.html", ["a"]).read_text(encoding="utf-8")
    told = page.partition("Words on this page")[2].partition("</dl>")[0]
    assert "<dt>local-sgd</dt>" in told
    assert "<dt>ffn</dt>" not in told
