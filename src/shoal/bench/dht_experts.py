"""The *experts* mode of `shoal bench dht`: one peer declares experts in batches, another looks them up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.bench.dht_config import ExpertsPlan
from shoal.bench.dht_outcome import Outcome, Watched
from shoal.bench.dht_swarm import Swarm
from shoal.experts.names import UidPattern

_PATTERN = UidPattern("expert", (range(1000),) * 3)


async def run_experts(swarm: Swarm, plan: ExpertsPlan) -> Outcome:
    """Declare and look up, batch after batch; only the peers' own work is timed."""
    outcome = Outcome(create_s=await swarm.create())
    uids = _draw(swarm, plan.num_experts)
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


def _draw(swarm: Swarm, count: int) -> list[str]:
    """Uids drawn at random, each once."""
    draws = (
        ".".join((_PATTERN.name, *(str(swarm.random.choice(axis)) for axis in _PATTERN.axes)))
        for _ in range(count)
    )
    return list(dict.fromkeys(draws))


def _any_address(swarm: Swarm) -> str:
    """Where the experts of a batch are said to be served: nobody calls them."""
    host = ".".join(str(swarm.random.randint(1, 254)) for _ in range(4))
    return f"{host}:{swarm.random.randint(1, 65_535)}"


async def _declare(
    swarm: Swarm,
    plan: ExpertsPlan,
    outcome: Outcome,
    declarer: int,
    batches: Sequence[tuple[list[str], str]],
) -> list[float]:
    """When each batch expires."""
    phase, expiries = outcome.store, []
    advance = swarm.counted("experts declared", sum(len(uids) for uids, _ in batches))
    async with Watched(swarm, phase):
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
    swarm: Swarm, outcome: Outcome, who: tuple[int, int], batches: Sequence[tuple[list[str], str]]
) -> list[float]:
    """By which wall time each batch was read."""
    declarer, reader = who
    phase, read_by_s = outcome.get, []
    advance = swarm.counted("experts looked up", sum(len(uids) for uids, _ in batches))
    async with Watched(swarm, phase):
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
