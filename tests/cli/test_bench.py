import json
from pathlib import Path

import msgspec
import pytest

from shoal.bench import collectives
from shoal.bench.collectives import MIB, CollectivesConfig
from shoal.bench.dht import DhtConfig, config_of
from shoal.bench.transport import SHORT, TransportConfig
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.core import PeerLost
from shoal.doctor import machine
from shoal.report import DEFAULT_FOLDER, Report, Row, load

CREATED = "2026-01-02T03:04:05+00:00"
NAME = "transport-20260102T030405Z.json"
CONFIGS = {
    "transport": TransportConfig,
    "collectives": CollectivesConfig,
    "dht": DhtConfig,
}


def small_report(factor=1.0, error=None):
    starts = [[1000 * factor + number] * 2 for number in range(5)]
    rows = [
        Row(
            key={"scenario": "echo", "in_flight": 64},
            metric="calls_per_s",
            unit="1/s",
            direction="higher",
            starts=starts,
        )
    ]
    if error is not None:
        rows.append(Row(key={"scenario": "µ"}, metric="t", unit="s", direction="lower", error=error))
    return Report(benchmark="transport", created=CREATED, rows=rows)


class Bench:
    """Stands in for the benchmark: remembers what it was asked, and gives the reports it was told to."""

    def __init__(self):
        self.reports = [small_report()]

    def __call__(self, benchmark, config, settings, *, tell, versions, starter):
        self.benchmark, self.settings, self.versions = benchmark, settings, versions
        self.config = msgspec.convert(config, CONFIGS[benchmark])
        tell("measuring")
        return self.reports


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stand_in = Bench()
    monkeypatch.setattr(module, "run_benchmark", stand_in)
    return stand_in


@pytest.fixture
def call(bench, capsys):
    """Run `shoal bench transport`, or another, and give its exit code, stdout and stderr."""

    def call(*arguments, verb="transport"):
        code = run(["bench", verb, *map(str, arguments)])
        return (code, *capsys.readouterr())

    return call


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_the_report_is_saved_here_and_its_path_printed(call):
    code, out, complaint = call()
    path = DEFAULT_FOLDER / NAME
    assert code == 0
    assert f"\nReport: {path}\n" in out
    assert last_line(out) == {"calls_per_s": 1002, "report": str(path)}
    report = load(path)
    assert report.rows == small_report().rows
    assert report.result["calls_per_s"] == 1002
    assert report.result["conditions"], "what pages say of it, and the last line does not"
    assert complaint == "bench transport: measuring\n"


def test_a_second_report_does_not_replace_the_first(call):
    call()
    _, out, _ = call()
    assert last_line(out)["report"] == str(DEFAULT_FOLDER / NAME.replace(".json", "-2.json"))
    assert len(list(DEFAULT_FOLDER.iterdir())) == 2


def test_the_report_may_have_another_place(call):
    path = Path("mine") / "report.json"
    code, out, _ = call("--report", path)
    assert code == 0
    assert f"\nReport: {path}\n" in out
    assert last_line(out)["report"] == str(path)
    assert load(path).benchmark == "transport"
    assert not DEFAULT_FOLDER.exists()


def test_json_goes_to_a_file_too(call):
    code, out, _ = call("--json", "copy.json")
    assert code == 0
    assert "\nJSON: copy.json\n" in out
    path = Path(last_line(out)["report"])
    assert Path("copy.json").read_bytes() == path.read_bytes()


def test_json_on_stdout_is_alone_there(call, bench):
    bench.reports = [small_report(error="PeerLost: µ")]
    code, out, complaint = call("--json", "-")
    assert code == 1
    path = DEFAULT_FOLDER / NAME
    assert json.loads(out) == json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(out)["rows"][1]["error"] == "PeerLost: µ"
    assert "calls_per_s" in complaint
    assert f"\nReport: {path}\n" in complaint
    assert last_line(complaint) == {"calls_per_s": 1002, "failed": 1, "report": str(path)}
    assert not Path("-").exists()


def test_a_failed_row_is_exit_code_1_and_the_report_stays(call, bench):
    bench.reports = [small_report(error="PeerLost: peer 7")]
    code, out, _ = call()
    assert code == 1
    assert "PeerLost: peer 7" in out
    result = last_line(out)
    assert result["failed"] == 1
    assert load(result["report"]).failed


def test_another_version_is_compared_with_and_its_report_kept(call, bench, request):
    bench.reports = [small_report(), small_report(0.5)]
    checkout = request.config.rootpath
    code, out, _ = call("--against", checkout)
    assert code == 0
    base, path = DEFAULT_FOLDER / NAME.replace("transport-", "transport-base-"), DEFAULT_FOLDER / NAME
    assert f"\nReport of {checkout}: {base}\n" in out
    assert f"\nReport: {path}\n" in out
    assert "worse" in out
    assert last_line(out) == {"calls_per_s": 502, "report": str(path)}
    assert load(base).rows == small_report().rows
    assert load(path).rows == small_report(0.5).rows
    assert [(version.name, version.source) for version in bench.versions] == [
        (str(checkout), checkout / "src"),
        ("this", None),
    ]


def test_the_comparison_goes_to_stderr_beside_json(call, bench, request):
    bench.reports = [small_report(), small_report(0.5)]
    _, out, complaint = call("--against", request.config.rootpath, "--json", "-")
    assert json.loads(out)["result"]["calls_per_s"] == 502
    assert "worse" in complaint


def test_a_version_that_is_not_there_is_bad_usage_and_nothing_is_measured(call, bench, tmp_path):
    code, out, complaint = call("--against", tmp_path)
    assert code == 2
    assert out == ""
    assert complaint.startswith(f"shoal: {tmp_path} holds no Shoal.")
    assert not hasattr(bench, "settings")


def test_samples_are_saved_whatever_happens_to_the_output(call, bench, monkeypatch, request):
    def lose(*_):
        raise PeerLost("The terminal is gone.")

    bench.reports = [small_report(), small_report(0.5)]
    monkeypatch.setattr(module, "show", lose)
    assert call("--against", request.config.rootpath)[0] == 1
    assert len(list(DEFAULT_FOLDER.iterdir())) == 2


def test_defaults_reach_the_benchmark(call, bench):
    call()
    assert bench.benchmark == "transport"
    assert bench.config == TransportConfig()
    assert (bench.settings.num_starts, bench.settings.seed) == (5, 0)
    assert [version.source for version in bench.versions] == [None]


def test_options_reach_the_benchmark(call, bench):
    call("--starts", 7, "--seed", 40, "--repeats", 3)
    assert (bench.settings.num_starts, bench.settings.seed) == (7, 40)
    assert bench.config == msgspec.structs.replace(TransportConfig(), repeats=3)


def test_short_is_one_quick_start(call, bench):
    call("--short")
    assert bench.settings.num_starts == 1
    assert bench.config == SHORT
    call("--short", "--repeats", 4)
    assert bench.config == msgspec.structs.replace(SHORT, repeats=4)


def test_the_command_is_kept_as_it_was_given(call, bench):
    call("--starts", 2, "--report", "my_report.json")
    assert bench.settings.command == (
        "shoal", "bench", "transport", "--starts", "2", "--report", "my_report.json",
    )  # fmt: skip


@pytest.mark.parametrize("option", ["--starts", "--repeats"])
def test_no_starts_and_no_repeats_are_bad_usage(call, option):
    code, out, complaint = call(option, 0)
    assert code == 2
    assert out == ""
    assert option in complaint


def test_collectives_by_default_are_all_of_them_in_one_start(call, bench):
    code, out, _ = call(verb="collectives")
    assert code == 0
    assert bench.config == CollectivesConfig()
    assert bench.settings.num_starts == 1
    assert last_line(out)["rows"] == []


def test_collectives_take_lists(call, bench):
    call("--workers", "3", "--sizes", "4KB, 25MB", "--ops", "all-reduce,barrier", verb="collectives")
    assert bench.config == CollectivesConfig(
        workers=(3,), sizes=(4096, 25 * MIB), ops=("all_reduce", "barrier")
    )
    call("--short", "--repeats", 2, verb="collectives")
    assert bench.config == msgspec.structs.replace(collectives.SHORT, repeats=2)


def test_collectives_are_of_the_cpu_unless_a_gpu_is_asked_for(call, bench, monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    call("--np", "2", verb="collectives")
    assert (bench.config.device, bench.config.workers) == ("cpu", (2,))
    call("--device", "cuda", verb="collectives")
    assert bench.config.device == "cuda"
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    code, _, complaint = call("--device", "cuda", verb="collectives")
    assert code == 2
    assert "There is no GPU for --device cuda" in complaint


def test_collectives_between_machines_are_all_reduces_unless_told_otherwise(call, bench):
    call("--machines", "2x1,2x2", verb="collectives")
    assert bench.config == CollectivesConfig(
        workers=(),
        sizes=(4096, MIB, 25 * MIB, 100 * MIB),
        ops=("all_reduce",),
        machines=((2, 1), (2, 2)),
    )
    call(
        *("--machines", "3x1", "--encrypted", "no", "--profile", "wan", "--short", "--ops", "barrier"),
        verb="collectives",
    )
    assert bench.config == CollectivesConfig(
        workers=(),
        sizes=collectives.SHORT.sizes,
        ops=("barrier",),
        repeats=collectives.SHORT.repeats,
        machines=((3, 1),),
        encrypted=(False,),
        profile="wan",
    )


def test_collectives_on_hosts_are_between_those(call, bench):
    assert call("-H", "10.9.9.9:2,10.9.9.8:2", verb="collectives")[0] == 0
    assert bench.config.machines == ((2, 2),)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--machines 2x1 --workers 2", "--workers is of one machine"),
        ("--machines 2", "does not say how many machines"),
        ("--machines 2x1 --profile nowhere", "nowhere"),
        ("--encrypted yes", "links between machines"),
        ("--profile wan", "links between machines"),
        ("-H localhost:4", "this machine alone"),
        ("-H 10.9.9.9:2,10.9.9.8:1", "no equal machines"),
        ("-H 10.9.9.9:2,10.9.9.8:2 --machines 4x1", "leave --machines out"),
    ],
)
def test_machines_that_cannot_be_are_bad_usage(call, bench, words, complaint):
    code, _, said = call(*words.split(), verb="collectives")
    assert code == 2
    assert complaint in said
    assert not hasattr(bench, "settings")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--workers", "two"), ("--workers", "1"), ("--sizes", "6"), ("--sizes", "big"), ("--ops", "reduce")],
)
def test_collectives_that_there_are_not_are_bad_usage(call, bench, option, value):
    code, out, complaint = call(option, value, verb="collectives")
    assert (code, out) == (2, "")
    assert complaint.startswith("shoal: ")
    assert not hasattr(bench, "settings")


@pytest.fixture
def dht(call, bench):
    """Run `shoal bench dht`, and give its exit code and what it was told to measure, or its complaint."""

    def dht(*arguments):
        config = msgspec.to_builtins(config_of(None, {}))
        bench.reports = [msgspec.structs.replace(small_report(), config=config)]
        code, _, complaint = call(*arguments, verb="dht")
        return code, (bench.config if code == 0 else complaint)

    return dht


def test_the_documents_flags_of_the_dht_benchmark(dht, bench):
    given = {"num_peers": 64, "num_experts": 1024, "expert_batch_size": 64, "expiration": 99999}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    code, config = dht(*flags, "--increase_file_limit", "--random_seed", 17)
    assert code == 0
    assert config == config_of("experts", given)
    assert (bench.settings.num_starts, bench.settings.seed) == (1, 17)


def test_flags_of_the_dht_benchmarks_other_modes(dht):
    assert dht("--mode", "keys", "--num-keys", 9, "--failure-rate", 0.2, "--latest") == (
        0,
        config_of("keys", {"num_keys": 9, "failure_rate": 0.2, "latest": True}),
    )
    assert dht("--mode", "keys", "--no-latest")[1].plan.latest is False
    assert dht("--virtual", "--profile", "lan", "--num-peers", 50) == (
        0,
        config_of(None, {"profile": "lan", "num_peers": 50}, is_virtual=True),
    )
    code, complaint = dht("--mode", "experts", "--num-keys", 9)
    assert code == 2
    assert "--num-keys belongs to --mode keys" in complaint


def test_peers_that_have_more_sockets_than_the_system_allows_are_refused(dht, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    code, complaint = dht("--num-peers", 1024, "--num-processes", 2)
    assert code == 2
    assert "open files, and may have 256" in complaint
    assert dht("--virtual")[0] == 0
