"""Collectives by torch.distributed: for tensors on a device, and for all where a backend was asked for.

NCCL needs a device for each worker; gloo lets several share one, and works without any. torch.distributed is
brought up when the first such tensor comes, unless the user has done so.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.core import PeerLost, UsageError
from shoal.group.base import Reduction
from shoal.group.lane import FREE, Step, Steps
from shoal.group.rendezvous import Rendezvous
from shoal.group.torch_world import destroy_world

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_FOREVER = datetime.timedelta(days=365)  # who is lost is noticed by the mesh


class DeviceOperations:
    """Of one worker.

    torch.distributed cannot go on without a member: `watch(seq)` gives the error of one that is lost, or has
    left before an operation. `gather(seq)` lets all come together before it is brought up, and names the
    lost.
    """

    def __init__(
        self, rank: int, size: int, num_mates: int, backend: str | None, rendezvous: Rendezvous | None
    ) -> None:
        self.watch: Callable[[int], PeerLost | None] = lambda seq: None
        self.gather: Callable[[int], Steps]
        self._rank = rank
        self._size = size
        self._num_mates = num_mates
        """Workers of this machine, which share its devices."""
        self._backend = backend
        self._rendezvous = rendezvous
        self._is_own = False
        self._is_up = False

    @property
    def store(self) -> Any:
        """Shared by all members."""
        return None if self._rendezvous is None else self._rendezvous.store

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor goes this way."""
        return tensor.device.type != "cpu" or self._backend == "gloo"

    def all_reduce(self, seq: int, tensor: torch.Tensor, op: Reduction) -> Steps:
        """In place."""
        yield from self._prepare(seq, tensor)
        flat = tensor.detach().contiguous()
        reducing = dist.all_reduce(flat, _OPS[op], async_op=True)
        yield FREE
        yield self._work(seq, reducing)
        if op == "mean":
            flat.div_(self._size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    def broadcast(self, seq: int, tensor: torch.Tensor, root: int) -> Steps:
        """In place."""
        yield from self._prepare(seq, tensor)
        flat = tensor.detach().contiguous()
        sending = dist.broadcast(flat, root, async_op=True)
        yield FREE
        yield self._work(seq, sending)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    def all_gather(self, seq: int, tensor: torch.Tensor) -> Steps:
        """Rows may differ in number: all are filled up to the longest, and cut again."""
        yield from self._prepare(seq, tensor)
        own = tensor.detach().contiguous()
        own = own.view(1) if own.ndim == 0 else own
        rows = torch.zeros(self._size, dtype=torch.int64, device=tensor.device)
        rows[self._rank] = own.shape[0]
        yield self._work(seq, dist.all_reduce(rows, async_op=True))
        counts = rows.tolist()
        longest = max(counts)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: own.shape[0]] = own
        parts = [torch.empty_like(padded) for _ in counts]
        gathering = dist.all_gather(parts, padded, async_op=True)
        yield FREE  # the lane is kept until the last is issued: all ranks must do so in the same order
        yield self._work(seq, gathering)
        return [part[:count].clone() for part, count in zip(parts, counts, strict=True)]

    def close(self) -> None:
        """Take torch.distributed down if it was brought up here."""
        if self._is_own and dist.is_initialized():
            destroy_world()
        self._is_own = self._is_up = False

    def abandon(self) -> None:
        """The same without waiting for the others."""
        if self._is_own and dist.is_initialized():
            abort = getattr(dist.group.WORLD, "abort", None)
            if abort is not None:
                abort()
        self._is_own = self._is_up = False

    def _prepare(self, seq: int, tensor: torch.Tensor) -> Steps:
        gone = self.watch(seq)
        if gone is not None:
            raise gone
        if not self._is_up:
            yield from self.gather(seq)
            self._bring_up(tensor)

    def _bring_up(self, tensor: torch.Tensor) -> None:
        if self._is_up:
            return
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (self._rank, self._size):
                raise UsageError(
                    f"rank {self._rank} of {self._size} is rank {dist.get_rank()} of "
                    f"{dist.get_world_size()} in torch.distributed.",
                    next_step="let the group and torch.distributed have the same ranks.",
                )
            self._is_up = True
            return
        backend = self._backend or ("nccl" if dist.is_nccl_available() else "gloo")
        if backend == "nccl" and self._num_mates > torch.cuda.device_count():
            if self._backend is not None:
                raise UsageError(
                    f"NCCL wants a device for each worker; {self._num_mates} workers of this machine have "
                    f"{torch.cuda.device_count()}.",
                    next_step='start fewer workers, or let them share one: shoal.init(backend="gloo").',
                )
            backend = "gloo"
        if tensor.device.type == "cuda":
            torch.cuda.set_device(tensor.device)
        dist.init_process_group(
            backend, store=self.store, rank=self._rank, world_size=self._size, timeout=_FOREVER
        )
        self._is_up = self._is_own = True

    def _work(self, seq: int, work: Any) -> Step:
        return _Work(work, lambda: self.watch(seq))


class _Work(Step):
    """What torch has under way."""

    def __init__(self, work: Any, watch: Callable[[], PeerLost | None]) -> None:
        self._work = work
        self._watch = watch

    def is_done(self) -> bool:
        return bool(self._work.is_completed()) or self._watch() is not None

    def result(self) -> None:
        if not self._work.is_completed():
            lost = self._watch()
            if lost is not None:
                raise lost
        try:
            self._work.wait()
        except RuntimeError as error:
            lost = self._watch()
            if lost is not None:
                raise lost from None
            raise PeerLost(f"torch.distributed failed: {error}.", cause="a worker has ended.") from None
