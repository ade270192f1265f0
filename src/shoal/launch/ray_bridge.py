"""The process through which a head reaches Ray: it copies bytes between actors and the head's sockets.

So a head polls plain descriptors, and what Ray prints never comes between the lines of workers. The bridge
has one actor placed for each worker. When the head closes a socket its agent ends; when all have ended, the
bridge ends, and with it the Ray job. In a run whose workers come and go the head sends the sockets of more
actors over a socket of their own: Ray starts each as soon as there is room, also on a node that comes later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.core import SYSTEM_CLOCK, LoopThread, Scope, ShoalError
from shoal.launch.polling import poll_once
from shoal.launch.protocol import AGENT, ChildProcess, Decoder, JobFailed, Message, MessageStream
from shoal.report.units import counted

READ_BYTES = 1 << 16
_MAX_LAST_WORDS = 2000
_AGENT_ENDING_S = 5.0
ENDING_S = 3.0
"""An agent has so long to end when the head has closed the way; it ends without us, too."""
READ_WAIT_S = 10.0
"""After which an actor with nothing to pass on is asked again."""
SHRINK_S = 5.0
"""Room for all workers is waited for so long where fewer would do; then a second for each one fewer."""
_ROOM_TICK_S = 0.2
_SAY_S = 10.0
_CONNECT_S = 5.0


class ActorRequest(Message, frozen=True):
    """Says what the head wants of the cluster."""

    address: str
    num_cpus: float
    """The CPUs of each worker."""
    start_timeout_s: float
    num_workers: int = 0
    min_workers: int = 0
    """So many are enough where there is no room for all."""


@dataclass(frozen=True)
class ActorPlace:
    """The place where an actor is."""

    node: str
    """Ray's id of it."""
    address: str
    host: str
    gpus: tuple[str, ...] = ()
    """Those that Ray has given to this actor."""

    @property
    def machine(self) -> str:
        """The machine, as lines call it: several nodes on one computer are several machines."""
        return f"Ray node {self.node[:8]} at {self.address}"


class BridgeReport(Message, frozen=True, omit_defaults=True):
    """What the bridge tells the head; an empty one, the first, says that the cluster has answered."""

    waiting: str = ""
    """What the cluster lacks for now."""
    num_agents: int | None = None
    """So many agents run, one behind each descriptor, in order; those that are left over are closed."""
    lost: tuple[int, str, str] | None = None
    """The actor behind this descriptor has gone: why, and where it was, if it was anywhere."""
    refusal: JobFailed | None = None
    """Nothing runs."""


def reason_of(error: Exception) -> str:
    """Return what matters of Ray's many lines: the sentence with the reason, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    because = [line.partition(". ")[0] for line in lines if " because " in line]
    return [*because, *lines, type(error).__name__][0].rstrip(".")


class AgentActor:
    """The Ray actor of one worker: it runs an agent as its child, and passes bytes between it and the bridge.

    What those bytes mean is known to the head and the agent alone. An actor that dies closes the agent's
    standard input, by which the agent ends its worker and itself. Methods are called by the bridge, at most
    one reading and one writing at a time.
    """

    _agent: ChildProcess

    def where(self) -> ActorPlace:
        """Say where it is, and which GPUs Ray has given to it."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
        return ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname(), gpus)

    def start(self, place: ActorPlace, variables: dict[str, str]) -> None:
        """Run the agent there by this actor's interpreter, with these variables besides the actor's own."""
        command = [sys.executable, *AGENT, place.address, place.machine]
        self._agent = ChildProcess(command, {**os.environ, **variables})

    def read(self, wait_s: float) -> bytes | None:
        """Return what the agent has written; b"" when it has ended, None when nothing came in this time."""
        poll = select.poll()
        poll.register(self._agent.stdout, select.POLLIN)
        return os.read(self._agent.stdout.fileno(), READ_BYTES) if poll.poll(wait_s * 1000) else None

    def write(self, data: bytes) -> None:
        """Give it to the agent; an agent that has ended does not want it."""
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(data)
            while view:
                view = view[self._agent.stdin.write(view) :]

    def close(self) -> None:
        """Write no more: the agent ends its worker and itself."""
        self._agent.hang_up()

    def last_words(self) -> tuple[int | None, str]:
        """Return the agent's exit code and the end of its stderr; it has ended, or is about to."""
        code, complaint = self._agent.last_words(_AGENT_ENDING_S)
        return code, complaint[-_MAX_LAST_WORDS:]


class ActorLink:
    """The way between one actor and the socket behind which the head waits for it."""

    def __init__(self, actor: Any, end: socket.socket) -> None:
        self._actor = actor
        self._end = end
        self._end.setblocking(False)
        self._input: asyncio.Queue[bytes] = asyncio.Queue()

    async def run(self) -> str:
        """Pass on what comes from either side until it ends; return why the actor is lost, if it is."""
        try:
            async with asyncio.timeout(None) as limit, Scope("the link to an actor") as scope:
                scope.start(self._take_input(limit))
                scope.start(self._pass_input())
                why_lost = await self._pass_output()
                scope.cancel()
        except Exception as error:  # noqa: BLE001  Ray has many kinds for an actor that has gone
            return "" if limit.expired() else reason_of(error)
        return why_lost

    async def _take_input(self, limit: asyncio.Timeout) -> None:
        """Read all that the head sends; once it has closed its end, the actor has a limited time.

        Not where it is passed on: the end must be noticed while a silent actor takes nothing.
        """
        loop, data = asyncio.get_running_loop(), b"any"
        while data:
            try:
                data = await loop.sock_recv(self._end, READ_BYTES)
            except ConnectionError:
                data = b""
            self._input.put_nowait(data)
        limit.reschedule(loop.time() + ENDING_S)

    async def _pass_input(self) -> None:
        while data := await self._input.get():
            await self._actor.write.remote(data)
        await self._actor.close.remote()

    async def _pass_output(self) -> str:
        while (data := await self._actor.read.remote(READ_WAIT_S)) != b"":
            with contextlib.suppress(ConnectionError):  # the head does not want it any more
                await asyncio.get_running_loop().sock_sendall(self._end, data or b"")
        code, text = await self._actor.last_words.remote()
        return f"its agent ended with exit code {code}{f': {text}' if text else ''}" if code else ""


class Bridge:
    """The bridge of one start, whose actors share a placement group; `report` tells the head something."""

    def __init__(self, ray: Any, request: ActorRequest, report: Callable[[BridgeReport], None]) -> None:
        self._ray = ray
        self._request = request
        self._report = report
        self._group: Any = None
        self._num_gpus = 0.0
        self._num_links = 0
        self._num_in_group = 0
        """The actors that have a bundle of the placement group."""
        self._visible: dict[str, list[ActorPlace | None]] = {}
        """By node: the actors there, by the local ranks of their workers; None for one that has gone."""

    def run(self, descriptors: list[int], more: socket.socket | None = None) -> None:
        """Place the actors, start the agents, and copy until all have ended; ShoalError without room.

        Over `more` come the descriptors of actors that are asked for later.
        """
        actors, places = self._place()
        for descriptor in descriptors[len(actors) :]:
            os.close(descriptor)
        pairs = zip(actors, places, strict=True)
        starts = [actor.start.remote(place, variables_of(place, places)) for actor, place in pairs]
        self._ray.get(starts, timeout=self._request.start_timeout_s)
        self._report(BridgeReport(num_agents=len(places)))
        for place in places:
            self._visible.setdefault(place.node, []).append(place)
        with LoopThread("ray-bridge") as loop:
            loop.run(self._copy(actors, places, descriptors, more))

    def _place(self) -> tuple[list[Any], list[ActorPlace]]:
        """Return actors and where they are, a node's one after the other."""
        self._group, self._num_gpus = self._reserve()
        actors = [self._make_actor(bundle) for bundle in range(self._group.bundle_count)]
        asked = [actor.where.remote() for actor in actors]
        try:
            places: list[ActorPlace] = self._ray.get(asked, timeout=self._request.start_timeout_s)
        except Exception as error:
            raise ShoalError(
                f"A worker's actor could not be started: {reason_of(error)}.",
                cause="a node that has just gone, or on which Shoal is not installed.",
                next_step="install the same Shoal on all nodes; `ray status` shows which there are.",
            ) from error
        nodes = [place.node for place in places]
        order = sorted(range(len(nodes)), key=lambda i: nodes.index(nodes[i]))
        return [actors[i] for i in order], [places[i] for i in order]

    def _make_actor(self, bundle: int | None) -> Any:
        """Have Ray start an actor in that bundle of the placement group, in any (-1), or outside of it."""
        options: dict[str, Any] = {}
        if bundle is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

            options["scheduling_strategy"] = InGroup(self._group, placement_group_bundle_index=bundle)
        return (
            self._ray.remote(AgentActor)
            .options(
                num_cpus=self._request.num_cpus,
                num_gpus=self._num_gpus,
                max_concurrency=2,  # it reads while it writes
                **options,
            )
            .remote()
        )

    def _reserve(self) -> tuple[Any, float]:
        """Return a placement group for as many workers as there is room for, and the GPUs of each."""
        from ray.util.placement_group import placement_group, remove_placement_group

        request, patience_s = self._request, SHRINK_S
        for num_workers in range(request.num_workers, request.min_workers - 1, -1):
            num_gpus = 1.0 if self._total("GPU") >= num_workers else 0.0
            bundle = {"CPU": request.num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
            each = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
            workers = f"{counted(num_workers, 'worker')} with {each} each"
            group = placement_group([bundle] * num_workers, strategy="PACK")
            limit_s = request.start_timeout_s if num_workers == request.min_workers else patience_s
            if self._wait_for(group, limit_s, workers):
                return group, num_gpus
            remove_placement_group(group)
            patience_s = 1.0
        raise ShoalError(
            f"The Ray cluster has no room for {workers}; {self._room()}.",
            cause="other jobs hold the rest, or nodes are missing.",
            next_step="give a smaller -np or a longer --start-timeout; `ray status` shows what is in use.",
        )

    def _wait_for(self, group: Any, limit_s: float, workers: str) -> bool:
        began_s = said_s = SYSTEM_CLOCK.now_s()
        while not group.wait(_ROOM_TICK_S):
            _check_head()
            now_s = SYSTEM_CLOCK.now_s()
            if now_s - began_s > limit_s:
                return False
            if now_s - said_s > _SAY_S:
                said_s = now_s
                text = f"waiting for room for {workers} on the Ray cluster; {self._room()}"
                self._report(BridgeReport(waiting=text))
        return True

    def _room(self) -> str:
        num_nodes, num_gpus, free = len(self._nodes()), self._total("GPU"), self._ray.available_resources()
        has_gpus = f" and {num_gpus:g} GPUs ({free.get('GPU', 0.0):g} free)" if num_gpus else ""
        nodes = counted(num_nodes, "node has", "nodes have")
        return f"its {nodes} {self._total('CPU'):g} CPUs ({free.get('CPU', 0.0):g} free){has_gpus}"

    def _total(self, resource: str) -> float:
        return sum(float(node.get(resource, 0.0)) for node in self._nodes())

    def _nodes(self) -> list[dict[str, float]]:
        """Return what each node has."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    async def _copy(
        self,
        actors: list[Any],
        places: list[ActorPlace],
        descriptors: list[int],
        more: socket.socket | None,
    ) -> None:
        async with Scope("the links to all actors") as scope:
            self._num_links = self._num_in_group = len(actors)
            for index, actor in enumerate(actors):
                end = socket.socket(fileno=descriptors[index])
                scope.start(self._link(scope, index, end, actor, places[index]))
            if more is not None:
                scope.start(self._take_more(scope, more, len(descriptors)))

    async def _take_more(self, scope: Scope, more: socket.socket, index: int) -> None:
        """Start another actor for each descriptor that comes; they are counted on from `index`."""
        more.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError):
                data, found, _, _ = socket.recv_fds(more, 1, 1)
                if not data:
                    return
                for descriptor in found:
                    self._num_links += 1
                    scope.start(self._link(scope, index, socket.socket(fileno=descriptor)))
                    index += 1
                continue
            await _wait_readable(more)

    async def _link(
        self,
        scope: Scope,
        index: int,
        end: socket.socket,
        actor: Any = None,
        place: ActorPlace | None = None,
    ) -> None:
        """Pass on what one actor and the head tell each other; without one, have another started first.

        That one takes the place of one that has gone, if the placement group holds such a place.
        """
        is_in_group = actor is not None or self._num_in_group < self._group.bundle_count
        self._num_in_group += is_in_group and actor is None
        try:
            with end:
                if actor is None:
                    actor = self._make_actor(-1 if is_in_group else None)
                    place, why_lost = await self._start(actor, end)
                else:
                    why_lost = ""
                if place is not None:
                    why_lost = await ActorLink(actor, end).run()
                if why_lost:  # told before the head finds the end of what came
                    where = "" if place is None else f"{place.host} ({place.machine})"
                    self._report(BridgeReport(lost=(index, why_lost, where)))
        finally:
            for here in self._visible.values():
                here[:] = [None if other is place else other for other in here]
            self._num_in_group -= is_in_group
            self._num_links -= 1
            if not self._num_links:
                scope.cancel()

    async def _start(self, actor: Any, end: socket.socket) -> tuple[ActorPlace | None, str]:
        """Wait until an actor runs; return where, or why it does not. neither if the head has given up."""
        end.setblocking(False)
        try:
            async with asyncio.timeout(None) as limit, Scope("start another actor") as scope:
                scope.start(_end_when_readable(end, limit))  # the head speaks when it has heard something
                place: ActorPlace = await actor.where.remote()
                await actor.start.remote(place, self._variables_of_another(place))
                scope.cancel()
        except Exception as error:  # noqa: BLE001  Ray has many kinds
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
            return None, "" if limit.expired() else reason_of(error)
        return place, ""

    def _variables_of_another(self, place: ActorPlace) -> dict[str, str]:
        """Show it its GPU as that of the first local rank which is free on its node."""
        here = self._visible.setdefault(place.node, [])
        if None in here:
            here[here.index(None)] = place
        else:
            here.append(place)
        return variables_of(place, [place if other is None else other for other in here])


def variables_of(place: ActorPlace, places: list[ActorPlace]) -> dict[str, str]:
    """Show a worker its machine's GPUs, as other launchers do; the one of its local rank is its own."""
    gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus))} if gpus else {}


async def _wait_readable(end: socket.socket) -> None:
    """Wait until there is something to read, or nothing will come any more."""
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(end, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(end)


async def _end_when_readable(end: socket.socket, limit: asyncio.Timeout) -> None:
    await _wait_readable(end)
    limit.reschedule(asyncio.get_running_loop().time())


def _check_head() -> None:
    if select.select([0], [], [], 0)[0]:
        raise SystemExit(0)


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise ShoalError("Ray is not installed.", next_step="pip install 'shoal[ray]'") from None
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ShoalError(
            f"The Ray cluster {address} cannot be used: {reason_of(error)}.",
            cause="it does not run, this machine is none of its nodes, or Ray or Python is another version "
            "there.",
            next_step="run it on a node of the cluster; `ray status` says whether this is one.",
        ) from error
    return ray


def _require_listener(address: str) -> None:
    """Refuse an address where nobody listens: Ray itself would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ShoalError(
            f"There is no Ray cluster at {address}: {error.strerror or error}.",
            cause="it does not run, or this is not its address.",
            next_step="`ray start --head` starts one and says its address.",
        ) from None


def main(descriptors: list[int]) -> int:
    """Run until the head or all agents have gone; over the last descriptor come those of more actors."""
    head: MessageStream[ActorRequest] = MessageStream(0, os.dup(1), Decoder(ActorRequest))
    os.dup2(2, 1)  # what Ray prints is no report
    while not (requests := head.take()):
        if not head.is_open:
            return 1
        poll_once(head.interests())
    try:
        ray = _connect(requests[0].address)
        head.send(BridgeReport())
        try:
            with socket.socket(fileno=descriptors.pop()) as more:
                Bridge(ray, requests[0], head.send).run(descriptors, more)
        finally:
            ray.shutdown()
    except ShoalError as error:
        head.send(BridgeReport(refusal=JobFailed(error.what, error.cause, error.next_step)))
        return 1
    return 0
