import msgspec
import pytest

from shoal.core.errors import NotComparable
from shoal.report import Code, Report, Row, Verdict, compare


def row(key=None, starts=None, **fields):
    starts = [[1.0, 2.0]] * 5 if starts is None and "error" not in fields else starts or []
    defaults = {"metric": "m", "unit": "s", "direction": "lower"}
    return Row(**defaults | {"key": key or {"size": 1}, "starts": starts} | fields)


def report(*rows, **fields):
    return Report(**{"benchmark": "transport", "created": "", "rows": list(rows) or [row()]} | fields)


def test_rows_pair_by_key_and_metric_not_by_position():
    keys = [{"size": 1, "mode": "a"}, {"size": 2, "mode": "a"}, {"size": 3, "mode": "a"}]
    old = report(row(keys[0], [[1.0]]), row(keys[1], [[2.0]]), row(keys[2], [[3.0]]))
    new = report(row({"mode": "a", "size": 2.0}, [[2.0]]), row(keys[0], [[1.0]]), row(keys[0], metric="n"))
    diff = compare(old, new)
    assert [pair.changes[0].percent for pair in diff.rows] == [0, 0]
    assert [lone.key["size"] for lone in diff.only_baseline] == [3]
    assert [lone.metric for lone in diff.only_test] == ["n"]


def test_all_four_percentiles_change_with_the_sign_of_their_direction():
    slow = compare(report(row(starts=[[1.0, 2.0, 3.0]])), report(row(starts=[[2.0, 4.0, 6.0]])))
    assert [(change.q, change.percent) for change in slow.rows[0].changes] == [
        (q, -100) for q in (50, 75, 90, 95)
    ]
    rate = {"direction": "higher", "unit": "1/s"}
    fast = compare(report(row(starts=[[10.0]], **rate)), report(row(starts=[[11.0]], **rate)))
    assert fast.rows[0].changes[0].percent == pytest.approx(10)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (report(benchmark="dht"), report(), "'dht'"),
        (report(row(unit="s")), report(row(unit="ms")), "unit 's'"),
        (report(row(direction="lower")), report(row(direction="higher")), "direction"),
        (report(row({"size": 1})), report(row({"size": 2})), "no row in common"),
        (report(rows=[]), report(), "no row in common"),
        (report(environment={"device": "cpu"}), report(environment={"device": "cuda:0"}), "cuda"),
        (
            report(environment={"device": {"kind": "cpu"}}),
            report(environment={"device": {"kind": "cuda"}}),
            "cuda",
        ),
        (report(config={"batch_size": 32}), report(config={"batch_size": 64}), "batch_size is 32"),
        (report(benchmark="pytorch-ddp"), report(), "PyTorch's DDP-benchmark JSON"),
    ],
)
def test_what_measures_different_things_is_refused_with_a_next_step(old, new, words):
    with pytest.raises(NotComparable, match=words) as caught:
        compare(old, new)
    assert caught.value.next_step


def test_a_workload_that_is_in_the_keys_may_differ_between_configs():
    key = {"model": "resnet50"}
    compare(
        report(row(key), config={"model": ["resnet50"]}),
        report(row(key), config={"model": ["resnet50", "vgg"]}),
    )


def test_differences_of_config_and_environment_are_named_and_the_rest_is_not():
    old = report(
        config={"bucket": 25, "net": {"delay": 1, "loss": 0}},
        environment={"machine": "ws1", "cores": 2, "before": {"load_average": 0.1}},
        code=Code(version="1", revision="a" * 40),
    )
    new = report(
        config={"bucket": 1, "net": {"delay": 1}},
        environment={"machine": "ws2", "cores": 2, "before": {"load_average": 0.2}},
        code=Code(version="1", revision="a" * 40, is_dirty=True),
    )
    diff = compare(old, new)
    assert [(item.name, item.baseline, item.test) for item in diff.differences] == [
        ("code", "1 (aaaaaaaaaaaa)", "1 (aaaaaaaaaaaa, changed)"),
        ("config.bucket", "25", "1"),
        ("config.net.loss", "0", "-"),
        ("environment.machine", "ws1", "ws2"),
    ]
    assert diff.warnings == ("the environments differ: machine",)


def test_a_busy_machine_is_warned_about():
    loud = {"cores": 2, "before": {"load_average": [7.5, 1, 1]}, "after": {"cpu_steal_percent": 12.0}}
    warnings = compare(report(environment={"cores": 2}), report(environment=loud)).warnings
    assert len(warnings) == 2
    assert all(warning.startswith("test: ") for warning in warnings)


def test_the_document_is_plain_json_with_every_row():
    old = report(row({"size": 1}), row({"size": 2}), row({"size": 3}))
    new = report(row({"size": 1}), row({"size": 2}, error="lost"))
    document = msgspec.json.decode(msgspec.json.encode(compare(old, new).document()))
    assert [entry["verdict"] for entry in document["rows"]] == [Verdict.NO_DIFFERENCE, Verdict.FAILED]
    assert document["rows"][1]["errors"] == [None, "lost"]
    assert document["only_baseline"] == [{"key": {"size": 3}, "metric": "m"}]
    assert document["result"]["failed"] == 1
