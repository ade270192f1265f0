"""Experts are saved while they serve, when they have changed, and a failing disk stops nobody."""

import asyncio
import threading

import pytest
import torch

from experts.fake_server import FakeServer, FakeThread, small_expert, train
from shoal.core import LoopThread, Scope, UsageError, run_virtual
from shoal.experts.server.checkpoints import CheckpointError, Checkpoints, Saver


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
    restored = small_expert("ffn.1")
    restored.load(checkpoints.load("ffn.1").state)
    restored.num_changes = 0
    server = FakeServer(restored)
    saver = Saver(server, checkpoints, FakeThread())
    assert run_virtual(saver.save()) == 0
    server.experts["ffn.1"] = small_expert("ffn.1", num_updates=4)
    assert run_virtual(saver.save()) == 1
    del server.experts["ffn.1"]
    assert run_virtual(saver.save()) == 0


def test_what_others_have_changed_is_saved(tmp_path):
    checkpoints, expert = Checkpoints(tmp_path), small_expert("ffn.1", num_updates=1)
    saver = Saver(FakeServer(expert), checkpoints, FakeThread())
    assert run_virtual(saver.save()) == 1
    own = expert.parameters_and_buffers()
    own["0.bias"].add_(1)  # as by averaging
    expert.num_changes += 1
    assert [run_virtual(saver.save()) for _ in range(2)] == [1, 0]
    assert torch.equal(checkpoints.load("ffn.1").state.tensors["module.0.bias"], own["0.bias"])
    expert.load(small_expert("ffn.1", seed=3, num_updates=1).state())
    assert [run_virtual(saver.save()) for _ in range(2)] == [1, 0]


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
        with LoopThread("writer") as writer:
            await save_twice(Saver(FakeServer(expert), checkpoints, writer), expert, was_saved)
        return checkpoints.load("ffn.1")

    async def save_twice(saver, expert, was_saved):
        async with Scope() as scope:
            scope.start(saver.run(0.01))
            await was_saved.wait()
            was_saved.clear()
            train(expert, 1)
            await was_saved.wait()
            scope.cancel()

    assert run(work()).num_updates == 1
    assert set(threads) == {"writer"}


def test_a_time_of_zero_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="every 0 s"):
        run(Saver(FakeServer(), Checkpoints(tmp_path), FakeThread()).run(0))
