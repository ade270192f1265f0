import msgspec
import pytest

from shoal.bench import collectives
from shoal.bench.collectives import (
    KIB,
    MIB,
    OPS,
    CollectivesConfig,
    collectives_items,
    parse_machines,
    parse_size,
    size_text,
    summarize_collectives,
    usual_repeats,
)
from shoal.bench.frame import make_scenario
from shoal.core import BenchmarkError, UsageError
from shoal.report import Report, Row
from shoal.report.tables import Table

TINY = CollectivesConfig(workers=(2,), sizes=(4096,), repeats=3)


def as_report(measured):
    return Report(benchmark="collectives", created="2026-01-01T00:00:00+00:00", rows=list(measured))


def measure(config):
    return as_report(make_scenario("collectives", msgspec.to_builtins(config), 0).run(lambda _: None))


@pytest.fixture(scope="module")
def report():
    return measure(TINY)


def test_every_operation_is_measured_with_both_memories_and_beside_gloo(report):
    assert not report.failed
    found = {(row.metric, row.key["via"]): len(row.samples) for row in report.rows}
    tensors = [op for op in OPS if op != "barrier"]
    expected = {(op, via): 3 for op in tensors for via in ("group", "foreign", "gloo")}
    del expected["publish_fetch", "gloo"], expected["publish_mix", "gloo"]
    assert found == expected | {("barrier", "group"): 3, ("barrier", "gloo"): 3}


def test_the_result_has_a_row_for_each_tensor(report):
    rows = summarize_collectives(report)["rows"]
    assert [(row["op"], row["tensor"]) for row in rows] == [
        *((op, tensor) for op in OPS[:-1] for tensor in ("group", "foreign")),
        ("barrier", "none"),
    ]
    assert all(row["workers"] == 2 and row["shoal_ms"] > 0 for row in rows)
    without_gloo = [row["op"] for row in rows if row["gloo_ms"] is None]
    assert without_gloo == ["publish_fetch", "publish_fetch", "publish_mix", "publish_mix"]
    assert {row["device"] for row in rows} == {"cpu"}


def test_calls_may_be_issued_back_to_back_and_their_results_are_still_checked():
    config = msgspec.structs.replace(TINY, workers=(3,), repeats=2, calls_per_sample=5)
    report = measure(config)
    assert not report.failed
    assert {len(row.samples) for row in report.rows} == {2}
    assert all(sample > 0 for row in report.rows for sample in row.samples)


def times(op, via, seconds, workers=2, size_bytes=4096, device="cpu"):
    key = {"device": device, "workers": workers, "size_bytes": size_bytes, "via": via}
    return Row(key=key, metric=op, unit="s", direction="lower", starts=seconds)


def test_the_result_is_of_medians_over_all_starts():
    rows = [
        times("all_reduce", "group", [[0.001, 0.002], [0.003]]),
        times("all_reduce", "foreign", [[0.005]]),
        times("all_reduce", "gloo", [[0.01, 0.01, 0.9]]),
    ]
    result = summarize_collectives(Report(benchmark="collectives", created="", rows=rows))
    common = {"op": "all_reduce", "device": "cpu", "workers": 2, "size_bytes": 4096, "gloo_ms": 10.0}
    assert result == {
        "rows": [
            {**common, "tensor": "group", "shoal_ms": 2.0, "ratio": 0.2},
            {**common, "tensor": "foreign", "shoal_ms": 5.0, "ratio": 0.5},
        ]
    }


def test_devices_are_apart_and_the_table_says_how_calls_were_issued():
    rows = [
        times("all_reduce", "group", [[0.001]]),
        times("all_reduce", "group", [[0.0005]], device="cuda"),
        times("all_reduce", "gloo", [[0.005]], device="cuda"),
    ]
    del rows[0].key["device"]  # as in reports that were saved before there was a choice
    report = Report(benchmark="collectives", created="", rows=rows)
    result = summarize_collectives(report)["rows"]
    assert [(row["device"], row["shoal_ms"], row["ratio"]) for row in result] == [
        ("cpu", 1.0, None),
        ("cuda", 0.5, 0.1),
    ]
    titles = [item.title for item in collectives_items(report) if isinstance(item, Table)]
    assert titles[0].startswith("2 workers on cpu: ms a call (")
    assert titles[1].startswith("2 workers on cuda: ms a call, 20 back to back (")


def test_the_table_has_a_line_for_each_size_and_says_what_failed():
    rows = [
        times("broadcast", "group", [[0.0123]], size_bytes=MIB),
        times("broadcast", "gloo", [[0.0246]], size_bytes=MIB),
        Row(
            key={"device": "cpu", "workers": 2, "size_bytes": 25 * MIB, "via": "group", "start": 1},
            metric="broadcast",
            unit="s",
            direction="lower",
            error="it broke",
        ),
        times("barrier", "group", [[0.001]], workers=4, size_bytes=0),
    ]
    two, four = (
        item
        for item in collectives_items(Report(benchmark="collectives", created="", rows=rows))
        if isinstance(item, Table)
    )
    assert two.rows == [
        ("broadcast", "1 MB", "12.3", "-", "24.6", "0.500", "-"),
        ("", "25 MB", "-", "-", "-", "-", "-"),
    ]
    assert two.notes == {1: ("failed: it broke", "red")}
    assert four.rows == [("barrier", "-", "1.00", "-", "-", "-", "-")]


GBIT = """
name = "gbit"
[ways.default]
delay_ms = 10
mbit_s = 1000
"""
PAIR = CollectivesConfig(workers=(), sizes=(4096,), ops=("all_reduce",), repeats=2, machines=((2, 1),))


def test_between_machines_shoal_plain_and_encrypted_take_turns_with_gloo():
    report = measure(PAIR)
    common = {"device": "cpu", "machines": 2, "workers": 1, "size_bytes": 4096}
    assert [row.key for row in report.rows] == [
        {**common, "encrypted": False, "via": "group"},
        {**common, "encrypted": True, "via": "group"},
        {**common, "encrypted": False, "via": "gloo"},
    ]
    assert not report.failed
    rows = summarize_collectives(report)["rows"]
    fields = [
        "op",
        "device",
        "machines",
        "workers",
        "size_bytes",
        "encrypted",
        "shoal_ms",
        "gloo_ms",
        "ratio",
    ]
    assert [list(row) for row in rows] == [fields] * 2
    assert all(row["ratio"] == pytest.approx(row["shoal_ms"] / row["gloo_ms"], rel=0.01) for row in rows)


def test_over_slow_links_an_operation_is_held_against_what_the_links_take_alone(tmp_path):
    profile = tmp_path / "gbit.toml"
    profile.write_text(GBIT)
    report = measure(msgspec.structs.replace(PAIR, encrypted=(True,), profile=str(profile)))
    assert {(row.key["via"], row.key["encrypted"]) for row in report.rows} == {
        ("group", True),
        ("link", False),
    }
    (row,) = summarize_collectives(report)["rows"]
    # a ring of two: both halves go over the line, one after the other
    assert row["link_ms"] == pytest.approx(2 * (10 + 2048 / 125e6 * 1e3), rel=0.01)
    assert row["shoal_ms"] >= 0.99 * row["link_ms"]
    assert row["ratio_to_link"] == pytest.approx(row["shoal_ms"] / row["link_ms"], rel=0.01)
    assert row["gloo_ms"] is None


def between(via, seconds, *, machines=2, encrypted=False, size_bytes=MIB):
    key = {"device": "cpu", "machines": machines, "workers": 1, "size_bytes": size_bytes}
    key |= {"encrypted": encrypted, "via": via}
    outcome = {"error": seconds} if isinstance(seconds, str) else {"starts": [seconds]}
    return Row(key=key, metric="all_reduce", unit="s", direction="lower", **outcome)


def test_each_number_of_machines_has_a_table_apart_from_those_of_one_machine():
    rows = [
        times("all_reduce", "group", [[0.001]]),
        between("group", [0.002]),
        between("group", [0.003], encrypted=True),
        between("gloo", [0.004]),
        between("group", "it broke", machines=4),
        between("group", "it broke", machines=4, encrypted=True),
    ]
    report = Report(benchmark="collectives", created="", rows=rows)
    one, two, four = (item for item in collectives_items(report) if isinstance(item, Table))
    assert two.title.startswith("2 machines of 1 worker on cpu: ms a call (")
    assert [column.name for column in two.columns[1:]] == [
        "size", "plain", "TLS", "gloo", "plain/gloo", "TLS/gloo",
    ]  # fmt: skip
    assert two.rows == [("all_reduce", "1 MB", "2.00", "3.00", "4.00", "0.500", "0.750")]
    assert four.rows == [("all_reduce", "1 MB", "-", "-", "-", "-", "-")]
    assert four.notes == {0: ("failed: it broke", "red")}
    assert one.title.startswith("2 workers on cpu")
    result = summarize_collectives(report)
    assert result["failed"] == 2
    assert [(row.get("machines"), row["shoal_ms"]) for row in result["rows"]] == [
        (None, 1.0), (2, 2.0), (2, 3.0), (4, None), (4, None),
    ]  # fmt: skip


class FakeWorkers:
    """Answers as workers would that take longer by rank, give a wrong result, or break."""

    asked = ()

    def __init__(self, settings):
        self.size = settings.size
        self.device = settings.arguments["device"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, order, op, size_bytes, num_rounds, samples_per_round, calls_per_sample):
        assert order == "measure"
        FakeWorkers.asked = (self.device, size_bytes, num_rounds * samples_per_round, calls_per_sample)
        if op == "broadcast":
            raise BenchmarkError("rank 1 of 2 failed: PeerLost: gone.\n  Try: again.")
        count = num_rounds * samples_per_round
        foreign = "wrong result: 1 and should be 2" if op == "exchange" else [0.5] * count
        return [{"group": [0.1 + rank] * count, "foreign": foreign} for rank in range(self.size)]


def test_a_sample_is_the_slowest_workers_and_what_fails_is_a_row(monkeypatch):
    monkeypatch.setattr(collectives, "LocalWorkers", FakeWorkers)
    config = msgspec.structs.replace(TINY, ops=("all_reduce", "broadcast", "exchange"), workers=(2, 3))
    rows = measure(config).rows
    assert [(row.metric, row.key["workers"], row.key["via"]) for row in rows] == [
        (op, workers, via)
        for workers in (2, 3)
        for op in config.ops
        for via in (("group",) if op == "broadcast" else ("group", "foreign"))
    ]
    assert [row.samples for row in rows[:2]] == [[1.1] * 3, [0.5] * 3]
    assert rows[2].error == "rank 1 of 2 failed: PeerLost: gone. Try: again."
    assert rows[4].error == "wrong result: 1 and should be 2"
    assert rows[5].samples == [2.1] * 3


def test_a_case_between_machines_that_fails_is_a_row_for_each_encryption(monkeypatch):
    monkeypatch.setattr(collectives, "LocalWorkers", FakeWorkers)
    rows = measure(msgspec.structs.replace(PAIR, ops=("broadcast", "all_reduce"))).rows
    failed = [(row.metric, row.key["encrypted"]) for row in rows if row.error]
    assert failed == [("broadcast", False), ("broadcast", True)]
    assert {row.metric for row in rows if not row.error} == {"all_reduce"}


@pytest.mark.parametrize(("device", "calls_per_sample"), [("cpu", 1), ("cuda", 20)])
def test_the_device_is_the_workers_and_in_the_keys(monkeypatch, device, calls_per_sample):
    monkeypatch.setattr(collectives, "LocalWorkers", FakeWorkers)
    rows = measure(msgspec.structs.replace(TINY, ops=("all_reduce",), device=device)).rows
    assert {row.key["device"] for row in rows} == {device}
    assert FakeWorkers.asked == (device, 4096, 3, calls_per_sample)


@pytest.mark.parametrize(("device", "fewest"), [("cpu", 10), ("cuda", 6)])
def test_small_calls_are_repeated_more_often(device, fewest):
    counts = [usual_repeats(size, device) for size in (0, 4 * KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= fewest


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("4KB", 4096), (" 25 mb", 25 * MIB), ("0.5MB", MIB // 2), ("8B", 8)],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text) == size_bytes


def test_sizes_are_written_as_they_are_read():
    for size_bytes in (12, 4 * KIB, 100 * MIB):
        assert parse_size(size_text(size_bytes)) == size_bytes
    with pytest.raises(UsageError, match="'many' is no size"):
        parse_size("many")


def test_machines_are_read():
    assert parse_machines("2x1, 4X2") == ((2, 1), (4, 2))
    for text in ("", "2", "2x", "2xtwo", "2x1x1"):
        with pytest.raises(UsageError, match="--machines 2x1,4x1,2x2"):
            parse_machines(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ops": ["reduce"]},
        {"workers": [1]},
        {"workers": []},
        {"sizes": [6]},
        {"sizes": []},
        {"machines": [[1, 2]]},
        {"machines": [[2, 0]]},
        {"encrypted": [True]},
        {"profile": "wan"},
    ],
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises((UsageError, msgspec.ValidationError)):
        make_scenario("collectives", wrong, 0)
