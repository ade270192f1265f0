"""What a member tells whoever asks: how far its run is, what it trains, what became of its own samples.

Joiners ask before they join, so that another model is refused by name and not by a failing transfer;
`shoal swarm` asks everybody, again and again. Nothing here imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.core import Address, Deadline, Peer, PeerId, ShoalError, UsageError, fanout
from shoal.dht import DHT, present
from shoal.transport import Transport

log = logging.getLogger(__name__)

FACTS = "swarm.facts"
MAX_FOUND = 64
_FIND_S = 10.0
_ASK_S = 3.0


class FactsRequest(msgspec.Struct, frozen=True):
    """Asks a member of this run for its facts."""

    run: str
    with_model: bool = False
    """Whether to say what the model is made of, too."""


class ModelFacts(msgspec.Struct, frozen=True):
    """What members must have alike."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """The names and shapes of what is shared, in order."""
    rounds: str
    """Which kind of rounds, and what all members step by, in words."""
    robust: str = ""
    """How contributions are averaged, where not by their mean."""


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A member, its run, and what it has done for it."""

    peer_id: str
    address: str
    name: str = ""
    """The machine's name and the process's number."""
    fork: str = ""
    round: int = 0
    num_steps: int = 0
    num_samples: int = 0
    """Samples of all members that are in the parameters."""
    members: tuple[str, ...] = ()
    """The addresses of the listed members, in order."""
    ways: tuple[str, ...] = ()
    """How others reach each of them: dialed, relayed, or not at all: a client."""
    way: str = "dialed"
    """How others reach this one."""
    links: Mapping[str, int] = {}
    """With how many other members this one is connected directly, punched through routers, and relayed."""
    is_member: bool = False
    num_committed: int = 0
    """Samples of this member's own that went in."""
    num_pending: int = 0
    num_lost: int = 0
    lost: Mapping[str, int] = {}
    """Why samples were lost, and how many."""
    num_failed: int = 0
    """Rounds that came to nothing."""
    samples_per_s: float = 0.0
    """What this member computes, lately."""
    num_bytes: int = 0
    """Bytes of parts that it sent to other members."""
    loss: float | None = None
    notes: tuple[str, ...] = ()
    """What went wrong lately."""
    model: ModelFacts | None = None
    kind: str = "trainer"
    codec: str = "plain"
    """How its values travel."""


def ways_in_words(ways: Sequence[str]) -> str:
    """Says how the members of a run are reached, such as '1 of 6 dialed, 3 relayed, 2 clients'."""
    counted = [(ways.count("dialed"), "dialed"), (ways.count("relayed"), "relayed")]
    counted.append((num := ways.count("client"), "client" if num == 1 else "clients"))
    (first, word), *others = [one for one in counted if one[0]] or [(0, "dialed")]
    return ", ".join([f"{first} of {len(ways)} {word}", *(f"{num} {word}" for num, word in others)])


def presence_name(run: str) -> str:
    """The name under which the members of a run are present in the DHT."""
    return f"run.{run}"


async def find_members(dht: DHT, run: str) -> list[Peer]:
    """Looks for the peers that are present in a run, this one left out; none where nobody answers."""
    try:
        found = await present(dht, presence_name(run), deadline=Deadline.after(_FIND_S))
    except ShoalError as error:
        log.debug("the run %s could not be looked up: %s", run, error)
        return []
    peers = [_read(peer_id, slot.value) for peer_id, slot in found.items() if peer_id != dht.peer_id]
    return [peer for peer in peers if peer is not None][:MAX_FOUND]


async def ask_facts(
    transport: Transport, peers: Sequence[Peer], request: FactsRequest
) -> dict[Peer, MemberFacts | ShoalError]:
    """Asks peers for their facts; those that do not answer stand with the reason."""
    calls = [transport.call(peer, FACTS, request, deadline=Deadline.after(_ASK_S)) for peer in peers]
    answers: dict[Peer, MemberFacts | ShoalError] = {}
    for peer, outcome in zip(peers, await fanout(calls, Deadline.after(2 * _ASK_S)), strict=True):
        try:
            if isinstance(outcome, Exception):
                raise outcome
            answers[peer] = msgspec.convert(outcome.payload, MemberFacts)
        except ShoalError as error:
            answers[peer] = error
        except msgspec.ValidationError as error:
            answers[peer] = UsageError(
                f"It answers with something else: {error}.", next_step="run the same version everywhere."
            )
    return answers


def require_same_model(run: str, mine: ModelFacts, theirs: ModelFacts) -> None:
    """UsageError that names the first parameter that differs, or the other kind of rounds."""
    here, there = dict(mine.tensors), dict(theirs.tensors)
    next_step = "build the same model as the other members, or give the run another name."
    for name in dict.fromkeys([*there, *here]):
        if here.get(name) != there.get(name):
            raise UsageError(
                f"{name} has {_words(there.get(name))} in the run {run!r}, "
                f"and {_words(here.get(name))} here.",
                cause="the model is built in another way (another number of classes, other layers frozen, "
                "another version of the code).",
                next_step=next_step,
            )
    if mine.tensors != theirs.tensors:
        raise UsageError(
            f"The model's parameters come in another order in the run {run!r}.", next_step=next_step
        )
    if mine.rounds != theirs.rounds:
        raise UsageError(
            f"The run {run!r} has {theirs.rounds}, and this program {mine.rounds}.",
            cause="all members must make the same step of the same averages.",
            next_step="give the strategy and the optimizer the settings that the other members have, or the "
            "run another name.",
        )


def _words(shape: tuple[int, ...] | None) -> str:
    return "no such parameter" if shape is None else f"shape {list(shape)}"


def _read(peer_id: PeerId, value: Any) -> Peer | None:
    """Reads what a peer has announced; None where it cannot be called."""
    try:
        if isinstance(value[-1], str):
            return Peer(Address.parse(value[0]), peer_id)  # through its relays, the best one first
        host, port = value
        return Peer(Address(host, port), peer_id)
    except (TypeError, ValueError, LookupError):
        return None
