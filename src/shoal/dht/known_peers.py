"""The peers that were there last time, in a small JSON file: a way back when no join address answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.core import Address, Peer, PeerId, ReportError, UsageError
from shoal.core.untrusted import decode_json
from shoal.report.storage import write_atomically
from shoal.transport import Membership

log = logging.getLogger(__name__)

MAX_PEERS = 64
_MAX_FILE_BYTES = 1 << 20
_SCHEMA = "shoal known peers"


class _Line(msgspec.Struct, frozen=True):
    id: str
    address: str


class _Document(msgspec.Struct, frozen=True):
    schema: str
    swarm: str
    peers: list[_Line]


def swarm_tag(membership: Membership | None) -> str:
    """What tells one swarm from another in the file; says nothing of its secret."""
    return "open" if membership is None else membership.secret.derive("known peers", size_bytes=8).hex()


class KnownPeers:
    """The last known peers of one swarm, newest first; without a path they are kept in memory alone.

    A file that cannot be read, or belongs to another swarm, counts as empty; one that cannot be written is
    complained of once.
    """

    def __init__(self, path: Path | None = None, swarm: str = "open") -> None:
        self.path = path
        self.peers: list[Peer] = []
        self._swarm = swarm
        self._saved: list[str] = []
        self._has_complained = False

    def load(self) -> list[Peer]:
        """Read the file, if there is one."""
        if self.path is None or not self.path.exists():
            return self.peers
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError("it is too large")
            document = decode_json(self.path.read_bytes(), _Document)
            if document.schema != _SCHEMA:
                raise ValueError("it is something else")
            found = [Peer(Address.parse(line.address), PeerId.parse(line.id)) for line in document.peers]
        except (OSError, UsageError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.warning("The known peers in %s cannot be read and are left out: %s", self.path, error)
            return self.peers
        if document.swarm != self._swarm:
            log.info("The known peers in %s are of another swarm and are left out.", self.path)
            return self.peers
        self._saved = _names(found)
        self.remember(peer for peer in found if peer.address.port)
        return self.peers

    def remember(self, peers: Iterable[Peer]) -> None:
        """Put these first, or of too many every so-manieth; the oldest that were known are forgotten."""
        newest = list(peers)
        step = -(-len(newest) // MAX_PEERS) or 1
        by_address: dict[Address, Peer] = {}
        for peer in (*newest[::step], *self.peers):
            if peer.id is not None:
                by_address.setdefault(peer.address, peer)
        self.peers = list(by_address.values())[:MAX_PEERS]

    def save(self) -> None:
        """Write the file if other peers are known than it holds."""
        if self.path is None or not self.peers or _names(self.peers) == self._saved:
            return
        lines = [_Line(str(peer.id), str(peer.address)) for peer in self.peers]
        content = msgspec.json.format(msgspec.json.encode(_Document(_SCHEMA, self._swarm, lines)), indent=1)
        try:
            write_atomically(self.path, content + b"\n")
        except ReportError as error:
            if not self._has_complained:
                log.warning("The known peers are not kept: %s", error)
            self._has_complained = True
        else:
            self._saved = _names(self.peers)


def _names(peers: Iterable[Peer]) -> list[str]:
    return sorted(map(str, peers))
