"""`shoal bench swarm`: rounds of a swarm of processes, undisturbed, and with a peer killed or stopped.

Each peer is a process with a `SwarmRun` on a loop thread, over TLS on loopback, or in the open with
`--plain`. Clean rounds take turns with the *ceiling*: the same peers move the bytes of a round through the
same transport, part by part, and do nothing else. So what a round takes above the ceiling is the protocol's
own, whatever else the machine is doing; the processor time of both is told too.

A fault is a signal at a random moment of a round. The peer that is hit is in turn the coordinator, another
reducer, and one that reduces nothing. What is timed is how long after the signal the last of the others has
committed a step; then their committed parameters are compared bit by bit. A killed peer's place is taken by a
new one, which joins the run; a stopped one comes back by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from shoal.bench.collectives import parse_size
from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell, measured
from shoal.bench.workers import Child, Parent, ask_all, child, resident_bytes, serve
from shoal.core import (
    Address,
    BenchmarkError,
    Deadline,
    LoopThread,
    Peer,
    Scope,
    StandingScope,
    UsageError,
    fanout,
    results_of,
)
from shoal.core.identity import Identity, new_secret
from shoal.core.run_options import flag
from shoal.report import Report, Row
from shoal.report.schema import with_failed
from shoal.report.statistics import known_percentile
from shoal.transport import Head, Membership, Reply, StreamTransport, SwarmSecret

_HOST = "127.0.0.1"
_ROLES = ("coordinator", "reducer", "plain")
_NO_BANDWIDTH = 1e-3  # of a peer whose share of the reducing is nothing
_MEET_S = 60.0
_HUNG_S = 30.0
_PART_BYTES = 1 << 20
_NUM_IN_FLIGHT = 8
_NUM_SPARES = 2
_MIN_FAILED = 10  # failed rounds from which on growth of memory is told
_HIVEMIND_S = 180.0
_OBSERVER = 1  # the number of the peer that is never hit
_HIVEMIND_KILLS = 3  # each may take two minutes


class SwarmFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench swarm`."""

    peers: Annotated[int, flag("Processes that train together.", ge=2)] = 4
    size: Annotated[str, flag("Of the parameters, as float32.", metavar="BYTES")] = "100MB"
    rounds: Annotated[int, flag("Clean rounds.", ge=1)] = 10
    kills: Annotated[int, flag("Rounds in which a peer is killed (SIGKILL).", ge=0)] = 0
    stops: Annotated[int, flag("Rounds in which a peer is stopped (SIGSTOP).", ge=0)] = 0
    plain: Annotated[bool, flag("Without encryption.")] = False
    hivemind: Annotated[
        str | None,
        flag("An interpreter that has hivemind: its averager is measured beside.", metavar="PYTHON"),
    ] = None


class SwarmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured in each start."""

    num_peers: int = 4
    size_bytes: int = 100 << 20
    num_rounds: int = 10
    num_kills: int = 0
    num_stops: int = 0
    is_plain: bool = False
    hivemind: str | None = None


def swarm_command(flags: SwarmFlags, run: RunFlags) -> BenchmarkPlan:
    """Rounds of a swarm of processes, clean and with a peer killed or stopped, beside the transport alone."""
    return BenchmarkPlan(swarm_config(flags, run), run=run, summarize=summarize_swarm)


def swarm_config(flags: SwarmFlags, run: RunFlags) -> SwarmConfig:
    """Reads the flags; with --short at most three rounds, three kills and one stop."""
    size_bytes = parse_size(flags.size)
    if size_bytes < 4 * flags.peers:
        raise UsageError(
            f"--size {flags.size} is less than one value for each peer.", next_step="give 1MB, for example."
        )
    if flags.hivemind is not None and shutil.which(flags.hivemind) is None:
        raise UsageError(
            f"--hivemind {flags.hivemind}: there is no such interpreter.",
            next_step="install hivemind in an environment of its own, and give the path of its python.",
        )
    most = (3, 3, 1) if run.short else (flags.rounds, flags.kills, flags.stops)
    return SwarmConfig(
        flags.peers,
        size_bytes // 4 * 4,
        min(flags.rounds, most[0]),
        min(flags.kills, most[1]),
        min(flags.stops, most[2]),
        flags.plain,
        flags.hivemind,
    )


# --- a peer's process ---


def run_peer(arguments: dict[str, Any], parent: Parent) -> None:
    """Is a peer of the run until its parent has had enough."""
    peer = _BenchPeer(arguments)
    with LoopThread() as loop:
        loop.run(peer.open())
        parent.tell(port=peer.port, pid=os.getpid())
        serve(parent, peer, loop)
        parent.leave()


class _BenchPeer:
    """A member of the run as the benchmark orders it about; its public coroutines are the orders."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import torch

        from shoal.swarm import CommittedSGD, SwarmRun, SwarmSettings

        torch.set_num_threads(1)
        secret = arguments["secret"]
        identity = Identity.generate()
        membership = Membership(identity, SwarmSecret.parse(secret)) if secret else None
        self.port = 0
        self._number: int = arguments["number"]
        self._num_elements = arguments["size_bytes"] // 4
        self._transport = StreamTransport(membership=membership, peer_id=identity.peer_id)
        self._settings = SwarmSettings(target_samples=arguments["num_peers"])
        self._optimizer = CommittedSGD(0.5)
        self._make = SwarmRun
        self._run: Any = None
        self._standing = StandingScope("bench peer")
        self._steps: list[tuple[int, float]] = []
        self._cpu_s: dict[str, float] = {}
        generator = torch.Generator().manual_seed(self._number)
        self._gradient = torch.randn(self._num_elements, generator=generator)
        self._part = bytearray(min(_PART_BYTES, arguments["size_bytes"]))

    async def open(self) -> None:
        """Listens; the run begins with the order to join."""
        await self._transport.__aenter__()
        self._transport.handle("bench.give", lambda head, buffers: None)
        self._transport.handle("bench.take", self._serve_take)
        self.port = (await self._transport.listen(Address(_HOST, 0))).port

    def _serve_take(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        return Reply(buffers=[memoryview(self._part)[: head.payload]])

    async def join(self, contacts: list[int], bandwidth: float) -> dict[str, float]:
        """Founds the run, or joins it; returns the seconds until this peer is listed."""
        import torch

        settings = msgspec.structs.replace(self._settings, bandwidth=bandwidth)
        began_s = time.monotonic()
        self._run = self._make(
            self._transport,
            Address(_HOST, self.port),
            "bench",
            torch.zeros(self._num_elements),
            self._optimizer,
            settings=settings,
            contacts=[Peer(Address(_HOST, port)) for port in contacts],
            may_found=not contacts,
        )
        await self._run.__aenter__()
        scope = await self._standing.open()
        scope.start_soon(self._note_steps(), name="note steps")
        while not self._run.is_member:
            await asyncio.sleep(0.01)
            if time.monotonic() - began_s > _MEET_S:
                raise BenchmarkError("A peer has not come into the run.")
        return {"join_s": time.monotonic() - began_s}

    async def _note_steps(self) -> None:
        while True:
            await self._run.next_commit()
            self._steps.append((self._run.state.num_steps, time.monotonic()))

    async def contribute(self, samples: int = 1) -> dict[str, Any]:
        """Adds a gradient; returns when it began to."""
        now_s = time.monotonic()
        self._cpu_s["begun"] = time.process_time()
        self._run.add(self._gradient, samples)
        return {"began_s": now_s, "steps": self._run.state.num_steps}

    async def wait_for_step(self, after: int, limit_s: float, since_s: float = 0.0) -> dict[str, Any]:
        """Waits for the first step after so many, and after a time; returns when it was committed here."""
        until_s = time.monotonic() + limit_s
        while not (times := [at_s for steps, at_s in self._steps if steps > after and at_s > since_s]):
            if time.monotonic() > until_s:
                return {"at_s": None}
            await asyncio.sleep(0.005)
        cpu_s = time.process_time() - self._cpu_s.get("begun", 0.0)
        return {"at_s": times[0], "cpu_s": cpu_s}

    async def look(self, is_full: bool = False) -> dict[str, Any]:
        """Tells where this peer is; with the hash of its parameters if `is_full`."""
        run = self._run
        connections = [each for shard in self._transport._shards for each in shard.connections]
        return {
            "is_member": run.is_member,
            "is_first": run.is_member and run.members[0] == run.context.me,
            "num_members": len(run.members),
            "steps": run.state.num_steps,
            "pending": run.ledger.num_ready + run.ledger.num_under_way,
            "name": run.state.name.hex(),
            "bits": run.state.fingerprint() if is_full else "",
            "is_balanced": run.ledger.is_balanced,
            "sent_bytes": sum(each.outbox.sent_bytes for each in connections if each.is_usable),
            "rss_bytes": resident_bytes(os.getpid()),
        }

    async def move(self, ports: list[int]) -> dict[str, float]:
        """Moves the bytes of a round to and from these peers, and does nothing else: the ceiling."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        share = 4 * self._num_elements // (len(ports) + 1)
        sizes = [min(len(self._part), share - begin) for begin in range(0, share, len(self._part))]
        peers = [Peer(Address(_HOST, port)) for port in ports]
        spare = [bytearray(len(self._part)) for _ in range(_NUM_IN_FLIGHT)]

        async def take(peer: Peer, size: int) -> None:
            place = spare.pop()
            into = [memoryview(place)[:size]]
            await self._transport.call(peer, "bench.take", size, deadline=Deadline.after(_HUNG_S), into=into)
            spare.append(place)

        async def give(peer: Peer, size: int) -> None:
            buffers = [memoryview(self._part)[:size]]
            await self._transport.call(peer, "bench.give", buffers=buffers, deadline=Deadline.after(_HUNG_S))

        async with Scope("move") as scope:
            for work in (give, take):
                calls = [work(peer, size) for size in sizes for peer in peers]
                scope.start_soon(_all(calls), name="move")
        return {"began_s": began_s, "at_s": time.monotonic(), "cpu_s": time.process_time() - began_cpu_s}


async def _all(calls: Sequence[Any]) -> None:
    results_of(await fanout(calls, Deadline.after(2 * _HUNG_S), limit=_NUM_IN_FLIGHT))


# --- the swarm, as the measuring process sees it ---


class _Member:
    """One peer's process."""

    def __init__(self, process: Child, number: int, ending: contextlib.ExitStack) -> None:
        self.process = process
        self.ending = ending
        """What is left to do for its process."""
        self.number = number
        self.is_plain = False
        """Whether it reduces nothing."""
        self.port = self.pid = 0
        self.num_failed = 0
        self.rss_bytes: list[int] = []
        """After each failed round that it lived through."""

    def wait_until_up(self) -> None:
        """Waits until its process has started."""
        told = self.process.expect()
        self.port, self.pid = told["port"], told["pid"]

    def hit(self, what: signal.Signals) -> None:
        os.kill(self.pid, what)


_Looks = list[dict[str, Any]]
"""What each member tells of itself, in their order."""


class _Swarm:
    """The processes, what they are asked together, and those that replace the killed."""

    def __init__(self, config: SwarmConfig, stack: contextlib.ExitStack) -> None:
        self.members: list[_Member] = []
        self.join_s: list[float] = []
        self._config = config
        self._stack = stack
        self._secret = "" if config.is_plain else new_secret()
        self._num_started = 0

    def start(self) -> _Member:
        """Starts a process, which is not waited for and does not join yet."""
        config, number = self._config, self._num_started
        arguments = {
            "number": number,
            "num_peers": config.num_peers,
            "size_bytes": config.size_bytes,
            "secret": self._secret,
        }
        self._num_started += 1
        ending = self._stack.enter_context(contextlib.ExitStack())
        name = f"peer {number}"
        process = ending.enter_context(child("shoal.bench.swarm:run_peer", arguments, name=name))
        return _Member(process, number, ending)

    def add(self, member: _Member, *, is_plain: bool = False) -> None:
        """Has it join, and waits until all list it."""
        member.is_plain = is_plain
        contacts = [other.port for other in self.members]
        joined = member.process.ask("join", contacts=contacts, bandwidth=_NO_BANDWIDTH if is_plain else 1.0)
        if self.members:
            self.join_s.append(joined["join_s"])
        self.members.append(member)

    def ask(self, order: str, members: Sequence[_Member] | None = None, **details: Any) -> list[Any]:
        """Gives all the same order at once, and returns their answers."""
        asked = self.members if members is None else members
        return ask_all([member.process for member in asked], order, **details)

    def settle(self, otherwise: str = "The peers have not come to rest between two rounds.") -> _Looks:
        """Waits until all are members of one list and nothing is pending; BenchmarkError otherwise."""
        until_s = time.monotonic() + _HUNG_S
        while time.monotonic() < until_s:
            looks = self.ask("look")
            is_whole = all(look["is_member"] and look["num_members"] == len(looks) for look in looks)
            pending = sum(look["pending"] for look in looks)
            if is_whole and len({look["name"] for look in looks}) == 1:
                if pending == 0:
                    return looks
                # too few for a round: as many more as it needs
                self.ask("contribute", self.members[: max(0, self._config.num_peers - pending)])
            time.sleep(0.05)
        raise BenchmarkError(otherwise)


class SwarmScenario:
    """One start: a swarm of fresh processes, and hivemind's after it if asked."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), SwarmConfig)
        self._choice = random.Random(seed)
        key: RowKey = {"peers": self._config.num_peers, "size_bytes": self._config.size_bytes}
        self._key: RowKey = {**key, "via": "plain" if self._config.is_plain else "tls"}

    def run(self, tell: Tell) -> Iterator[Row]:
        """Joining, clean rounds beside the ceiling, then faults."""
        config = self._config
        with contextlib.ExitStack() as stack:
            swarm = _Swarm(config, stack)
            started = [swarm.start() for _ in range(config.num_peers)]
            for number, member in enumerate(started, 1):
                member.wait_until_up()
                swarm.add(member)
                tell(f"peers in the run: {number} of {config.num_peers}")
            yield from self._clean(swarm, tell)
            for kind, num in (("kill", config.num_kills), ("stop", config.num_stops)):
                if num:
                    yield from self._faults(swarm, kind, num, tell)
            yield self._row("join", {}, swarm.join_s)
            rates = [config.size_bytes / 1e6 / join_s for join_s in swarm.join_s]
            yield self._row("join_rate", {}, rates)
        if config.hivemind is not None:
            yield from measure_hivemind(config.hivemind, config, self._choice, tell)

    def _row(self, metric: str, key: RowKey, samples: Sequence[float]) -> Row:
        return measured(metric, {**self._key, **key}, samples)

    # --- undisturbed ---

    def _clean(self, swarm: _Swarm, tell: Tell) -> Iterator[Row]:
        from shoal.swarm.kept import PIN_S

        found: dict[str, list[float]] = {}
        warm_s = time.monotonic() + PIN_S  # until then peers keep what those who have just joined might need
        while time.monotonic() < warm_s:
            self._ceiling(swarm)
            self._one_round(swarm)
        for number in range(self._config.num_rounds):
            ceiling = self._ceiling(swarm)
            one = self._one_round(swarm)
            tell(f"clean rounds: {number + 1} of {self._config.num_rounds}")
            one |= {**ceiling, "round_over_ceiling": one["round"] / ceiling["ceiling"]}
            for name, value in one.items():
                found.setdefault(name, []).append(value)
        for name, samples in found.items():
            yield self._row(name, {"scenario": "clean"}, samples)

    def _one_round(self, swarm: _Swarm) -> dict[str, float]:
        before = swarm.settle()
        began = swarm.ask("contribute")
        ends = swarm.ask("wait_for_step", after=before[0]["steps"], limit_s=_HUNG_S)
        if any(end["at_s"] is None for end in ends):
            raise BenchmarkError("A round without any fault did not end.")
        after = swarm.ask("look", is_full=True)
        if len({look["bits"] for look in after}) != 1:
            raise BenchmarkError("After a round without any fault the peers hold different parameters.")
        sent = [look["sent_bytes"] for look in after], [look["sent_bytes"] for look in before]
        return {
            "round": max(end["at_s"] for end in ends) - min(one["began_s"] for one in began),
            "round_cpu": sum(end["cpu_s"] for end in ends),
            "round_bytes": float(sum(sent[0]) - sum(sent[1])),
        }

    def _ceiling(self, swarm: _Swarm) -> dict[str, float]:
        ports = [member.port for member in swarm.members]
        for member in swarm.members:
            others = [port for port in ports if port != member.port]
            member.process.order(order="move", details={"ports": others})
        moved = [member.process.expect()["answer"] for member in swarm.members]
        seconds = max(one["at_s"] for one in moved) - min(one["began_s"] for one in moved)
        return {"ceiling": seconds, "ceiling_cpu": sum(one["cpu_s"] for one in moved)}

    # --- with faults ---

    def _faults(self, swarm: _Swarm, kind: str, num: int, tell: Tell) -> Iterator[Row]:
        usual_s = self._one_round(swarm)["round"]
        times_s: list[float] = []
        num_hung = num_equal = 0
        spares: list[_Member] = []  # two are on their way up meanwhile: that takes longer than a round
        for number in range(num):
            if kind == "kill":
                spares += [swarm.start() for _ in range(min(_NUM_SPARES, num - number) - len(spares))]
            spare = spares.pop(0) if spares else None
            after_s = self._fault(swarm, spare, _ROLES[number % len(_ROLES)], usual_s)
            if after_s is None:
                num_hung += 1
            else:
                times_s.append(after_s)
            swarm.settle(f"After a {kind} the peers have not become one run again.")
            whole = swarm.ask("look", is_full=True)
            num_equal += len({look["bits"] for look in whole}) == 1
            for member, look in zip(swarm.members, whole, strict=True):
                member.rss_bytes.append(look["rss_bytes"])
            tell(f"rounds with a {kind}: {number + 1} of {num}")
        key: RowKey = {"scenario": kind}
        if times_s:  # none where all rounds hung
            yield self._row("after_fault", key, times_s)
        yield self._row("hung", key, [float(num_hung)])
        yield self._row("same_bits", key, [num_equal / num])
        growth = [
            statistics.median(rss[-5:]) / statistics.median(rss[5:10]) - 1
            for member in swarm.members
            if len(rss := [size for size in member.rss_bytes if size]) >= 2 * _MIN_FAILED
        ]
        if growth:
            yield self._row("rss_growth", key, growth)

    def _fault(self, swarm: _Swarm, spare: _Member | None, role: str, usual_s: float) -> float | None:
        """Hits one peer in the middle of a round: kills it where there is a spare, else stops it for a while.

        Returns how long after it the last of the others has committed a step, None if it never does.
        """
        if spare is not None:
            spare.wait_until_up()
        before = swarm.settle()
        victim = self._victim(swarm, role, before)
        others = [member for member in swarm.members if member is not victim]
        steps = max(look["steps"] for look in before)
        swarm.ask("contribute")
        time.sleep(self._choice.uniform(0, usual_s))
        hit_s = time.monotonic()
        victim.hit(signal.SIGSTOP if spare is None else signal.SIGKILL)
        # who has gone on computes more: what the victim took along is not waited for, and where the signal
        # came too late for the round it is timed in the next one
        swarm.ask("contribute", others, samples=self._config.num_peers)
        ends = swarm.ask("wait_for_step", others, after=steps, limit_s=_HUNG_S, since_s=hit_s)
        if spare is not None:
            swarm.members.remove(victim)
            victim.ending.close()
            swarm.add(spare, is_plain=victim.is_plain or role == "reducer")
        else:
            victim.hit(signal.SIGCONT)
        if any(end["at_s"] is None for end in ends):
            return None
        return float(max(end["at_s"] for end in ends) - hit_s)

    def _victim(self, swarm: _Swarm, role: str, looks: _Looks) -> _Member:
        """Chooses by role; one peer is never hit, and its memory tells of all failed rounds."""
        pairs = list(zip(swarm.members, looks, strict=True))
        pairs = [(member, look) for member, look in pairs if member.number != _OBSERVER]
        others = [member for member, look in pairs if not look["is_first"]]
        chosen = [member for member in others if member.is_plain == (role == "plain")]
        if role == "coordinator":
            chosen = [member for member, look in pairs if look["is_first"]]
        return self._choice.choice(chosen or others)


# --- hivemind beside it ---


def measure_hivemind(python: str, config: SwarmConfig, choice: random.Random, tell: Tell) -> Iterator[Row]:
    """The same tensors through hivemind's averager, in processes of an environment that has it."""
    key: RowKey = {"peers": config.num_peers, "size_bytes": config.size_bytes, "via": "hivemind"}
    rounds_s: list[float] = []
    with _hivemind_peers(python, config) as peers:
        for number in range(config.num_rounds):
            rounds_s.append(max(one["took_s"] for one in _step_all(peers)))
            tell(f"clean rounds of hivemind: {number + 1} of {config.num_rounds}")
    yield measured("round", {**key, "scenario": "clean"}, rounds_s)
    after_s: list[float] = []
    num_equal = 0
    for number in range(min(config.num_kills, _HIVEMIND_KILLS)):
        with _hivemind_peers(python, config) as peers:
            usual_s = max(one["took_s"] for one in _step_all(peers))
            for peer in peers:
                peer.order(order="step")
            time.sleep(choice.uniform(0, usual_s))
            hit_s = time.monotonic()
            peers[-1].kill()
            ends = [peer.expect() for peer in peers[:-1]]
            after_s.append(max(end["at_s"] for end in ends) - hit_s)
            num_equal += len({end["bits"] for end in ends}) == 1
            tell(f"rounds of hivemind with a kill: {number + 1}")
    if after_s:
        yield measured("after_fault", {**key, "scenario": "kill"}, after_s)
        yield measured("same_bits", {**key, "scenario": "kill"}, [num_equal / len(after_s)])


_HIVEMIND_SCRIPT = """
import hashlib, json, sys, time
import torch, hivemind
from hivemind.averaging import DecentralizedAverager

arguments = json.loads(sys.argv[1])
torch.set_num_threads(1)
dht = hivemind.DHT(
    initial_peers=arguments["initial_peers"], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True
)
generator = torch.Generator().manual_seed(arguments["number"])
tensor = torch.randn(arguments["num_elements"], generator=generator)
averager = DecentralizedAverager(
    [tensor], dht, prefix="bench", target_group_size=arguments["num_peers"],
    min_group_size=2, min_matchmaking_time=arguments["matchmaking_s"], start=True,
)
print(json.dumps({"maddrs": [str(one) for one in dht.get_visible_maddrs()]}), flush=True)
for line in sys.stdin:
    began_s = time.monotonic()
    try:
        found = averager.step(timeout=arguments["timeout_s"], allow_retries=True)
    except Exception as error:
        found = None
    at_s = time.monotonic()
    with averager.get_tensors() as tensors:
        bits = hashlib.sha256(tensors[0].detach().numpy().tobytes()).hexdigest()
    told = {"at_s": at_s, "took_s": at_s - began_s, "bits": bits, "done": found is not None}
    print(json.dumps(told), flush=True)
averager.shutdown()
dht.shutdown()
"""


@contextlib.contextmanager
def _hivemind_peers(python: str, config: SwarmConfig) -> Iterator[list[Child]]:
    """Starts hivemind's peers; each takes one line for each step."""
    peers: list[Child] = []
    with contextlib.ExitStack() as stack:
        maddrs: list[str] = []
        for number in range(config.num_peers):
            arguments = {
                "number": number,
                "num_peers": config.num_peers,
                "num_elements": config.size_bytes // 4,
                "initial_peers": maddrs,
                "matchmaking_s": 2.0,
                "timeout_s": _HIVEMIND_S,
            }
            process = subprocess.Popen(
                [python, "-c", _HIVEMIND_SCRIPT, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(_end, process)
            peer = Child(process, f"hivemind's peer {number}")
            maddrs = maddrs or peer.expect()["maddrs"] if number == 0 else maddrs
            if number:
                peer.expect()
            peers.append(peer)
        yield peers


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _step_all(peers: Sequence[Child]) -> list[dict[str, Any]]:
    for peer in peers:
        peer.order(order="step")
    return [peer.expect() for peer in peers]


def summarize_swarm(report: Report) -> dict[str, Any]:
    """The RESULT line: medians of clean rounds, and what came after faults."""
    result: dict[str, Any] = {}
    for told in report.rows:
        if not told.starts or not told.samples:
            continue
        scenario = told.key.get("scenario")
        prefix = "hivemind_" if told.key.get("via") == "hivemind" else ""
        for name, value in _figures(told.metric, str(scenario), told.samples).items():
            key = prefix + name
            is_worse = name != "rss_growth" or value > result.get(key, -1.0)  # of kills and of stops
            result[key] = value if is_worse else result[key]
    for prefix in ("", "hivemind_"):
        equal, hung = f"{prefix}same_bits", f"{prefix}hung"
        shares = [result.pop(name) for name in list(result) if name.startswith(f"{equal}_")]
        counts = [result.pop(name) for name in list(result) if name.startswith(f"{hung}_")]
        if shares:
            result[equal] = min(shares) == 1.0
        if counts:
            result[hung] = int(sum(counts))
    return with_failed(report, result)


def _figures(metric: str, scenario: str, samples: Sequence[float]) -> dict[str, Any]:
    """What one row gives to the RESULT line."""
    median = statistics.median(samples)
    if metric == "after_fault":
        after = {f"{scenario}s": len(samples), f"after_{scenario}_max_s": round(max(samples), 3)}
        p95 = known_percentile(samples, 95)
        return after if p95 is None else {**after, f"after_{scenario}_p95_s": round(p95, 3)}
    if metric in ("same_bits", "hung"):
        return {f"{metric}_{scenario}": min(samples) if metric == "same_bits" else sum(samples)}
    if metric == "rss_growth":
        return {"rss_growth": round(max(samples), 4)}
    if metric == "join_rate":
        return {"join_mb_s": round(median, 1)}
    if metric == "round_bytes":
        return {"round_bytes": int(median)}
    is_ratio = metric == "round_over_ceiling"
    return {metric if is_ratio else f"{metric}_s": round(median, 3)}
