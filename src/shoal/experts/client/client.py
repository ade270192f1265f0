"""Calls to experts: which replica to ask, how long to wait, when to ask again, and whether to believe it.

Blocking code uses `RemoteExpert` and the mixtures, which cross to the client's loop by `run`; the coroutines
here run on that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from shoal.core import (
    Address,
    BlockingBridge,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    ShoalError,
    TensorError,
    UsageError,
    fanout,
    results_of,
)
from shoal.dht import DHT, Swarm
from shoal.experts.client.servers import KnownServer, KnownServers
from shoal.experts.names import get_experts
from shoal.experts.schema import ExpertSchema, TensorSchema, check_tensors
from shoal.experts.settings import ClientSettings
from shoal.experts.wire import (
    BACKWARD,
    FORWARD,
    ID_BYTES,
    INFO,
    Answer,
    BackwardRequest,
    ForwardRequest,
    Info,
    InfoRequest,
    fitting,
    fitting_to_send,
    from_wire,
    make_wire_codec,
    to_wire,
)
from shoal.tensors import TensorSpec
from shoal.transport import Membership, Reply, StreamTransport
from shoal.transport.streams.blocking import MAX_CALL_BYTES, BlockingCaller

T = TypeVar("T")


_TOO_LATE_S = 0.005
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 1.0
_MAX_SENDS = 4  # of one backward whose connection breaks
_MAX_INFOS = 100_000
_ANSWERS = msgspec.msgpack.Decoder(Answer)


class Forwarded(msgspec.Struct, frozen=True):
    """What an expert has answered, and who did."""

    uid: str
    peer: Peer
    outputs: list[torch.Tensor]
    seconds: float
    kept_as: bytes = b""
    """The id under which the server keeps the inputs; empty when it was not asked to."""
    parts: tuple[Forwarded, ...] = ()
    """Of a batch that was more than a server takes at once; `peer` is then the first part's."""
    num_samples: int = 0


class _Call(msgspec.Struct, eq=False):
    """One request of a `kind`, forward or backward, however often it is sent."""

    kind: str
    method: str
    request: Any
    buffers: Sequence[Any]
    sent_bytes: int
    expected: tuple[TensorSchema, ...]
    """What is answered, for so many samples."""
    num_samples: int

    def tensors(self, answer: Answer, buffers: Sequence[Any], sizes: list[int]) -> list[torch.Tensor | None]:
        """What an answer holds; TensorError for one that is none."""
        known = fitting(self.expected, answer.tensors, sizes)
        if known is not None and known.num_samples == self.num_samples:
            return known.tensors(buffers)  # type: ignore[return-value]
        # all this before it is decoded: what is compressed may become large
        if self.kind == "backward":
            if not answer.is_missing_inputs:
                _check_gradients(answer, self.expected, self.num_samples)
        elif (given := check_tensors("output", self.expected, _specs(answer))) != self.num_samples:
            raise TensorError(f"outputs for {given} samples, not for {self.num_samples}")
        return from_wire(answer.tensors, buffers)


class ExpertClient(BlockingBridge):
    """Calls experts of a swarm, or of servers whose addresses are known; open it with `with`.

    With a `swarm` it uses that one's loop and connections; without, it has its own, and `membership` says
    which secret they are protected by.
    """

    _what = "client"
    _how = "'with ExpertClient(...)'"

    def __init__(
        self,
        swarm: Swarm | None = None,
        *,
        settings: ClientSettings | None = None,
        membership: Membership | None = None,
        loop: LoopThread | None = None,
    ) -> None:
        super().__init__()
        self.swarm = swarm
        self.settings = settings or ClientSettings()
        self._codec = make_wire_codec(self.settings.codec)
        self._membership = membership
        self._given_loop = loop
        self._transport: StreamTransport | None = None
        self._blocking: BlockingCaller | None = None
        self._servers = KnownServers(self.settings)
        self._infos: dict[str, Info] = {}

    # --- for any thread but the loop's ---

    def _begin(self, closing: contextlib.ExitStack) -> Callable[..., Any]:
        """With a swarm, which must be open, this costs nothing."""
        if self.swarm is not None:
            self._transport, run = self.swarm.dht.endpoint.streams, self.swarm.run
        else:
            loop = self._given_loop or closing.enter_context(LoopThread("shoal-experts"))
            self._transport, run = StreamTransport(membership=self._membership), loop.run
            loop.run(self._transport.__aenter__())
            closing.callback(_close_on, loop, self._transport)
        self._blocking = BlockingCaller(self._transport)
        closing.callback(self._blocking.close)
        return run

    def expert(self, uid: str, *peers: Peer | Address | str) -> RemoteExpert:
        """An expert at these servers; without any, at those that the DHT knows."""
        return RemoteExpert(self, uid, [self._servers.known_peer(_peer(peer)) for peer in peers])

    @property
    def dht(self) -> DHT:
        """Of its swarm; UsageError when it has none."""
        if self.swarm is None:
            raise UsageError(
                "This client has no swarm to look experts up in.",
                next_step="use ExpertClient(swarm), or give the addresses of the servers.",
            )
        return self.swarm.dht

    def forward_blocking(
        self,
        uid: str,
        peers: Sequence[Peer],
        inputs: Sequence[torch.Tensor],
        *,
        deadline: Deadline | None = None,
        is_kept: bool,
    ) -> Forwarded:
        """As `forward`; a small call to a known expert at one peer is made by the calling thread itself."""
        info = self._infos.get(uid)
        if info is not None and len(peers) == 1 and self._codec is None:
            fits = fitting_to_send(info.schema.inputs, inputs)
            if fits is not None and fits[0].num_samples <= info.max_batch_size:
                known, buffers = fits
                keep_as = secrets.token_bytes(ID_BYTES) if is_kept else b""
                request = ForwardRequest(uid, known.metas, keep_as)  # type: ignore[arg-type]
                num_samples = known.num_samples
                schemas = info.schema.outputs
                call = _Call("forward", FORWARD, request, buffers, known.size_bytes, schemas, num_samples)
                answered = self._try_blocking(peers[0], call, deadline)
                if answered is not None:
                    outputs: list[Any] = answered[1]
                    return Forwarded(uid, peers[0], outputs, answered[2], keep_as, num_samples=num_samples)
        return self.run(self.forward(uid, peers, inputs, deadline=deadline, is_kept=is_kept))

    def backward_blocking(
        self,
        forwarded: Forwarded,
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor],
        *,
        deadline: Deadline | None = None,
    ) -> list[torch.Tensor | None]:
        """As `backward`; a small call is made by the calling thread itself."""
        if forwarded.parts or self._codec is not None:
            return self.run(self.backward(forwarded, inputs, grad_outputs, deadline=deadline))
        call = self._backward_call(forwarded, inputs, grad_outputs)
        with contextlib.suppress(PeerLost):  # then it is sent again under the same id
            answered = self._try_blocking(forwarded.peer, call, deadline)
            if answered is not None and not answered[0].is_missing_inputs:
                return answered[1]
        return self.run(self._backward(forwarded, call, inputs, deadline))

    def _try_blocking(
        self, peer: Peer, call: _Call, deadline: Deadline | None
    ) -> tuple[Answer, list[torch.Tensor | None], float] | None:
        """One call on this thread; None when it is not small, or cannot be made so."""
        blocking = self._blocking
        if call.sent_bytes > MAX_CALL_BYTES or blocking is None or not blocking.is_open:
            return None
        server = self._servers.of(peer)
        timeout_s = server.begin(call.kind, 2 * call.sent_bytes)
        try:
            began_s = time.monotonic()
            if deadline is None:
                deadline = Deadline(began_s + timeout_s)
            reply = blocking.call(peer, call.method, call.request, call.buffers, deadline, _ANSWERS)
            return self._read_answer(peer, server, call, reply.payload, reply.buffers, began_s)
        except ShoalError as error:
            self._note_error(server, call, error)
            if type(error) is PeerBusy:
                return None
            raise
        finally:
            server.end()

    # --- on the loop ---

    @property
    def transport(self) -> StreamTransport:
        """What it calls through."""
        if self._transport is None:
            raise UsageError("This client is not open.", next_step="use it inside 'with ExpertClient(...)'.")
        return self._transport

    def is_suspect(self, peer: Peer) -> bool:
        """Whether the peer failed lately and should be asked last."""
        return self._servers.is_suspect(peer, time.monotonic())

    async def find(self, uid: str) -> list[Peer]:
        """Who serves an expert, by the DHT; PeerUnreachable when nobody does."""
        (found,) = await get_experts(self.dht, [uid], latest=True)
        if found is None:
            raise PeerUnreachable(
                f"Nobody serves the expert {uid}.",
                cause="its server has left or died, or another grid is meant.",
                next_step="start one with `shoal serve`, with --adopt to bring back those that were saved.",
            )
        return list(found.peers)

    def known_schema(self, uid: str) -> ExpertSchema | None:
        """What an expert takes and gives, if that was asked. For any thread."""
        known = self._infos.get(uid)
        return None if known is None else known.schema

    async def schema_of(
        self, uid: str, peers: Sequence[Peer], deadline: Deadline | None = None
    ) -> ExpertSchema:
        """What an expert takes and gives, asked once."""
        return (await self._info_of(uid, peers, deadline)).schema

    async def _info_of(self, uid: str, peers: Sequence[Peer], deadline: Deadline | None) -> Info:
        known = self._infos.get(uid)
        if known is not None:
            return known
        deadline = deadline or Deadline.after(self.settings.first_s * self.settings.patience)

        async def ask(peer: Peer) -> Info:
            reply = await self.transport.call(peer, INFO, InfoRequest(uid), deadline=deadline)
            info = _read(reply, Info, peer)
            try:
                info.schema.check_itself()
            except TensorError as error:
                raise self._unbelievable(peer, uid, error) from None
            return info

        info = await self._first_answer(peers, ask, deadline)
        if len(self._infos) >= _MAX_INFOS:
            self._infos.clear()
        self._infos[uid] = info
        return info

    async def forward(
        self,
        uid: str,
        peers: Sequence[Peer],
        inputs: Sequence[torch.Tensor],
        *,
        deadline: Deadline | None = None,
        is_kept: bool,
        accept: Callable[[Sequence[torch.Tensor]], None] | None = None,
    ) -> Forwarded:
        """An expert's outputs, from whichever replica answers first; `is_kept` when a backward will follow.

        Without a deadline each replica is given the time that it usually takes, several times over. `accept`
        raises TensorError for outputs that are not to be believed: then the next replica is asked.
        """
        info = self._infos.get(uid) or await self._info_of(uid, peers, deadline)
        try:
            num_samples = info.schema.check_inputs(inputs)
        except TensorError:
            self._infos.pop(uid, None)  # the expert may be another one by now
            info = await self._info_of(uid, peers, deadline)
            num_samples = info.schema.check_inputs(inputs)
        if num_samples > info.max_batch_size:
            forward = functools.partial(
                self.forward, uid, peers, deadline=deadline, is_kept=is_kept, accept=accept
            )
            return await _in_parts(forward, inputs, num_samples, info.max_batch_size)
        call = self._forward_call(uid, info.schema, inputs, num_samples, is_kept=is_kept)

        async def ask(peer: Peer) -> Forwarded:
            _, tensors, seconds = await self._ask(peer, call, deadline)
            outputs: list[Any] = tensors
            if accept is not None:
                try:
                    accept(outputs)
                except TensorError as error:
                    raise self._unbelievable(peer, uid, error) from None
            return Forwarded(uid, peer, outputs, seconds, call.request.keep_as, num_samples=num_samples)

        return await (ask(peers[0]) if len(peers) == 1 else self._first_answer(peers, ask, deadline))

    def _forward_call(
        self,
        uid: str,
        schema: ExpertSchema,
        inputs: Sequence[torch.Tensor],
        num_samples: int,
        *,
        is_kept: bool,
    ) -> _Call:
        metas, buffers = to_wire(inputs, self._codec)
        keep_as = secrets.token_bytes(ID_BYTES) if is_kept else b""
        request = ForwardRequest(uid, metas, keep_as, self.settings.codec)  # type: ignore[arg-type]
        sent_bytes = sum(map(len, buffers))
        return _Call("forward", FORWARD, request, buffers, sent_bytes, schema.outputs, num_samples)

    async def backward(
        self,
        forwarded: Forwarded,
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor],
        *,
        deadline: Deadline | None = None,
    ) -> list[torch.Tensor | None]:
        """Gradients of a forward's inputs; the expert learns. Asked of the peer that answered, and no other.

        It may be sent several times, and is applied once.
        """
        if forwarded.parts:
            return await self._backward_in_parts(forwarded.parts, inputs, grad_outputs, deadline)
        return await self._backward(
            forwarded, self._backward_call(forwarded, inputs, grad_outputs), inputs, deadline
        )

    def _backward_call(
        self, forwarded: Forwarded, inputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor]
    ) -> _Call:
        metas, buffers = to_wire(grad_outputs, self._codec)
        request = BackwardRequest(
            forwarded.uid,
            secrets.token_bytes(ID_BYTES),
            metas,  # type: ignore[arg-type]
            kept_as=forwarded.kept_as,
            codec=self.settings.codec,
        )
        expected = tuple([TensorSchema.of(tensor) for tensor in inputs])
        sent_bytes = sum(map(len, buffers))
        call = _Call("backward", BACKWARD, request, buffers, sent_bytes, expected, len(inputs[0]))
        return call if forwarded.kept_as else self._with_inputs(call, inputs)

    def _with_inputs(self, call: _Call, inputs: Sequence[torch.Tensor]) -> _Call:
        metas, buffers = to_wire(inputs, self._codec)
        request = msgspec.structs.replace(call.request, inputs=metas, kept_as=b"")
        buffers = [*call.buffers, *buffers]
        return msgspec.structs.replace(
            call, request=request, buffers=buffers, sent_bytes=sum(map(len, buffers))
        )

    async def _backward(
        self, forwarded: Forwarded, call: _Call, inputs: Sequence[torch.Tensor], deadline: Deadline | None
    ) -> list[torch.Tensor | None]:
        """Send a backward until it is answered, with its inputs when the server lacks them."""
        uid, peer = forwarded.uid, forwarded.peer
        num_lost = 0
        while True:
            try:
                answer, tensors, _ = await self._ask(peer, call, deadline)
            except PeerLost:
                num_lost += 1
                if num_lost >= _MAX_SENDS:
                    raise
                continue
            if not answer.is_missing_inputs:
                return tensors
            if call.request.inputs:
                raise ProtocolError(f"{peer} asks for inputs of {uid} that it was sent.")
            call = self._with_inputs(call, inputs)

    async def _backward_in_parts(
        self,
        parts: Sequence[Forwarded],
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor],
        deadline: Deadline | None,
    ) -> list[torch.Tensor | None]:
        sizes = [part.num_samples for part in parts]
        calls = [
            self.backward(part, some_inputs, some_grads, deadline=deadline)
            for part, some_inputs, some_grads in zip(
                parts, _split(inputs, sizes), _split(grad_outputs, sizes), strict=True
            )
        ]
        gradients = results_of(await fanout(calls, Deadline.never()))
        return [
            None if several[0] is None else torch.cat(several) for several in zip(*gradients, strict=True)
        ]

    async def _ask(
        self, peer: Peer, call: _Call, deadline: Deadline | None
    ) -> tuple[Answer, list[torch.Tensor | None], float]:
        """One call to one peer, made again while that says 'busy'."""
        server = self._servers.of(peer)
        timeout_s = server.begin(call.kind, 2 * call.sent_bytes)
        if deadline is None:
            deadline = Deadline.after(timeout_s)
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                began_s = time.monotonic()
                try:
                    reply = await self.transport.call(
                        peer, call.method, call.request, call.buffers, deadline=deadline
                    )
                    answer = _read(reply, Answer, peer)
                    return self._read_answer(peer, server, call, answer, reply.buffers, began_s)
                except asyncio.CancelledError:
                    if call.kind == "forward":
                        server.on_overtaken(time.monotonic() - began_s, time.monotonic())
                    raise
                except ShoalError as error:
                    self._note_error(server, call, error)
                    pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
                    wait_s = pause_s * (0.5 + self.transport.network.random.random())
                    if type(error) is not PeerBusy or wait_s >= deadline.remaining_s:
                        raise
                    await asyncio.sleep(wait_s)
        finally:
            server.end()

    def _note_error(self, server: KnownServer, call: _Call, error: ShoalError) -> None:
        """Remember of a server that a call to it has failed, where that says something of the server."""
        if isinstance(error, DeadlineExceeded):
            server.on_late(call.kind, time.monotonic())
        elif isinstance(error, (PeerLeaving, PeerLost, PeerUnreachable, ProtocolError)):
            server.on_failure(time.monotonic())
        elif isinstance(error, PeerRefused):
            self._infos.pop(call.request.uid, None)

    def _read_answer(
        self,
        peer: Peer,
        server: KnownServer,
        call: _Call,
        answer: Answer,
        buffers: Sequence[Any],
        began_s: float,
    ) -> tuple[Answer, list[torch.Tensor | None], float]:
        seconds = time.monotonic() - began_s
        sizes = list(map(len, buffers))
        try:
            tensors = call.tensors(answer, buffers, sizes)
        except TensorError as error:
            raise self._unbelievable(peer, call.request.uid, error) from None
        moved_bytes = call.sent_bytes + sum(sizes)
        # a server's word on itself: no longer than the call, and never a gain
        waited_s = answer.waited_s if 0 <= answer.waited_s <= seconds else seconds
        server.on_answer(call.kind, seconds, moved_bytes, waited_s)
        return answer, tensors, seconds

    async def _first_answer(
        self, peers: Sequence[Peer], ask: Callable[[Peer], Coroutine[Any, Any, T]], deadline: Deadline | None
    ) -> T:
        """What the best replica answers; the next one is asked when it fails, or takes unusually long."""
        if len(peers) == 1:
            return await ask(peers[0])
        if not peers:
            raise UsageError("There is no peer to ask.")
        ranked = self._servers.ranked(peers, time.monotonic())
        turns = [asyncio.Event() for _ in ranked]
        turns[0].set()
        calls = [
            self._in_turn(functools.partial(ask, peer), turns, index, self._hedge_s(ranked, index), deadline)
            for index, peer in enumerate(ranked)
        ]
        outcomes = await fanout(
            calls,
            deadline or Deadline.never(),
            is_enough=lambda results: any(not isinstance(result, Exception) for result in results),
        )
        for outcome in outcomes:
            if not isinstance(outcome, Exception):
                return outcome
        raise _worst(outcomes)

    def _hedge_s(self, ranked: Sequence[Peer], index: int) -> float | None:
        """How long the one before is waited for; None: until it fails."""
        if index == 0 or not self.settings.has_hedges:
            return None
        return self._servers.of(ranked[index - 1]).hedge_s

    @staticmethod
    async def _in_turn(
        ask: Callable[[], Coroutine[Any, Any, T]],
        turns: Sequence[asyncio.Event],
        index: int,
        hedge_s: float | None,
        deadline: Deadline | None,
    ) -> T:
        if index > 1:
            await turns[index - 1].wait()  # the one before has begun
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hedge_s):
                await turns[index].wait()
        turns[index].set()
        try:
            return await ask()
        except Exception:
            # the deadline ends this call a moment before it ends all: nobody else could answer then
            has_time = deadline is None or deadline.remaining_s > _TOO_LATE_S
            if index + 1 < len(turns) and has_time:
                turns[index + 1].set()
            raise

    def _unbelievable(self, peer: Peer, uid: str, error: ShoalError) -> PeerError:
        self._servers.of(peer).on_failure(time.monotonic())
        self._infos.pop(uid, None)  # it may serve another class by now
        return PeerRefused(
            f"{peer} answered for {uid} what is no answer of this expert: {error.what}",
            peer=peer,
            cause="its server is broken or hostile, or serves another class under this uid.",
            next_step="leave it out; deny its peer id if it goes on.",
        )


async def _in_parts(
    forward: Callable[[Sequence[torch.Tensor]], Coroutine[Any, Any, Forwarded]],
    inputs: Sequence[torch.Tensor],
    num_samples: int,
    max_samples: int,
) -> Forwarded:
    """A batch that is more than a server takes at once."""
    sizes = [min(max_samples, num_samples - start) for start in range(0, num_samples, max_samples)]
    parts = results_of(await fanout([forward(some) for some in _split(inputs, sizes)], Deadline.never()))
    outputs = [torch.cat(several) for several in zip(*(part.outputs for part in parts), strict=True)]
    parts = [msgspec.structs.replace(part, outputs=[]) for part in parts]
    return Forwarded(
        parts[0].uid,
        parts[0].peer,
        outputs,
        max(part.seconds for part in parts),
        parts=tuple(parts),
        num_samples=num_samples,
    )


def _split(tensors: Sequence[torch.Tensor], sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True))


def _peer(given: Peer | Address | str) -> Peer:
    if isinstance(given, Peer):
        return given
    return Peer(Address.parse(given) if isinstance(given, str) else given)


def _read(reply: Reply, kind: type[T], peer: Peer) -> T:
    try:
        return msgspec.convert(reply.payload, kind)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise PeerRefused(f"{peer} answered what cannot be read: {error}.", peer=peer) from None


def _specs(answer: Answer) -> list[TensorSpec]:
    specs = [meta.spec for meta in answer.tensors if meta is not None]
    if len(specs) != len(answer.tensors):
        raise TensorError("an output is missing")
    return specs


def _check_gradients(answer: Answer, inputs: Sequence[TensorSchema], num_samples: int) -> None:
    if len(answer.tensors) != len(inputs):
        raise TensorError(f"{len(answer.tensors)} gradients for {len(inputs)} inputs")
    for index, (meta, schema) in enumerate(zip(answer.tensors, inputs, strict=True)):
        if meta is None:
            continue
        shape = (num_samples, *schema.shape)
        if meta.spec.shape != shape or meta.spec.dtype != schema.dtype:
            raise TensorError(
                f"gradient {index} is {meta.spec.dtype}{list(meta.spec.shape)}, "
                f"its input {schema.dtype}{list(shape)}"
            )


def _worst(outcomes: Sequence[Any]) -> Exception:
    """Of several failures the one that says most: not that a deadline passed while another was waited for."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    telling = [error for error in errors if not isinstance(error, DeadlineExceeded)]
    return (telling or errors)[0]


def _close_on(loop: LoopThread, transport: StreamTransport) -> None:
    loop.run(_close(transport))


async def _close(transport: StreamTransport) -> None:
    await transport.__aexit__(None, None, None)


class RemoteExpert(nn.Module):
    """Calls an expert where its module would be called; gradients flow through it, and the expert learns.

    It has no parameters here. `forward_timeout_s` and `backward_timeout_s` bound a call; without them the
    client's own deadlines do, which follow what the server usually takes. Made by `ExpertClient.expert`.
    """

    def __init__(self, client: ExpertClient, uid: str, peers: Sequence[Peer] = ()) -> None:
        super().__init__()
        self._client = client
        self.uid = uid
        self._is_looked_up = not peers
        self.peers = tuple(peers) or tuple(client.run(client.find(uid)))
        self.forward_timeout_s: float | None = None
        self.backward_timeout_s: float | None = None

    @property
    def schema(self) -> ExpertSchema:
        """What it takes and gives; asked of a server the first time."""
        known = self._client.known_schema(self.uid)
        return known or self._client.run(self._client.schema_of(self.uid, self.peers))

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """What the expert's module gives for these inputs."""
        schema = self.schema
        inputs = schema.flatten(args, kwargs)
        if not torch.is_grad_enabled():
            outputs = tuple(_on(inputs[0], self.call_forward(inputs, is_kept=False).outputs))
        else:
            # A tensor that needs a gradient, so that backward comes here although no input needs one.
            anchor = torch.empty(0, requires_grad=True)
            outputs = _RemoteCall.apply(self, anchor, *inputs)  # type: ignore[no-untyped-call]
        return outputs[0] if schema.is_single else outputs

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{self.uid} at {', '.join(map(str, self.peers))}"

    def call_forward(self, inputs: Sequence[torch.Tensor], *, is_kept: bool) -> Forwarded:
        """One forward call, outside of autograd."""
        deadline = None if self.forward_timeout_s is None else Deadline.after(self.forward_timeout_s)
        client = self._client
        try:
            return client.forward_blocking(self.uid, self.peers, inputs, deadline=deadline, is_kept=is_kept)
        except TensorError as error:
            raise UsageError(
                f"The expert {self.uid} takes {self.schema.describe_inputs()}, and {error.what}.",
                next_step="reshape or cast the input.",
            ) from None
        except (PeerError, DeadlineExceeded):
            if not self._is_looked_up or (deadline is not None and deadline.is_past):
                raise
            peers = tuple(client.run(client.find(self.uid)))
            if peers == self.peers:
                raise
            self.peers = peers  # it has moved, or was adopted
            return client.forward_blocking(self.uid, peers, inputs, deadline=deadline, is_kept=is_kept)

    def call_backward(
        self, forwarded: Forwarded, inputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The backward call that belongs to a forward call."""
        deadline = None if self.backward_timeout_s is None else Deadline.after(self.backward_timeout_s)
        return self._client.backward_blocking(forwarded, inputs, grad_outputs, deadline=deadline)


class _RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expert: RemoteExpert, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        forwarded = expert.call_forward([tensor.detach() for tensor in inputs], is_kept=True)
        outputs = tuple(_on(inputs[0], forwarded.outputs))
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not _has_gradient(tensor)))
        ctx.expert = expert
        ctx.forwarded = msgspec.structs.replace(forwarded, outputs=[])
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = ctx.expert.call_backward(ctx.forwarded, inputs, grad_outputs)
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.to(tensor.device)
                for gradient, tensor in zip(gradients, inputs, strict=True)
            ),
        )


def _on(like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs on the device of an input."""
    return list(outputs) if like.is_cpu else [tensor.to(like.device) for tensor in outputs]


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
