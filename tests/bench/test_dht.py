"""`shoal bench dht` at a size that takes seconds: what it counts, prints and says at the end."""

import json
import re

import msgspec
import pytest

from shoal.bench.dht import DhtConfig, ExpertsPlan, KeysPlan, config_of
from shoal.bench.frame import make_scenario
from shoal.bench.processes import dht as dht_hosts
from shoal.bench.tables.dht import dht_items, summarize_dht
from shoal.cli.program import run
from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.dht.node import DHT
from shoal.dht.records import Stored, Verdict
from shoal.report import Report, Row

NAMES = (
    *("num_peers", "create_s", "store_ms_per_key", "store_success", "get_success", "survival", "rss_mib"),
    *("messages_per_store", "messages_per_get", "bucket_size", "num_replicas", "num_processes", "mode"),
    *(
        "get_ms_per_expert",
        "store_latency_ms",
        "get_latency_ms",
        "store_p50_ms",
        "get_p50_ms",
        "askers_apart",
    ),
    *("datagrams_per_get", "bytes_per_get", "replicas_per_record", "peak_rss_mib", "round_trip_ms"),
)


def measure(mode=None, *, seed=0, is_virtual=False, **given):
    config = config_of(mode, given, is_virtual=is_virtual)
    told = []
    rows = list(make_scenario("dht", msgspec.to_builtins(config), seed).run(told.append))
    report = Report(
        benchmark="dht",
        created="2026-01-01T00:00:00+00:00",
        config=msgspec.to_builtins(config),
        rows=rows,
    )
    return report, told


def text_of(report):
    return "\n".join(item if isinstance(item, str) else item[0] for item in dht_items(report))


def test_the_documents_command_prints_its_lines_and_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "bench dht --num_peers 8 --num_experts 48 --expert_batch_size 16 --expiration 99999"
    code = run([*command.split(), "--increase_file_limit"])
    out, complaint = capsys.readouterr()
    assert code == 0, complaint
    assert "The limit on open files is" in complaint or "Raised the limit on open files" in complaint
    assert "peers created: 8 of 8\n" in complaint
    assert "experts declared: 48 of 48\n" in complaint
    number = r"\d[\d.e+-]*"
    for line in (
        r"Unique ids after deduplication: 48",
        r"Store success rate: 100\.0% \(144 / 144\)",
        rf"Mean store time: {number}, Total: {number}",
        r"Get success rate: 100\.0 \(48 / 48\)",
        rf"Mean get time: {number}, Total: {number}",
        r"Node survival rate: 100\.000%",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), line
    assert "Warning" not in out
    result = json.loads(out.splitlines()[-1].removeprefix("RESULT: "))
    assert set(NAMES) | {"unique_experts"} <= set(result)
    assert "get_p99_ms" not in result  # of fewer than a hundred
    assert "get_ms_per_key" not in result
    assert (result["num_peers"], result["mode"]) == (8, "experts")
    assert result["store_success"] == result["get_success"] == result["survival"] == 1
    assert (result["bucket_size"], result["num_replicas"]) == (20, 5)
    assert result["peak_rss_mib"] > result["rss_mib"] > 10
    assert result["messages_per_store"] > 0
    assert 1 <= result["replicas_per_record"] <= 8
    assert result["askers_apart"] == (num_cores() > 1)
    assert result["num_processes"] == min(num_cores(), 8) + result["askers_apart"]
    lines = out.splitlines()
    survival = lines.index("Node survival rate: 100.000%")
    assert lines[survival + 1].startswith("Store latency of a batch (ms): p50 ")
    assert re.match(
        rf"Store traffic of each record: {number} messages, {number} datagrams", lines[survival + 2]
    )
    assert any(line.startswith("Memory of the peers and their driver, ") for line in lines)


def test_the_dead_are_counted_and_gets_that_met_them(monkeypatch):
    monkeypatch.setattr(dht_hosts, "_ALIVE_S", 0.5)
    report, told = measure("keys", num_peers=12, num_keys=30, failure_rate=0.25, num_processes=2)
    result = summarize_dht(report)
    assert set(NAMES) | {"get_ms_per_key", "slowest_get_s", "slowest_get_meeting_dead_s"} <= set(result)
    assert result["get_ms_per_key"] == result["get_ms_per_expert"]
    assert (result["num_processes"], result["askers_apart"]) == (2, False)
    assert result["survival"] == 0.75
    assert result["store_success"] == 1
    assert result["get_success"] == 1
    assert 0 < result["gets_meeting_dead_at_most"] <= 30
    assert 0 < result["slowest_get_meeting_dead_s"] <= result["slowest_get_s"]
    assert sum(result["hops"].values()) == 30
    assert told[-1] == "asking all 12 peers whether they live"
    text = text_of(report)
    assert "Node survival rate: 75.000%" in text
    assert "Get success rate: 100.0% (30 / 30)" in text
    assert "Gets that met dead peers: at most " in text


def test_a_virtual_world_is_the_same_each_time_and_peers_die_along_the_way():
    given = {"num_peers": 24, "total_num_rounds": 12, "num_get_peers": 4, "num_store_peers": 3}
    given |= {"failure_rate": 0.25, "is_virtual": True, "seed": 3}
    (first, _), (again, _) = measure(**given), measure(**given)
    result, same = (
        {**summarize_dht(report), "rss_mib": 0, "peak_rss_mib": 0, "wall_s": 0} for report in (first, again)
    )
    assert result == same
    assert result["survival"] == 0.75
    assert result["store_success"] == 1
    assert result["get_success"] == 1
    assert result["simulated_s"] > result["median_get_s"] > 0
    assert result["median_round_trips"] > 0
    assert result["median_hops"] >= 1
    text = text_of(first)
    assert "Store success rate: 100.0% (36 / 36)" in text
    assert "Get success rate: 100.0% (48 / 48)" in text
    assert re.search(r"^Get wall time of a round: mean .*, std .*, max ", text, re.MULTILINE)
    assert re.search(r"^Average get time per worker: ", text, re.MULTILINE)
    assert " round trips\n" in text


@pytest.mark.parametrize("mode", ["experts", "keys"])
def test_rows_are_what_was_measured_and_settings_are_elsewhere(mode):
    report, _ = measure(mode, is_virtual=True, num_peers=6)
    assert all(any(row.samples) for row in report.rows)
    metrics = [row.metric for row in report.rows]
    assert not {"num_replicas", "bucket_size", "store_tried", "get_tried"} & set(metrics)
    assert ("get_round" in metrics) == ("median_round_trips" in summarize_dht(report)) == (mode == "keys")


def test_two_peers_are_a_swarm():
    report, _ = measure("experts", num_peers=2, num_experts=6, num_processes=2)
    result = summarize_dht(report)
    assert (result["num_processes"], result["askers_apart"], result["get_success"]) == (2, False, 1)
    assert result["replicas_per_record"] == 2


def test_a_get_of_what_was_never_stored_is_a_failure_and_stores_have_a_reason(monkeypatch):
    async def refused(dht, *_, **__):
        return Stored(0, Verdict.TOO_LONG)

    monkeypatch.setattr(DHT, "store", refused)
    report, _ = measure("keys", is_virtual=True, num_peers=4, num_keys=24)
    result = summarize_dht(report)
    assert result["store_success"] == result["get_success"] == result["replicas_per_record"] == 0
    assert result["store_failures"] == {"TOO_LONG": 24}
    assert "Get success rate: 0.0% (0 / 24)" in text_of(report)
    assert "refused: TOO_LONG × 24" in text_of(report)


def test_experts_that_nobody_takes_have_a_reason(monkeypatch):
    async def refused(dht, entries, **_):
        return [Stored(0, Verdict.FULL)] * len(entries)

    monkeypatch.setattr(DHT, "store_many", refused)
    report, _ = measure("experts", is_virtual=True, num_peers=4, num_experts=4)
    assert summarize_dht(report)["store_failures"] == {"FULL": 12}
    assert "Store success rate: 0.0% (0 / 12)" in text_of(report)


def test_what_expired_before_or_while_it_was_read_is_said():
    some = {"mode": "experts", "is_virtual": True, "num_peers": 4, "num_experts": 8, "expert_batch_size": 2}
    late, _ = measure(**some, expiration=2, wait_before_read=60)
    assert "Warning: all records expired before they were read" in text_of(late)
    assert summarize_dht(late)["get_success"] == 0
    hurried, _ = measure(**some, expiration=2, wait_after_request=0.9)
    assert "Warning: records expired while they were read" in text_of(hurried)
    assert 0 < summarize_dht(hurried)["get_success"] < 1


def test_a_start_that_failed_leaves_the_result_to_the_others():
    report, _ = measure(is_virtual=True, num_peers=3, num_keys=2)
    broken = Row(
        key={"scenario": "start", "start": 2},
        metric="completed",
        unit="",
        direction="higher",
        error="it broke",
    )
    result = summarize_dht(msgspec.structs.replace(report, rows=[*report.rows, broken]))
    assert result["failed"] == 1
    assert result["get_success"] == 1
    empty = msgspec.structs.replace(report, rows=[broken])
    assert summarize_dht(empty) == {
        "mode": "keys",
        "num_peers": 3,
        "num_processes": 1,
        "askers_apart": False,
        "profile": "wan",
        "bucket_size": 20,
        "num_replicas": 5,
        "failed": 1,
    }
    assert "failed: it broke" in text_of(empty)


def test_the_defaults_are_those_of_the_two_benchmarks():
    experts, keys = config_of(None, {}), config_of("keys", {"num_experts": None})
    assert (experts.mode, experts.num_peers, experts.initial_peers) == ("experts", 32, 1)
    assert experts.plan == ExpertsPlan(256, 32, 0.0, 0.0)
    assert (keys.mode, keys.num_peers, keys.initial_peers) == ("keys", 16, 4)
    assert keys.plan == KeysPlan(None, 16, 8, 8, 10, 0.1, 0.0, 0.0, True)
    assert experts.num_processes == keys.num_processes == min(num_cores(), 16)
    assert experts.expiration_s == keys.expiration_s == 300
    assert keys.num_victims == 2
    assert experts.num_victims == 0


def test_a_number_of_keys_is_stored_and_got_once_each_and_a_virtual_world_has_keys():
    between = config_of("keys", {"num_keys": 10_000, "failure_rate": 0.2, "num_peers": 256})
    assert between.plan == KeysPlan(10_000, 16, 1, 1, 10, 0.2, latest=False)
    assert between.num_victims == 51
    world = config_of(None, {"num_peers": 10_000}, is_virtual=True)
    assert (world.mode, world.profile, world.num_processes) == ("keys", "wan", 1)
    assert world.plan == KeysPlan(1000, 16, 1, 1, 10, 0.0, latest=False)
    assert config_of("experts", {"profile": "home"}, is_virtual=True).profile == "home"


def test_a_config_survives_the_way_to_another_process():
    for config in (config_of(None, {}), config_of(None, {}, is_virtual=True)):
        assert msgspec.convert(msgspec.to_builtins(config), DhtConfig) == config


@pytest.mark.parametrize(
    ("mode", "given", "complaint"),
    [
        ("experts", {"failure_rate": 0.1}, "--failure-rate belongs to --mode keys"),
        ("keys", {"expert_batch_size": 64}, "--expert-batch-size belongs to --mode experts"),
        (None, {"latest": False}, "--latest belongs to --mode keys, not to --mode experts"),
        ("keys", {"num_keys": 10, "total_num_rounds": 10}, "two orders of the same work"),
        ("keys", {"failure_rate": 0.95}, "15 would be killed"),
        (None, {"profile": "wan"}, "runs on sockets"),
        (None, {"num_peers": 2, "num_processes": 3}, "no swarm to measure"),
        (None, {"expiration": 604_801}, "at most 604800 s"),
        ("keys", {"num_keys": 10, "wait_after_iteration": 1}, "rests between rounds"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(mode, given, complaint):
    with pytest.raises(UsageError, match=complaint):
        config_of(mode, given)


@pytest.mark.parametrize(
    ("num_peers", "num_processes", "num_ranks"), [(7, 2, 2), (8, 2, 3), (8, 1, 1), (9, 8, 8), (10, 8, 9)]
)
def test_those_that_ask_have_a_further_process_where_that_leaves_peers_for_the_others(
    num_peers, num_processes, num_ranks
):
    config = config_of("experts", {"num_peers": num_peers, "num_processes": num_processes})
    assert config.num_ranks == num_ranks
    assert config.has_askers_apart == (num_ranks > num_processes)
    assert config_of("keys", {"num_peers": 16, "num_processes": 2}).num_ranks == 2


def test_a_virtual_world_is_one_process_on_a_known_network():
    with pytest.raises(UsageError, match="one process"):
        config_of(None, {"num_processes": 2}, is_virtual=True)
    with pytest.raises(UsageError, match="wann"):
        config_of(None, {"profile": "wann"}, is_virtual=True)
