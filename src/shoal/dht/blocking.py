"""The DHT for blocking code, scripts and notebooks: the same methods on a loop thread, waited for.

Everything happens in `DHT`; this file only crosses to its loop and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from shoal.core import Address, BlockingBridge, LoopThread, Peer, PeerId, UsageError
from shoal.core.identity import Identity
from shoal.core.turns import LoopInTurns
from shoal.dht.node import DHT
from shoal.dht.records import Schema
from shoal.dht.settings import DHTSettings
from shoal.transport.relay import DEFAULT_LIMITS, RelayLimits
from shoal.transport.trust.membership import Membership
from shoal.transport.trust.secret import SwarmSecret

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    method: Callable[Concatenate[DHT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Swarm, P], T]:
    """A method of `DHT` as one of `Swarm`: it runs on the DHT's loop, and its result is waited for."""

    @functools.wraps(method)
    def wait(swarm: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return swarm.run(method(swarm.dht, *args, **kwargs))

    return wait


class Swarm(BlockingBridge):
    """A swarm as one of its peers sees it; for any thread but the loop's own. Made by `connect`.

    Open it with `with`, or by `open` and `close`. Its methods are those of `DHT`, which says what they mean.
    """

    _what = "swarm"
    _how = "'with shoal.connect(...)'"

    def __init__(
        self,
        opening: AbstractAsyncContextManager[DHT],
        loop: LoopThread | LoopInTurns | None = None,
        make_listening: Callable[[], AbstractAsyncContextManager[DHT]] | None = None,
    ) -> None:
        super().__init__()
        self._opening = opening
        self._make_listening = make_listening
        self._given_loop = loop
        self._dht: DHT | None = None

    def _begin(self, closing: ExitStack) -> Callable[..., Any]:
        loop = self._given_loop or closing.enter_context(LoopThread("shoal-dht"))
        self._dht = loop.run(self._opening.__aenter__())
        closing.callback(lambda: loop.run(_leave(self._opening)))
        closing.callback(setattr, self, "_dht", None)
        return loop.run

    @property
    def is_open(self) -> bool:
        """Whether it has been opened, and not been closed since."""
        return self._dht is not None

    def listen_too(self) -> None:
        """Has a peer that was to be a client listen when it opens, at any free port; one that is open stays
        what it is.
        """
        if not self.is_open and self._make_listening is not None:
            self._opening, self._make_listening = self._make_listening(), None

    @property
    def dht(self) -> DHT:
        """The peer itself, for code on its loop: `swarm.run(declare_experts(swarm.dht, ...))`."""
        if self._dht is None:
            raise self._not_open()
        return self._dht

    @property
    def peer_id(self) -> PeerId:
        """The id that other peers know this one by."""
        return self.dht.peer_id

    @property
    def address(self) -> Address | None:
        """Where others can call it, a client through its first relay; None for a client without."""
        return next(iter(self.dht.addresses), None)

    def in_s(self, seconds: float) -> float:
        """The wall time so long from now, as expirations are given."""
        return self.dht.in_s(seconds)

    store = _waiting(DHT.store)
    store_many = _waiting(DHT.store_many)
    get = _waiting(DHT.get)
    get_many = _waiting(DHT.get_many)
    ping = _waiting(DHT.ping)
    use_relays = _waiting(DHT.use_relays)

    def add_schema(self, schema: Schema) -> None:
        """Refuse, from now on, what does not fit this schema under its prefix."""
        self.run(_add_schema(self.dht, schema))

    def find_peer(self, peer_id: PeerId) -> Peer | None:
        """Where a peer is, or None when nobody knows."""
        return self.run(self.dht.find_peer(peer_id))

    def peers(self) -> list[Peer]:
        """Those of the swarm that this peer has met and still remembers: a sample of a large swarm."""
        return self.run(_peers(self.dht))


def connect(
    *join: Address | str,
    listen: Address | str | None = None,
    secret: SwarmSecret | Path | None = None,
    secret_file: Path | str | None = None,
    identity: Identity | None = None,
    settings: DHTSettings | None = None,
    loop: LoopThread | None = None,
    relaying: RelayLimits | None = DEFAULT_LIMITS,
) -> Swarm:
    """A swarm to be opened: `with shoal.connect("10.0.0.7:31337") as swarm: swarm.get("name")`.

    `join` are peers of it, any that answers will do. Without `listen` this one only asks, and keeps nothing
    for others. `secret` is the swarm's or its file; SHOAL_SECRET where it is not given. Without `identity` it
    has a new one each time: records that it signs can then be replaced by nobody until they expire.
    `secret_file` is the path of the file, as `shoal keys secret` has written it. One that listens relays for
    peers behind routers within `relaying`.
    """
    if secret_file is not None:
        if secret is not None:
            raise UsageError("secret and secret_file are both given.", next_step="give one of them.")
        secret = Path(secret_file)
    if isinstance(secret, str):
        raise UsageError(
            "A secret is given as a pathlib.Path of its file, or as a SwarmSecret, not as text.",
            cause="text in a program is easily published with it.",
            next_step="secret=Path('swarm.secret'), or set SHOAL_SECRET.",
        )
    if not join and listen is None:
        raise UsageError(
            "There is nobody to connect to, and nobody could join this peer.",
            next_step="give the address of a peer, or listen='127.0.0.1:0' to begin a swarm.",
        )
    if secret is None:
        secret = SwarmSecret.from_environment()
    elif isinstance(secret, Path):
        secret = SwarmSecret.load(secret)
    identity = identity or Identity.generate()
    membership = None if secret is None else Membership(identity, secret)

    def make(where: Address | str | None) -> DHT:
        return DHT(
            join=join,
            listen=where,
            membership=membership,
            identity=identity,
            settings=settings,
            relaying=relaying,
        )

    # without a secret a peer listens to this machine alone
    reachable = "127.0.0.1:0" if membership is None else "0.0.0.0:0"
    return Swarm(make(listen), loop, None if listen is not None else lambda: make(reachable))


async def _peers(dht: DHT) -> list[Peer]:
    return [contact.peer for contact in dht.table.contacts()]


async def _add_schema(dht: DHT, schema: Schema) -> None:
    dht.add_schema(schema)


async def _leave(opening: AbstractAsyncContextManager[DHT]) -> None:
    await opening.__aexit__(None, None, None)
