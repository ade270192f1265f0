"""A Kademlia DHT whose records expire, merge and may be owned: how peers of a swarm find what others have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.dht.blocking import Swarm, connect
from shoal.dht.declaring import ExpertAddress, declare_experts, get_experts, sample_uids
from shoal.dht.node import DHT
from shoal.dht.presence import announce, present
from shoal.dht.protocol import Answered
from shoal.dht.records import Entry, OwnSubkey, Stored, Value, Verdict, reserved
from shoal.dht.replication import Keeper, Kept
from shoal.dht.settings import DHTSettings
from shoal.dht.uids import ExpertPrefix, ExpertUid
from shoal.dht.validation import Schema, reserved_key

if TYPE_CHECKING:
    from shoal.dht.beam import batch_beam_search, beam_search

_HOMES = {"batch_beam_search": "beam", "beam_search": "beam"}
"""What needs numpy, and is loaded when it is first used."""

__all__ = [
    "DHT",
    "Answered",
    "DHTSettings",
    "Entry",
    "ExpertAddress",
    "ExpertPrefix",
    "ExpertUid",
    "Keeper",
    "Kept",
    "OwnSubkey",
    "Schema",
    "Stored",
    "Swarm",
    "Value",
    "Verdict",
    "announce",
    "batch_beam_search",
    "beam_search",
    "connect",
    "declare_experts",
    "get_experts",
    "present",
    "reserved",
    "reserved_key",
    "sample_uids",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.dht' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.dht.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
