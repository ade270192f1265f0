import pytest

from shoal.bench.contenders import options_of
from shoal.bench.frame import RunSettings, Version, run_benchmark
from shoal.core import UsageError

STEADY = "bench.sample_scenarios:Steady"


@pytest.fixture(autouse=True)
def _tests_are_importable(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))


def measure(config, num_starts, **more):
    told = []
    reports = run_benchmark(STEADY, config, RunSettings(num_starts), tell=told.append, **more)
    return reports, told


def test_samples_are_kept_by_start_with_what_ran_and_where():
    (report,), told = measure({"failing": []}, 2)
    steady, shaky = report.rows
    assert steady.starts == [[1.0, 2.0], [2.0, 2.0]]
    assert shaky.starts == [[1.0], [1.0]]
    assert report.seeds == [0, 1]
    assert report.config == {"failing": []}
    assert told == ["start 1 of 2: measuring", "start 2 of 2: measuring"]
    environment = report.environment
    assert environment["cores"] >= 1
    assert environment["versions"]["python"]
    assert set(environment["before"]) == set(environment["after"])
    assert report.code.version


def test_what_fails_is_a_row_that_says_so_and_the_rest_stays():
    (report,), _ = measure({"failing": [1], "raising": [2], "dying": [3]}, 4)
    rows = {(row.label, row.error): row for row in report.rows}
    assert rows[("scenario=steady", None)].starts == [[1.0, 2.0], [2.0, 2.0], [3.0, 2.0], [4.0, 2.0]]
    assert len(rows[("scenario=shaky", None)].starts) == 3
    assert ("scenario=shaky start=2", "it broke") in rows
    errors = {row.label: row.error for row in report.rows if row.error}
    assert "RuntimeError: no more" in errors["scenario=start start=3"]
    assert "signal 9" in errors["scenario=start start=4"]


def test_another_machine_that_measured_is_the_one_of_the_report():
    def elsewhere(arguments, version, receive):
        receive({"machine": {"machine": "far", "versions": {"torch": "9"}, "before": {"load_average": 7}}})
        receive({"machine": {"after": {}}})

    (report,), _ = measure({}, 1, starter=elsewhere)
    environment = report.environment
    assert (environment["machine"], environment["versions"]) == ("far", {"torch": "9"})
    assert (environment["before"], environment["after"]) == ({"load_average": 7}, {})


def test_two_versions_take_turns(request):
    source = request.config.rootpath / "src"
    reports, told = measure({}, 2, versions=[Version("old", source), Version("new")])
    assert [line.split(":")[0] for line in told] == [
        "start 1 of 4 (old)",
        "start 2 of 4 (new)",
        "start 3 of 4 (new)",
        "start 4 of 4 (old)",
    ]
    assert [len(report.rows) for report in reports] == [2, 2]


def test_another_version_is_not_asked_for_options_that_it_may_not_know(request):
    asked = {}

    def starter(arguments, version, receive):
        asked[version.name] = arguments["config"]["options"]

    options = options_of(["local-sgd"], {"local_steps": "16"})
    source = request.config.rootpath / "src"
    reports, _ = measure(
        {"options": options}, 1, versions=[Version("old", source), Version("new")], starter=starter
    )
    assert asked == {"old": {"local-sgd": {"local_steps": 16}}, "new": options}
    assert [report.config for report in reports] == [{"options": options}] * 2


def test_no_start_is_refused():
    with pytest.raises(UsageError, match="--starts 0"):
        RunSettings(0)
