"""TLS 1.3 between members of a swarm: certificates, contexts, what carries it, its errors in plain words.

Three libraries can carry it: aiofastnet, uvloop and the standard library. What differs between them is evened
out here, so that nobody else needs to know which it is.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import importlib
import os
import secrets
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.core import (
    IdentityError,
    Peer,
    PeerBusy,
    PeerError,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
)
from shoal.core.identity import Identity, write_private_file
from shoal.core.ids import PeerId
from shoal.transport.trust.secret import SwarmSecret

LIBRARY: str | None = None
"""What carries TLS: `aiofastnet`, `loop` for the loop's own, None for the first where it is installed."""

BUSY_ALERT = bytes.fromhex("15 0303 0002 02 50")
"""A fatal alert, 'internal error', for a peer that greets and finds no place: it is not worth a handshake."""

VALID_BEFORE_S = 24 * 3600.0  # for peers whose clocks are behind
VALID_FOR_S = 30 * 24 * 3600.0
AUTHORITY_NAME = "Shoal swarm"
# the same for everybody, so that every member makes the same certificate to the byte
_AUTHORITY_SERIAL = 1
_AUTHORITY_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)

_NO_NAME = "0.0.0.0"  # an address is not sent along, unlike a name; nothing is compared with it
_MAX_HANDSHAKE_S = 600.0  # callers have limits of their own
_SHUTDOWN_S = 5.0
_EXPIRED, _NOT_YET_VALID = 10, 9  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and _CERT_NOT_YET_VALID
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "PACKET_LENGTH",
)
_SAME_SECRET = "give both peers the same --secret-file or SHOAL_SECRET."
_CLOCKS = "compare the clocks of the two machines, for example with: date -u"


def make_context(
    identity: Identity, authority: Authority, wall_s: float, *, is_server: bool
) -> ssl.SSLContext:
    """A context that shows a certificate of this moment and trusts this swarm's authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the peer id is compared instead
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    if is_server:
        context.num_tickets = 0  # a session that is resumed would outlive its certificate
    context.load_verify_locations(cadata=authority.pem)
    certificate = authority.certify(identity.public_key, wall_s)
    _load_chain(context, certificate, identity)
    return context


def _load_chain(context: ssl.SSLContext, certificate: x509.Certificate, identity: Identity) -> None:
    """Hand the private key to OpenSSL, which takes it from a file only: one in memory where there are such.

    Elsewhere it passes through a temporary file, encrypted and gone at once.
    """
    if _load_from_memory(context, certificate, identity):
        return
    try:
        password = secrets.token_hex().encode()
        with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
            path = Path(folder) / "chain.pem"
            write_private_file(path, chain_pem(certificate, identity, password))
            context.load_cert_chain(path, password=password)
    except OSError as error:
        raise IdentityError(
            f"This peer's certificate cannot be given to OpenSSL: {error.strerror or error}.",
            cause="it passes through a temporary file for a moment, and there is no folder for one.",
            next_step="set TMPDIR to a folder that this user can write to.",
        ) from error


def _load_from_memory(context: ssl.SSLContext, certificate: x509.Certificate, identity: Identity) -> bool:
    """The same through a file in memory; whether there can be such a file here."""
    try:
        if (descriptor := _memory_file()) is None:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(chain_pem(certificate, identity, None))
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except OSError:  # a sandbox forbids one or the other
        return False
    return True


def _memory_file() -> int | None:
    """A file that no other process can open by name; None where the system has none, or no /proc."""
    if sys.platform != "linux" or not Path("/proc/self/fd").exists():
        return None
    return os.memfd_create("shoal-certificate", os.MFD_CLOEXEC)


async def carry(
    protocol: asyncio.BufferedProtocol, connected: socket.socket, context: ssl.SSLContext, *, is_server: bool
) -> None:
    """Make the handshake over a connected socket, then have `protocol` speak through it.

    Returns once `protocol` has its transport; ssl.SSLError when the handshake fails. The socket is closed
    then, and when this is cancelled, which is how a caller bounds the time.
    """
    loop = asyncio.get_running_loop()
    fast = _aiofastnet() if LIBRARY != "loop" else None
    options: dict[str, Any] = {
        "ssl": context,
        "ssl_handshake_timeout": _MAX_HANDSHAKE_S,
        "ssl_shutdown_timeout": _SHUTDOWN_S,
    }
    guarded = _LoopForAiofastnet(loop, connected)
    carrier: Any = fast or loop
    target = () if fast is None else (guarded,)
    try:
        if is_server:
            await carrier.connect_accepted_socket(*target, lambda: protocol, connected, **options)
        else:
            options |= {"sock": connected, "server_hostname": _NO_NAME}
            await carrier.create_connection(*target, lambda: protocol, **options)
    except BaseException as error:
        guarded.give_up()
        connected.close()
        if isinstance(error, (ConnectionError, TimeoutError)):
            raise ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "the connection ended during the handshake") from error
        raise


class _LoopForAiofastnet:
    """A loop as aiofastnet sees it, where three of its ways are made good.

    It reports a connection that ends in the handshake as an unhandled exception, and leaves the timer of a
    failed handshake to hold half a megabyte. On uvloop, which tells of a reset once and then no more, it
    takes a reset that comes together with bytes for bytes alone, and never learns of the end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connected: socket.socket) -> None:
        self._loop = loop
        self._socket = connected
        self._timer: asyncio.TimerHandle | None = None
        self._on_readable: Callable[[], None] | None = None
        self._is_reset = False
        # used for every write that has to wait
        self.call_soon = loop.call_soon
        self.add_writer = loop.add_writer
        self.remove_writer = loop.remove_writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        timer = self._loop.call_later(delay_s, callback, *arguments)
        self._timer = self._timer or timer
        return timer

    def give_up(self) -> None:
        """Cancel the timer of a handshake that has failed."""
        if self._timer is not None:
            self._timer.cancel()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if context.get("exception") is not ConnectionResetError:  # the class itself: an end in the handshake
            self._loop.call_exception_handler(context)

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._on_readable = callback
        self._loop.add_reader(descriptor, self._read)

    def remove_reader(self, descriptor: int) -> bool:
        self._on_readable = None
        return self._loop.remove_reader(descriptor)

    def _read(self) -> None:
        if self._on_readable is None:
            return
        self._on_readable()
        if self._on_readable is not None:  # nobody has closed it
            self._is_reset = (
                self._is_reset or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            )
            if self._is_reset:
                self._loop.call_soon(self._read)


@functools.cache
def _aiofastnet() -> ModuleType | None:
    try:
        module = importlib.import_module("aiofastnet")
    except ImportError:  # not installed, or not for this Python
        return None
    # where OpenSSL is built into Python it has a way of its own, whose flow control gets stuck
    return module if getattr(module, "OPENSSL_DYN_LIBS", None) is not None else None


_CLOCK_IS_WRONG = "the clock of one of the two machines is wrong."
_ALERTS: dict[str, tuple[type[PeerError], str, str, str]] = {
    "INTERNAL_ERROR": (
        PeerBusy,
        "takes no connection now.",
        "all its connections are taken.",
        "try again later.",
    ),
    "CERTIFICATE_EXPIRED": (
        PeerRefused,
        "says that this peer's certificate has expired.",
        _CLOCK_IS_WRONG,
        _CLOCKS,
    ),
    "CERTIFICATE_REQUIRED": (PeerRefused, "was shown no certificate.", "", _SAME_SECRET),
}
"""What the other side's alert means, and BUSY_ALERT of ours: error, words, cause, next step."""
_ALERTS |= dict.fromkeys(
    ("UNKNOWN_CA", "DECRYPT_ERROR", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED"),
    (
        PeerRefused,
        "does not take this peer's certificate.",
        "it has another swarm secret, or the clock of one of the two machines is wrong.",
        _SAME_SECRET,
    ),
)


def explain(error: ssl.SSLError, peer: Peer) -> ShoalError:
    """The error to raise for TLS that failed, in plain words."""
    reason = str(getattr(error, "reason", None) or "")
    alert = reason.partition("ALERT_")[2]
    kind: type[PeerError] = PeerRefused
    if isinstance(error, ssl.SSLCertVerificationError):
        code = getattr(error, "verify_code", None)
        if code in (_EXPIRED, _NOT_YET_VALID):
            when = "has expired" if code == _EXPIRED else "is not valid yet"
            what, cause, next_step = f"The certificate of {peer} {when}.", _CLOCK_IS_WRONG, _CLOCKS
        else:
            what = f"The certificate of {peer} is not of this swarm."
            cause, next_step = "it has another swarm secret.", _SAME_SECRET
    elif reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        what, cause, next_step = f"{peer} showed no certificate.", "", _SAME_SECRET
    elif reason.startswith(_NOT_TLS):
        what, cause = f"{peer} does not speak TLS.", "it has no swarm secret, or is no Shoal peer."
        next_step = "start it with the swarm's --secret-file or SHOAL_SECRET."
    elif alert in _ALERTS:
        kind, words, cause, next_step = _ALERTS[alert]
        what = f"{peer} {words}"
    elif isinstance(error, ssl.SSLEOFError):
        kind, what = PeerUnreachable, f"{peer} hung up during the TLS handshake."
        cause = "it has another swarm secret, is stopping, or is no Shoal peer."
        next_step = "check the address, and the log of the peer."
    else:
        words = reason.lower().replace("_", " ") or "unknown"
        kind, what = PeerLost, f"TLS with {peer} failed: {words}."
        cause = "what arrived was changed on its way, or is not TLS 1.3."
        next_step = "try again; if it stays so, look for a proxy or a firewall between the two."
    return kind(what, peer=peer, cause=cause, next_step=next_step)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs the certificates of one swarm; every member derives it from the secret.

    A certificate says that its owner knew the secret, and TLS proves that the other side has the private key;
    the peer id is the hash of that key. So a member can vouch for new ids, and can be nobody else.
    """

    private_key: Ed25519PrivateKey = field(repr=False, compare=False)
    certificate: x509.Certificate = field(repr=False)

    @classmethod
    def of(cls, secret: SwarmSecret) -> Authority:
        """The authority of the swarm with this secret."""
        key = Ed25519PrivateKey.from_private_bytes(secret.derive("certificate authority"))
        name = _name(AUTHORITY_NAME)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), _AUTHORITY_SERIAL)
            .not_valid_before(_AUTHORITY_FROM)
            .not_valid_after(_AUTHORITY_UNTIL)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, None)
        )
        return cls(key, certificate)

    @property
    def pem(self) -> str:
        """What members trust, and nothing else."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def _key_identifier(self) -> x509.SubjectKeyIdentifier:
        return self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value

    def certify(self, public_key: Ed25519PublicKey, wall_s: float) -> x509.Certificate:
        """A certificate for a peer's key, valid from a day ago on."""
        peer_id = PeerId.of_public_key(public_key.public_bytes_raw())
        now = datetime.datetime.fromtimestamp(wall_s, datetime.UTC)
        return (
            x509.CertificateBuilder(self.certificate.subject, _name(str(peer_id)), public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(seconds=VALID_BEFORE_S))
            .not_valid_after(now + datetime.timedelta(seconds=VALID_FOR_S))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_identifier),
                critical=False,
            )
            .sign(self.private_key, None)
        )


def chain_pem(certificate: x509.Certificate, identity: Identity, password: bytes | None) -> bytes:
    """A peer's certificate and its private key as OpenSSL reads them; without a password, in the clear."""
    key = identity.private_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key


@functools.lru_cache(maxsize=1024)
def peer_id_of(certificate_der: bytes) -> PeerId:
    """Whose certificate it is; its signature has been checked by TLS."""
    try:
        key = x509.load_der_x509_certificate(certificate_der).public_key()
    except (ValueError, TypeError) as error:
        raise IdentityError("A certificate cannot be read.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise IdentityError("A certificate is for a key of another kind: Shoal's are Ed25519.")
    return PeerId.of_public_key(key.public_bytes_raw())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
