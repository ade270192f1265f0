"""Experts are saved while they serve, when they have changed, and a failing disk stops nobody."""

import asyncio
import threading

import pytest

from experts.fake_server import FakeServer, FakeThread, small_expert, train
from shoal.core import Scope, UsageError, run_virtual
from shoal.experts.checkpoints import CheckpointError, Checkpoints
from shoal.experts.saving import Saver, keep_saving


def test_only_what_has_changed_is_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first, second = small_expert("ffn.1"), small_expert("ffn.2")
    saver = Saver(FakeServer(first, second), checkpoints, FakeThread(), {"class": "ffn"})
    assert run_virtual(saver.save()) == 2
    assert run_virtual(saver.save()) == 0
    train(second, 2)
    assert run_virtual(saver.save()) == 1
    assert checkpoints.load("ffn.2").num_updates == 2
    assert checkpoints.load("ffn.2").about == {"class": "ffn"}


def test_what_was_restored_is_not_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save("ffn.1", small_expert("ffn.1", num_updates=3).state())
    server = FakeServer(small_expert("ffn.1", num_updates=3))
    saver = Saver(server, checkpoints, FakeThread())
    assert run_virtual(saver.save()) == 0
    server.experts["ffn.1"] = small_expert("ffn.1", num_updates=4)
    assert run_virtual(saver.save()) == 1
    del server.experts["ffn.1"]
    assert run_virtual(saver.save()) == 0


def test_a_failing_disk_is_told_of_once_and_tried_again(tmp_path, caplog):
    class Failing(Checkpoints):
        is_failing = True

        def save(self, *args):
            if self.is_failing:
                raise CheckpointError("No room.")
            return super().save(*args)

    checkpoints = Failing(tmp_path)
    expert = small_expert("ffn.1")
    saver = Saver(FakeServer(expert, small_expert("ffn.2")), checkpoints, FakeThread())
    assert [run_virtual(saver.save()) for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("No room.") == 1
    checkpoints.is_failing = False
    assert run_virtual(saver.save()) == 2
    checkpoints.is_failing = True
    train(expert, 1)
    assert run_virtual(saver.save()) == 0
    assert caplog.text.count("No room.") == 2


def test_experts_are_saved_off_the_loop_every_while(run, tmp_path):
    threads = []

    async def work():
        loop, was_saved = asyncio.get_running_loop(), asyncio.Event()

        class Watched(Checkpoints):
            def save(self, *args):
                path = super().save(*args)
                threads.append(threading.current_thread().name)
                loop.call_soon_threadsafe(was_saved.set)
                return path

        expert, checkpoints = small_expert("ffn.1"), Watched(tmp_path)
        async with Scope() as scope:
            scope.start(keep_saving(FakeServer(expert), checkpoints, 0.01, {"hidden_dim": 4}))
            await was_saved.wait()
            was_saved.clear()
            train(expert, 1)
            await was_saved.wait()
            scope.cancel()
        return checkpoints.load("ffn.1")

    assert run(work()).num_updates == 1
    assert set(threads) == {"shoal-checkpoints"}
    assert "shoal-checkpoints" not in [thread.name for thread in threading.enumerate()]


def test_a_time_of_zero_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="every 0 s"):
        run(keep_saving(FakeServer(), Checkpoints(tmp_path), 0))
