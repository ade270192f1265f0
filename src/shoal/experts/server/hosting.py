"""A process that serves experts: endpoint, DHT, server, checkpoints and metrics, opened and closed in order.

What each of them does is theirs; here they are put together as a `HostingConfig` says. How the host is at a
moment is told as numbers, as a status line, and as text for Prometheus. Signals and words for people are the
command line's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from shoal.core import (
    SYSTEM_CLOCK,
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    PeerId,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.core.identity import Identity
from shoal.core.placement import num_cores
from shoal.dht.node import DHT
from shoal.dht.settings import DHTSettings
from shoal.experts.config import HostingConfig
from shoal.experts.expert import Expert
from shoal.experts.server.assignment import ExpertAdopter, ExpertMaker, choose_uids
from shoal.experts.server.checkpoints import Checkpoints, Saver
from shoal.experts.server.publishing import Publishing
from shoal.experts.server.replicas import Replicas
from shoal.experts.server.server import ExpertServer
from shoal.experts.settings import ServerSettings
from shoal.experts.status import MAX_TOLD, STATUS, ExpertStatus, HostStatus
from shoal.report.pages import Page, PageServer, Site
from shoal.transport import Endpoint, Head, Limits, Membership, Reply
from shoal.transport.limits import GIB, MIB

log = logging.getLogger(__name__)


_MAX_LOOPS = 8
_DECLARE_S, _WITHDRAW_S, _RELAY_S = 60.0, 10.0, 15.0


class Hosting:
    """Experts that are served as a configuration says; open it with `async with` on the loop it lives on.

    Leaving the block without an error ends it in order: what was accepted is finished while new work is
    refused, experts are saved, and the swarm is told that they are here no more. With an error it ends at
    once. Without an `identity` it has a new one; with a `membership`, the membership's.
    """

    def __init__(
        self,
        config: HostingConfig,
        identity: Identity | None = None,
        membership: Membership | None = None,
    ) -> None:
        config.check()
        self.config = config
        self.identity = membership.identity if membership else identity or Identity.generate()
        self.device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.num_loops = config.num_loops or min(_MAX_LOOPS, max(1, num_cores() // 2))
        self._helpers = [LoopThread(f"shoal-network-{index}") for index in range(1, self.num_loops)]
        self.endpoint = Endpoint(
            membership=membership,
            is_insecure=config.insecure,
            limits=_limits(config),
            helpers=self._helpers,
            peer_id=self.identity.peer_id,
        )
        self.dht: DHT | None = None
        self.publishing: Publishing | None = None
        self.metrics: MetricsServer | None = None
        self._checkpoints = (
            Checkpoints(Path(config.checkpoint_dir), config.num_checkpoints)
            if config.checkpoint_dir
            else None
        )
        self._maker = ExpertMaker(config, self._checkpoints)
        self._worker = LoopThread("shoal-files")
        self._server: ExpertServer | None = None
        self._saver: Saver | None = None
        self._replicas: Replicas | None = None
        self._adopting: ExpertAdopter | None = None
        self._standing = StandingScope("hosting")
        self._closing = contextlib.AsyncExitStack()
        self._began_s = 0.0
        self._last: HostStatus | None = None

    async def __aenter__(self) -> Self:
        config = self.config
        async with contextlib.AsyncExitStack() as closing:
            for thread in (*self._helpers, self._worker):
                closing.enter_context(thread)
            await closing.enter_async_context(self.endpoint)
            await self.endpoint.listen(self._where())
            if config.join:
                await self._join(closing)
            saved = await self._worker.run_blocking(self._maker.saved_uids)
            uids = await choose_uids(config, saved, self.dht)
            experts = [await self._made(uid) for uid in uids]
            server = ExpertServer(self.endpoint, experts, config.part(ServerSettings, device=self.device))
            self._server = await closing.enter_async_context(server)
            if self.dht is not None and set(uids) != set(config.uid):
                uids = await self._choose_again(server, self.dht, saved)
            self._began_s = SYSTEM_CLOCK.now_s()
            self.endpoint.routes.add(STATUS, self._serve_status, None, None)
            closing.callback(self.endpoint.routes.remove, STATUS)
            if config.metrics_port is not None:
                address = Address(config.metrics_host, config.metrics_port)
                metrics = MetricsServer(address, lambda: metrics_text(self.moment()))
                self.metrics = await closing.enter_async_context(metrics)
            self._standing = StandingScope("hosting")
            scope = await self._standing.open()
            closing.push_async_callback(self._standing.close)
            if self._checkpoints is not None:
                self._saver = Saver(server, self._checkpoints, self._worker, self._maker.about)
                scope.start_soon(self._saver.run(config.checkpoint_every_s), name="saving experts")
            if self.publishing is not None and self.dht is not None:
                scope.start_soon(self._stay_callable(self.dht), name="being called")
                replicas = self._replicas = Replicas(server, self.dht, config.replica_sync_s)
                if config.uid:
                    await replicas.sync(config.uid)  # before they are found here, they become copies
                await self._declare(uids)
                scope.start_soon(replicas.run(), name="averaging replicas")
                if config.adopt and self._checkpoints is not None:
                    self._adopting = self._adopter(server, self.dht, self._checkpoints)
                    scope.start_soon(self._adopting.run(), name="adopting experts")
            self._closing = closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self._leave()
        finally:
            self._last = self.moment()
            self._server = self._saver = self.dht = self.publishing = self.metrics = None
            self._replicas = self._adopting = None
            await self._closing.aclose()

    # --- what it is ---

    @property
    def server(self) -> ExpertServer:
        """The server; UsageError while this is not open."""
        if self._server is None:
            raise UsageError("The host is not open.", next_step="use it inside 'async with'.")
        return self._server

    @property
    def address(self) -> Address:
        """Where it is called."""
        return self.endpoint.addresses[0]

    @property
    def peer_id(self) -> PeerId:
        """The id of the peer that serves."""
        return self.identity.peer_id

    @property
    def uids(self) -> list[str]:
        """Of all experts that are served now."""
        return list(self.server.experts)

    def moment(self) -> HostStatus:
        """How it is now, or was when it was closed. For any thread."""
        if self._server is None and self._last is not None:
            return self._last
        server = self.server
        return HostStatus(
            up_s=SYSTEM_CLOCK.now_s() - self._began_s,
            num_waiting=server.num_waiting,
            num_failed=server.statistics.num_failed,
            num_peers=0 if self.dht is None else len(self.dht.table),
            is_leaving=server.is_leaving,
            experts=tuple(_moment_of(expert) for expert in tuple(server.experts.values())),
            num_averaged=0 if self._replicas is None else self._replicas.num_averaged,
            num_copied=0 if self._replicas is None else self._replicas.num_copied,
            num_adopted=0 if self._adopting is None else self._adopting.num_adopted,
            expert_class=self.config.expert_class,
        )

    def _serve_status(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        moment = self.moment()
        return Reply(msgspec.structs.replace(moment, experts=moment.experts[:MAX_TOLD]))

    # --- how it begins ---

    def _where(self) -> Address:
        if self.config.listen is not None:
            return Address.parse(self.config.listen)
        is_open = self.config.insecure or self.endpoint.membership is not None
        return Address("0.0.0.0" if is_open else "127.0.0.1", 0)

    async def _join(self, closing: contextlib.AsyncExitStack) -> None:
        dht = DHT(
            join=self.config.join,
            identity=self.identity,
            endpoint=self.endpoint,
            settings=DHTSettings(is_strict=not self.config.wait),
        )
        self.dht = await closing.enter_async_context(dht)
        if dht.is_client:
            try:
                await dht.use_relays(deadline=Deadline.after(_RELAY_S))
            except ShoalError as error:
                raise UsageError(
                    f"Others cannot call this peer at port {self.address.port}, so it cannot serve experts.",
                    cause="a firewall or router is in between, or it listens on the wrong address, and no "
                    "peer of the swarm relays for it.",
                    next_step="open the port for TCP and UDP, or give another --listen; `shoal doctor --join "
                    f"{self.config.join[0]}` tells more.",
                ) from error
            log.warning(
                "Others cannot call this peer at port %d: it serves through relays.", self.address.port
            )
        self.publishing = Publishing(dht, self.config.declare_s)

    async def _stay_callable(self, dht: DHT) -> None:
        """Goes to relays when others cannot call this peer any more; ends when cancelled."""
        while True:
            await asyncio.sleep(_RELAY_S)
            if dht.is_client and not dht.addresses:
                with contextlib.suppress(ShoalError):
                    await dht.use_relays(deadline=Deadline.after(_RELAY_S))

    async def _declare(self, uids: list[str]) -> None:
        assert self.publishing is not None
        try:
            num_found = await self.publishing.declare(uids, Deadline.after(_DECLARE_S))
        except DeadlineExceeded as error:
            log.warning("Experts are served, but cannot be found yet, which is tried on: %s", error)
            return
        if num_found < len(uids):
            log.warning("%d of %d experts could not be declared yet.", len(uids) - num_found, len(uids))

    def _adopter(self, server: ExpertServer, dht: DHT, checkpoints: Checkpoints) -> ExpertAdopter:
        return ExpertAdopter(
            server,
            dht,
            checkpoints,
            self._maker.like,
            self.config.adopt_s,
            max_experts=self.config.max_experts,
            on_adopted=lambda uid: self._declare([uid]),
        )

    async def _made(self, uid: str) -> Expert:
        return await self._worker.run_blocking(functools.partial(self._maker.make, uid))

    async def _choose_again(self, server: ExpertServer, dht: DHT, saved: list[str]) -> list[str]:
        """Leave to others what they have begun to serve while this host was making the same."""
        held = list(server.experts)
        uids = await choose_uids(self.config, saved, dht, held)
        if lost := [uid for uid in held if uid not in uids]:
            log.warning(
                "Others have begun to serve %d of the experts here: %s", len(lost), ", ".join(lost[:5])
            )
        for uid in lost:
            await server.remove(uid)
        for uid in uids:
            if uid not in server.experts:
                await server.add(await self._made(uid))
        return uids

    # --- how it ends ---

    async def _leave(self) -> None:
        """In this order: who adopts an expert that is gone from the swarm finds its newest state saved."""
        is_done = await self.server.leave(Deadline.after(self.config.leave_s))
        if not is_done:
            log.warning("Not all that was accepted was finished within %g s.", self.config.leave_s)
        await self._standing.close()
        if self._saver is not None:
            await self._saver.save()
        if self.publishing is not None and not await self._withdrawn(self.publishing):
            log.warning("Some experts are found here until their records expire.")

    async def _withdrawn(self, publishing: Publishing) -> bool:
        try:
            return await publishing.withdraw(Deadline.after(_WITHDRAW_S))
        except ShoalError as error:
            log.warning("Experts could not be withdrawn: %s", error)
            return False


@contextlib.contextmanager
def hosted(
    config: HostingConfig, identity: Identity | None = None, membership: Membership | None = None
) -> Iterator[tuple[Hosting, LoopThread]]:
    """A host for blocking code, and the loop thread that it lives on."""
    with LoopThread("shoal-serve") as loop:
        hosting = Hosting(config, identity, membership)
        loop.run(hosting.__aenter__())
        try:
            yield hosting, loop
        except BaseException as error:
            loop.run(hosting.__aexit__(type(error), error, error.__traceback__))
            raise
        loop.run(hosting.__aexit__(None, None, None))


def _moment_of(expert: Expert) -> ExpertStatus:
    done = expert.statistics
    return ExpertStatus(
        uid=expert.uid,
        num_forward_batches=done.num_forward_batches,
        num_forward_samples=done.num_forward_samples,
        num_backward_batches=done.num_backward_batches,
        num_backward_samples=done.num_backward_samples,
        num_updates=expert.num_updates,
        busy_s=done.busy_s,
        num_clipped=done.num_clipped_updates,
    )


def _limits(config: HostingConfig) -> Limits:
    max_message_bytes = config.max_message_mib * MIB
    return Limits(max_message_bytes=max_message_bytes, max_bytes_in_flight=max(GIB, 4 * max_message_bytes))


PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(moment: HostStatus) -> str:
    """In the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP shoal_{name} {about}")
        lines.append(f"# TYPE shoal_{name} {kind}")
        lines.extend(f"shoal_{name}{labels} {value:.10g}" for labels, value in values)

    def each(of: Callable[[ExpertStatus], tuple[float, float]]) -> list[tuple[str, float]]:
        found = [(_escaped(expert.uid), of(expert)) for expert in moment.experts]
        return [
            (f'{{expert="{uid}",kind="{kind}"}}', value)
            for uid, values in found
            for kind, value in zip(("forward", "backward"), values, strict=True)
        ]

    def alone(value: float) -> list[tuple[str, float]]:
        return [("", value)]

    add("up_seconds", "gauge", "Seconds since this server is ready.", alone(moment.up_s))
    add("experts", "gauge", "Experts that are served.", alone(len(moment.experts)))
    add("waiting_requests", "gauge", "Requests that wait for the device.", alone(moment.num_waiting))
    add("is_leaving", "gauge", "1 when no new work is taken.", alone(moment.is_leaving))
    add("dht_peers", "gauge", "Peers of the swarm that are known.", alone(moment.num_peers))
    add("samples_total", "counter", "Samples computed by all experts.", alone(moment.num_samples))
    add("batches_total", "counter", "Batches computed by all experts.", alone(moment.num_batches))
    add("failed_requests_total", "counter", "Accepted requests that failed.", alone(moment.num_failed))
    add("averages_total", "counter", "Averages with other replicas begun here.", alone(moment.num_averaged))
    add("copies_total", "counter", "Experts copied from other replicas.", alone(moment.num_copied))
    add("adoptions_total", "counter", "Experts that nobody served any more.", alone(moment.num_adopted))
    add(
        "expert_samples_total",
        "counter",
        "Samples computed.",
        each(lambda one: (one.num_forward_samples, one.num_backward_samples)),
    )
    add(
        "expert_batches_total",
        "counter",
        "Batches computed.",
        each(lambda one: (one.num_forward_batches, one.num_backward_batches)),
    )
    names = [f'{{expert="{_escaped(expert.uid)}"}}' for expert in moment.experts]
    updates = [expert.num_updates for expert in moment.experts]
    busy = [expert.busy_s for expert in moment.experts]
    add("expert_updates_total", "counter", "Steps of the optimizer.", zip(names, updates, strict=True))
    add(
        "expert_clipped_updates_total",
        "counter",
        "Steps whose gradient was clipped, being far above the usual norm.",
        zip(names, [expert.num_clipped for expert in moment.experts], strict=True),
    )
    add("expert_busy_seconds_total", "counter", "Seconds of computing.", zip(names, busy, strict=True))
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer(PageServer):
    """Answers `GET /metrics` with what `text` gives, on the loop that it is opened on."""

    def __init__(self, address: Address, text: Callable[[], str]) -> None:
        super().__init__(address, Site({PATH: Page(text, CONTENT_TYPE)}, "Metrics", "--metrics-port"))

    @property
    def url(self) -> str:
        """Where to read it."""
        return f"http://{self.address}{PATH}"
