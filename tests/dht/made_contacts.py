"""Contacts with chosen ids and addresses."""

from shoal.core import Address, Peer, PeerId
from shoal.core.ids import ID_BYTES
from shoal.dht.wire import ID_BITS, Contact, pack

TOP = 1 << (ID_BITS - 8)
"""One more of this is one more in the first byte of an id."""


def made_contact(number, host=None, port=4000):
    """The host is by default one that no other id has."""
    first = number >> (ID_BITS - 24)
    host = host or f"10.{first >> 16}.{first >> 8 & 255}.{first & 255}"
    peer = Peer(Address(host, port), PeerId(number.to_bytes(ID_BYTES)))
    return Contact(peer, pack(peer))


def by_distance(contacts, number):
    """What looking at all of them gives, nearest first."""
    return sorted(contacts, key=lambda contact: contact.number ^ number)
