"""What workers and servers have between them: windows for orders, gradients and replies, and parameters.

A worker sends a server an order, which says what follows and what it was computed from, and then each chunk
of its gradients. The server tells it in a reply how much of all that it has handled until now; a later reply
replaces an earlier one. Parameters are read from where the server has published them. Everything lies in
`Group.everybody`, whose first ranks are the servers.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from shoal.core.errors import UsageError
from shoal.group import Group, Handle, Window, share
from shoal.strategies.server_handing import PIECE_BYTES
from shoal.strategies.server_options import ParameterServerOptions
from shoal.strategies.server_settings import OptimizerNumbers
from shoal.strategies.shares import MAX_CHUNKS, Chunk, plan_chunks
from shoal.tensors import TensorSpec, size_bytes
from shoal.tensors.codecs import Encoded, EncodedMeta, codec_from_name
from shoal.tensors.codecs.base import FormatCodec

_NAME = "parameter-server"
_NEXT = f"{_NAME}'s next version"
_ORDER = struct.Struct("<b?")
_REPLY = struct.Struct("<qqq")


class Kind(enum.IntEnum):
    """What an order is."""

    PUSH = 0
    SKIP = 1
    """A step without gradients: nothing follows, and it counts."""
    REST = 2
    """Until all workers have asked: then everything that they have pushed is applied."""
    GIVE = 3
    """Once all workers have asked: a collective in which the servers give their optimizers' state."""
    HAND = 4
    """The server gives its optimizer's state to this worker alone."""
    BYE = 5


@dataclass(slots=True)
class Order:
    """What a worker sends before its gradients."""

    kind: Kind
    stays: bool = False
    """With BYE: it will take part in giving the memory back."""
    numbers: Sequence[float] = ()
    """Of its optimizer."""
    versions: Sequence[int] = ()
    """Of each chunk of this server: the one that it has read."""
    has_gradient: Sequence[bool] = ()
    """Of each parameter of this server, chunk by chunk."""


@dataclass(slots=True)
class Reply:
    """What a server has done for one worker until now."""

    num_handled: int = 0
    """Chunks, and orders that none follow."""
    released: int = 0
    """The worker may begin with rounds up to this number."""
    num_refused: int = 0
    """Chunks that held a NaN or an infinity, and were not applied."""
    summary: dict[str, Any] | None = None
    """What the server has counted, with the last one."""

    def note(self) -> bytes:
        """As it travels."""
        summary = b"" if self.summary is None else msgspec.msgpack.encode(self.summary)
        return _REPLY.pack(self.num_handled, self.released, self.num_refused) + summary

    @classmethod
    def of(cls, note: bytes) -> Reply:
        """The inverse of `note`."""
        summary = note[_REPLY.size :]
        num_handled, released, num_refused = _REPLY.unpack_from(note)
        return cls(num_handled, released, num_refused, msgspec.msgpack.decode(summary) if summary else None)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a chunk's gradient travels: as it is, or encoded into a fixed number of bytes."""

    codec: FormatCodec
    meta: EncodedMeta
    sizes: tuple[int, ...]

    def decode(self, raw: torch.Tensor) -> torch.Tensor:
        """The flat gradient."""
        buffers = [part.numpy().data for part in torch.split(raw, list(self.sizes))]
        return self.codec.decode(Encoded(self.meta, buffers)).view(-1)


@dataclass(slots=True)
class Channel:
    """Opened by workers and servers together; see `open_channel`."""

    group: Group
    num_servers: int
    options: ParameterServerOptions
    chunks: list[Chunk]
    packings: list[Packing | None]
    numbers: OptimizerNumbers
    orders: Window
    replies: Window
    gradients: list[Window]
    states: Window
    """For what a server hands over; see `server_handing`."""
    published: list[list[Window]]
    """Of each chunk, from where it is read: by all, or by one worker each where delays are compensated."""
    flats: list[torch.Tensor]
    """Of each chunk, memory of the group: a server's are published, a worker's are its parameters."""
    thens: list[list[torch.Tensor]]
    """Of each worker and chunk: what that worker has read, where delays are compensated."""
    shares: list[list[Chunk]]
    """The chunks of each server."""
    first_version: int
    """Of all chunks; a name's versions never fall, not even with another model."""

    @property
    def workers(self) -> range:
        """Their ranks in the group."""
        return range(self.num_servers, self.group.size)

    def parameters(self, chunk: Chunk, worker: int | None = None) -> Window:
        """Where its server publishes a chunk, and this worker reads it."""
        windows = self.published[chunk.number]
        return windows[worker - self.num_servers] if self.thens and worker is not None else windows[0]

    def send_order(self, server: int, order: Order) -> Handle[None]:
        """Once the server has taken the one before."""
        values = [*order.numbers, *map(float, order.versions), *map(float, order.has_gradient)]
        vector = torch.zeros(self.orders.num_elements, dtype=torch.float64)
        if values:
            vector[: len(values)] = torch.tensor(values, dtype=torch.float64)
        return self.orders.send(server, vector, note=_ORDER.pack(order.kind, order.stays))

    def read_order(self, server: int, vector: torch.Tensor, note: bytes) -> Order:
        """What `send_order` was given."""
        kind, stays = _ORDER.unpack(note)
        share = self.shares[server]
        num_numbers, num_chunks = len(self.numbers.names), len(share)
        num_parameters = sum(len(chunk.layout.slots) for chunk in share)
        values = vector[: num_numbers + num_chunks + num_parameters].tolist()
        return Order(
            Kind(kind),
            stays,
            values[:num_numbers],
            [int(value) for value in values[num_numbers : num_numbers + num_chunks]],
            [bool(value) for value in values[num_numbers + num_chunks :]],
        )

    def end(self, last_version: int) -> None:
        """A server has published its last version."""
        notes = self.group.notes
        notes[_NEXT] = max(notes.get(_NEXT, 0), last_version + 1)

    def close(self) -> None:
        """Give everything back; collective."""
        for window in (self.orders, self.replies, *self.gradients, self.states):
            window.close()
        for windows in self.published:
            for window in windows:
                window.close()
        memory = [*self.flats, *(flat for flats in self.thens for flat in flats)]
        for flat in memory:
            self.group.free(flat)


def open_channel(
    group: Group,
    num_servers: int,
    parameters: Sequence[torch.Tensor],
    numbers: OptimizerNumbers,
    options: ParameterServerOptions,
) -> Channel:
    """The same on all; UsageError on all when they have different options or parameters. Collective."""
    workers = range(num_servers, group.size)
    num_copies = 1 + len(workers) if options.delay_compensation else 1
    chunks = plan_chunks(parameters, num_servers, max(3, MAX_CHUNKS // num_copies))
    mine = [[chunk.layout for chunk in chunks], numbers.names, options]
    _require_equal(group, msgspec.msgpack.encode(mine))
    codec = codec_from_name(options.compression)
    packings = [_packing(codec, chunk) for chunk in chunks]
    shares = [[chunk for chunk in chunks if chunk.server == server] for server in range(num_servers)]
    widths = [len(share) + sum(len(chunk.layout.slots) for chunk in share) for share in shares]
    first_version = max(share(group, group.notes.get(_NEXT, 0)))
    is_server = group.rank < num_servers
    nobody: list[int] = []
    writers = workers if is_server else nobody
    orders = group.window(f"{_NAME} orders", len(numbers.names) + max(widths), torch.float64, sources=writers)
    readers = nobody if is_server else range(num_servers)
    replies = group.window(f"{_NAME} replies", 1, sources=readers)
    gradients = [
        group.window(
            f"{_NAME} gradients {chunk.number}",
            chunk.num_elements if packing is None else sum(packing.sizes),
            chunk.dtype if packing is None else torch.uint8,
            sources=workers if group.rank == chunk.server else nobody,
        )
        for chunk, packing in zip(chunks, packings, strict=True)
    ]
    states = group.window(f"{_NAME} states", PIECE_BYTES, torch.uint8, sources=readers)
    suffixes = [f" of {worker}" for worker in workers] if options.delay_compensation else [""]
    published = [
        [
            group.window(f"{_NAME} {chunk.number}{suffix}", chunk.num_elements, chunk.dtype, sources=())
            for suffix in suffixes
        ]
        for chunk in chunks
    ]
    flats = [group.empty(chunk.num_elements, chunk.dtype) for chunk in chunks]
    thens = (
        [[group.empty(chunk.num_elements, chunk.dtype) for chunk in chunks] for _ in workers]
        if options.delay_compensation
        else []
    )
    return Channel(
        group,
        num_servers,
        options,
        chunks,
        packings,
        numbers,
        orders,
        replies,
        gradients,
        states,
        published,
        flats,
        thens,
        shares,
        first_version,
    )


def _packing(codec: FormatCodec, chunk: Chunk) -> Packing | None:
    name = str(chunk.dtype).removeprefix("torch.")
    spec = TensorSpec(name, (chunk.num_elements,))
    options = codec.options(spec) if codec.name != "none" and chunk.layout.slots else None
    if options is None or codec.size_bytes(spec, options) >= chunk.num_elements * chunk.dtype.itemsize:
        return None
    sizes = tuple(size_bytes(part) for part in codec.parts(spec, options))
    return Packing(codec, EncodedMeta(codec.name, spec, options), sizes)


def _require_equal(group: Group, mine: bytes) -> None:
    for rank, theirs in zip(group.members, share(group, mine), strict=True):
        if theirs != mine:
            raise UsageError(
                f"rank {rank} of workers and servers has another model, optimizer or options of "
                f"parameter-server than rank {group.rank}.",
                cause="the programs differ, or a scheduler was made before attach on some only.",
                next_step="run the same program on all, up to attach.",
            )
