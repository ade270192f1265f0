"""torch.distributed for the members of a group, where something of torch's own needs it.

Nothing of Shoal's computes by it, but NCCL between GPUs, gloo where it was asked for (`TorchOperations`), and
the strategies that run torch's own code.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.core import PeerLost, UsageError
from shoal.group.base import PENDING, Group, Reduction
from shoal.group.cluster.machine_exchange import FREE, PendingStep, Steps
from shoal.group.cluster.members import Members
from shoal.group.functions import share
from shoal.group.host.engine import put_back
from shoal.group.operations import GroupWrapper, TrafficCounter

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_FOREVER = datetime.timedelta(days=365)  # who is lost is noticed by the mesh

_ended: deque[Any] = deque(maxlen=4)
"""Process groups that are over, and are let go of only when others have come after them."""


def open_process_group(group: Group, device: torch.device, stack: contextlib.ExitStack) -> None:
    """Use torch.distributed as the user has set it up, or set it up until the stack closes. Collective."""
    backend = _backend(group, device)  # which may bring it up: the group may be one of torch.distributed's
    if is_world_open(group.rank, group.size):
        return
    with contextlib.ExitStack() as until_met:
        # gloo connects at once, NCCL with the first operation
        store = (stack if backend == "nccl" else until_met).enter_context(_store(group))
        dist.init_process_group(backend, store=store, world_size=group.size, rank=group.rank)
        stack.callback(destroy_world)
        group.barrier().wait()


def _backend(group: Group, device: torch.device) -> str:
    """NCCL refuses workers that share a GPU. Collective."""
    is_gpu = device.type == "cuda" and dist.is_nccl_available()
    if is_gpu:
        torch.cuda.set_device(device)
    own = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
    gpus = share(group, own)
    return "nccl" if all(gpus) and len({*gpus}) == group.size else "gloo"


@contextlib.contextmanager
def _store(group: Group) -> Iterator[Any]:
    """Where torch's workers find each other: the group's own store over machines, else a file."""
    inner = group
    while isinstance(inner, GroupWrapper):
        inner = inner.inner
    common = getattr(inner, "torch_store", None)
    if common is not None:
        name = share(group, secrets.token_hex(8))[0]
        yield dist.PrefixStore(f"ddp-{name}", common)  # type: ignore[attr-defined]
        return
    folder = Path(tempfile.mkdtemp(prefix="shoal-ddp-")) if group.rank == 0 else None
    try:
        path = next(path for path in share(group, str(folder) if folder else "") if path)
        yield dist.FileStore(f"{path}/store", group.size)  # type: ignore[attr-defined]
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def is_world_open(rank: int, size: int) -> bool:
    """Tells whether the program has brought torch.distributed up; UsageError if its ranks are others."""
    is_open = dist.is_initialized()
    if is_open and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UsageError(
            f"rank {rank} of {size} is rank {dist.get_rank()} of {dist.get_world_size()} in "
            "torch.distributed.",
            next_step="let the group and torch.distributed have the same ranks.",
        )
    return is_open


def destroy_world() -> None:
    """Does what torch's `destroy_process_group` does, without the deadlock that this can be.

    When the last reference to a process group goes, torch waits for gloo's threads, and holds the
    interpreter's lock meanwhile, for which a thread may wait that has just done its last operation. So a
    group is let go of only when others have come after it.
    """
    _ended.append(dist.group.WORLD)
    dist.destroy_process_group()


class TorchOperations:
    """Collectives of one worker through torch.distributed, which cannot go on without a member."""

    def __init__(self, members: Members, backend: str | None, store: Any) -> None:
        self.counter = TrafficCounter(members.rank, members.size)
        """The bytes that it was asked to move, by formula."""
        self.is_wanted = None if backend is None else True
        """Whether GPU tensors go this way; None until somebody has a look at all members' GPUs."""
        self.is_up = False
        self._rank = members.rank
        self._size = members.size
        self._members = members
        self._backend = backend
        self._store = store
        self._is_own = False

    def choose(self, gpus: Sequence[bytes]) -> None:
        """Learns the GPUs of those that take part: NCCL needs everybody's, each another one."""
        self.is_wanted = len(dict.fromkeys(gpus)) == self._size and b"-" not in gpus

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor goes this way."""
        return self._backend == "gloo" or (tensor.is_cuda and bool(self.is_wanted))

    def all_reduce(self, seq: int, tensor: torch.Tensor, op: Reduction) -> Steps:
        """Reduces in place, and divides where a mean is asked for."""
        self.counter.all_reduce(tensor.nbytes)
        flat = tensor.detach().contiguous()
        yield from self._last(seq, dist.all_reduce(flat, _OPS[op], async_op=True))
        if op == "mean":
            flat.div_(self._size)
        return put_back(flat, tensor)

    def broadcast(self, seq: int, tensor: torch.Tensor, root: int) -> Steps:
        """Copies the root's tensor, in place."""
        self.counter.broadcast(tensor.nbytes, root)
        flat = tensor.detach().contiguous()
        yield from self._last(seq, dist.broadcast(flat, root, async_op=True))
        return put_back(flat, tensor)

    def all_gather(self, seq: int, tensor: torch.Tensor) -> Steps:
        """Collects tensors whose rows may differ in number: all are filled up to the longest."""
        # the others' sizes come later; most often all give alike
        self.counter.all_gather(tensor.nbytes, dict.fromkeys(range(self._size), tensor.nbytes))
        own = tensor.detach().contiguous()
        own = own.view(1) if own.ndim == 0 else own
        rows = torch.zeros(self._size, dtype=torch.int64, device=tensor.device)
        rows[self._rank] = own.shape[0]
        yield self._until(seq, dist.all_reduce(rows, async_op=True))
        counts = rows.tolist()
        longest = max(counts)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: own.shape[0]] = own
        parts = [torch.empty_like(padded) for _ in counts]
        yield from self._last(seq, dist.all_gather(parts, padded, async_op=True))
        return [part[:count].clone() for part, count in zip(parts, counts, strict=True)]

    def close(self, error: BaseException | None = None) -> None:
        """Takes torch.distributed down if it was brought up here; with an error, waits for nobody."""
        if self._is_own and dist.is_initialized():
            if error is None:
                destroy_world()
            else:
                abort = getattr(dist.group.WORLD, "abort", None)
                if abort is not None:
                    abort()
        self._is_own = self.is_up = False

    def bring_up(self, tensor: torch.Tensor) -> None:
        """Initialises torch.distributed, unless the program has; all members do it together."""
        if is_world_open(self._rank, self._size):
            self.is_up = True
            return
        backend = self._backend or "nccl"
        num_here = len(self._members.ranks_here)
        if backend == "nccl" and num_here > torch.cuda.device_count():
            raise UsageError(
                f"NCCL wants a GPU for each worker; {num_here} workers of this machine have "
                f"{torch.cuda.device_count()}.",
                next_step="start fewer workers, or leave out backend=: then workers may share a GPU.",
            )
        if tensor.is_cuda:
            torch.cuda.set_device(tensor.device)
        dist.init_process_group(
            backend, store=self._store, rank=self._rank, world_size=self._size, timeout=_FOREVER
        )
        self.is_up = self._is_own = True

    def _last(self, seq: int, work: Any) -> Steps:
        """Waits for the last work of an operation; the next one issues its own, as on all ranks."""
        yield FREE
        yield self._until(seq, work)

    def _until(self, seq: int, work: Any) -> PendingStep:
        """Waits for what torch has under way, which never ends without a member that is gone."""

        def look() -> Any:
            if not work.is_completed():
                absent = self._members.error_of_absence(seq)
                if absent is None or work.is_completed():
                    return PENDING
                raise absent
            try:
                work.wait()
            except RuntimeError as error:
                failed = PeerLost(f"torch.distributed failed: {error}.", cause="a worker has ended.")
                raise (self._members.error_of_absence(seq) or failed) from None
            return None

        return PendingStep(look)
