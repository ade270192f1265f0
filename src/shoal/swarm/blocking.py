"""A run for blocking code: found through the DHT, on a loop thread of its own, waited for.

    with shoal.dht.connect("HOST:31337") as swarm, BlockingSwarmRun(swarm, "digits", parameters) as run:
        run.add(gradient, samples)
        run.wait_for_commit()
        parameters = run.parameters()

Everything happens in `SwarmRun`; this file only crosses to its loop and back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from shoal.core import Address, Deadline, Peer, PeerId, ShoalError, UsageError
from shoal.dht import DHT, Swarm, announce, present
from shoal.swarm.membership import SwarmSettings
from shoal.swarm.optimizers import CommittedOptimizer
from shoal.swarm.run import SwarmRun
from shoal.tensors import Codec

log = logging.getLogger(__name__)

LIFETIME_S = 60.0
"""A member that vanishes is found for so long."""
_FIND_S = 10.0
_LEAVE_S = 30.0
_MAX_FOUND = 32


def finder(dht: DHT, run: str) -> Callable[[], Awaitable[Sequence[Peer]]]:
    """Makes the function by which a member finds others of its run in the DHT, this peer left out."""

    async def find() -> list[Peer]:
        try:
            found = await present(dht, _name_of(run), deadline=Deadline.after(_FIND_S))
        except ShoalError as error:
            log.debug("the run %s could not be looked up: %s", run, error)
            return []
        peers = [_read(peer_id, slot.value) for peer_id, slot in found.items() if peer_id != dht.peer_id]
        return [peer for peer in peers if peer is not None][:_MAX_FOUND]

    return find


class BlockingSwarmRun:
    """A member of a run, for any thread but the loop's own; open it with `with`.

    `swarm` must be open, and reachable by others: a member needs an address.
    """

    def __init__(
        self,
        swarm: Swarm,
        run: str,
        parameters: torch.Tensor,
        optimizer: CommittedOptimizer | None = None,
        *,
        settings: SwarmSettings | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._swarm = swarm
        self._name = run
        self._made = (parameters, optimizer)
        self._settings = settings
        self._codec = codec
        self._run: SwarmRun | None = None
        self._kept: Any = None

    def __enter__(self) -> Self:
        if self._swarm.address is None:
            raise UsageError(
                "A member of a run must be reachable, and this peer is a client.",
                next_step="connect with listen=HOST:PORT.",
            )
        self._swarm.run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swarm.run(self._close(is_in_order=kind is None))

    @property
    def run(self) -> SwarmRun:
        """The member itself, for code on its loop."""
        if self._run is None:
            raise UsageError("This run is not open.", next_step="use it inside 'with'.")
        return self._run

    def add(self, mean: torch.Tensor, samples: int) -> None:
        """Takes the mean gradient, or the difference from the committed parameters, of so many samples."""
        self._cross(lambda: self.run.add(mean, samples))

    def set_ready(self) -> None:
        """Says that this member's local steps are done."""
        self._cross(self.run.set_ready)

    def parameters(self) -> torch.Tensor:
        """Copies the committed parameters, as one vector."""
        copied: torch.Tensor = self._cross(self.run.state.parameters.clone)
        return copied

    def wait_for_commit(self, after_round: int | None = None, timeout_s: float = 60.0) -> int:
        """Waits until the run is past a round, by default the one that it is in; gives the round it is in."""
        return self._swarm.run(self._pass_round(after_round, Deadline.after(timeout_s)))

    async def _pass_round(self, after_round: int | None, deadline: Deadline) -> int:
        run = self.run
        number = run.state.round if after_round is None else after_round
        while run.state.round <= number or not run.is_member:
            await run.next_commit(deadline)
        return run.state.round

    def _cross(self, work: Callable[[], Any]) -> Any:
        async def do() -> Any:
            return work()

        return self._swarm.run(do())

    async def _open(self) -> None:
        dht = self._swarm.dht
        find = finder(dht, self._name)
        run = SwarmRun(
            dht.endpoint.streams,
            dht.peer.address,
            self._name,
            *self._made,
            settings=self._settings,
            codec=self._codec,
            find=find,
        )
        self._run = await run.__aenter__()
        address = dht.peer.address
        self._kept = announce(dht, _name_of(self._name), [address.host, address.port], LIFETIME_S)

    async def _close(self, *, is_in_order: bool) -> None:
        run = self.run
        self._kept.stop()
        try:
            if is_in_order and run.is_member:
                await _unless_late(run.leave(Deadline.after(_LEAVE_S)))
        finally:
            await run.__aexit__(None, None, None)
            self._run = None


async def _unless_late(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except ShoalError as error:
        log.warning("left without a commit: %s", error)


def _name_of(run: str) -> str:
    return f"run.{run}"


def _read(peer_id: PeerId, value: Any) -> Peer | None:
    """Reads what a peer has announced; None where it is no address."""
    try:
        host, port = value
        return Peer(Address(host, port), peer_id)
    except (TypeError, ValueError):
        return None
