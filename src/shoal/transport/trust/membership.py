"""Belonging to a swarm: who this peer is, the secret that it shares, and whom it lets talk to it."""

from __future__ import annotations

import logging
import math
import ssl
import threading
from pathlib import Path

from shoal.core import SYSTEM_CLOCK, Address, Clock, PeerId, ShoalError, UsageError
from shoal.core.identity import Identity
from shoal.core.ids import is_loopback
from shoal.transport.trust.secret import SwarmSecret
from shoal.transport.trust.tls import VALID_BEFORE_S, VALID_FOR_S, Authority, make_context

log = logging.getLogger(__name__)

_SETTLED_S = 2.0  # a file that changed less than this ago may change again without its times showing it
_State = tuple[int, int, int] | None


class Access:
    """Who among the members may talk to this peer: a list of those allowed and a list of those denied.

    Without an allow-list every member may; denied beats allowed, whichever way either was said. The files
    hold one peer id a line, with # comments, and are read again when they change; a list that was good once
    is kept while its file is not. For any thread.
    """

    def __init__(self, *, allow_file: Path | None = None, deny_file: Path | None = None) -> None:
        self._allow_list = _ListFile(allow_file) if allow_file else None
        self._deny_list = _ListFile(deny_file) if deny_file else None
        self._allowed: frozenset[PeerId] = frozenset()
        self._denied: frozenset[PeerId] = frozenset()
        self._changing = threading.Lock()
        self.version = 0
        """Another one whenever somebody may have been denied or allowed."""

    def is_allowed(self, peer_id: PeerId) -> bool:
        """Whether this peer may talk now."""
        if peer_id in self._denied or (self._deny_list and peer_id in self._deny_list.ids):
            return False
        return self._allow_list is None or peer_id in self._allow_list.ids or peer_id in self._allowed

    def deny(self, peer_id: PeerId) -> None:
        """Refuse this peer, beside what the files say; its connections end within about a second."""
        with self._changing:
            self._denied |= {peer_id}
            self._allowed -= {peer_id}
            self.version += 1

    def allow(self, peer_id: PeerId) -> None:
        """Take back `deny`, and let the peer in beside an allow-list; a deny-list still counts."""
        with self._changing:
            self._allowed |= {peer_id}
            self._denied -= {peer_id}
            self.version += 1

    def refresh(self) -> bool:
        """Read files that have changed again; True when a list is another one now. A few microseconds."""
        changes = [one.refresh() for one in (self._allow_list, self._deny_list) if one]
        if any(changes):
            with self._changing:
                self.version += 1
        return any(changes)


class _ListFile:
    """A file of peer ids, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: _State = None
        self._is_broken = False
        self.ids: frozenset[PeerId] = frozenset()
        self._read()

    def refresh(self) -> bool:
        before = self.ids
        try:
            self._read()
        except ShoalError as error:
            if not self._is_broken:
                log.warning("%s The list that was read before stays in force.", error.what)
            self._is_broken = True
        else:
            if self._is_broken:
                log.info("The list %s can be read again.", self._path)
            self._is_broken = False
        return self.ids != before

    def _read(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            content = self._path.read_bytes()
        except OSError as error:
            self._seen = None
            raise UsageError(
                f"The list {self._path} cannot be read: {error.strerror}.",
                next_step="create it, with one peer id a line; it may be empty.",
            ) from error
        self.ids = _parse(content, self._path)
        is_settled = SYSTEM_CLOCK.wall_s() - stat.st_mtime > _SETTLED_S
        self._seen = seen if is_settled else None


def _parse(content: bytes, path: Path) -> frozenset[PeerId]:
    ids = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                ids.append(PeerId.parse(text))
            except UsageError as error:
                raise UsageError(
                    f"Line {number} of {path} is no peer id.",
                    cause=error.cause,
                    next_step="`shoal keys show` prints a peer's id.",
                ) from error
    return frozenset(ids)


class Membership:
    """What makes this peer a member; shared by everything in a process that talks to the swarm.

    `clock` dates this peer's certificates; those of others are held against the machine's own clock.
    For any thread.
    """

    def __init__(
        self,
        identity: Identity,
        secret: SwarmSecret,
        access: Access | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.identity = identity
        self.peer_id: PeerId = identity.peer_id
        self.secret = secret
        self.access = access or Access()
        self.clock = clock
        self._authority = Authority.of(secret)
        self._contexts: dict[bool, tuple[float, ssl.SSLContext]] = {}  # one made twice does no harm

    def client_tls(self) -> ssl.SSLContext:
        """For dialing; kept until its certificate has grown old."""
        return self._context(is_server=False)

    def server_tls(self) -> ssl.SSLContext:
        """For accepting; kept until its certificate has grown old."""
        return self._context(is_server=True)

    def _context(self, *, is_server: bool) -> ssl.SSLContext:
        wall_s = self.clock.wall_s()
        made_s, context = self._contexts.get(is_server, (-math.inf, None))
        if context is None or not -VALID_BEFORE_S / 2 < wall_s - made_s < VALID_FOR_S / 2:
            context = make_context(self.identity, self._authority, wall_s, is_server=is_server)
            self._contexts[is_server] = (wall_s, context)
        return context


def check_may_listen(address: Address, membership: Membership | None, *, is_insecure: bool) -> None:
    """UsageError when a peer without a secret would be heard by other machines."""
    if membership is None and not is_insecure and not is_loopback(address.host):
        raise UsageError(
            f"Without a swarm secret this peer listens on this machine only, not on {address}.",
            cause="anybody who can reach that address could call it.",
            next_step="give a secret (--secret-file, SHOAL_SECRET; `shoal keys secret` makes one), listen on "
            "127.0.0.1, or say --insecure in a network that you trust.",
        )
