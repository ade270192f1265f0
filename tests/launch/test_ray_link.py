import asyncio
import socket
from types import SimpleNamespace

import pytest

from shoal.core import LoopThread, Scope
from shoal.launch import ray_bridge
from shoal.launch.ray_bridge import ActorLink, ActorPlace, ActorRequest, Bridge, reason_of

LIMIT_S = 10.0


class Method:
    """Of an actor: each call is kept with the future that the test sets."""

    def __init__(self):
        self.calls = []
        self._called = asyncio.Event()

    def remote(self, *arguments):
        future = asyncio.get_running_loop().create_future()
        self.calls.append((arguments, future))
        self._called.set()
        return future

    async def next_call(self):
        """The future of the next call that has no answer yet, which is waited for."""
        while not (waiting := [future for _, future in self.calls if not future.done()]):
            self._called.clear()
            await self._called.wait()
        return waiting[0]

    async def answer(self, value=None, error=None):
        future = await self.next_call()
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class Run:
    """A link that runs, its actor, and the head's end of it."""

    def __init__(self, scope):
        self.read, self.write, self.close, self.last_words = Method(), Method(), Method(), Method()
        self.head, self._end = socket.socketpair()
        self.head.setblocking(False)
        self.link = scope.start(ActorLink(self, self._end).run())

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self.head, data)

    async def receive(self):
        return await asyncio.get_running_loop().sock_recv(self.head, 1 << 20)

    def end(self):
        self.head.close()
        self._end.close()


def play(story):
    """A coroutine that gets a link which runs."""

    async def within_limit():
        async with asyncio.timeout(LIMIT_S), Scope() as scope:
            run = Run(scope)
            try:
                await story(run)
            finally:
                scope.cancel()
        run.end()

    with LoopThread() as loop:
        loop.run(within_limit())


def test_output_of_the_agent_reaches_the_head():
    async def story(run):
        await run.read.answer(b"some")
        assert await run.receive() == b"some"
        await run.read.answer(None)  # nothing came for a while
        await run.read.answer(b"more")
        assert await run.receive() == b"more"
        assert not run.link.done()

    play(story)


def test_input_is_written_piece_by_piece_in_order():
    async def story(run):
        await run.send(b"one")
        await run.write.next_call()
        await run.send(b"two")
        await asyncio.sleep(0.05)
        assert [arguments for arguments, _ in run.write.calls] == [(b"one",)]
        await run.write.answer()
        await run.write.answer()
        assert [arguments for arguments, _ in run.write.calls] == [(b"one",), (b"two",)]

    play(story)


def test_a_head_that_closes_ends_the_agent():
    async def story(run):
        run.head.close()
        await run.close.answer()
        await run.read.answer(b"")
        await run.last_words.answer((0, ""))
        assert await run.link == ""

    play(story)


def test_an_agent_that_fails_is_named_with_its_last_words():
    async def story(run):
        await run.read.answer(b"")
        await run.last_words.answer((1, "No module named shoal"))
        why_lost = await run.link
        assert "exit code 1" in why_lost
        assert "No module named shoal" in why_lost

    play(story)


def test_a_silent_actor_that_the_head_has_given_up_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ray_bridge, "ENDING_S", 0.0)

    async def story(run):
        await run.send(b"a beat")
        run.head.close()
        assert await run.link == ""
        assert len(run.close.calls) == 0

    play(story)


@pytest.mark.parametrize("method", ["read", "write"])
def test_an_actor_that_dies_is_lost_at_once(method):
    async def story(run):
        await run.send(b"x")
        await getattr(run, method).answer(error=RuntimeError("\nThe actor died.\nMany lines follow."))
        assert await run.link == "The actor died"

    play(story)


def test_a_head_that_does_not_read_stops_the_reading():
    async def story(run):
        piece, num_read = bytes(1 << 16), 0
        try:
            async with asyncio.timeout(0.5):
                while True:
                    await run.read.answer(piece)
                    num_read += 1
        except TimeoutError:
            pass
        assert 0 < num_read < 60
        num_bytes = 0
        while num_bytes < num_read * len(piece):
            num_bytes += len(await run.receive())
        await run.read.answer(None)

    play(story)


def test_the_reason_is_found_among_many_lines():
    error = RuntimeError(
        "The actor died.\n\tpid: 1\nThe actor is dead because its node has died. Worker exit type: X"
    )
    assert reason_of(error) == "The actor is dead because its node has died"
    assert reason_of(RuntimeError()) == "RuntimeError"


class FakeRay:
    """Starts actors when the test says so; `killed` are those that are not wanted any more."""

    def __init__(self):
        self.actors, self.killed, self.reports = [], [], []
        self._happened = asyncio.Event()

    def remote(self, kind=None):
        if kind is not None:
            return self
        actor = SimpleNamespace(
            **{name: Method() for name in ("where", "start", "read", "write", "close", "last_words")}
        )
        self._note(self.actors, actor)
        return actor

    def options(self, **options):
        return self

    def kill(self, actor):
        self._note(self.killed, actor)

    def report(self, report):
        self._note(self.reports, report)

    def _note(self, where, what):
        where.append(what)
        self._happened.set()

    async def wait_for(self, noted):
        while not noted:
            self._happened.clear()
            await self._happened.wait()


def play_more(story):
    """A coroutine that gets a bridge whose only actor has gone, and a way to ask for another one."""

    async def within_limit():
        ray = FakeRay()
        bridge = Bridge(ray, ActorRequest("", 1.0, 1.0, num_workers=1), ray.report)
        bridge._group = SimpleNamespace(bundle_count=0)  # without one Ray need not be there
        asking, asked = socket.socketpair()
        head, theirs = socket.socketpair()
        head.setblocking(False)
        with asking, asked, head, theirs:
            socket.send_fds(asking, [b"\0"], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(LIMIT_S), Scope() as scope:
                scope.start(bridge._copy([], [], [], asked))
                await ray.wait_for(ray.actors)
                await story(ray, head)
                scope.cancel()

    with LoopThread() as loop:
        loop.run(within_limit())


def test_another_actor_is_told_where_it_is_before_its_words_come():
    async def story(ray, head):
        (actor,) = ray.actors
        place = ActorPlace("node", "10.0.0.1", "one", ("3",))
        await actor.where.answer(place)
        await actor.start.answer()
        assert actor.start.calls[0][0] == (place, {"CUDA_VISIBLE_DEVICES": "3"})
        await actor.read.answer(b"hello")
        assert await asyncio.get_running_loop().sock_recv(head, 9) == b"hello"
        assert not ray.killed
        await actor.read.answer(error=RuntimeError("the actor died"))
        await ray.wait_for(ray.reports)
        assert [report.lost for report in ray.reports] == [
            (0, "the actor died", "one (Ray node node at 10.0.0.1)")
        ]

    play_more(story)


def test_an_actor_without_room_is_not_waited_for_when_the_head_gives_it_up():
    async def story(ray, head):
        await ray.actors[0].where.next_call()
        head.close()
        await ray.wait_for(ray.killed)
        assert ray.killed == ray.actors
        assert not ray.reports

    play_more(story)


def test_another_actor_that_cannot_start_is_lost_with_the_reason():
    async def story(ray, head):
        await ray.actors[0].where.answer(error=RuntimeError("no Shoal there"))
        await ray.wait_for(ray.reports)
        assert [report.lost for report in ray.reports] == [(0, "no Shoal there", "")]

    play_more(story)
