import math

from core.boards import note
from shoal.cli.top_view import job_metrics
from shoal.core.board import Sighting


def read(text):
    kinds, values = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            assert name.partition("{")[0] in kinds
            values[name] = float(value)
    return kinds, values


def test_it_is_what_prometheus_reads():
    one = note(1, step=7, values={"loss": math.nan}, waited_s={0: 1.5}, host='a"b')
    kinds, values = read(job_metrics([Sighting(one, "stopped", 2.0)]))
    labels = 'run="job",role="worker",rank="1",host="a\\"b",strategy="all-reduce",number="0"'
    assert values["shoal_jobs"] == 1
    assert values[f"shoal_worker_steps_total{{{labels}}}"] == 7
    assert values[f"shoal_worker_up{{{labels}}}"] == 0
    assert values[f'shoal_worker_waited_seconds_total{{{labels},for="0"}}'] == 1.5
    assert math.isnan(values[f'shoal_worker_value{{{labels},name="loss"}}'])
    assert kinds["shoal_worker_steps_total"] == "counter"
    assert "shoal_worker_sent_bytes_total" not in kinds


def test_without_jobs_it_says_so():
    assert read(job_metrics([]))[1] == {"shoal_jobs": 0}
