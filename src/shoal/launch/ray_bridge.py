"""The process through which a head reaches Ray: it copies bytes between actors and the head's sockets.

So a head polls plain descriptors, and what Ray prints never comes between the lines of workers. The bridge
has one actor placed for each worker. When the head closes a socket its agent ends; when all have ended, the
bridge ends, and with it the Ray job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.launch.polling import poll_once
from shoal.launch.protocol import ChildProcess, Decoder, Message, MessageStream

READ_BYTES = 1 << 16
_MAX_LAST_WORDS = 2000
_AGENT_ENDING_S = 5.0
ENDING_S = 3.0
"""An agent has so long to end when the head has closed the way; it ends without us, too."""
READ_WAIT_S = 10.0
"""After which an actor with nothing to pass on is asked again."""
_MAX_QUEUED_BYTES = 1 << 20
SHRINK_S = 5.0
"""Room for all workers is waited for so long where fewer would do; then a second for each one fewer."""
_ROOM_TICK_S = 0.2
_SAY_S = 10.0
_TICK_S = 0.5
_CONNECT_S = 5.0
_WAKE_BYTES = 4096


class ActorRequest(Message, frozen=True):
    """Says what the head wants of the cluster."""

    address: str
    agent: tuple[str, ...]
    """Arguments of Python that run an agent."""
    num_workers: int
    min_workers: int
    """So many are enough where there is no room for all."""
    num_cpus: float
    """The CPUs of each worker."""
    num_gpus: float | None
    """The GPUs of each worker; None gives one to each where the cluster has enough, else none."""
    start_timeout_s: float


class ActorPlace(msgspec.Struct, frozen=True):
    """The place where an actor is."""

    node: str
    """Ray's id of it."""
    address: str
    host: str
    python: str
    """The interpreter there."""
    gpus: list[str]
    """Those that Ray has given to this actor."""


class BridgeReport(Message, frozen=True, omit_defaults=True):
    """What the bridge tells the head; one of the first five is set."""

    is_connected: bool = False
    """The cluster has answered."""
    waiting: str = ""
    """What the cluster lacks for now."""
    places: list[ActorPlace] | None = None
    """The agents run, one behind each descriptor, in order; descriptors that are left over are closed."""
    lost: int | None = None
    """The actor behind this descriptor has gone: `what` says why."""
    is_refused: bool = False
    """Nothing runs."""
    what: str = ""
    cause: str = ""
    next_step: str = ""


class RayRefusal(Exception):
    """An error that says that the cluster cannot be used."""

    def __init__(self, what: str, cause: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.report = BridgeReport(is_refused=True, what=what, cause=cause, next_step=next_step)


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

    def where(self) -> tuple[str, str, str, str, list[str]]:
        """Return node id, address, host name, interpreter, and the GPUs that Ray has given to this actor."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return context.get_node_id(), address, socket.gethostname(), sys.executable, gpus

    def start(self, arguments: Sequence[str], variables: dict[str, str]) -> None:
        """Run the agent by this actor's interpreter, with these variables besides the actor's own."""
        self._agent = ChildProcess([sys.executable, *arguments], {**os.environ, **variables})

    def read(self, wait_s: float) -> bytes | None:
        """Return what the agent has written; b"" when it has ended, None when nothing came in this time."""
        poll = select.poll()
        poll.register(self._agent.stdout.fileno(), select.POLLIN)
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
        return self._agent.exit_code(_AGENT_ENDING_S), self._agent.complaint()[-_MAX_LAST_WORDS:]


class ActorLink:
    """The way between one actor and the descriptor behind which the head waits for it. Nothing here blocks.

    `wake` is called in a thread of Ray's whenever `step` has something to do.
    """

    def __init__(self, index: int, descriptor: int, actor: Any, wake: Callable[[object], None]) -> None:
        self.index = index
        self.is_finished = False
        """Whether nothing more will come from the actor."""
        self.why_lost = ""
        """Empty after an orderly end."""
        self._end = socket.socket(fileno=descriptor)
        self._end.setblocking(False)
        self._has_input = True
        self._closed_s: float | None = None
        """Since when the head wants no more of it."""
        self._actor = actor
        self._wake = wake
        self._reading: Future[Any] | None = self._ask(actor.read.remote(READ_WAIT_S))
        self._writing: Future[Any] | None = None
        self._last_words: Future[Any] | None = None
        self._queue = bytearray()

    @property
    def descriptor(self) -> int:
        """The descriptor to be polled."""
        return self._end.fileno()

    @property
    def events(self) -> int | None:
        """The events to poll it for; None when there is nothing to be learned."""
        wants_input = self._has_input and self._writing is None
        if self._closed_s is not None and not wants_input and not self._queue:
            return None
        return (select.POLLIN if wants_input else 0) | (select.POLLOUT if self._queue else 0)

    def step(self, *, is_hung_up: bool = False) -> None:
        """Pass on what has come from either side; `is_hung_up` says that the head has closed its end."""
        now_s = SYSTEM_CLOCK.now_s()
        if is_hung_up and self._closed_s is None:
            self._closed_s = now_s
        try:
            self._take_input()
            self._take_output()
        except Exception as error:  # noqa: BLE001  Ray has many kinds for an actor that has gone
            self.why_lost, self.is_finished = reason_of(error), True
        if self._queue:
            self._pass_on()
        if self._closed_s is not None and now_s > self._closed_s + ENDING_S:
            self.is_finished = True

    def close(self) -> None:
        """Let the head find the end of what came."""
        self._end.close()

    def _ask(self, reference: Any) -> Future[Any]:
        future: Future[Any] = reference.future()
        future.add_done_callback(self._wake)
        return future

    def _take_input(self) -> None:
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()
        if not self._has_input or self._writing is not None:
            return
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._writing = self._ask(self._actor.write.remote(data) if data else self._actor.close.remote())
        self._has_input = bool(data)
        if not data and self._closed_s is None:
            self._closed_s = SYSTEM_CLOCK.now_s()

    def _take_output(self) -> None:
        if self._reading is not None and self._reading.done() and len(self._queue) < _MAX_QUEUED_BYTES:
            data = self._reading.result()
            self._queue += data or b""
            if data == b"":
                self._reading, self._last_words = None, self._ask(self._actor.last_words.remote())
            else:
                self._reading = self._ask(self._actor.read.remote(READ_WAIT_S))
        if self._last_words is not None and self._last_words.done() and not self._queue:
            code, text = self._last_words.result()
            if code:
                self.why_lost = f"its agent ended with exit code {code}{f': {text}' if text else ''}"
            self.is_finished = True

    def _pass_on(self) -> None:
        try:
            del self._queue[: self._end.send(self._queue)]
        except BlockingIOError:
            return
        except ConnectionError:  # the head does not want it any more
            self._queue.clear()


class ActorPlacement:
    """Makes room for the actors of a start in one placement group, and puts each where it was given room.

    `say` gets what the cluster lacks; `check` may raise to give up.
    """

    def __init__(
        self, ray: Any, request: ActorRequest, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._ray = ray
        self._request = request
        self._say = say
        self._check = check

    def place(self) -> tuple[list[Any], list[ActorPlace]]:
        """Return actors and where they are, a node's one after the other; RayRefusal without room."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, num_gpus = self._reserve()
        remote = self._ray.remote(AgentActor)
        actors = [
            remote.options(
                num_cpus=self._request.num_cpus,
                num_gpus=num_gpus,
                max_concurrency=2,  # it reads while it writes
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(group.bundle_count)
        ]
        asked = [actor.where.remote() for actor in actors]
        try:
            places = [
                ActorPlace(*place) for place in self._ray.get(asked, timeout=self._request.start_timeout_s)
            ]
        except Exception as error:
            raise RayRefusal(
                f"A worker's actor could not be started: {reason_of(error)}.",
                "a node that has just gone, or on which Shoal is not installed.",
                "install the same Shoal on all nodes; `ray status` shows which there are.",
            ) from error
        order = {node: i for i, node in enumerate(dict.fromkeys(place.node for place in places))}
        pairs = sorted(zip(actors, places, strict=True), key=lambda pair: order[pair[1].node])
        return [actor for actor, _ in pairs], [place for _, place in pairs]

    def _reserve(self) -> tuple[Any, float]:
        """Return a placement group for as many workers as there is room for, and the GPUs of each."""
        from ray.util.placement_group import placement_group, remove_placement_group

        request = self._request
        patience_s = SHRINK_S
        for num_workers in range(request.num_workers, request.min_workers - 1, -1):
            num_gpus = self._choose_gpus(num_workers)
            bundle = {"CPU": request.num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
            group = placement_group([bundle] * num_workers, strategy="PACK")
            limit_s = request.start_timeout_s if num_workers == request.min_workers else patience_s
            if self._wait_for(group, limit_s, _describe_workers(num_workers, bundle)):
                return group, num_gpus
            remove_placement_group(group)
            patience_s = 1.0
        workers = _describe_workers(request.min_workers, bundle)
        raise RayRefusal(
            f"The Ray cluster has no room for {workers}; {self._room()}.",
            "other jobs hold the rest, or nodes are missing.",
            "give a smaller -np or a longer --start-timeout; `ray status` shows what is in use.",
        )

    def _wait_for(self, group: Any, limit_s: float, workers: str) -> bool:
        began_s = said_s = SYSTEM_CLOCK.now_s()
        while not group.wait(_ROOM_TICK_S):
            self._check()
            now_s = SYSTEM_CLOCK.now_s()
            if now_s - began_s > limit_s:
                return False
            if now_s - said_s > _SAY_S:
                said_s = now_s
                self._say(f"waiting for room for {workers} on the Ray cluster; {self._room()}")
        return True

    def _choose_gpus(self, num_workers: int) -> float:
        if self._request.num_gpus is not None:
            return self._request.num_gpus
        return 1.0 if sum(self._totals("GPU")) >= num_workers else 0.0

    def _totals(self, resource: str) -> Iterator[float]:
        """Yield how much of it each node has."""
        for node in self._ray.nodes():
            if node["Alive"]:
                yield float(node["Resources"].get(resource, 0.0))

    def _room(self) -> str:
        cpus, num_gpus, free = (
            list(self._totals("CPU")),
            sum(self._totals("GPU")),
            self._ray.available_resources(),
        )
        has_gpus = f" and {num_gpus:g} GPUs ({free.get('GPU', 0.0):g} free)" if num_gpus else ""
        nodes = "1 node has" if len(cpus) == 1 else f"{len(cpus)} nodes have"
        return f"its {nodes} {sum(cpus):g} CPUs ({free.get('CPU', 0.0):g} free){has_gpus}"


def _describe_workers(num_workers: int, bundle: dict[str, float]) -> str:
    each = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
    return f"{num_workers} worker{'' if num_workers == 1 else 's'} with {each} each"


class Bridge:
    """The bridge of one start."""

    def __init__(self, ray: Any, request: ActorRequest, report: Callable[[BridgeReport], None]) -> None:
        self._ray = ray
        self._request = request
        self._report = report
        self._wakes, self._wake_end = os.pipe()
        for end in (self._wakes, self._wake_end):
            os.set_blocking(end, False)

    def run(self, descriptors: list[int]) -> None:
        """Place the actors, start the agents, and copy until all have ended."""
        placing = ActorPlacement(
            self._ray, self._request, lambda text: self._report(BridgeReport(waiting=text)), _check_head
        )
        actors, places = placing.place()
        for descriptor in descriptors[len(actors) :]:
            os.close(descriptor)
        variables = [variables_of(place, places) for place in places]
        starts = [
            actor.start.remote(self._request.agent, own) for actor, own in zip(actors, variables, strict=True)
        ]
        self._ray.get(starts, timeout=self._request.start_timeout_s)
        self._report(BridgeReport(places=places))
        self._copy([ActorLink(i, descriptors[i], actor, self._wake) for i, actor in enumerate(actors)])

    def _wake(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_end, b".")

    def _copy(self, links: list[ActorLink]) -> None:
        while links:
            poll = select.poll()
            poll.register(self._wakes, select.POLLIN)
            for link in links:
                if link.events is not None:
                    poll.register(link.descriptor, link.events)
            ready = dict(poll.poll(_TICK_S * 1000))
            if self._wakes in ready:
                os.read(self._wakes, _WAKE_BYTES)
            for link in links:
                link.step(is_hung_up=bool(ready.get(link.descriptor, 0) & select.POLLHUP))
                if link.is_finished:
                    if link.why_lost:
                        self._report(BridgeReport(lost=link.index, what=link.why_lost))
                    link.close()
            links = [link for link in links if not link.is_finished]


def variables_of(place: ActorPlace, places: list[ActorPlace]) -> dict[str, str]:
    """Show a worker its machine's GPUs, as other launchers do; the one of its local rank is its own."""
    gpus = [gpu for other in places if other.node == place.node for gpu in other.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus))} if gpus else {}


def _check_head() -> None:
    if select.select([0], [], [], 0)[0]:
        raise SystemExit(0)


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise RayRefusal("Ray is not installed.", next_step="pip install 'shoal[ray]'") from None
    _require_listener(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise RayRefusal(
            f"The Ray cluster {address} cannot be used: {reason_of(error)}.",
            "it does not run, this machine is none of its nodes, or Ray or Python is another version there.",
            "run it on a node of the cluster; `ray status` says whether this is one.",
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
        raise RayRefusal(
            f"There is no Ray cluster at {address}: {error.strerror or error}.",
            "it does not run, or this is not its address.",
            "`ray start --head` starts one and says its address.",
        ) from None


def main(descriptors: list[int]) -> int:
    """Run until the head or all agents have gone."""
    head: MessageStream[ActorRequest] = MessageStream(0, os.dup(1), Decoder(ActorRequest))
    os.dup2(2, 1)  # what Ray prints is no report
    while not (requests := head.take()):
        if not head.is_open:
            return 1
        poll_once(head.interests())
    try:
        ray = _connect(requests[0].address)
        head.send(BridgeReport(is_connected=True))
        try:
            Bridge(ray, requests[0], head.send).run(descriptors)
        finally:
            ray.shutdown()
    except RayRefusal as refusal:
        head.send(refusal.report)
        return 1
    return 0
