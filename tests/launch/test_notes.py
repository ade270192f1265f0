import os
import select
import sys
import time

import pytest

from core.boards import NOW_S, note
from launch.stations import FakeChannel
from shoal.core import ManualClock, board
from shoal.core.board import Sighting, look, pin
from shoal.core.elastic import encode_message
from shoal.launch import LaunchSettings, agent
from shoal.launch.agent import Agent, seen_here
from shoal.launch.head import AgentHandle, Copies, RunWorkers
from shoal.launch.protocol import (
    AGENT,
    MAGIC,
    AgentHello,
    Decoder,
    PipeChannel,
    Post,
    Seen,
    Up,
    WorkerJob,
)
from shoal.launch.worker_process import take_down

CLOCK = ManualClock(wall_s=NOW_S)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(board, "_MEMORY", tmp_path / "none")  # other runs of this user have their notes there


def test_an_agent_sees_its_own_ranks_of_the_run():
    for one in (note(0), note(1), note(0, "other"), note(2, keeper=board.own_keeper())):
        pin(".".join(map(str, one.who))).write(one)
    assert [one.note.rank for one in seen_here("job", [1, 2])] == [1]
    assert seen_here("", [0]) == []


def test_the_head_pins_up_what_agents_tell_by_its_own_clock_and_names():
    copies = Copies(CLOCK)
    there = note(1, pid=1, started="?", host="vm-17", noted_s=5_000.0, began_s=4_000.0, step=7, namespace="b")
    copies.take([Sighting(there, "stopped", 2.0)], "gpu-1")
    (seen,) = look(CLOCK)
    assert (seen.note.host, seen.note.step, seen.state, seen.age_s) == ("gpu-1", 7, "stopped", 2.0)
    assert seen.note.began_s == NOW_S - 1002
    assert seen.note.namespace != "b"
    copies.take([Sighting(there, "running", 0.0)], "gpu-1")
    assert [one.state for one in look(CLOCK)] == ["running"]
    copies.close()
    assert look(CLOCK) == []


def test_who_is_told_of_no_more_is_taken_down():
    copies, other = Copies(CLOCK), Copies(CLOCK)
    first, second = (Sighting(note(rank, pid=1, started="?"), "running", 0.0) for rank in (0, 1))
    copies.take([first, second], "gpu-1")
    other.take([Sighting(note(2, pid=1, started="?"), "running", 0.0)], "gpu-1")
    copies.take([second], "gpu-1")
    assert [one.note.rank for one in look(CLOCK)] == [1, 2]
    copies.take([], "gpu-1")
    assert [one.note.rank for one in look(CLOCK)] == [2]


def test_what_killed_workers_have_left_is_taken_down_when_their_run_is_over(tmp_path):
    for one in (note(0, pid=1, started="?"), note(1, "other")):
        pin(".".join(map(str, one.who))).write(one)
    take_down()
    (left,) = (tmp_path / "shoal").iterdir()
    assert "other" in left.name


def test_nothing_that_fails_here_ends_an_agent_or_the_head(monkeypatch):
    monkeypatch.setattr(board, "look", lambda: 1 / 0)
    assert seen_here("job", [0]) == []
    take_down()
    monkeypatch.setattr(board, "pin", lambda name: 1 / 0)
    Copies(CLOCK).take([Sighting(note(), "running", 0.0)], "gpu-1")


@pytest.mark.skipif(os.name != "posix", reason="agents run on POSIX only")
def test_an_agent_tells_once_that_there_is_nothing_left(monkeypatch):
    pipes, found = [*os.pipe(), *os.pipe()], [[], [Sighting(note(), "running", 0.0)], [], []]
    monkeypatch.setattr(agent, "seen_here", lambda run, ranks: found.pop(0))
    try:
        one = Agent(pipes[0], pipes[3])
        for _ in range(4):
            one._tell_seen()
        came = Decoder(Up).feed(os.read(pipes[2], 1 << 16).removeprefix(MAGIC))
    finally:
        for descriptor in pipes:
            os.close(descriptor)
    assert [len(message.sightings) for message in came] == [1, 0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_notes_travel_from_the_agent_to_the_head_of_the_run(is_lost):
    sent = Seen([Sighting(note(0, values={"loss": 0.5}, waited_s={1: 2.0}), "running", 0.25)])
    (came,) = Decoder(Up).feed(encode_message(sent))
    assert came == sent
    channel = FakeChannel("gpu-0", [came])
    hello, copies = AgentHello("1", "vm"), Copies(CLOCK)
    handle = AgentHandle(channel, 1, "gpu-0", hello=hello, num_processes=1, copies=copies)
    workers = RunWorkers(LaunchSettings(("true",), 1), [handle], Output())
    workers.start(Logs())
    workers.look(0.0)
    assert [(one.note.host, one.note.values) for one in look(CLOCK)] == [("gpu-0", {"loss": 0.5})]
    if is_lost:
        channel.close()
        workers.look(0.0)
    else:
        workers.close(0.0)
    assert look(CLOCK) == []


@pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
def test_an_agent_tells_how_far_its_workers_are():
    body = """
import os, sys
from shoal.core.board import Note, pin
run, pid = os.environ["SHOAL_RUN_ID"], os.getpid()
pin("a").write(Note(run=run, rank=0, size=1, pid=pid, host="vm", noted_s=0.0, step=7))
sys.stdin.read()
"""
    variables = {"SHOAL_LOCAL_WORLD_SIZE": "1", "SHOAL_RUN": "{}", "SHOAL_RUN_ID": "job"}
    channel, came, end_s = PipeChannel("here", [sys.executable, *AGENT]), [], time.monotonic() + 20
    try:
        channel.send(
            WorkerJob(
                [sys.executable, "-c", f"{body}\nimport time; time.sleep(60)"], "/", variables, [Post(0, {})]
            )
        )
        while not (seen := [one for one in came if isinstance(one, Seen)]):
            assert time.monotonic() < end_s, came
            poll, actions = select.poll(), {}
            for descriptor, event, action in channel.interests():
                poll.register(descriptor, event)
                actions[descriptor] = action
            for descriptor, _ in poll.poll(100):
                actions[descriptor]()
            came += channel.take()
    finally:
        channel.close()
    (sighting,) = seen[0].sightings
    assert (sighting.note.run, sighting.note.step, sighting.state) == ("job", 7, "running")


class Output:
    is_full = False

    def __getattr__(self, name):
        return lambda *args, **named: None


class Logs:
    def __getattr__(self, name):
        return lambda *args, **named: None
