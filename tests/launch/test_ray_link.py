import socket
from concurrent.futures import Future

import pytest

from shoal.launch import ray_bridge
from shoal.launch.ray_bridge import ActorLink, reason_of


class Method:
    """Of an actor: each call is kept with the future that the test sets."""

    def __init__(self):
        self.calls = []

    def remote(self, *arguments):
        future = Future()
        future.future = lambda: future
        self.calls.append((arguments, future))
        return future

    def answer(self, value=None, error=None):
        """The last call."""
        future = self.calls[-1][1]
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class Actor:
    def __init__(self):
        self.read, self.write, self.close, self.last_words = Method(), Method(), Method(), Method()


@pytest.fixture
def made():
    head, end = socket.socketpair()
    head.settimeout(5)
    actor, wakes = Actor(), []
    link = ActorLink(0, end.detach(), actor, wakes.append)
    yield link, actor, head, wakes
    link.close()
    head.close()


def test_output_of_the_agent_reaches_the_head(made):
    link, actor, head, wakes = made
    actor.read.answer(b"some")
    assert len(wakes) == 1
    link.step()
    assert head.recv(100) == b"some"
    actor.read.answer(None)  # nothing came for a while
    link.step()
    actor.read.answer(b"more")
    link.step()
    assert head.recv(100) == b"more"
    assert not link.is_finished


def test_input_is_written_piece_by_piece_in_order(made):
    link, actor, head, _ = made
    head.sendall(b"one")
    link.step()
    head.sendall(b"two")
    link.step()
    assert [arguments for arguments, _ in actor.write.calls] == [(b"one",)]
    actor.write.answer()
    link.step()
    assert [arguments for arguments, _ in actor.write.calls] == [(b"one",), (b"two",)]


def test_a_head_that_closes_ends_the_agent(made):
    link, actor, head, _ = made
    head.close()
    link.step()
    assert len(actor.close.calls) == 1
    actor.close.answer()
    actor.read.answer(b"")
    link.step()
    actor.last_words.answer((0, ""))
    link.step()
    assert link.is_finished
    assert link.why_lost == ""


def test_an_agent_that_fails_is_named_with_its_last_words(made):
    link, actor, _, _ = made
    actor.read.answer(b"")
    link.step()
    actor.last_words.answer((1, "No module named shoal"))
    link.step()
    assert link.is_finished
    assert "exit code 1" in link.why_lost
    assert "No module named shoal" in link.why_lost


def test_a_silent_actor_that_the_head_has_given_up_is_not_waited_for(made, monkeypatch):
    monkeypatch.setattr(ray_bridge, "ENDING_S", 0.0)
    link, actor, head, _ = made
    head.sendall(b"a beat")
    link.step()
    head.close()
    assert link.events is not None, "so that the end is noticed while a beat is on its way"
    link.step(is_hung_up=True)
    assert link.events is None
    link.step()
    assert link.is_finished
    assert len(actor.close.calls) == 0


@pytest.mark.parametrize("method", ["read", "write"])
def test_an_actor_that_dies_is_lost_at_once(made, method):
    link, actor, head, _ = made
    head.sendall(b"x")
    link.step()
    getattr(actor, method).answer(error=RuntimeError("\nThe actor died.\nMany lines follow."))
    link.step()
    assert link.is_finished
    assert link.why_lost == "The actor died"


def test_a_head_that_does_not_read_stops_the_reading(made):
    link, actor, head, _ = made
    piece = bytes(1 << 16)
    for _ in range(100):
        if actor.read.calls[-1][1].done():
            break
        actor.read.answer(piece)
        link.step()
    assert len(actor.read.calls) < 60
    num_read = len(actor.read.calls)
    head.setblocking(False)
    num_bytes = 0
    while num_bytes < num_read * len(piece):
        num_bytes += len(head.recv(1 << 20))
        link.step()
    assert len(actor.read.calls) == num_read + 1


def test_the_reason_is_found_among_many_lines():
    error = RuntimeError(
        "The actor died.\n\tpid: 1\nThe actor is dead because its node has died. Worker exit type: X"
    )
    assert reason_of(error) == "The actor is dead because its node has died"
    assert reason_of(RuntimeError()) == "RuntimeError"
