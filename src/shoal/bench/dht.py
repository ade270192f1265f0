"""`shoal bench dht`: peers of a DHT that store and look up, on sockets in some processes or in virtual time.

*experts* is the document's benchmark: one peer declares experts in batches, another looks them up. *keys*
stores and gets single keys from many peers while others are killed, in one of two orders: rounds, in each of
which a key is stored and then got while victims die along the way; or, with `num_keys`, all stores, then all
deaths, then all gets. The peers and the processes that host them are `processes.dht`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import check_profile
from shoal.bench.frame import BenchmarkPlan, RowKey, Tell, WholeRunFlags, announce, measured
from shoal.core import LoopThread, UsageError
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.doctor import machine
from shoal.report import Row

if TYPE_CHECKING:
    from shoal.bench.processes.dht import BenchSwarm, Details
    from shoal.dht.settings import DHTSettings

# --- what it is told ---

EXPERTS, KEYS = "experts", "keys"
_FILES_A_PEER = 3  # a socket for datagrams, one that listens for streams, and now and then a stream
_OTHER_FILES = 128
_NUM_PEERS_WITH_ASKERS_APART = 8


class ExpertsPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag=EXPERTS):
    """What is declared and looked up, batch after batch: the flags of --mode experts."""

    num_experts: Annotated[int, flag("experts: drawn at random.", ge=1)] = 256
    """Of which those that come twice are left out."""
    expert_batch_size: Annotated[int, flag("experts: at once.", ge=1)] = 32
    wait_after_request_s: Annotated[
        float, flag("experts: seconds after each declared batch.", "--wait-after-request", ge=0, shown="0")
    ] = 0.0
    wait_before_read_s: Annotated[
        float, flag("experts: seconds before the look-ups.", "--wait-before-read", ge=0, shown="0")
    ] = 0.0


class KeysPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="mode", tag=KEYS):
    """Which keys are stored and got, by how many peers, and how many die: the flags of --mode keys."""

    num_keys: Annotated[
        int | None,
        flag("keys: store so many, then kill, then get all; instead of rounds.", ge=1, shown=False),
    ] = None
    total_num_rounds: Annotated[
        int, flag("keys: one key each, stored and got; peers die along the way.", ge=1)
    ] = 16
    num_store_peers: Annotated[
        int, flag("keys: store a subkey each.", ge=1, shown="8; 1 with --num-keys")
    ] = 8
    num_get_peers: Annotated[int, flag("keys: get each key.", ge=1, shown="8; 1 with --num-keys")] = 8
    num_threads: Annotated[int, flag("keys: keys at once.", ge=1)] = 10
    failure_rate: Annotated[
        float, flag("keys: share of peers that is killed.", ge=0, le=1, shown="0.1; --virtual: 0")
    ] = 0.1
    """They never ask for anything."""
    delay_s: Annotated[float, flag("keys: seconds between store and get.", "--delay", ge=0, shown="0")] = 0.0
    wait_after_iteration_s: Annotated[
        float,
        flag(
            "keys: seconds of rest after each --num-threads rounds, before the next are stored.",
            "--wait-after-iteration",
            ge=0,
            shown="0",
        ),
    ] = 0.0
    latest: Annotated[
        bool,
        flag(
            "keys: ask all replicas; also --latest true, --latest false.",
            "--latest/--no-latest",
            shown="--latest; not with --num-keys",
        ),
    ] = True


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
        """The mode's name: 'experts' or 'keys'."""
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
        """The DHT settings that every peer has."""
        from shoal.bench.processes.dht import dht_settings

        return dht_settings(self.wait_timeout_s)

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        return _FILES_A_PEER * -(-self.num_peers // self.num_processes) + _OTHER_FILES

    def __post_init__(self) -> None:
        check_profile(self.profile)
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


class DhtFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench dht` in both modes, by the names that the document's users type."""

    mode: Annotated[
        Literal["experts", "keys"] | None,
        flag(
            "Declare and look up experts, or store and get keys while peers die.",
            shown="experts; keys with --virtual",
        ),
    ] = None
    num_peers: Annotated[
        int | None, flag("Peers in the swarm.", ge=2, shown="32, keys: 16, --virtual: 1000")
    ] = None
    initial_peers: Annotated[int | None, flag("Peers that a new one joins by.", ge=1, shown="1, keys: 4")] = (
        None
    )
    num_processes: Annotated[
        int | None,
        flag(
            "Processes that peers are spread over; experts: and one for the two that ask (8 peers or more).",
            ge=1,
            shown="the cores",
        ),
    ] = None
    expiration: Annotated[
        float | None, flag("Seconds that a record lives, a week at most.", ge=0.001, shown="300")
    ] = None
    wait_timeout: Annotated[
        float | None, flag("Seconds after which a request has failed.", ge=0.001, shown="3, the DHT's own")
    ] = None
    increase_file_limit: Annotated[bool, flag("Allow as many open sockets as the peers need.")] = False
    virtual: Annotated[bool, flag("In virtual time, on simulated links.")] = False
    profile: Annotated[
        str | None, flag("--virtual: the network, a preset's name or a TOML file.", shown="wan")
    ] = None


class DhtRunFlags(WholeRunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark, with the document's other name of the seed."""

    seed: Annotated[int, flag("Of the first start; each further one adds 1.", "--seed", "--random-seed")] = 0


_FIELDS = {
    field.removesuffix("_s"): (mode, field)
    for mode, plan in ((EXPERTS, ExpertsPlan), (KEYS, KeysPlan))
    for field in plan.__struct_fields__
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
    for name in list(flags):
        if name in _FIELDS:
            owner, field = _FIELDS[name]
            if owner != mode:
                raise UsageError(
                    f"--{name.replace('_', '-')} belongs to --mode {owner}, not to --mode {mode}.",
                    next_step=f"leave it out, or say --mode {owner}.",
                )
            fields[field] = flags.pop(name)
    if is_virtual and "num_processes" in flags:
        raise UsageError("A virtual world is one process.", next_step="leave --num-processes out.")
    if not is_virtual and "profile" in flags:
        raise UsageError(
            "--profile describes a simulated network, and this benchmark runs on sockets.",
            next_step=f"add --virtual, or leave --profile {flags['profile']} out.",
        )
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


def dht_command(
    flags: DhtFlags, experts: ExpertsPlan, keys: KeysPlan, run: DhtRunFlags, typed: Mapping[str, str]
) -> BenchmarkPlan:
    """Peers of a DHT, each with an identity and a sealed socket of its own, that store and look up."""
    from shoal.bench.tables.dht import dht_items, summarize_dht

    planned = msgspec.structs.asdict(experts) | msgspec.structs.asdict(keys)
    given = {name.removesuffix("_s"): value for name, value in planned.items() if name in typed}
    config = config_of(flags.mode, msgspec.structs.asdict(flags) | given, is_virtual=flags.virtual)
    if not flags.virtual:
        announce(machine.ensure_open_files(config.num_files, should_raise=flags.increase_file_limit))
    return BenchmarkPlan(config, run, summarize_dht, dht_items)


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


# --- one start ---


class DhtScenario:
    """One start: one swarm, from its first peer to the last question whether everybody lives."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), DhtConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Row]:
        """Let it live, and tell what it took."""
        began_s = time.perf_counter()
        if self._config.profile is not None:
            from shoal.core.virtual import run_virtual

            outcome = run_virtual(self._live(tell))
        else:
            with LoopThread() as loop:  # for orders alone: the peers have loops of their own
                outcome = loop.run(self._live(tell))
        yield from outcome.rows(self._config, time.perf_counter() - began_s)

    async def _live(self, tell: Tell) -> DhtOutcome:
        config = self._config
        from shoal.bench.processes.dht import BenchSwarm, ProcessFleet, VirtualFleet

        fleet = ProcessFleet(config) if config.profile is None else VirtualFleet(config, self._seed)
        async with fleet:
            swarm = BenchSwarm(fleet, config, self._seed, tell)
            plan = config.plan
            work = run_experts(swarm, plan) if isinstance(plan, ExpertsPlan) else run_keys(swarm, plan)
            outcome = await work
            alive = await swarm.ask_who_lives()
            outcome.num_alive = len(alive)
            if len(alive) > 1:
                outcome.round_trips_s = await swarm.round_trips(alive)
            await swarm.look_at_memory()
            outcome.memory_bytes, outcome.peak_rss_bytes = swarm.memory_bytes, swarm.peak_rss_bytes
            if config.profile is not None:
                outcome.simulated_s = swarm.clock.now_s()
        return outcome


# --- what it finds out ---


class Totals(msgspec.Struct, frozen=True):
    """What peers have done so far, added up."""

    datagrams: int = 0
    """Sent, greetings, acknowledgements and repeats among them; one carries several messages."""
    size_bytes: int = 0
    """The bytes of those datagrams."""
    messages: int = 0
    """Requests that were sent (to find, to store, to answer a ping), and answers that were given."""

    def __sub__(self, earlier: Totals) -> Totals:
        now, then = msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)
        return Totals(*(late - early for late, early in zip(now, then, strict=True)))

    def __add__(self, other: Totals) -> Totals:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Totals(*(one + another for one, another in zip(mine, theirs, strict=True)))


@dataclass
class Phase:
    """What was measured of all stores, or of all gets."""

    what: str
    """'store' or 'get': what rows are named by."""
    latencies_s: list[float] = field(default_factory=list)
    """Of every operation, a batch in experts mode."""
    rounds_s: list[float] = field(default_factory=list)
    """The slowest operation of each round, in keys mode."""
    replicas: list[int] = field(default_factory=list)
    """How many peers took each record."""
    hops: list[int] = field(default_factory=list)
    """Answers that followed from each other, of every key that was looked up."""
    failures: dict[str, int] = field(default_factory=dict)
    """Records that nobody took, by the reason."""
    meeting_dead_s: list[float] = field(default_factory=list)
    """Of the operations during which their peer sent something to a dead one, perhaps for another."""
    num_tried: int = 0
    """Records, or keys; all of them are in `replicas`, or in `hops`."""
    num_right: int = 0
    total_s: float = 0.0
    """In experts mode of all batches together, in keys mode from the first operation to the last."""
    traffic: Totals = field(default_factory=Totals)
    """Of all peers while it lasted, whatever they did it for."""

    def note_failures(self, failures: Mapping[str, int]) -> None:
        """Some more records that nobody took."""
        for reason, count in failures.items():
            self.failures[reason] = self.failures.get(reason, 0) + count

    def rows(self, key: RowKey, *, has_deaths: bool) -> Iterator[Row]:
        """Raw samples, and figures that are one number each."""
        raw: dict[str, Sequence[float]] = {
            "latency": self.latencies_s,
            "round": self.rounds_s,
            "replicas": self.replicas,
            "hops": self.hops,
        }
        for metric, samples in raw.items():
            if samples:
                yield measured(f"{self.what}_{metric}", key, samples)
        totals = {
            "success": self.num_right,
            "time_per_key": self.total_s,
            "messages": self.traffic.messages,
            "datagrams": self.traffic.datagrams,
            "bytes": self.traffic.size_bytes,
        }
        for metric, total in totals.items():
            yield measured(f"{self.what}_{metric}", key, [total / self.num_tried])
        if has_deaths and self.what == "get":
            yield measured("get_met_dead_at_most", key, [len(self.meeting_dead_s)])
            yield measured("get_slowest_met_dead", key, [max(self.meeting_dead_s, default=0.0)])
        for reason, count in self.failures.items():
            yield measured(f"{self.what}_failures", {**key, "reason": reason}, [count])


@dataclass
class DhtOutcome:
    """All that one run found out."""

    store: Phase = field(default_factory=lambda: Phase("store"))
    get: Phase = field(default_factory=lambda: Phase("get"))
    create_s: float = 0.0
    num_alive: int = 0
    """Peers that answered at the end."""
    round_trips_s: list[float] = field(default_factory=list)
    """How long pings between pairs of them took."""
    memory_bytes: int = 0
    peak_rss_bytes: int = 0
    num_expired_batches: int = 0
    """In experts mode, of those that were read."""
    simulated_s: float | None = None
    """How long the virtual world has lasted; None on sockets."""

    def rows(self, config: DhtConfig, wall_s: float) -> Iterator[Row]:
        """Tell the report what was measured. Failures and expired batches are there where there are any."""
        key: RowKey = {"scenario": config.mode, "num_peers": config.num_peers}
        if config.profile is not None:
            key["profile"] = config.profile
        yield measured("create", key, [self.create_s])
        for phase in (self.store, self.get):
            yield from phase.rows(key, has_deaths=config.num_victims > 0)
        yield measured("survival", key, [self.num_alive / config.num_peers])
        if self.round_trips_s:
            yield measured("round_trip", key, self.round_trips_s)
        yield measured("memory", key, [self.memory_bytes])
        yield measured("peak_rss", key, [self.peak_rss_bytes])
        if self.num_expired_batches:
            yield measured("expired_batches", key, [self.num_expired_batches])
        if self.simulated_s is not None:
            yield measured("simulated", key, [self.simulated_s])
        yield measured("wall", key, [wall_s])


@contextlib.asynccontextmanager
async def _watched(swarm: BenchSwarm, phase: Phase) -> AsyncIterator[None]:
    """A phase while it lasts: its traffic and the memory that it took are noted at its end."""
    before = await swarm.totals()
    yield
    phase.traffic += await swarm.totals() - before
    await swarm.look_at_memory()


# --- experts ---

_AXIS, _NUM_AXES = range(1000), 3  # of the grid that uids are drawn from


async def run_experts(swarm: BenchSwarm, plan: ExpertsPlan) -> DhtOutcome:
    """Declare and look up, batch after batch; only the peers' own work is timed."""
    outcome = DhtOutcome(create_s=await swarm.create())
    uids = _draw_uids(swarm, plan.num_experts)
    batches = [
        uids[start : start + plan.expert_batch_size] for start in range(0, len(uids), plan.expert_batch_size)
    ]
    addresses = [_any_address(swarm) for _ in batches]
    declarer, reader = sorted(swarm.peers)[-2:]
    expiries = await _declare(swarm, plan, outcome, declarer, list(zip(batches, addresses, strict=True)))
    await asyncio.sleep(plan.wait_before_read_s)
    read_by_s = await _look_up(swarm, outcome, (declarer, reader), list(zip(batches, addresses, strict=True)))
    outcome.num_expired_batches = sum(
        expiry <= ended_at_s for expiry, ended_at_s in zip(expiries, read_by_s, strict=True)
    )
    return outcome


def _draw_uids(swarm: BenchSwarm, count: int) -> list[str]:
    """Uids drawn at random, each once."""
    draws = (
        ".".join(("expert", *(str(swarm.random.choice(_AXIS)) for _ in range(_NUM_AXES))))
        for _ in range(count)
    )
    return list(dict.fromkeys(draws))


def _any_address(swarm: BenchSwarm) -> str:
    """Where the experts of a batch are said to be served: nobody calls them."""
    host = ".".join(str(swarm.random.randint(1, 254)) for _ in range(4))
    return f"{host}:{swarm.random.randint(1, 65_535)}"


async def _declare(
    swarm: BenchSwarm,
    plan: ExpertsPlan,
    outcome: DhtOutcome,
    declarer: int,
    batches: Sequence[tuple[list[str], str]],
) -> list[float]:
    """When each batch expires."""
    phase, expiries = outcome.store, []
    advance = swarm.counted("experts declared", sum(len(uids) for uids, _ in batches))
    async with _watched(swarm, phase):
        for uids, address in batches:
            answer = await swarm.ask(
                declarer, "declare", uids=uids, expiration_s=swarm.config.expiration_s, address=address
            )
            phase.latencies_s.append(answer["took_s"])
            phase.replicas += answer["replicas"]
            phase.num_tried += len(answer["replicas"])
            phase.num_right += answer["num_stored"]
            phase.note_failures(answer["failed"])
            expiries.append(answer["expires_at_s"])
            advance(len(uids))
            await asyncio.sleep(plan.wait_after_request_s)
    phase.total_s = sum(phase.latencies_s)
    return expiries


async def _look_up(
    swarm: BenchSwarm, outcome: DhtOutcome, who: tuple[int, int], batches: Sequence[tuple[list[str], str]]
) -> list[float]:
    """By which wall time each batch was read."""
    declarer, reader = who
    phase, read_by_s = outcome.get, []
    advance = swarm.counted("experts looked up", sum(len(uids) for uids, _ in batches))
    async with _watched(swarm, phase):
        for uids, address in batches:
            server = str(swarm.peers[declarer].id)
            answer = await swarm.ask(reader, "fetch", uids=uids, address=address, server=server)
            phase.latencies_s.append(answer["took_s"])
            phase.hops += answer["hops"]
            phase.num_tried += len(uids)
            phase.num_right += answer["num_right"]
            read_by_s.append(answer["ended_at_s"])
            advance(len(uids))
    phase.total_s = sum(phase.latencies_s)
    return read_by_s


# --- keys ---

_BATCH = 200  # operations that a host is given at once where nobody waits for others


@dataclass
class _Round:
    """One key: who stores what under it, and who gets it."""

    index: int
    name: str
    values: dict[int, int]
    """By the number of the peer that stores it."""
    getters: list[int]
    stored: dict[str, int] = field(default_factory=dict)
    """The values that peers took, by subkey."""


async def run_keys(swarm: BenchSwarm, plan: KeysPlan) -> DhtOutcome:
    """Create, store, kill, get; in rounds, or one after the other where the plan has a number of keys."""
    outcome = DhtOutcome(create_s=await swarm.create())
    numbers = sorted(swarm.peers)
    victims = swarm.random.sample(numbers, swarm.config.num_victims)
    doomed = frozenset(victims)
    survivors = [number for number in numbers if number not in doomed]
    rounds = [
        _draw_round(swarm, plan, index, survivors) for index in range(plan.num_keys or plan.total_num_rounds)
    ]
    keys = _Keys(swarm, plan, outcome, rounds)
    if plan.num_keys is not None:
        await keys.store(rounds)
        await swarm.kill(victims)
        await asyncio.sleep(plan.delay_s)
        await keys.get(rounds)
        return outcome
    dies_in = sorted(swarm.random.randrange(len(rounds)) for _ in victims)
    for start in range(0, len(rounds), plan.num_threads):
        some = rounds[start : start + plan.num_threads]
        dying = [
            victim for victim, index in zip(victims, dies_in, strict=True) if 0 <= index - start < len(some)
        ]
        await keys.store(some, dying)
        await asyncio.sleep(plan.delay_s)
        await keys.get(some)
        await asyncio.sleep(plan.wait_after_iteration_s)
    return outcome


def _draw_round(swarm: BenchSwarm, plan: KeysPlan, index: int, survivors: Sequence[int]) -> _Round:
    """Those who get are others than those who store, where there are enough."""
    draw = swarm.random
    storing = draw.sample(survivors, min(plan.num_store_peers, len(survivors)))
    others = [number for number in survivors if number not in storing]
    able = others if len(others) >= plan.num_get_peers else survivors
    return _Round(
        index,
        name=f"bench/{draw.getrandbits(64):016x}",
        values={number: draw.getrandbits(32) for number in storing},
        getters=draw.sample(able, min(plan.num_get_peers, len(able))),
    )


class _Keys:
    def __init__(
        self, swarm: BenchSwarm, plan: KeysPlan, outcome: DhtOutcome, rounds: Sequence[_Round]
    ) -> None:
        self._swarm = swarm
        self._plan = plan
        self._store, self._get = outcome.store, outcome.get
        self._on_stored = swarm.counted("stored", sum(len(round_.values) for round_ in rounds))
        self._on_got = swarm.counted("got", sum(len(round_.getters) for round_ in rounds))

    async def store(self, rounds: Sequence[_Round], dying: Sequence[int] = ()) -> None:
        """Store all keys of these rounds, while some peers die."""
        swarm, plan, phase = self._swarm, self._plan, self._store
        work = [
            (round_.index, number, round_.name, value)
            for round_ in rounds
            for number, value in round_.values.items()
        ]
        details = {"expiration_s": swarm.config.expiration_s, "limit": self._limit(plan.num_store_peers)}
        queues = {
            rank: _orders(share, {**details, "deaths": []}) for rank, share in self._shares(work).items()
        }
        by_rank: dict[int, list[Details]] = {rank: list(orders) for rank, orders in queues.items()}
        for victim in dying:
            orders = by_rank.setdefault(swarm.rank_of(victim), [{**details, "work": [], "deaths": []}])
            orders[0]["deaths"] = [*orders[0]["deaths"], victim]
        async with _watched(swarm, phase):
            began_s = swarm.clock.now_s()
            answers = await swarm.work_off("store", by_rank, self._on_stored)
            phase.total_s += swarm.clock.now_s() - began_s
        await swarm.bury(dying)
        by_index = {round_.index: round_ for round_ in rounds}
        for index, number, _, num_replicas, verdict in answers:
            if num_replicas:
                by_index[index].stored[str(number)] = by_index[index].values[number]
                phase.num_right += 1
            else:
                phase.note_failures({verdict: 1})
            phase.replicas.append(num_replicas)
        phase.num_tried += len(answers)
        self._note(phase, [(index, took_s) for index, _, took_s, _, _ in answers])

    async def get(self, rounds: Sequence[_Round]) -> None:
        """Get all keys of these rounds; all that was stored under one must come back."""
        swarm, plan, phase = self._swarm, self._plan, self._get
        work = [
            (round_.index, number, round_.name, round_.stored)
            for round_ in rounds
            for number in round_.getters
        ]
        details = {"latest": plan.latest, "limit": self._limit(plan.num_get_peers)}
        queues = {rank: list(_orders(share, details)) for rank, share in self._shares(work).items()}
        async with _watched(swarm, phase):
            began_s = swarm.clock.now_s()
            answers = await swarm.work_off("get", queues, self._on_got)
            phase.total_s += swarm.clock.now_s() - began_s
        phase.num_tried += len(answers)
        phase.num_right += sum(is_right for _, _, is_right, _, _ in answers)
        phase.hops += [hops for _, _, _, hops, _ in answers]
        phase.meeting_dead_s += [took_s for _, took_s, _, _, num_to_dead in answers if num_to_dead]
        self._note(phase, [(index, took_s) for index, took_s, *_ in answers])

    def _limit(self, num_peers: int) -> int:
        """Operations of one host at once."""
        return max(1, round(self._plan.num_threads * num_peers / self._swarm.num_ranks))

    def _shares(self, work: Sequence[tuple[Any, ...]]) -> dict[int, list[tuple[Any, ...]]]:
        """By the host of the peer that is to do it."""
        shares: dict[int, list[tuple[Any, ...]]] = {}
        for item in work:
            shares.setdefault(self._swarm.rank_of(item[1]), []).append(item)
        return shares

    def _note(self, phase: Phase, times: Sequence[tuple[int, float]]) -> None:
        phase.latencies_s += [took_s for _, took_s in times]
        slowest: dict[int, float] = {}
        for index, took_s in times:
            slowest[index] = max(took_s, slowest.get(index, 0.0))
        phase.rounds_s += slowest.values()


def _orders(work: Sequence[Any], details: Details) -> Iterator[Details]:
    for start in range(0, len(work), _BATCH):
        yield {**details, "work": work[start : start + _BATCH]}
