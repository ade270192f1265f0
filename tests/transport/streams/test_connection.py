"""One connection on a transport that the test moves by hand: every stage of a call, and peers that lie."""

import asyncio
import gc
import socket
import weakref
from typing import Any

import msgspec
import pytest

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    ProtocolError,
    RemoteFailure,
    Scope,
    UsageError,
    fork,
)
from shoal.transport.frames import ErrorHead, FrameKind, GoodbyeHead, Mode, encode, frame
from shoal.transport.limits import Limits
from shoal.transport.messages import Reply
from shoal.transport.streams.calls import ConnectionRetired
from shoal.transport.streams.connection import Connection
from transport.wire import (
    FakeHost,
    FakeTransport,
    chunk,
    fake_connection,
    feed,
    header,
    hello,
    message,
    request,
    turn,
    until,
)

MIB = 1 << 20
NEVER = Deadline.never()


def begin(connection, method="echo", payload=None, buffers=(), into=None, mode=Mode.CALL, deadline=NEVER):
    assert connection.calling.slots.try_take() or not connection.is_usable
    return connection.calling.begin(method, payload, buffers, deadline, into, mode)


def errors(transport):
    return [
        msgspec.msgpack.decode(head, type=ErrorHead)
        for kind, _, head, _ in transport.frames()
        if kind is FrameKind.ERROR
    ]


# --- greeting ---


def test_both_sides_greet_first(run):
    async def check():
        host = FakeHost(peer_id=PeerId(bytes(20)))
        async with Scope("test") as scope:
            connection = Connection(host, scope, Peer.at("10.0.0.7:7"), is_dialer=True)
            transport = FakeTransport(connection)
            connection.connection_made(transport)
            await turn()
            assert transport.kinds() == [FrameKind.HELLO]
            assert not connection.is_usable
            feed(connection, hello(bytes(range(20))))
            assert connection.is_usable
            assert connection.peer.id == PeerId(bytes(range(20)))
            await connection.ready
            connection.connection_lost(None)

    run(check())


BEFORE_HELLO = {
    "request": request(1, "echo"),
    "chunk": chunk(1, b"abc"),
    "cancel": frame(FrameKind.CANCEL, 1),
    "id": hello(b"short"),
    "head": header(FrameKind.HELLO, head_bytes=5000),
}


@pytest.mark.parametrize("name", BEFORE_HELLO)
def test_whoever_does_not_greet_is_cut_off(run, name):
    async def check():
        host = FakeHost()
        async with fake_connection(host, greet=False) as (connection, transport):
            feed(connection, BEFORE_HELLO[name])
            assert transport.is_closed
            assert transport.kinds() == [FrameKind.GOODBYE]
            assert len(host.complaints) == 1
            feed(connection, b"more of it" * 1000)  # what was on its way is swallowed
            assert len(host.complaints) == 1

    run(check())


def test_the_wrong_peer_is_left_and_that_is_the_reason(run):
    async def check():
        expected = Peer(Address("10.0.0.7", 7), PeerId(bytes(20)))
        async with fake_connection(greet=False, is_dialer=True, peer=expected) as (connection, transport):
            feed(connection, hello(bytes(range(20))) + request(2, "echo"))
            assert transport.is_closed
            connection.connection_lost(None)
            with pytest.raises(PeerRefused, match=r"is 00010203, not 00000000"):
                await connection.ready

    run(check())


def test_an_end_before_the_beginning(run):
    async def check():
        async with Scope("test") as scope:
            host = FakeHost()
            connection = Connection(host, scope, Peer.at("10.0.0.7:7"), is_dialer=True)
            connection.connection_lost(None)
            assert host.lost == [connection]
            unwanted = Connection(host, scope, Peer.at("10.0.0.7:7"), is_dialer=False)
            unwanted.abort()
            transport = FakeTransport(unwanted)
            transport.write = lambda data: None
            unwanted.connection_made(transport)
            assert transport.is_aborted
            unwanted.connection_lost(None)

    run(check())


def test_one_that_ended_before_it_began_keeps_no_descriptor(run, monkeypatch):
    monkeypatch.setattr(fork, "_descriptors", {})

    async def check():
        async with Scope() as scope:
            connection = Connection(FakeHost(), scope, Peer(Address("127.0.0.1", 1)), is_dialer=True)
            connection.connection_lost(None)
            ours, theirs = socket.socketpair()
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
            connection.abort()
            theirs.close()
            await until(lambda: connection._transport._socket.fileno() < 0)
            assert fork._descriptors == {}

    run(check())


def test_a_lost_connection_keeps_no_memory(run):
    async def check():
        async with fake_connection() as (connection, _):
            feed(connection, request(1, "x" * 200))
            connection.connection_lost(None)
            assert len(connection._decoder._scratch) < 100
            assert len(connection.arrivals) == 0

    run(check())


# --- calls that end early, seen from the caller ---


def test_an_error_in_the_middle_of_an_answer_frees_the_memory_it_went_into(run):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, _):
            into = bytearray(MIB)
            call = begin(connection, into=[into])
            feed(connection, message(FrameKind.REPLY, call.id, sizes=[MIB]) + chunk(call.id, b"x" * 1000))
            feed(connection, frame(FrameKind.ERROR, call.id, encode(["deadline", "too late", "", ""])))
            with pytest.raises(DeadlineExceeded, match="too late"):
                await call.answer
            connection.calling.end(call)
            assert len(connection.arrivals) == 0
            feed(connection, chunk(call.id, b"y" * 1000))
            assert b"y" not in into
            assert not connection._decoder.expects_chunk

    run(check())


def test_a_second_answer_does_not_reach_memory_that_was_given_back(run):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, transport):
            into = bytearray(MIB)
            call = begin(connection, into=[into])
            feed(connection, message(FrameKind.REPLY, call.id, sizes=[MIB]) + chunk(call.id, b"x" * 1000))
            call.into = [bytearray(3)]
            feed(connection, message(FrameKind.REPLY, call.id, sizes=[3], body=b"abc"))
            assert transport.is_closed
            connection.connection_lost(None)
            with pytest.raises(PeerLost):
                await call.answer
            connection.calling.end(call)

    run(check())


@pytest.mark.parametrize("ending", ["error", "reply"])
def test_an_answer_before_the_request_was_granted_lets_its_buffers_go(run, ending):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, transport):
            call = begin(connection, buffers=[bytes(9 * MIB)])
            await turn(30)
            assert connection.outbox.body_of(call.id) is not None  # it waits for its grant
            if ending == "error":
                feed(connection, frame(FrameKind.ERROR, call.id, encode(["refused", "no", "", ""])))
                with pytest.raises(PeerRefused):
                    await call.answer
            else:
                feed(connection, message(FrameKind.REPLY, call.id, 7))
                assert (await call.answer).payload == 7
            connection.calling.end(call)
            assert connection.outbox.body_of(call.id) is None
            before = len(transport.frames())
            feed(connection, frame(FrameKind.GRANT, call.id, encode([True])))
            await turn(30)
            assert len(transport.frames()) == before

    run(check())


@pytest.mark.parametrize("buffers", [(), [b""]])
def test_a_grant_for_a_call_without_buffers_is_ignored(run, buffers):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, _):
            call = begin(connection, buffers=buffers)
            feed(connection, frame(FrameKind.GRANT, call.id, encode([True])) * 3)
            assert connection.outbox.body_of(call.id) is None
            connection.calling.end(call)

    run(check())


def test_cancelling_at_every_stage_leaves_nothing(run):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, transport):
            into = bytearray(MIB)
            stages = [
                lambda call: None,
                lambda call: feed(connection, frame(FrameKind.GRANT, call.id, encode([False]))),
                lambda call: feed(connection, frame(FrameKind.GRANT, call.id, encode([True]))),
                lambda call: feed(connection, message(FrameKind.REPLY, call.id, sizes=[MIB])),
                lambda call: feed(
                    connection,
                    message(FrameKind.REPLY, call.id, sizes=[MIB])
                    + header(FrameKind.CHUNK, 0, call.id, MIB)
                    + b"x" * 10,
                ),
            ]
            for stage in stages:
                call = begin(connection, buffers=[bytes(9 * MIB)], into=[into])
                await turn(5)
                stage(call)
                connection.calling.end(call)
                before = bytes(into)
                if stage is stages[-1]:
                    feed(connection, b"y" * (MIB - 10))  # the rest of the chunk
                assert bytes(into) == before
                await turn(5)
                assert len(connection.arrivals) == 0
                assert connection.outbox.body_of(call.id) is None
                assert transport.kinds()[-1] is FrameKind.CANCEL
            assert connection.num_open == 0

    run(check())


def test_the_answer_of_a_peer_that_lies(run):
    async def check():
        lies = {
            "negative": ([-5], ProtocolError),
            "huge": ([10**10], LimitExceeded),
            "many": ([0] * 20_000, LimitExceeded),
            "overflowing": ([2**63, 2**63], LimitExceeded),
        }
        for sizes, error in lies.values():
            async with fake_connection(is_dialer=True) as (connection, transport):
                call = begin(connection)
                feed(connection, message(FrameKind.REPLY, call.id, sizes=sizes))
                with pytest.raises(error):
                    await call.answer
                connection.calling.end(call)
                assert not transport.is_closed
        async with fake_connection(is_dialer=True) as (connection, transport):
            call = begin(connection)
            feed(
                connection, frame(FrameKind.REPLY, call.id, b"\x92\x90\xa2\xff\xff")
            )  # a payload that is not UTF-8
            with pytest.raises(ProtocolError, match="cannot be read"):
                await call.answer
            connection.calling.end(call)

    run(check())


def test_a_peer_that_reads_nothing_is_asked_no_more(run):
    async def check():
        host = FakeHost(Limits(max_calls=10))
        async with fake_connection(host, is_dialer=True) as (connection, transport):
            transport.is_stuck = True
            with pytest.raises(PeerBusy, match="does not read"):  # noqa: PT012 - one of them, sooner or later
                for _ in range(1000):  # each of them gives up at once, as with a short deadline
                    connection.calling.end(begin(connection, buffers=[bytes(30_000)]))
                    await turn(1)
            assert connection.outbox.waiting_bytes < 2 * connection.max_waiting_bytes

    run(check())


# --- waiting for a place ---


def test_a_slot_that_is_not_used_goes_to_the_next(run):
    async def check():
        host = FakeHost(Limits(max_calls=1))
        async with fake_connection(host, is_dialer=True) as (connection, _):
            calling = connection.calling
            assert calling.slots.try_take()
            first = calling.begin("echo", None, (), NEVER, None, Mode.CALL)
            waiting = [asyncio.ensure_future(calling.wait_for_slot("echo", NEVER)) for _ in range(3)]
            await turn()
            calling.end(first)
            waiting[0].cancel()  # it had been given the slot
            await turn()
            assert [waiter.done() for waiter in waiting] == [True, True, False]
            with pytest.raises(UsageError):
                calling.begin("echo", object(), (), NEVER, None, Mode.CALL)
            await turn()
            assert waiting[2].done()
            calling.end(calling.begin("echo", None, (), NEVER, None, Mode.CALL))
            assert calling.slots.try_take()
            assert not calling.slots.try_take()
            await asyncio.gather(*waiting, return_exceptions=True)

    run(check())


def test_the_deadline_while_waiting_for_a_place(run):
    async def check():
        host = FakeHost(Limits(max_calls=1))
        async with fake_connection(host, is_dialer=True) as (connection, _):
            first = begin(connection)
            with pytest.raises(DeadlineExceeded, match=r"(?s)could not be sent.*1 calls"):
                await connection.calling.wait_for_slot("echo", Deadline.after(0.02))
            connection.calling.end(first)
            assert connection.calling.slots.try_take()

    run(check())


def test_those_who_wait_for_a_place_learn_of_the_end(run):
    async def check():
        host = FakeHost(Limits(max_calls=1))
        async with fake_connection(host, is_dialer=True) as (connection, _):
            calling, first = connection.calling, begin(connection)

            async def ask():
                await calling.wait_for_slot("echo", NEVER)
                calling.begin("echo", None, (), NEVER, None, Mode.CALL)

            waiting = [asyncio.ensure_future(ask()) for _ in range(3)]
            await turn()
            waiting[1].cancel()
            connection.connection_lost(None)
            outcomes = await asyncio.gather(*waiting, first.answer, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [
                PeerLost,
                asyncio.CancelledError,
                PeerLost,
                PeerLost,
            ]

    run(check())


# --- calls that are served ---


def with_handlers(limits=None, **handlers):
    host = FakeHost(limits)
    for name, serve in handlers.items():
        host.routes.add(name, serve, None, Any)
    return host


@pytest.mark.parametrize("name", ["plain", "later"])
def test_handlers_that_return_nonsense_fail_alone(run, name, caplog):
    async def check():
        answers = iter(
            [
                {"a": 1},
                7,
                Reply(object()),
                Reply(None, [7]),
                Reply("x" * 2_000_000),
                Reply("\ud800"),
                Reply("fine"),
            ]
        )

        def plain(head, buffers):
            return next(answers)

        async def later(head, buffers):
            return next(answers)

        async with fake_connection(with_handlers(plain=plain, later=later)) as (connection, transport):
            for number in range(7):
                feed(connection, request(2 * number + 1, name))
                await turn()
            assert transport.kinds() == [FrameKind.ERROR] * 6 + [FrameKind.REPLY]
            assert connection.num_open == 0

    run(check())


def test_a_plain_function_that_returns_a_coroutine_is_told_so(run, caplog):
    async def check():
        async def later():
            pass

        host = with_handlers(plain=lambda head, buffers: later())
        async with fake_connection(host) as (connection, transport):
            feed(connection, request(1, "plain"))
            await turn()
            assert "async def" in errors(transport)[0].what

    run(check())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_on_sent_is_called_once_whatever_happens(run, is_async, size, caplog):
    async def check():
        calls = []

        def on_sent():
            calls.append(1)
            raise RuntimeError("an owner's own mistake")

        payloads = iter(["fine", object(), "fine"])

        def plain(head, buffers):
            return Reply(next(payloads), [bytes(size)], on_sent)

        async def later(head, buffers):
            return plain(head, buffers)

        async with fake_connection(with_handlers(serve=later if is_async else plain)) as (
            connection,
            transport,
        ):
            for number in range(3):
                transport.is_stuck = number == 2
                feed(connection, request(2 * number + 1, "serve"))
                await turn(5)
            connection.connection_lost(None)
            assert calls == [1, 1, 1]
            assert connection.num_open == 0

    run(check())
    assert "on_sent" in caplog.text


def test_a_handler_cancelled_by_what_it_waited_for_answers_its_caller(run):
    async def check():
        async def serve(head, buffers):
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner

        async with fake_connection(with_handlers(serve=serve)) as (connection, transport):
            feed(connection, request(1, "serve", sizes=[3], body=b"abc"))
            await turn()
            assert [error.code for error in errors(transport)] == ["busy"]
            assert connection.num_open == 0
            assert connection.budget.used_bytes == 0

    run(check())


def test_a_handlers_protocol_error_is_its_callers_affair_alone(run):
    async def check():
        def serve(head, buffers):
            raise ProtocolError("another peer talked nonsense")

        async with fake_connection(with_handlers(serve=serve)) as (connection, transport):
            feed(connection, request(1, "serve"))
            assert not transport.is_closed
            await turn()
            assert "another peer" in errors(transport)[0].what

    run(check())


def test_a_payload_that_cannot_be_read_is_refused(run):
    async def check():
        async with fake_connection(with_handlers(serve=lambda head, buffers: None)) as (
            connection,
            transport,
        ):
            bad = [b"\xa2\xff\xff", b"\x91" * 5000, b"\x81\x80\x00", b"\xc1"]
            for number, payload in enumerate(bad):
                head = b"\x95" + encode("serve") + b"\x00\x00\x90" + payload
                feed(connection, frame(FrameKind.REQUEST, 2 * number + 1, head))
                if transport.is_closed:
                    break
            await turn()
            assert transport.kinds()[0] is FrameKind.ERROR

    run(check())


def test_large_payloads_count_as_bytes_in_flight(run):
    async def check():
        limits = Limits(max_message_bytes=MIB, max_bytes_in_flight=MIB)

        async def sit(head, buffers):
            await asyncio.Event().wait()

        host = with_handlers(limits, sit=sit)
        async with fake_connection(host) as (connection, transport):
            for number in range(10):
                feed(connection, request(2 * number + 1, "sit", "x" * 300_000))
                await turn()
            assert [error.code for error in errors(transport)] == ["busy"] * 7
            assert connection.num_open == 3
            assert 900_000 <= host.budget.used_bytes <= 1_200_000
            feed(connection, frame(FrameKind.CANCEL, 1))
            assert host.budget.used_bytes <= 700_000
        assert host.budget.used_bytes == 0

    run(check())


def test_what_came_along_with_its_request_passes_those_who_wait(run):
    async def check():
        limits = Limits(max_message_bytes=MIB, max_bytes_in_flight=MIB)

        async def serve(head, buffers):
            return Reply(bytes(buffers[0]))

        host = with_handlers(limits, serve=serve)
        async with fake_connection(host) as (connection, transport):
            feed(connection, request(1, "serve", sizes=[MIB]))  # takes all of it and never comes
            feed(connection, request(3, "serve", sizes=[MIB]))  # waits
            feed(connection, request(5, "serve", sizes=[5], body=b"small"))
            await turn(5)
            replies = [
                (call_id, head) for kind, call_id, head, _ in transport.frames() if kind is FrameKind.REPLY
            ]
            assert [call_id for call_id, _ in replies] == [5]
        assert host.budget.used_bytes == 0

    run(check())


def test_a_call_that_waited_for_room_in_a_loop_that_was_closed_gives_it_back(run):
    async def check():
        limits = Limits(max_message_bytes=MIB, max_bytes_in_flight=MIB)
        host = with_handlers(limits, serve=lambda head, buffers: None)
        async with fake_connection(host) as (connection, _):
            assert host.budget.try_take(MIB)
            feed(connection, request(1, "serve", sizes=[MIB]))
            closed = asyncio.new_event_loop()
            closed.close()
            alive, connection.loop = connection.loop, closed
            host.budget.give_back(MIB)
            assert host.budget.used_bytes == 0
            connection.loop = alive
            for call in connection.serving.calls.values():
                call.wanted_bytes = 0
        assert host.budget.used_bytes == 0

    run(check())


def test_an_answer_that_nobody_reads_ends_the_connection_not_the_memory(run):
    async def check():
        host = with_handlers(
            Limits(max_calls=10), echo=lambda head, buffers: Reply(head.payload, [bytes(30_000)])
        )
        async with fake_connection(host) as (connection, transport):
            transport.is_stuck = True
            most = 0
            for number in range(5000):
                feed(connection, request(2 * number + 1, "echo"))
                most = max(most, connection.outbox.waiting_bytes)
                if transport.is_closed:
                    break
                await turn(1)
            assert transport.is_closed
            assert most < 2 * connection.max_waiting_bytes
            assert "does not read" in host.complaints[0].what

    run(check())


# --- channels ---


async def _listen(head, channel):
    items = [item.payload async for item in channel]
    return Reply(items)


def channel_host(limits=None, serve=_listen):
    host = FakeHost(limits)
    host.routes.add_channel("talk", serve, Any)
    return host


def test_an_item_larger_than_the_window_counts_as_bytes_in_flight(run):
    async def check():
        limits = Limits(max_message_bytes=8 * MIB, max_bytes_in_flight=10 * MIB, channel_window_bytes=1 * MIB)
        host = channel_host(limits)
        async with fake_connection(host) as (connection, transport):
            for call_id in (1, 3):
                feed(connection, request(call_id, "talk", mode=Mode.CHANNEL))
                await turn()
                feed(connection, message(FrameKind.ITEM, call_id, sizes=[8 * MIB]))
            await turn()
            assert host.budget.used_bytes > 8 * MIB
            assert host.budget.used_bytes <= 10 * MIB
            assert [error.code for error in errors(transport)] == ["busy"]
            assert len(connection.serving.calls) == 1
            feed(connection, frame(FrameKind.CANCEL, 1))
            await turn()
        assert host.budget.used_bytes == 0

    run(check())


def test_an_item_before_the_window_is_open_is_against_the_protocol(run):
    async def check():
        limits = Limits(max_message_bytes=8 * MIB, max_bytes_in_flight=8 * MIB)
        host = channel_host(limits)
        async with fake_connection(host) as (connection, transport):
            host.budget.try_take(8 * MIB)
            feed(connection, request(1, "talk", mode=Mode.CHANNEL))
            await turn()
            feed(connection, message(FrameKind.ITEM, 1, sizes=[8 * MIB]))
            assert transport.is_closed
        host.budget.give_back(8 * MIB)
        assert host.budget.used_bytes == 0

    run(check())


def test_a_window_wider_than_the_budget_does_not_wait_forever(run):
    async def check():
        limits = Limits(max_message_bytes=MIB, max_bytes_in_flight=MIB, channel_window_bytes=8 * MIB)
        async with fake_connection(channel_host(limits)) as (connection, transport):
            feed(connection, request(1, "talk", mode=Mode.CHANNEL) + frame(FrameKind.END, 1))
            await turn()
            assert FrameKind.WINDOW in transport.kinds()

    run(check())


def test_a_sender_waits_for_the_socket_however_wide_the_window(run):
    async def check():
        sent = []

        async def pour(head, channel):
            for number in range(10_000):
                await channel.send(number, [bytes(1000)])
                sent.append(number)

        async with fake_connection(channel_host(serve=pour)) as (connection, transport):
            transport.is_stuck = True
            feed(connection, request(1, "talk", mode=Mode.CHANNEL))
            feed(connection, frame(FrameKind.WINDOW, 1, encode([2**62])))
            for _ in range(50):
                await turn()
            assert len(sent) < 100
            assert connection.outbox.waiting_bytes < 100_000

    run(check())


@pytest.mark.parametrize("size", [MIB, 8 * MIB], ids=["in the socket", "in part"])
def test_an_item_that_was_cancelled_halfway_ends_its_channel_only(run, size):
    async def check():
        done = asyncio.Event()

        async def hasty(head, channel):
            await channel.receive()
            sending = asyncio.ensure_future(channel.send(1, [bytes(size)]))
            await turn()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            done.set()
            return Reply("all is well")

        async with fake_connection(channel_host(serve=hasty)) as (connection, transport):
            feed(connection, request(1, "talk", mode=Mode.CHANNEL))
            await turn()
            transport.is_stuck = True
            feed(connection, frame(FrameKind.WINDOW, 1, encode([16 * MIB])) + message(FrameKind.ITEM, 1))
            await done.wait()
            await turn()
            transport.drain()
            await turn()
            assert [error.code for error in errors(transport)] == ["refused"]
            assert FrameKind.REPLY not in transport.kinds()
            assert connection.outbox.body_of(1) is None

    run(check())


# --- stalls and idleness ---


def ticking(connection):
    """A clock for `check` that starts now."""
    start_s = connection.loop.time()
    seconds = iter(range(1, 10_000))

    def tick(times=1):
        for _ in range(times):
            connection.check(start_s + next(seconds))

    return tick


def test_a_hello_that_never_comes(run):
    async def check():
        host = FakeHost()
        async with fake_connection(host, greet=False) as (connection, transport):
            tick = ticking(connection)
            tick(9)
            assert not transport.is_closed
            tick(3)
            assert transport.is_closed
            assert "No hello" in host.complaints[0].what

    run(check())


@pytest.mark.parametrize(
    "beginning",
    [
        header(FrameKind.REQUEST, 1000, 1)[:5],
        request(1, "echo")[:-1],
        header(FrameKind.CHUNK, 0, 99, 4 * MIB),
    ],
    ids=["header", "head", "chunk"],
)
def test_a_frame_that_stops_arriving(run, beginning):
    async def check():
        host = FakeHost()
        async with fake_connection(host) as (connection, transport):
            feed(connection, beginning)
            tick = ticking(connection)
            tick(9)
            assert not transport.is_closed
            tick(4)
            assert transport.is_closed
            tick(100)
            assert len(host.complaints) == 1

    run(check())


def test_a_slow_frame_is_not_a_stalled_one(run):
    async def check():
        async with fake_connection() as (connection, transport):
            feed(connection, header(FrameKind.CHUNK, 0, 99, 4 * MIB))
            tick = ticking(connection)
            for _ in range(300):
                feed(connection, bytes(5000))
                tick()
            assert not transport.is_closed

    run(check())


def test_a_chunk_before_the_hello_is_refused(run):
    async def check():
        host = FakeHost(Limits(max_head_bytes=100))  # less than a stranger's head may take
        async with fake_connection(host, greet=False) as (connection, transport):
            feed(connection, chunk(1, b"x"))
            assert transport.is_closed
            assert "before the hello" in host.complaints[0].what

    run(check())


def test_a_frame_that_begins_is_not_the_one_before_it(run):
    async def check():
        async with fake_connection() as (connection, transport):
            tick = ticking(connection)
            for _ in range(20):
                feed(connection, header(FrameKind.CHUNK, 0, 99, 100) + bytes(99))
                tick(6)
                assert not transport.is_closed
                feed(connection, bytes(1))
            feed(connection, header(FrameKind.CHUNK, 0, 99, 100) + bytes(99))
            tick(13)
            assert transport.is_closed

    run(check())


def assert_given_up(connection, transport, host):
    assert not transport.is_closed
    assert connection.num_open == 0
    assert len(connection.arrivals) == 0
    assert host.budget.used_bytes == 0
    assert [error.what for error in errors(transport)] == ["the buffers of this message stopped arriving."]


def test_a_message_that_stops_arriving(run):
    async def check():
        host = with_handlers(serve=lambda head, buffers: None)
        async with fake_connection(host) as (connection, transport):
            feed(connection, request(1, "serve", sizes=[9 * MIB]) + chunk(1, bytes(1000)))
            tick = ticking(connection)
            tick(25)
            assert connection.num_open == 1
            tick(10)
            await turn()
            assert_given_up(connection, transport, host)

    run(check())


def test_a_message_that_trickles(run):
    async def check():
        host = with_handlers(serve=lambda head, buffers: None)
        async with fake_connection(host) as (connection, _):
            feed(connection, request(1, "serve", sizes=[9 * MIB]))
            tick = ticking(connection)
            for _ in range(40):
                feed(connection, chunk(1, b"x") + request(connection.serving.last_call_id + 2, "none"))
                tick()
            await turn()
            assert connection.num_open == 0
            assert host.budget.used_bytes == 0

    run(check())


def test_a_message_that_does_not_come_though_it_was_granted(run):
    async def check():
        limits = Limits(max_message_bytes=MIB, max_bytes_in_flight=MIB)
        host = with_handlers(limits, serve=lambda head, buffers: None)
        async with fake_connection(host) as (connection, transport):
            host.budget.try_take(MIB)
            feed(connection, request(1, "serve", sizes=[MIB]))
            tick = ticking(connection)
            tick(100)
            assert connection.num_open == 1  # this side had no room: not the caller's fault
            host.budget.give_back(MIB)
            await turn()
            assert transport.kinds() == [FrameKind.GRANT]
            tick(40)
            await turn()
            assert_given_up(connection, transport, host)

    run(check())


def test_a_peer_that_does_not_read_is_cut_off(run):
    async def check():
        freed = []
        host = with_handlers(
            serve=lambda head, buffers: Reply(None, [bytes(8 * MIB)], lambda: freed.append(1))
        )
        async with fake_connection(host) as (connection, transport):
            transport.is_stuck = True
            feed(connection, request(1, "serve"))
            await turn()
            tick = ticking(connection)
            tick(25)
            assert not transport.is_closed
            tick(10)
            assert transport.is_aborted
            connection.connection_lost(None)
            assert freed == [1]
            assert [error.what for error in host.complaints] == ["What it was sent stays unread."]

    run(check())


def test_a_peer_that_reads_slowly_is_not(run):
    async def check():
        host = with_handlers(serve=lambda head, buffers: Reply(None, [bytes(MIB)]))
        async with fake_connection(host) as (connection, transport):
            transport.is_stuck = True
            feed(connection, request(1, "serve"))
            await turn()
            tick = ticking(connection)
            for _ in range(100):
                transport.held_bytes -= 5000
                tick()
            assert not transport.is_closed

    run(check())


def test_a_closed_connection_whose_last_bytes_stay_is_aborted(run):
    async def check():
        async with fake_connection() as (connection, transport):
            transport.is_stuck = True
            feed(connection, request(1, "none"))
            await turn()
            connection.leave("enough.")
            assert transport.is_closed
            ticking(connection)(40)
            assert transport.is_aborted

    run(check())


def test_our_own_pause_is_not_the_peers_fault(run):
    async def check():
        host = with_handlers(serve=lambda head, buffers: None)
        async with fake_connection(host) as (connection, transport):
            feed(connection, request(1, "serve", sizes=[9 * MIB]) + header(FrameKind.CHUNK, 0, 1, MIB))
            now_s = connection.loop.time()
            connection.check(now_s)
            connection.check(now_s + 1000)
            assert not transport.is_closed
            assert connection.num_open == 1

    run(check())


@pytest.mark.parametrize(("is_dialer", "idle_s"), [(True, 60), (False, 180)])
def test_an_idle_connection_is_left_and_a_busy_one_is_not(run, is_dialer, idle_s):
    async def check():
        async with fake_connection(is_dialer=is_dialer) as (connection, transport):
            tick = ticking(connection)
            for _ in range(3 * idle_s):  # short calls, over whenever somebody looks
                call = begin(connection)
                feed(connection, message(FrameKind.REPLY, call.id))
                connection.calling.end(call)
                await turn(1)
                tick()
            assert not transport.is_closed
            tick(idle_s - 2)
            assert not transport.is_closed
            tick(4)
            assert transport.is_closed
            assert transport.kinds()[-1] is FrameKind.GOODBYE

    run(check())


# --- goodbye ---


def test_goodbye_names_the_calls_that_were_not_looked_at(run):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, transport):
            old, new = begin(connection), begin(connection)
            feed(
                connection,
                frame(FrameKind.GOODBYE, 0, encode(GoodbyeHead("leaving", "done for today", old.id))),
            )
            assert not connection.is_usable
            assert not transport.is_closed  # the old call may still be answered
            feed(connection, message(FrameKind.REPLY, old.id, "yes"))
            assert (await old.answer).payload == "yes"
            assert isinstance(new.answer.exception(), ConnectionRetired)
            connection.calling.end(old)
            connection.calling.end(new)
            ticking(connection)(1)
            assert transport.is_closed

    run(check())


def test_nothing_is_written_after_the_close(run):
    async def check():
        async def sit(head, buffers):
            await asyncio.Event().wait()

        async with fake_connection(with_handlers(sit=sit)) as (connection, transport):
            feed(connection, request(1, "sit", timeout_ms=20) + request(3, "sit"))
            await turn()
            connection.leave("stopping.")
            connection.close()
            assert transport.is_closed
            await asyncio.sleep(0.05)  # the first call's deadline passes
            feed(connection, frame(FrameKind.CANCEL, 3))
            with pytest.raises(ConnectionRetired):
                begin(connection)
            await turn()
            assert transport.kinds() == [FrameKind.GOODBYE]

    run(check())


def test_calls_name_the_reason_of_the_end(run):
    async def check():
        reasons = {
            "version": (PeerLost, "another version"),
            "busy": (PeerBusy, "takes no connection"),
            "protocol": (PeerLost, "because"),
            "leaving": (PeerLost, "because"),
        }
        for code, (error, text) in reasons.items():
            async with fake_connection(is_dialer=True) as (connection, _):
                call = begin(connection, "fetch")
                feed(connection, frame(FrameKind.GOODBYE, 0, encode(GoodbyeHead(code, "because", 99))))
                connection.connection_lost(ConnectionResetError("reset"))
                with pytest.raises(error, match=rf"fetch at 10\.0\.0\.7:7: .*{text}"):
                    await call.answer
                connection.calling.end(call)

    run(check())


def test_a_remote_failure_is_told(run):
    async def check():
        async with fake_connection(is_dialer=True) as (connection, _):
            call = begin(connection, "fetch")
            feed(
                connection,
                frame(FrameKind.ERROR, call.id, encode(["failed", "ZeroDivisionError: x", "", ""])),
            )
            with pytest.raises(RemoteFailure, match="fetch at"):
                await call.answer
            connection.calling.end(call)

    run(check())


def test_an_ended_connection_can_be_forgotten(run):
    async def check():
        async with fake_connection() as (connection, transport):
            feed(connection, b"not a frame" * 10)
            assert transport.is_closed
            connection.connection_lost(None)
            gone = weakref.ref(connection)
            transport.protocol = None
        del connection
        gc.collect()
        assert gone() is None  # no timer holds it

    run(check())


def test_a_connection_is_looked_after_until_it_is_quiet(run):
    async def check():
        host = FakeHost()
        async with fake_connection(host, is_dialer=True) as (connection, _):
            now_s = connection.loop.time()
            assert host.watched
            assert connection.check(now_s)
            assert not connection.is_watched
            host.watched.clear()
            call = begin(connection, payload=1)
            assert host.watched == [connection]
            assert not connection.check(now_s + 1)
            connection.calling.end(call)
            assert connection.check(now_s + 2)
            feed(connection, header(FrameKind.REPLY, 5)[:-1])
            assert connection.is_watched
            assert not connection.check(now_s + 3)

    run(check())
