"""The channel between workers and servers: how the model is divided, what they say, and the windows for it.

The first ranks of the group are the servers. A worker sends a server a request, which says what follows and
which parameters it was computed from, and then the gradient of each shard. The server tells in a reply how
much of all that it has handled until now; a later reply replaces an earlier one.

The numbers of the optimizer's groups (lr, momentum, betas) go with each push, so that a schedule on a worker
counts on the servers. Its state lies with them, that of its own shards with each; the worker that writes a
checkpoint takes it from there, piece by piece, and no other has a part in that: at the end workers leave one
by one.

Parameters come back in one of two ways. In host memory the server publishes each shard, and workers read it
there. Where all members have their models on GPUs, gradients and parameters stay on them: the server puts
each shard into a slot at the worker, and no processor waits for a GPU to know that memory is free again.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.group import Group, Handle, Window, share
from shoal.group.functions import PIECE_BYTES
from shoal.strategies.options import ParameterServerOptions
from shoal.strategies.session import TrainingSession
from shoal.tensors import ALIGNMENT_BYTES, DTYPES, BucketLayout, TensorSpec, describe, size_bytes
from shoal.tensors.codecs import codec_from_name
from shoal.tensors.codecs.formats import Packing
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.flat import views_over

LARGE_BYTES = 2**20
"""From here on a shard of its own costs a parameter less than the copy into a shared one."""
SHARD_BYTES = 4 * 2**20
"""The size of a shard of small parameters: short enough that pushing, applying and pulling overlap."""
MAX_SHARDS = 256
"""The most shards of one server; a group has names for so many."""
_NAME = "parameter-server"
_NEXT_VERSION = f"{_NAME}'s next version"


# --- how the model is divided ---


@dataclass(frozen=True)
class ParameterShard:
    """Parameters of one dtype that one server holds in one piece of memory."""

    number: int
    """The position among all shards of all servers."""
    server: int
    layout: BucketLayout
    """Its indices are positions among all parameters."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of real numbers in which it travels: a complex parameter is twice as many."""
        return DTYPES[self.layout.dtype].to_real()

    @cached_property
    def num_elements(self) -> int:
        """The size of the memory; a parameter without elements still has a place."""
        slots = self.layout.slots
        num_bytes = size_bytes(slots[0].spec) if len(slots) == 1 else self.layout.size_bytes
        return max(1, num_bytes // self.dtype.itemsize)

    @cached_property
    def spans(self) -> list[slice]:
        """Where each parameter lies among the elements."""
        starts = [slot.offset_bytes // self.dtype.itemsize for slot in self.layout.slots]
        sizes = [size_bytes(slot.spec) // self.dtype.itemsize for slot in self.layout.slots]
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def move(
        self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor
    ) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Moves the shard's parameters into flat memory; gives each with the tensor that it has there."""
        moved = list(zip(self.layout.pick(parameters), views_over(self.layout, flat), strict=True))
        for parameter, tensor in moved:
            tensor.copy_(parameter.detach())
            parameter.data = tensor
        return moved


def divide(parameters: Sequence[torch.Tensor], num_servers: int) -> list[list[int]]:
    """Says which parameters each server holds, balanced by size; whatever the number of workers is."""
    sizes_bytes = [size_bytes(describe(parameter)) for parameter in parameters]
    loads = [0] * num_servers
    parts: list[list[int]] = [[] for _ in range(num_servers)]
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        server = loads.index(min(loads))
        loads[server] += max(ALIGNMENT_BYTES, sizes_bytes[index])
        parts[server].append(index)
    return [sorted(part) for part in parts]


def plan_shards(
    parameters: Sequence[torch.Tensor], num_servers: int, max_shards: int = MAX_SHARDS
) -> list[ParameterShard]:
    """Plans all shards, those of all servers in turn, so that the servers work at once; each has one.

    Whole parameters are balanced by size: an optimizer may look at all of a parameter at once. A large one is
    a shard by itself, whose gradient is pushed from where it lies; small ones share a shard. With
    `max_shards` 1 all of a server's parameters of one dtype are one: on a GPU each operation costs more than
    its bytes.
    """
    specs = [describe(parameter) for parameter in parameters]
    planned = [_layouts(specs, part, max_shards) for part in divide(parameters, num_servers)]
    turns = [
        (server, layouts[turn])
        for turn in range(max(map(len, planned)))
        for server, layouts in enumerate(planned)
        if turn < len(layouts)
    ]
    return [ParameterShard(number, server, layout) for number, (server, layout) in enumerate(turns)]


def _layouts(specs: Sequence[TensorSpec], indices: Sequence[int], max_shards: int) -> list[BucketLayout]:
    """Plans the shards of one server.

    Large parameters come first: the last shard to be pushed is the last to be applied, and a small one ends
    soonest. With few shards each holds more: less than a third of them can be large parameters, and of any
    two shards of small ones that follow each other one is at least half full.
    """
    total = sum(size_bytes(specs[index]) for index in indices)
    large_bytes = max(LARGE_BYTES, 3 * total // max_shards)
    large = [index for index in indices if size_bytes(specs[index]) >= large_bytes]
    small = [index for index in indices if size_bytes(specs[index]) < large_bytes]
    layouts = []
    for members in (*([index] for index in large), small):
        planned = BucketLayout.plan(
            [specs[index] for index in members], max_bytes=max(SHARD_BYTES, 2 * large_bytes)
        )
        for layout in planned:
            slots = (msgspec.structs.replace(slot, index=members[slot.index]) for slot in layout.slots)
            layouts.append(msgspec.structs.replace(layout, slots=tuple(slots)))
    return layouts or [BucketLayout("float32", (), ALIGNMENT_BYTES)]


# --- what they say ---


class RequestKind(enum.IntEnum):
    """What a worker asks of a server."""

    NONE = -1
    PUSH = 0
    SKIP = 1
    """A step without gradients: nothing follows, and it counts."""
    MEET = 2
    """The answer comes when all workers have asked: then everything that they have pushed is applied."""
    SEND_STATE = 3
    """The server sends its optimizer's state and its parameters to this worker alone."""
    LEAVE = 4
    DETACH = 5
    """The worker stays in the group, and will take part in giving the memory back."""


class Presence(enum.IntEnum):
    """Whether a push has a gradient of a parameter."""

    NONE = 0
    SENT = 1
    WITHHELD = 2
    """The worker has found a NaN or an infinity in the shard, and does not send it."""


class WorkerRequest(NamedTuple):
    """What a worker sends before its gradients."""

    kind: RequestKind
    numbers: Sequence[float] = ()  # of its optimizer
    versions: Sequence[int] = ()
    """The version that it has read of each shard of this server."""
    gradients: Sequence[Sequence[int]] = ()
    """The `Presence` of each parameter, for each shard of this server."""


NO_REQUEST = WorkerRequest(RequestKind.NONE)


class ServerReply(msgspec.Struct, array_like=True):
    """What a server has done for one worker until now; it travels as the note of a write."""

    num_handled: int = 0
    """Shards of gradients, and requests that none follow."""
    released: int = 0
    """The worker may begin with rounds up to this number."""
    num_refused: int = 0
    """Shards that held a NaN or an infinity, and were not applied."""
    summary: dict[str, Any] | None = None
    """What the server has counted, with the last reply."""


# --- the optimizer ---


class OptimizerNumbers:
    """The numbers of an optimizer's groups, in an order that is the same wherever it was built alike.

    What is no number (nesterov, foreach) stays as it was at attach.
    """

    names: list[tuple[int, str, int]]
    """For each number its group, its name, and its position there: Adam's betas are two."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self.names = [
            (number, name, position)
            for number, group in enumerate(optimizer.param_groups)
            for name in sorted(group)
            if name != "params"
            for position, part in enumerate(_parts(group[name]))
            if _is_number(part)
        ]
        self._last: list[float] | None = None

    def read(self, rate_factor: float = 1.0) -> list[float]:
        """Gives the numbers as they are now, learning rates times a factor."""
        return [
            float(_parts(self._groups[number][name])[position]) * (rate_factor if name == "lr" else 1.0)
            for number, name, position in self.names
        ]

    def write(self, values: Sequence[float], rate_factor: float = 1.0) -> None:
        """Makes the numbers what they were elsewhere; nearly free when they are that already."""
        places = zip(values, self.names, strict=True)
        values = [value * (rate_factor if name == "lr" else 1.0) for value, (_, name, _) in places]
        if values == self._last:
            return
        self._last = values
        for value, (number, name, position) in zip(values, self.names, strict=True):
            old = self._groups[number][name]
            parts = _parts(old)
            parts[position] = _replaced(parts[position], value)
            self._groups[number][name] = type(old)(parts) if isinstance(old, list | tuple) else parts[0]


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _replaced(value: Any, number: float) -> Any:
    """Gives the number in the type of the value that it replaces."""
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number


# --- where it goes ---


class ServerChannel:
    """The shards and the windows of workers and servers, who open it together."""

    def __init__(
        self, group: Group, session: TrainingSession, options: ParameterServerOptions, *, is_on_devices: bool
    ) -> None:
        """Opens it for everybody, collectively; UsageError on all when their parameters or options differ."""
        num_servers = session.group.num_servers
        self.group, self.num_servers, self.options = group, num_servers, options
        self.numbers = numbers = OptimizerNumbers(session.optimizer)
        self.device = device = session.device if is_on_devices else None
        """This member's GPU, where all members have their models on GPUs."""
        self.workers = range(num_servers, group.size)
        self.compensates = options.delay_compensation > 0
        num_copies = 1 + len(self.workers) if self.compensates else 1
        max_shards = max(3, MAX_SHARDS // num_copies) if device is None else 1
        self.shards = plan_shards(session.trainable, num_servers, max_shards)
        self._require_equal([[shard.layout for shard in self.shards], numbers.names, options])
        codec = codec_from_name(options.compression)
        self.packings: list[Packing | None] = []
        """How compressed gradients travel, in host memory; None for those that go as they are."""
        for shard in self.shards:
            packing = Packing.plan(codec, TensorSpec(dtype_name(shard.dtype), (shard.num_elements,)))
            self.packings.append(None if packing.is_plain or not shard.layout.slots else packing)
        self.by_server = [
            [shard for shard in self.shards if shard.server == server] for server in range(num_servers)
        ]
        self.first_version: int = max(share(group, group.notes.get(_NEXT_VERSION, 0)))
        """The first version of all shards: those of a name never fall, not even with another model."""
        nobody = range(0)
        is_server = group.rank < num_servers
        workers, servers = (self.workers, nobody) if is_server else (nobody, range(num_servers))
        widths = [len(shards) + sum(len(shard.layout.slots) for shard in shards) for shards in self.by_server]
        width = len(numbers.names) + max(widths)
        self.requests = group.window(f"{_NAME} orders", width, torch.float64, sources=workers)
        self.replies = group.window(f"{_NAME} replies", 1, sources=servers)
        self.gradients = [
            group.window(
                f"{_NAME} gradients {shard.number}",
                shard.num_elements if packing is None else sum(packing.sizes),
                shard.dtype if packing is None else torch.uint8,
                sources=workers if group.rank == shard.server else nobody,
                device=device if packing is None else None,
            )
            for shard, packing in zip(self.shards, self.packings, strict=True)
        ]
        self.states = group.window(f"{_NAME} states", PIECE_BYTES, torch.uint8, sources=servers)
        copied_for = self.workers if self.compensates else nobody
        self._parameters = [
            [self._make_window(shard, f" of {worker}") for worker in copied_for if device is None]
            or [self._make_window(shard)]
            for shard in self.shards
        ]
        self.flats: list[torch.Tensor] = []
        """In host memory of the group, for each shard: a server's are published."""
        self.copies: list[list[torch.Tensor]] = []
        """For each worker and shard, where delays are compensated: what that worker reads, or has read."""
        if device is None:
            self.flats = [group.empty(shard.num_elements, shard.dtype) for shard in self.shards]
            self.copies = [
                [group.empty(shard.num_elements, shard.dtype) for shard in self.shards] for _ in copied_for
            ]

    def _make_window(self, shard: ParameterShard, suffix: str = "") -> Window:
        """Makes the window of a shard's parameters: slots at the workers' GPUs, or a publication."""
        name = f"{_NAME} {shard.number}{suffix}"
        sources: Sequence[int] = ()
        if self.device is not None:
            sources = range(0) if self.group.rank < self.num_servers else [shard.server]
        return self.group.window(name, shard.num_elements, shard.dtype, sources=sources, device=self.device)

    def _require_equal(self, mine: Any) -> None:
        encoded = msgspec.msgpack.encode(mine)
        for rank, theirs in zip(self.group.members, share(self.group, encoded), strict=True):
            if theirs != encoded:
                raise UsageError(
                    f"rank {rank} of workers and servers has another model, optimizer or options of "
                    f"parameter-server than rank {self.group.rank}.",
                    cause="the programs differ, or a scheduler was made before attach on some only.",
                    next_step="run the same program on all, up to attach.",
                )

    def parameters(self, shard: ParameterShard, worker: int) -> Window:
        """Finds the window in which one worker gets a shard's parameters."""
        windows = self._parameters[shard.number]
        return windows[0] if len(windows) == 1 else windows[worker - self.num_servers]

    def send(self, server: int, request: WorkerRequest) -> Handle[None]:
        """Sends a request, once the server has taken the one before."""
        values = [*request.numbers, *request.versions, *itertools.chain(*request.gradients)]
        rest = [0] * (self.requests.num_elements - len(values))
        vector = torch.tensor([*values, *rest], dtype=torch.float64)
        return self.requests.send(server, vector, note=bytes([request.kind]))

    def receive(self, worker: int) -> WorkerRequest:
        """Takes a worker's next request, on a server; NO_REQUEST while there is none."""
        if worker not in self.requests.filled():
            return NO_REQUEST
        with self.requests.slot(worker) as slot:
            if not slot.num_writes:
                return NO_REQUEST
            kind = RequestKind(slot.note[0])
            values = iter(slot.tensor.tolist())
            slot.clear()
        shards = self.by_server[self.group.rank]
        return WorkerRequest(
            kind,
            numbers=list(itertools.islice(values, len(self.numbers.names))),
            versions=[int(next(values)) for _ in shards],
            gradients=[[int(next(values)) for _ in shard.layout.slots] for shard in shards],
        )

    def close(self) -> None:
        """Gives everything back; collective."""
        parameters = itertools.chain(*self._parameters)
        for window in (self.requests, self.replies, *self.gradients, self.states, *parameters):
            window.close()
        for flat in (*self.flats, *itertools.chain(*self.copies)):
            self.group.free(flat)

    def keep_version(self, last_version: int) -> None:
        """Remembers the last version that a server has given, so that the next model begins above it."""
        notes = self.group.notes
        notes[_NEXT_VERSION] = max(notes.get(_NEXT_VERSION, 0), last_version + 1)
