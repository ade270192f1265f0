"""A Kademlia DHT whose records expire, merge and may be owned: how peers of a swarm find what others have.

To be read in this order: `node` is what programs call, `search` and `store` look up and bring records,
`protocol` asks and answers peers with the messages of `wire`, `records` says who may write and what is
believed, `storage` and `routing_table` are what a peer holds and whom it knows; `join`, `replication` and
`upkeep` keep it so.
"""

from __future__ import annotations

from shoal.dht.blocking import Swarm, connect
from shoal.dht.node import DHT, announce, present
from shoal.dht.protocol import Answered
from shoal.dht.records import Entry, OwnSubkey, Schema, Stored, Value, Verdict, reserved, reserved_key
from shoal.dht.replication import Keeper, Kept
from shoal.dht.settings import DHTSettings

__all__ = [
    "DHT",
    "Answered",
    "DHTSettings",
    "Entry",
    "Keeper",
    "Kept",
    "OwnSubkey",
    "Schema",
    "Stored",
    "Swarm",
    "Value",
    "Verdict",
    "announce",
    "connect",
    "present",
    "reserved",
    "reserved_key",
]
