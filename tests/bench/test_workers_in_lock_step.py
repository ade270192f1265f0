import os
import select

import pytest

from shoal.bench.workers import Helper, LocalWorkers, WorkerSettings, child
from shoal.core import BenchmarkError


@pytest.fixture(autouse=True)
def _tests_are_importable(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))


def crew(**settings):
    return LocalWorkers(WorkerSettings("bench.sample_workers:work", 2, **settings))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_everybody_answers_by_rank_until_the_end():
    with crew(arguments={"word": "ahoy"}) as workers:
        assert not workers.is_running
        assert workers.ask("describe") == [[0, "ahoy"], [1, "ahoy"]]
        pids = workers.ask("pid")
        assert len(set(pids)) == 2
        assert workers.is_running
    assert not any(map(is_alive, pids))


def test_a_failure_names_the_rank_and_ends_the_others_and_the_next_order_starts_new_ones():
    with crew() as workers:
        pids = workers.ask("pid")
        with pytest.raises(BenchmarkError, match=r"rank 1 of 2 failed: ZeroDivisionError: nothing is left"):
            workers.ask("fail", who=1)
        assert not workers.is_running
        assert not any(map(is_alive, pids))
        assert workers.ask("describe") == [[0, None], [1, None]]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="one worker watches the other's process")
def test_the_one_that_was_killed_is_named_not_the_one_that_missed_it():
    with crew() as workers:
        pids = workers.ask("pid")
        with pytest.raises(BenchmarkError, match=r"rank 1 of 2 ended with signal 9"):
            workers.ask("lose", who=1, pid=pids[1])


def test_who_does_not_answer_is_named():
    with crew(answer_s=0.1) as workers:
        with pytest.raises(BenchmarkError, match=r"rank 0, 1 of 2 did not answer 'fail' within 0.1 s"):
            workers.ask("fail", who=None)


def test_a_worker_that_fails_at_its_end_is_named():
    with pytest.raises(BenchmarkError, match=r"rank 1 of 2 failed: ZeroDivisionError: at the end"):
        with crew(arguments={"word": "fail at the end"}) as workers:
            workers.ask("describe")


def test_workers_end_with_the_block_that_an_error_leaves():
    def leave_by_error():
        with crew() as workers:
            pids.extend(workers.ask("pid"))
            raise KeyError

    pids = []
    with pytest.raises(KeyError):
        leave_by_error()
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_a_helper_takes_no_orders_and_ends_with_the_workers():
    with crew() as workers:
        workers.start_helper(Helper("bench.sample_workers:stand_by", "the helper", {"word": "ahoy"}))
        (helper,) = workers._helpers
        assert helper.expect() == {"rank": -1, "size": 2, "word": "ahoy"}
        assert workers.ask("describe") == [[0, None], [1, None]]
    assert helper.exit_code == 0


def test_a_helper_is_killed_when_a_worker_fails():
    with crew() as workers:
        workers.start_helper(Helper("bench.sample_workers:stand_by", "the helper"))
        (helper,) = workers._helpers
        with pytest.raises(BenchmarkError, match=r"rank 1 of 2 failed"):
            workers.ask("fail", who=1)
        assert helper.exit_code is not None


def test_a_helper_that_fails_is_named_and_nobody_waits_for_it():
    with crew() as workers:
        workers.start_helper(Helper("bench.sample_workers:not_there", "the helper"))
        with pytest.raises(BenchmarkError, match=r"the helper failed: AttributeError"):
            workers.ask("fail", who=None)
        assert not workers.is_running


def test_workers_end_with_the_process_that_gives_the_orders(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # whoever is killed removes no folder of its own
    with child("bench.sample_workers:lead", {}, name="the leader") as leader:
        pids = leader.expect()["pids"]
        leader.kill()
        with pytest.raises(BenchmarkError, match="signal 9"):
            leader.receive()
        watched = [os.pidfd_open(pid) for pid in pids if is_alive(pid)]
        for descriptor in watched:
            assert select.select([descriptor], [], [], 20)[0]
            os.close(descriptor)
