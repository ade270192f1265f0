"""`shoal bench dht` at a size that takes seconds: what it counts, prints and says at the end."""

import json
import re

import msgspec

from shoal.bench import dht_fleet
from shoal.bench.dht_config import config_of
from shoal.bench.dht_summary import dht_items, summarize_dht
from shoal.bench.frame import make_scenario
from shoal.cli.program import run
from shoal.report import Report, Row

NAMES = (
    *("num_peers", "create_s", "store_ms_per_key", "store_success", "get_success", "survival", "rss_mib"),
    *("messages_per_store", "messages_per_get", "bucket_size", "num_replicas", "num_processes", "mode"),
)


def measure(mode=None, *, seed=0, is_virtual=False, **given):
    config = config_of(mode, given, is_virtual=is_virtual)
    rows, told = [], []
    for measured in make_scenario("dht", msgspec.to_builtins(config), seed).run(told.append):
        fields = {name: getattr(measured, name) for name in ("key", "metric", "unit", "direction")}
        rows.append(Row(**fields, starts=[measured.samples]))
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
    assert set(NAMES) | {"get_ms_per_expert", "get_p50_ms", "bytes_per_get"} <= set(result)
    assert (result["num_peers"], result["mode"]) == (8, "experts")
    assert result["store_success"] == result["get_success"] == result["survival"] == 1
    assert (result["bucket_size"], result["num_replicas"]) == (20, 5)
    assert result["rss_mib"] > 10
    assert result["messages_per_store"] > 0


def test_the_dead_are_counted_and_gets_that_met_them(monkeypatch):
    monkeypatch.setattr(dht_fleet, "_ALIVE_S", 0.5)
    report, told = measure("keys", num_peers=12, num_keys=30, failure_rate=0.25, num_processes=2)
    result = summarize_dht(report)
    assert set(NAMES) | {"get_ms_per_key", "slowest_get_s", "slowest_get_meeting_dead_s"} <= set(result)
    assert result["survival"] == 0.75
    assert result["store_success"] == 1
    assert result["get_success"] == 1
    assert 0 < result["gets_meeting_dead"] <= 30
    assert 0 < result["slowest_get_meeting_dead_s"] <= result["slowest_get_s"]
    assert sum(result["hops"].values()) == 30
    assert told[-1] == "asking all 12 peers whether they live"
    text = text_of(report)
    assert "Node survival rate: 75.000%" in text
    assert "Get success rate: 100.0% (30 / 30)" in text
    assert "Gets that met dead peers: " in text


def test_a_virtual_world_is_the_same_each_time_and_peers_die_along_the_way():
    given = {"num_peers": 24, "total_num_rounds": 12, "num_get_peers": 4, "num_store_peers": 3}
    given |= {"failure_rate": 0.25, "is_virtual": True, "seed": 3}
    (first, _), (again, _) = measure(**given), measure(**given)
    result, same = ({**summarize_dht(report), "rss_mib": 0, "wall_s": 0} for report in (first, again))
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
        "profile": "wan",
        "failed": 1,
    }
    assert "failed: it broke" in text_of(empty)
