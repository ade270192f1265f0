"""What protects the packets of a session, and what proves an address.

Both directions have a key of their own and count their packets; a packet that comes twice is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.transport.datagrams.packets import HEADER_BYTES

TOKEN_BYTES = 8
REPLAY_WINDOW = 1024
"""How far a packet may be overtaken by others and still be taken."""
_TOKEN_BUCKET_S = 60.0


class BareSeal:
    """No protection: for loopback, simulated networks, and those who want none."""

    def seal(self, header: bytes, content: bytes) -> bytes:
        """The packet to send."""
        return header + content

    def open(self, packet: bytes) -> bytes | None:
        """The content of a packet, None when it is not genuine."""
        return packet[HEADER_BYTES:]

    def is_fresh(self, counter: int) -> bool:
        """Whether a genuine packet comes for the first time; ask once for each."""
        return True


class AeadSeal(BareSeal):
    """AES-256-GCM with a key for each direction of one session; the packet's counter is its nonce."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._encrypt = AESGCM(sending_key).encrypt
        self._decrypt = AESGCM(receiving_key).decrypt
        self._window = ReplayWindow()
        self.is_fresh = self._window.is_fresh  # type: ignore[method-assign]

    def seal(self, header: bytes, content: bytes) -> bytes:
        """The packet to send; a header must never be used twice."""
        return header + self._encrypt(header[8:], content, header)

    def open(self, packet: bytes) -> bytes | None:
        """The content of a packet, None when it is not genuine."""
        header = packet[:HEADER_BYTES]
        try:
            return self._decrypt(header[8:], packet[HEADER_BYTES:], header)
        except (InvalidTag, ValueError):
            return None


class ReplayWindow:
    """Which of the last counters have come (as RFC 4303, section 3.4.3)."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: the counter n below the highest

    def is_fresh(self, counter: int) -> bool:
        """Whether this counter comes for the first time and is not too old; ask once for each packet."""
        ahead = counter - self._highest
        if ahead > 0:
            self._highest = counter
            self._seen = (self._seen << ahead | 1) & _WINDOW_MASK if ahead < REPLAY_WINDOW else 1
            return True
        if ahead <= -REPLAY_WINDOW:
            return False
        bit = 1 << -ahead
        if self._seen & bit:
            return False
        self._seen |= bit
        return True


_WINDOW_MASK = (1 << REPLAY_WINDOW) - 1


class Tokens:
    """Proofs of address that need no memory: only who receives at an address can know its token."""

    def __init__(self, source: random.Random) -> None:
        self._key = source.randbytes(32)

    def make(self, where: tuple[Any, ...], session_id: bytes, now_s: float) -> bytes:
        """What to send to an address for it to send back."""
        return self._token(where, session_id, int(now_s // _TOKEN_BUCKET_S))

    def is_good(self, token: bytes, where: tuple[Any, ...], session_id: bytes, now_s: float) -> bool:
        """Whether a token was sent to this address, for this session, one or two minutes ago at most."""
        bucket = int(now_s // _TOKEN_BUCKET_S)
        return any(hmac.compare_digest(token, self._token(where, session_id, bucket - age)) for age in (0, 1))

    def _token(self, where: tuple[Any, ...], session_id: bytes, bucket: int) -> bytes:
        text = b"%d:%s:%s" % (bucket, session_id, repr(where[:2]).encode())
        return hashlib.blake2b(text, key=self._key, digest_size=TOKEN_BYTES, person=b"shoal address").digest()
