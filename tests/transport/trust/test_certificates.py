import datetime
import time

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.core import IdentityError
from shoal.core.identity import Identity
from shoal.transport.trust.tls import Authority, chain_pem, peer_id_of
from transport.members import Swarm, assert_tells_nothing

DAY = datetime.timedelta(days=1)


def der(certificate):
    return certificate.public_bytes(serialization.Encoding.DER)


def test_every_member_makes_the_same_authority():
    swarm = Swarm()
    authority = Authority.of(swarm.secret)
    assert Authority.of(swarm.secret).pem == authority.pem != Authority.of(Swarm().secret).pem
    constraints = authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    assert_tells_nothing(repr(authority) + str(vars(type(authority))) + authority.pem, swarm)


def test_a_leaf():
    authority, identity = Authority.of(Swarm().secret), Identity.generate()
    now = datetime.datetime.now(datetime.UTC)
    leaf = authority.certify(identity.public_key, time.time())
    leaf.verify_directly_issued_by(authority.certificate)
    assert peer_id_of(der(leaf)) == identity.peer_id
    assert leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == str(identity.peer_id)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign
    assert set(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.CLIENT_AUTH,
        ExtendedKeyUsageOID.SERVER_AUTH,
    }
    assert abs(now - DAY - leaf.not_valid_before_utc) < DAY / 1000
    assert abs(now + 30 * DAY - leaf.not_valid_after_utc) < DAY / 1000
    with pytest.raises(InvalidSignature):
        leaf.verify_directly_issued_by(Authority.of(Swarm().secret).certificate)


def test_the_chain_holds_the_key_only_encrypted():
    swarm = Swarm()
    identity = swarm.member().identity
    leaf = Authority.of(swarm.secret).certify(identity.public_key, time.time())
    pem = chain_pem(leaf, identity, b"a password")
    assert b"BEGIN CERTIFICATE" in pem
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in pem
    assert_tells_nothing(pem.decode(), swarm)


def test_only_ed25519_keys_have_a_peer_id():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    certificate = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + DAY).sign(
        Authority.of(Swarm().secret).private_key, None
    )
    with pytest.raises(IdentityError, match="Ed25519"):
        peer_id_of(der(certificate))
    with pytest.raises(IdentityError, match="cannot be read"):
        peer_id_of(b"nonsense")
