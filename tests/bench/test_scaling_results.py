from shoal.bench.scaling import PROCESSORS, PointSpeeds, ScalingPoint, processor_rows, rows_of
from shoal.bench.tables.scaling import scaling_items, summarize_scaling
from shoal.report import Report, Row
from shoal.report.tables import Table


def report(measured, **config):
    config = {"model": "resnet18", "image_size": 32, "num_classes": 10, "device": "cpu", **config}
    return Report(benchmark="scaling", created="", config=config, rows=list(measured))


def lane(*speeds, ceiling=100.0):
    return PointSpeeds(
        speeds=[list(each) for each in speeds], ceilings=[[ceiling] * len(speeds[0])] * len(speeds)
    )


def sweep(device="cpu"):
    alone = [[100.0], [100.0]]
    yield from rows_of(ScalingPoint("none", 32, 1), {"neighbor": lane([99.0])}, alone)
    lanes = {
        "neighbor": lane([90.0] * 4, [80.0] * 4),
        "all-reduce": lane([50.0] * 4),
        "horovod": PointSpeeds(error="Horovod is not there."),
    }
    yield from rows_of(ScalingPoint("none", 32, 4), lanes, alone)
    yield from processor_rows(PROCESSORS[device], [["here", 2]] * 4, (1, 4))


def text_of(items):
    lines = []
    for item in items:
        if isinstance(item, Table):
            lines += [line for line, _ in item.lines()]
        else:
            lines.append(item if isinstance(item, str) else item[0])
    return "\n".join(lines)


def table_of(items):
    (table,) = [item for item in items if isinstance(item, Table)]
    return {cells[:2]: cells[2:] for cells in table.rows}


def test_the_result_has_means_by_batch_strategy_and_number():
    result = summarize_scaling(report(sweep()))
    assert result["images_per_s"]["32"]["neighbor"] == {"1": 99.0, "4": 340.0}
    assert result["scaling_efficiency"]["32"]["neighbor"]["4"] == 0.85
    assert result["fraction_of_ceiling"]["32"]["all-reduce"]["4"] == 0.5
    assert result["failed"] == 1
    (headline,) = result["headline"]
    assert headline.startswith(
        "With 4 workers at batch 32: neighbor and all-reduce are not told apart, 200 images/s–340 images/s"
    )


def test_a_table_shows_how_far_from_linear_each_is():
    items = scaling_items(report(sweep()))
    table = table_of(items)
    assert table["none", "1"][3:] == ("100", "100.0%", "-")
    assert table["neighbor", "4"] == ("340", "39.2", "85.0", "400", "85.0%", "85.0%")
    assert table["horovod", "4"][0] == "failed"
    text = text_of(items)
    assert "horovod failed with 4 workers at batch 32: Horovod is not there." in text
    assert "4 workers share 2 cores" in text
    assert "1 worker share" not in text
    assert "Iter #0" not in text
    assert "4 workers share 2 GPUs: linear is out of reach" in text_of(scaling_items(report(sweep("cuda"))))


def test_in_a_sweep_every_point_has_the_documents_last_lines_after_the_table():
    text = text_of(scaling_items(report(sweep())))
    lines = "[{}] Img/sec per GPU: 85.0 +-9.8\n"
    at = text.index("neighbor, 4 workers, batch 32:\n" + "".join(map(lines.format, range(4))))
    assert at > text.index("of ceiling: ")
    assert "Total img/sec on 4 GPU(s): 340.0 +-39.2\n" in text[at:]
    assert "neighbor, 1 worker, batch 32:\n[0] Img/sec per GPU: 99.0 +-0.0\nTotal img/sec on 1 GPU(s)" in text
    assert "horovod, 4 workers, batch 32:" not in text
    assert text.count("On the CPU: ") == 1
    assert "On the CPU: " not in text_of(scaling_items(report(sweep(), device="cuda")))


def test_one_strategy_with_one_number_has_the_lines_of_the_document():
    rows = rows_of(
        ScalingPoint("none", 64, 2), {"neighbor_allreduce": lane([10.0, 20.0], [20.0, 20.0])}, [[30.0]]
    )
    text = text_of(scaling_items(report(rows, device="cuda")))
    assert (
        "Model: resnet18\nBatch size: 64\nNumber of GPUs: 2\nRunning warmup...\nRunning benchmark...\n"
        "Iter #0: 10.0 img/sec per GPU\nIter #1: 20.0 img/sec per GPU\n"
        "[0] Img/sec per GPU: 15.0 +-9.8\n[1] Img/sec per GPU: 20.0 +-0.0\n"
        "Total img/sec on 2 GPU(s): 35.0 +-9.8\n"
    ) in text
    assert text.count("Total img/sec") == 1


def test_iterations_that_are_too_short_are_told():
    assert "Give more --num-batches-per-iter" not in text_of(scaling_items(report(sweep())))
    short = rows_of(ScalingPoint("none", 1, 1), {}, [[1000.0]])
    assert "takes one worker 1.0 ms" in text_of(scaling_items(report(short)))


def test_a_start_that_broke_off_is_told():
    row = Row(key={"scenario": "start"}, metric="completed", unit="", direction="higher", error="no memory")
    broken = Report(benchmark="scaling", created="", config={}, rows=[row])
    assert "start failed: no memory" in text_of(scaling_items(broken))
    assert summarize_scaling(broken)["failed"] == 1
