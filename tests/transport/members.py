"""What the tests of security share: swarms, their members, and a search for what must not be told."""

import base64
import re

from cryptography.hazmat.primitives import serialization

from shoal.core.identity import Identity, new_secret
from shoal.transport.trust.membership import Membership
from shoal.transport.trust.secret import SwarmSecret


class Swarm:
    """A secret, and members with it."""

    def __init__(self):
        self.text = new_secret()
        self.secret = SwarmSecret.parse(self.text)
        self.identities = []

    def member(self, **settings):
        self.identities.append(Identity.generate())
        return Membership(self.identities[-1], self.secret, **settings)

    def secrets(self):
        """Everything that nobody may be told, as text."""
        yield self.text
        for key in (self.secret._key, self.secret.derive("certificate authority")):
            yield from _spellings(key)
        for identity in self.identities:
            raw = identity.private_key.private_bytes_raw()
            yield from _spellings(raw)
            pem = identity.private_key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ).decode()
            yield re.search(r"-\n(.*)\n-", pem, re.DOTALL)[1].strip()


def _spellings(key):
    yield key.hex()
    yield repr(key)
    yield base64.b64encode(key).decode()


def assert_tells_nothing(text, *swarms):
    for swarm in swarms:
        for secret in swarm.secrets():
            assert secret not in text
