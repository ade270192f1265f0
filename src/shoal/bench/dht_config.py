"""What `shoal bench dht` is told: two modes, each with its own flags and defaults, in real or virtual time.

*experts* is the document's benchmark: one peer declares experts in batches, another looks them up. *keys*
stores and gets single keys from many peers while others are killed, in one of two orders: rounds, in each of
which a key is stored and then got while victims die along the way; or, with `num_keys`, all stores, then all
deaths, then all gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.core import UsageError
from shoal.core.placement import num_cores
from shoal.dht.settings import DHTSettings
from shoal.transport import Profile

EXPERTS, KEYS = "experts", "keys"
_FILES_A_PEER = 3  # a socket for datagrams, one that listens for streams, and now and then a stream
_OTHER_FILES = 128
_NUM_PEERS_WITH_ASKERS_APART = 8


class ExpertsPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag=EXPERTS):
    """What is declared and looked up, batch after batch."""

    num_experts: int = 256
    """Drawn, of which those that come twice are left out."""
    expert_batch_size: int = 32
    wait_after_request_s: float = 0.0
    """After each batch that was declared."""
    wait_before_read_s: float = 0.0


class KeysPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag=KEYS):
    """Which keys are stored and got, by how many peers, and how many of the others die."""

    num_keys: int | None = None
    """All stored before anybody dies, all got after; None for rounds."""
    total_num_rounds: int = 16
    num_store_peers: int = 8
    """That store a subkey each under one key."""
    num_get_peers: int = 8
    num_threads: int = 10
    """Keys that are stored, or got, at once."""
    failure_rate: float = 0.1
    """The share of all peers that is killed; they never ask for anything."""
    delay_s: float = 0.0
    """Between storing and getting."""
    wait_after_iteration_s: float = 0.0
    """Rest after every `num_threads` rounds."""
    latest: bool = True
    """Whether a get asks all replicas."""


class DhtConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peers, and what is done with them."""

    plan: ExpertsPlan | KeysPlan
    num_peers: int
    initial_peers: int
    """Those that a new peer joins by, at random among those that have joined."""
    num_processes: int
    """That the peers are spread over; `has_askers_apart` tells whether there is one more."""
    expiration_s: float = 300.0
    """How long each record lives, from its own store on."""
    wait_timeout_s: float | None = None
    """After which an unanswered request has failed; None for what the DHT ships with."""
    profile: str | None = None
    """The simulated network of a run in virtual time; None for sockets."""

    @property
    def mode(self) -> str:
        """'experts' or 'keys'."""
        return EXPERTS if isinstance(self.plan, ExpertsPlan) else KEYS

    @property
    def num_victims(self) -> int:
        """Peers that are killed."""
        return round(self.plan.failure_rate * self.num_peers) if isinstance(self.plan, KeysPlan) else 0

    @property
    def has_askers_apart(self) -> bool:
        """Whether the two peers that ask live in a further process, as they do in a user's program.

        Not in a swarm so small that others would be left without peers.
        """
        is_spread = self.mode == EXPERTS and self.profile is None and self.num_processes > 1
        return is_spread and self.num_peers >= max(_NUM_PEERS_WITH_ASKERS_APART, self.num_processes + 2)

    @property
    def num_ranks(self) -> int:
        """Processes that host peers, all told."""
        return self.num_processes + self.has_askers_apart

    @property
    def settings(self) -> DHTSettings:
        """Of every peer."""
        return dht_settings(self.wait_timeout_s)

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        return _FILES_A_PEER * -(-self.num_peers // self.num_processes) + _OTHER_FILES

    def __post_init__(self) -> None:
        if self.profile is not None:
            Profile.load(self.profile)  # complains before anything is started
        if self.num_peers < 2 or not 1 <= self.num_processes <= self.num_peers or self.initial_peers < 1:
            raise UsageError(
                f"{self.num_peers} peers in {self.num_processes} processes that join by {self.initial_peers} "
                "peers are no swarm to measure.",
                next_step="give 2 peers or more, at least one for each process, and one to join by.",
            )
        if self.num_peers - self.num_victims < 2:
            raise UsageError(
                f"Of {self.num_peers} peers {self.num_victims} would be killed, and fewer than 2 left.",
                next_step="lower --failure-rate, or raise --num-peers.",
            )
        if self.expiration_s > self.settings.max_lifetime_s:
            raise UsageError(
                f"--expiration {self.expiration_s:g}: no peer would take such a record.",
                cause=f"records live for at most {self.settings.max_lifetime_s:g} s (max_lifetime_s).",
                next_step=f"give at most {self.settings.max_lifetime_s:g}.",
            )


def dht_settings(wait_timeout_s: float | None) -> DHTSettings:
    """What the DHT ships with, but for the time after which a request has failed."""
    return DHTSettings() if wait_timeout_s is None else DHTSettings(call_s=wait_timeout_s)


_FIELDS = {
    "num_experts": (EXPERTS, "num_experts"),
    "expert_batch_size": (EXPERTS, "expert_batch_size"),
    "wait_after_request": (EXPERTS, "wait_after_request_s"),
    "wait_before_read": (EXPERTS, "wait_before_read_s"),
    "num_keys": (KEYS, "num_keys"),
    "total_num_rounds": (KEYS, "total_num_rounds"),
    "num_store_peers": (KEYS, "num_store_peers"),
    "num_get_peers": (KEYS, "num_get_peers"),
    "num_threads": (KEYS, "num_threads"),
    "failure_rate": (KEYS, "failure_rate"),
    "delay": (KEYS, "delay_s"),
    "wait_after_iteration": (KEYS, "wait_after_iteration_s"),
    "latest": (KEYS, "latest"),
}
"""By the flag's name: the mode that it belongs to, and its field there."""
_NUM_PEERS = {EXPERTS: 32, KEYS: 16}
_NUM_INITIAL = {EXPERTS: 1, KEYS: 4}
_NUM_VIRTUAL_PEERS, _NUM_VIRTUAL_KEYS = 1000, 1000


def config_of(mode: str | None, given: Mapping[str, Any], *, is_virtual: bool = False) -> DhtConfig:
    """What flags say that were given on a command line, by name; the others have the mode's defaults.

    Without a mode it is 'experts', or 'keys' in virtual time. UsageError for flags of the other mode.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    mode = mode or (KEYS if is_virtual else EXPERTS)
    fields: dict[str, Any] = {}
    for flag in list(flags):
        if flag in _FIELDS:
            owner, field = _FIELDS[flag]
            if owner != mode:
                raise _wrong_mode(flag, owner, mode)
            fields[field] = flags.pop(flag)
    _check_time(flags, is_virtual=is_virtual)
    num_peers = flags.get("num_peers", _NUM_VIRTUAL_PEERS if is_virtual else _NUM_PEERS[mode])
    return DhtConfig(
        plan=ExpertsPlan(**fields) if mode == EXPERTS else _keys_plan(fields, is_virtual=is_virtual),
        num_peers=num_peers,
        initial_peers=flags.get("initial_peers", _NUM_INITIAL[mode]),
        num_processes=1 if is_virtual else flags.get("num_processes", min(num_cores(), num_peers)),
        expiration_s=flags.get("expiration", 300.0),
        wait_timeout_s=flags.get("wait_timeout"),
        profile=flags.get("profile", "wan") if is_virtual else None,
    )


def _keys_plan(fields: dict[str, Any], *, is_virtual: bool) -> KeysPlan:
    if "num_keys" in fields and "total_num_rounds" in fields:
        raise UsageError(
            "--num-keys and --total-num-rounds are two orders of the same work.",
            next_step="give --num-keys to kill between all stores and all gets, --total-num-rounds to kill "
            "along the way.",
        )
    if is_virtual and "total_num_rounds" not in fields:
        fields = {"num_keys": _NUM_VIRTUAL_KEYS, "failure_rate": 0.0, **fields}
    if "num_keys" in fields:
        if "wait_after_iteration_s" in fields:
            raise UsageError(
                "--wait-after-iteration rests between rounds, and --num-keys has none.",
                next_step="leave it out, or say --total-num-rounds.",
            )
        fields = {"num_store_peers": 1, "num_get_peers": 1, "latest": False, **fields}
    return KeysPlan(**fields)


def _check_time(flags: Mapping[str, Any], *, is_virtual: bool) -> None:
    if is_virtual and "num_processes" in flags:
        raise UsageError("A virtual world is one process.", next_step="leave --num-processes out.")
    if not is_virtual and "profile" in flags:
        raise UsageError(
            "--profile describes a simulated network, and this benchmark runs on sockets.",
            next_step=f"add --virtual, or leave --profile {flags['profile']} out.",
        )


def _wrong_mode(flag: str, owner: str, mode: str) -> UsageError:
    return UsageError(
        f"--{flag.replace('_', '-')} belongs to --mode {owner}, not to --mode {mode}.",
        next_step=f"leave it out, or say --mode {owner}.",
    )
