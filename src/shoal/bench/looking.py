"""A closer look at what answers at a TCP address, for when a call to it has failed.

Two short connections: one that only listens, as a peer without a secret speaks first, and one that begins TLS
and believes any certificate, to see whose it is. Nothing is sent through either.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from shoal.core import Address
from shoal.transport.frames import HEADER, MAGIC
from shoal.transport.network.sockets import Network
from shoal.transport.trust.secret import SwarmSecret
from shoal.transport.trust.tls import AUTHORITY_NAME, VALID_BEFORE_S, Authority

Reach = Literal["open", "refused", "silent", "unreachable", "unknown host"]
"""How far a plain TCP connection comes; `silent` means that nothing came back at all."""


class ShownCertificate(msgspec.Struct, frozen=True):
    """What is of interest in a certificate."""

    is_of_shoal: bool
    """Whether it is some swarm's."""
    is_of_this_swarm: bool
    begins_s: float
    ends_s: float

    @property
    def made_s(self) -> float:
        """When it was made, by the clock of the peer that made it."""
        return self.begins_s + VALID_BEFORE_S


class Look(msgspec.Struct, frozen=True):
    """What was seen."""

    reach: Reach
    detail: str = ""
    """Why it cannot be reached, in the system's words."""
    version: int | None = None
    """The version of the protocol that a peer without a secret speaks."""
    certificate: ShownCertificate | None = None
    says: bytes = b""
    """What came first from something that is no Shoal peer."""

    @property
    def is_shoal(self) -> bool:
        """Whether a Shoal peer is there, of whatever version and swarm."""
        return self.version is not None or (self.certificate is not None and self.certificate.is_of_shoal)


async def look(
    network: Network, address: Address, secret: SwarmSecret | None, *, patience_s: float = 1.5
) -> Look:
    """Look twice, for `patience_s` each time at most."""
    listening = _Listening()
    try:
        try:
            async with asyncio.timeout(patience_s):
                await network.dial(address, listening)
        except TimeoutError:
            return Look("silent")
        except ConnectionRefusedError:
            return Look("refused")
        except (socket.gaierror, ValueError) as error:
            return Look("unknown host", str(error))
        except OSError as error:
            return Look("unreachable", error.strerror or str(error))
        try:
            async with asyncio.timeout(patience_s / 2):
                await listening.heard.wait()
        except TimeoutError:
            pass
        if listening.said.startswith(MAGIC) and len(listening.said) > len(MAGIC):
            return Look("open", version=listening.said[len(MAGIC)])
        if listening.said:
            return Look("open", says=listening.said)
    finally:
        listening.abort()
    shown = await _certificate(network, address, patience_s)
    return Look("open", certificate=None if shown is None else _read(shown, secret))


class _Listening(asyncio.BufferedProtocol):
    """Hears the first bytes."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.said = b""
        self.transport: Any = None
        self._buffer = memoryview(bytearray(HEADER.size))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.said = (self.said + bytes(self._buffer[:nbytes]))[: HEADER.size]
        self.heard.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.set()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


async def _certificate(network: Network, address: Address, patience_s: float) -> bytes | None:
    """The certificate that is shown there; None where nobody speaks TLS 1.3."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said to it, and nothing believed
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    listening = _Listening()
    try:
        async with asyncio.timeout(patience_s):
            await network.dial(address, listening, tls=context)
        session = listening.transport.get_extra_info("ssl_object")
        return None if session is None else session.getpeercert(binary_form=True)
    except (OSError, ValueError):  # of which ssl's errors and TimeoutError are
        return None
    finally:
        listening.abort()


def _read(shown: bytes, secret: SwarmSecret | None) -> ShownCertificate | None:
    try:
        certificate = x509.load_der_x509_certificate(shown)
        issuers = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        return None
    is_of_shoal = any(issuer.value == AUTHORITY_NAME for issuer in issuers)
    return ShownCertificate(
        is_of_shoal=is_of_shoal,
        is_of_this_swarm=is_of_shoal and secret is not None and _has_signed(secret, certificate),
        begins_s=certificate.not_valid_before_utc.timestamp(),
        ends_s=certificate.not_valid_after_utc.timestamp(),
    )


def _has_signed(secret: SwarmSecret, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(Authority.of(secret).certificate)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
