"""Which experts a host begins with: those it was told to serve, those it has saved, then new ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.core import Deadline, Peer, PeerBusy, ShoalError, UsageError, fanout
from shoal.dht.node import DHT
from shoal.experts.config import HostingConfig
from shoal.experts.names import ExpertUid, UidPattern, sample_uids
from shoal.experts.serving_peers import who_serves

log = logging.getLogger(__name__)

_LOOK_UP_S = 30.0
_PING_S = 5.0


async def choose_uids(
    config: HostingConfig, saved: Sequence[str], dht: DHT | None, held: Sequence[str] = ()
) -> list[str]:
    """As many uids as are wanted; UsageError when that cannot be, or would leave saved experts out.

    In a swarm saved ones are taken at random, for others may begin with the same folder at the same time.
    Those that were chosen before and are `held` come first, unless another peer serves them by now.
    """
    named = list(config.uid)
    others = [uid for uid in saved if uid not in named and uid not in held]
    if dht is not None:
        others, left = _fitting(others, config.uid_pattern)
        if left and not held:
            log.warning("%d saved experts are left alone: %s", len(left), ", ".join(left[:5]))
        dht.endpoint.network.random.shuffle(others)
        others = await _not_served([uid for uid in held if uid not in named] + others, dht)
    num_wanted = _num_wanted(config, len(others))
    room = num_wanted - len(named)
    if len(others) > room and not config.adopt and not named:
        raise UsageError(
            f"{config.checkpoint_dir} has {len(others)} experts, and --num-experts is {num_wanted}.",
            cause="those beyond it would be served by nobody.",
            next_step=f"give --num-experts {len(others)}, or --adopt to take in those that nobody serves, or "
            "another --checkpoint-dir.",
        )
    chosen = named + others[:room]
    if len(chosen) < num_wanted:
        chosen += await _new(num_wanted - len(chosen), chosen, config.uid_pattern, dht)
    return chosen


def _num_wanted(config: HostingConfig, num_saved: int) -> int:
    if config.num_experts is not None:
        return config.num_experts
    is_for_others = config.adopt and config.uid_pattern is None
    num_wanted = len(config.uid) or num_saved or (0 if is_for_others else 1)
    return num_wanted if config.max_experts is None else min(num_wanted, config.max_experts)


async def _new(count: int, taken: Sequence[str], pattern: str | None, dht: DHT | None) -> list[str]:
    if dht is None:
        plain = (f"expert{index}" for index in range(count + len(taken)))
        return [uid for uid in plain if uid not in taken][:count]
    drawn = await sample_uids(dht, pattern, count + len(taken), deadline=Deadline.after(_LOOK_UP_S))
    new = [str(uid) for uid in drawn if str(uid) not in taken][:count]
    if len(new) < count:
        raise UsageError(
            f"Only {len(new)} of {count} uids like {pattern or 'expert.0'} are free.",
            cause="others serve them already.",
            next_step="give a larger --uid-pattern, or --uid to serve one together with others.",
        )
    return new


def _fitting(uids: Sequence[str], pattern: str | None) -> tuple[list[str], list[str]]:
    """Those that a swarm can find and that are like the pattern, and the others."""
    grid = None if pattern is None else UidPattern.of(pattern)
    fitting: list[str] = []
    left: list[str] = []
    for text in uids:
        try:
            uid = ExpertUid.of(text)
        except UsageError:
            left.append(text)
            continue
        is_like = grid is None or (
            uid.name == grid.name
            and len(uid.coordinates) == len(grid.axes)
            and all(place in axis for place, axis in zip(uid.coordinates, grid.axes, strict=True))
        )
        (fitting if is_like else left).append(text)
    return fitting, left


async def _not_served(uids: list[str], dht: DHT) -> list[str]:
    """Those of which no record leads to another peer that answers."""
    found = await who_serves(dht, uids)
    peers = {peer: None for one in found if one is not None for peer in one.peers if peer.id != dht.peer_id}
    answers = await fanout((_answers(dht, peer) for peer in peers), Deadline.after(_PING_S))
    alive = {peer: answer is True for peer, answer in zip(peers, answers, strict=True)}
    return [
        uid
        for uid, one in zip(uids, found, strict=True)
        if one is None or not any(alive.get(peer, False) for peer in one.peers)
    ]


async def _answers(dht: DHT, peer: Peer) -> bool:
    try:
        await dht.ping(peer)
    except PeerBusy:
        return True
    except ShoalError:
        return False
    return True
