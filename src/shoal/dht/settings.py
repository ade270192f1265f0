"""What a peer of the DHT can be told, with the defaults that it ships with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from shoal.core import UsageError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DHTSettings:
    """Settings of one peer; those of the first block should be the same in the whole swarm."""

    bucket_size: int = 20
    """Kademlia's k: contacts of a bucket."""
    num_replicas: int = 5
    """The nearest peers that hold each record."""
    depth_modulo: int = 5
    """Kademlia's b: a full bucket splits if it contains this peer's id, or its depth is not a multiple."""
    max_clock_gap_s: float = 3.0
    """Peers whose clocks differ more are warned of, or refused at joining when `is_strict`."""
    max_lifetime_s: float = 7 * 86_400.0
    """Records that expire later than this from now are refused."""

    parallel: int = 3
    """Peers that a look-up of one key asks at once; batches ask one for each key, and more where that is
    slow."""
    beam: int = 8
    """A look-up ends without a value when so many of the nearest peers have answered."""
    call_s: float = 3.0
    """A peer that has not answered for so long has failed."""
    patience: float = 1.0
    """Multiplies every wait."""
    is_client: bool = False
    """Only ask: nobody is told to call this peer, and it stores nothing for others."""
    is_strict: bool = True
    """Joining fails when none of the given addresses answers or clocks differ too much; else it is logged."""

    checks_reach: bool = True
    """When joining beyond this machine, ask a peer to call back; one that cannot be called is a client."""

    refresh_s: float = 600.0
    """A bucket in which nobody was looked up for so long is refreshed by a look-up."""
    republish_s: float = 600.0
    """Records are sent again to the peers nearest to them this often."""
    check_s: float = 60.0
    """Addresses that this peer joined by are asked this often whether they know a swarm that it does not."""
    backoff_s: float = 5.0
    """A peer that has failed is not asked for so long, twice as long after every further failure."""
    max_backoff_s: float = 600.0

    max_records: int = 100_000
    """Slots that are stored for others; the nearest are kept."""
    max_bytes: int = 64 * MIB
    """Bytes of stored records, keys and some memory around them included."""
    max_value_bytes: int = 1_000_000
    """One value, encoded; with what is around it, it must fit into a call's payload."""
    max_slots_a_key: int = 16_384
    """Subkeys of one key."""
    max_cached: int = 10_000
    """Records of others that are kept because they were looked up."""
    max_cached_bytes: int = 16 * MIB
    cache_nearest: int = 1
    """A found value is put into the cache of so many nearer peers that did not have it."""
    refresh_before_expiry_s: float = 5.0
    """Cached records that were used are fetched again so long before they expire."""
    absent_s: float = 300.0
    """How long a prefix without experts is marked as such."""

    max_messages_a_s: float = 2_000.0
    """Requests of one address (of one host, other than this machine); four times as many at once."""
    max_records_a_s: float = 20_000.0
    """Records that one address may store in a second, likewise."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, bool):
                continue
            is_count = isinstance(value, int)
            least = 0 if setting.name == "cache_nearest" else 1 if is_count else 0
            if math.isnan(value) or value < least or (not is_count and value == 0):
                raise UsageError(f"The DHT setting {setting.name} cannot be {value}.", next_step="raise it.")
        if self.num_replicas > self.bucket_size:
            raise UsageError(
                f"num_replicas {self.num_replicas} is above bucket_size {self.bucket_size}.",
                cause="a look-up finds as many peers as a bucket holds.",
            )
