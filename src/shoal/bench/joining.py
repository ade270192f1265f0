"""What `shoal doctor --join` does on the network: call a peer both ways, and have it call back.

It gathers facts and judges nothing; what they mean is `advice`'s. Every step has its limit, so that the whole
takes no longer than about 15 s with the usual patience.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import msgspec

from shoal.bench.facts import Facts, Out
from shoal.bench.looking import look
from shoal.core import Address, Deadline, PeerId, ShoalError, UsageError, fanout
from shoal.transport import introductions
from shoal.transport.endpoint import Endpoint
from shoal.transport.introductions import (
    DIAL_BACK,
    WAYS,
    DialBack,
    DialedBack,
    Way,
    ask_about,
    outcome_of,
    read_answer,
)
from shoal.transport.network.sockets import Network, SocketNetwork
from shoal.transport.trust.membership import Membership, is_loopback

PATIENCE_S = 4.0
_MARGIN_S = 1.0  # for an answer to come back that took its whole time
_LOOK_SHARE = 0.375  # of the patience, for each of the two steps of a closer look
_MIN_LOOK_S = 0.5  # a handshake takes its time on a busy machine, however impatient the caller
_NUM_ROUND_TRIPS = 3


class Member(msgspec.Struct, frozen=True):
    """Who this peer is: a member of a swarm, or just somebody with an id."""

    peer_id: PeerId | None = None
    membership: Membership | None = None
    is_insecure: bool = False


def new_endpoint(member: Member, network: Network | None = None) -> Endpoint:
    """An endpoint of this peer, to be opened."""
    return Endpoint(
        peer_id=member.peer_id,
        membership=member.membership,
        is_insecure=member.is_insecure,
        network=network,
    )


async def join(
    target: Address,
    member: Member,
    listen: Address | None = None,
    *,
    network: Network | None = None,
    patience_s: float = PATIENCE_S,
) -> Facts:
    """Call the peer at `target` over TCP and UDP, ask it to dial back, and say what happened."""
    network = network or SocketNetwork()
    usual = await _where_to_listen(target, member, network, patience_s / 2)
    async with new_endpoint(member, network) as endpoint:
        listens = await endpoint.listen(listen or usual)
        out = await fanout(
            [_call(endpoint, way, target, patience_s) for way in WAYS], Deadline.after(patience_s + _MARGIN_S)
        )
        tcp, udp = (_failed(each) if isinstance(each, Exception) else each for each in out)
        facts = Facts(
            target=target,
            listens=listens,
            has_secret=member.membership is not None,
            tcp=tcp,
            udp=udp,
            port_to_open=(listen.port if listen else 0) or target.port,
            wall_s=network.clock.wall_s(),
            patience_s=patience_s,
        )
        if tcp.outcome != "ok":
            secret = member.membership.secret if member.membership else None
            look_s = max(patience_s * _LOOK_SHARE, _MIN_LOOK_S)
            seen = await look(network, target, secret, patience_s=look_s)
            facts = msgspec.structs.replace(facts, look=seen)
        return await _dialed_back(endpoint, facts)


async def _where_to_listen(target: Address, member: Member, network: Network, patience_s: float) -> Address:
    """All addresses of the target's kind where that is allowed, else those of this machine alone."""
    host = target.host
    try:
        async with asyncio.timeout(patience_s):
            host = (await network.resolve(target))[0]
    except (OSError, ValueError):
        pass  # dialing it will tell
    is_v6 = ":" in host
    is_allowed = member.membership is not None or member.is_insecure
    if is_loopback(host) or not is_allowed:
        return Address("::1" if is_v6 else "127.0.0.1", 0)
    return Address("::" if is_v6 else "0.0.0.0", 0)


async def _call(endpoint: Endpoint, way: Way, target: Address, patience_s: float) -> Out:
    """Ask who is there, once to make a connection, then to measure: the quickest counts."""
    transport = endpoint.streams if way == "tcp" else endpoint.datagrams
    clock = endpoint.network.clock
    deadline = Deadline.after(patience_s)
    best: Out | None = None
    try:
        await ask_about(transport, target, way, deadline)
        for _ in range(_NUM_ROUND_TRIPS):
            began_s, began_wall_s = clock.now_s(), clock.wall_s()
            about = await ask_about(transport, target, way, deadline)
            took_s = clock.now_s() - began_s
            if best is None or took_s < best.round_trip_s:
                best = Out("ok", "", about, took_s, about.wall_s - (began_wall_s + took_s / 2))
    except ShoalError as error:
        return best or _failed(error)
    assert best is not None
    return best


def _failed(error: Exception) -> Out:
    return Out(outcome_of(error), failure_text(error))


def failure_text(error: Exception) -> str:
    """An error in one line, without the advice in it."""
    if not isinstance(error, ShoalError):
        return " ".join(f"{type(error).__name__}: {error}".split())
    return f"{error.what} Likely cause: {error.cause}" if error.cause else error.what


async def _dialed_back(endpoint: Endpoint, facts: Facts) -> Facts:
    """The same facts, with what the peer found when it dialed back."""
    about = facts.about
    if about is None:
        return facts
    transport = endpoint.streams if facts.tcp.outcome == "ok" else endpoint.datagrams
    wish = DialBack(facts.listens.port, WAYS, facts.patience_s)
    if (host := _host(about.seen_as)) is not None:
        is_own = await _is_own(endpoint.network, host)
        facts = msgspec.structs.replace(
            facts, seen_as=Address(host, facts.listens.port), is_own_address=is_own
        )
    try:
        reply = await transport.call(
            facts.target, DIAL_BACK, wish, deadline=Deadline.after(facts.patience_s + _MARGIN_S)
        )
        told = read_answer(reply, DialedBack, DIAL_BACK)
    except ShoalError as error:
        return msgspec.structs.replace(facts, dial_back_error=failure_text(error))
    return msgspec.structs.replace(facts, attempts=told.attempts)


def _host(text: str) -> str | None:
    try:
        return Address.parse(text).host
    except UsageError:
        return None


async def _is_own(network: Network, host: str) -> bool:
    """Whether an address is this machine's: one can only bind to one's own."""
    try:
        carrier = await network.open_datagrams(Address(host, 0), asyncio.DatagramProtocol())
    except (ShoalError, OSError):
        return False
    carrier.close()
    return True


async def serve(
    address: Address,
    member: Member,
    *,
    on_ready: Callable[[Address], None],
    on_caller: Callable[[str], None],
    network: Network | None = None,
) -> None:
    """Be a peer that `join` can be pointed at, until cancelled; `on_caller` gets a line for each question."""
    with _heard_by(on_caller):
        async with new_endpoint(member, network) as endpoint:
            on_ready(await endpoint.listen(address))
            await asyncio.Event().wait()


@contextlib.contextmanager
def _heard_by(on_line: Callable[[str], None]) -> Iterator[None]:
    """Pass on what introductions log, and have it nowhere else."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_line(record.getMessage())

    log, handler = introductions.log, Listening(logging.INFO)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before
