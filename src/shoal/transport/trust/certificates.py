"""The certificates of a swarm: an authority that all members derive from the secret, a leaf for each peer.

A leaf says that its owner knew the secret, and TLS proves that the other side has the leaf's private key; the
peer id is the hash of that key. So a member can vouch for new ids, and can be nobody else.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.core.errors import IdentityError
from shoal.core.identity import Identity
from shoal.core.ids import PeerId
from shoal.transport.trust.secret import SwarmSecret

VALID_BEFORE_S = 24 * 3600.0  # for peers whose clocks are behind
VALID_FOR_S = 30 * 24 * 3600.0
AUTHORITY_NAME = "Shoal swarm"
# the same for everybody, so that every member makes the same certificate to the byte
_AUTHORITY_SERIAL = 1
_AUTHORITY_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs the certificates of one swarm; every member has it."""

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
