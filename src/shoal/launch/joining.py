"""`shoal run --join`: a machine that comes to an elastic run by itself, and the port where that run waits.

The joining process is an agent like those that ssh starts. What it and the head say to each other goes
through a channel of the transport: only who has the secret of the run's port can open one, and it is
encrypted. Each end copies bytes between the channel and a socket that the head, or the agent, polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.core import Address, Deadline, LoopThread, Scope
from shoal.core.errors import PeerError, PeerUnreachable, ShoalError, UsageError
from shoal.core.identity import Identity, new_secret
from shoal.core.processes import address_towards
from shoal.core.untrusted import visible
from shoal.launch.agent import Agent, introduce
from shoal.launch.head import AgentHandle
from shoal.launch.protocol import DescriptorChannel
from shoal.transport import Channel, Head, Membership, StreamTransport, SwarmSecret

METHOD = "launch.join"
_READ_BYTES = 1 << 16
_OPEN_S = 15.0
_CLOSE_S = 5.0
_MAX_NAME = 60
_MAX_SLOTS = 4096


class MachineOffer(msgspec.Struct, frozen=True):
    """What a machine says of itself when it comes."""

    host: str
    slots: int
    cwd: str


class JoinPort:
    """The port of an elastic run's launcher where other machines join; opened and asked by its thread.

    Without a secret of the user's it has one of its own, and only this machine reaches it.
    """

    def __init__(self, secret: SwarmSecret | None = None, port: int = 0) -> None:
        self.secret_text = "" if secret is not None else new_secret()
        """The secret, where it was made here."""
        self._secret = SwarmSecret.parse(self.secret_text) if secret is None else secret
        self._wanted = Address("127.0.0.1" if secret is None else "0.0.0.0", port)
        self._arrivals: queue.SimpleQueue[AgentHandle] = queue.SimpleQueue()
        self._num_arrivals = 0
        self._stack = contextlib.ExitStack()

    def open(self) -> Address:
        """Listen; return where. UsageError when the port is taken."""
        with contextlib.ExitStack() as stack:
            loop = stack.enter_context(LoopThread("shoal-join"))
            transport = StreamTransport(membership=Membership(Identity.generate(), self._secret))
            transport.handle_channel(METHOD, self._serve, payload_type=MachineOffer)
            loop.run(transport.__aenter__(), Deadline.after(_OPEN_S))
            stack.callback(lambda: loop.run(transport.__aexit__(None, None, None), Deadline.after(_CLOSE_S)))
            try:
                address = loop.run(transport.listen(self._wanted), Deadline.after(_OPEN_S))
            except OSError as error:
                raise UsageError(
                    f"Other machines cannot join at {self._wanted}: {error.strerror or error}.",
                    next_step="give another --elastic-port, or 0 for any.",
                ) from None
            self._stack = stack.pop_all()
        return address

    def take(self) -> Iterator[AgentHandle]:
        """Yield the agents of machines that have come since; they have not said hello yet."""
        while not self._arrivals.empty():
            yield self._arrivals.get()

    def close(self) -> None:
        """Listen no more; idempotent."""
        with contextlib.suppress(ShoalError):
            self._stack.close()

    async def _serve(self, head: Head, channel: Channel) -> None:
        """Stand between the launcher and a machine that has come; `head` is that of its message."""
        request: MachineOffer = head.payload
        ours, theirs = socket.socketpair()
        self._num_arrivals += 1
        name = visible(request.host[:_MAX_NAME]) or head.peer.address.host
        agent = AgentHandle(
            DescriptorChannel(name, ours.fileno(), ours.fileno(), _explain_loss, ours.close),
            slots=max(1, min(request.slots, _MAX_SLOTS)),
            machine=f"{name} that has joined as number {self._num_arrivals}",
            cwd=request.cwd,
            has_joined=True,
        )
        self._arrivals.put(agent)
        with theirs, contextlib.suppress(PeerError):
            await _copy(channel, theirs)


def _explain_loss(host: str) -> ShoalError:
    return PeerUnreachable(
        "it has left, or cannot be reached any more.",
        peer=host,
        next_step="start `shoal run --join` there again.",
    )


async def _copy(channel: Channel, end: socket.socket) -> None:
    """Copy bytes between a channel and a socket until both ways have ended."""
    end.setblocking(False)
    loop = asyncio.get_running_loop()

    async def to_channel() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(end, _READ_BYTES):
                await channel.send(None, [data])
        await channel.end()

    async def to_socket() -> None:
        with contextlib.suppress(OSError):
            while (item := await channel.receive()) is not None:
                for data in item.buffers:
                    await loop.sock_sendall(end, data)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)

    async with Scope("the way of a machine that joins") as scope:
        scope.start(to_channel())
        scope.start(to_socket())


def join_run(address: Address, secret: SwarmSecret, num_slots: int) -> None:
    """Be the agent of this machine in the run at that address, until the run or this machine ends it.

    PeerUnreachable or PeerRefused when the launcher does not take it in.
    """
    ours, theirs = socket.socketpair()
    request = MachineOffer(socket.gethostname(), num_slots, str(Path.cwd()))

    async def converse() -> None:
        with theirs:
            async with (
                StreamTransport(membership=Membership(Identity.generate(), secret)) as transport,
                transport.open_channel(address, METHOD, request, deadline=Deadline.never()) as channel,
            ):
                await _copy(channel, theirs)

    with LoopThread("shoal-join") as loop, ours:
        conversation = loop.submit(converse())
        hello = introduce(reached_at=address_towards(address.host, address.port), head_address=address.host)
        Agent(ours.fileno(), ours.fileno(), hello, is_guest=True).run()
        ours.close()
        with contextlib.suppress(TimeoutError):
            conversation.result(_CLOSE_S)
