"""Slots that are signed alone."""

from shoal.dht.records import Slot, sign_many


def sign(identity, key, subkey, value, expires_at_s):
    """A slot that `identity` owns; subkey and value are encoded already."""
    (signed,) = sign_many(identity, [(key, Slot(subkey, value, expires_at_s))])
    return signed
