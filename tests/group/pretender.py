"""One worker that believes it has others, for tests of wrappers: nothing moves, handles end when told to."""

import torch

from shoal.core import DeadlineExceeded, ManualClock
from shoal.group.base import Done, Handle
from shoal.group.operations import ClockSleeper, WrappedWindow
from shoal.group.solo import SoloGroup


class Pretender(SoloGroup):
    """Rank 0 of three, or of as many as asked; remembers what it was called with."""

    def __init__(self, size=3, per_machine=None):
        super().__init__()
        self.size = size
        self.machines = [rank // (per_machine or size) for rank in range(size)]
        self.num_machines = self.machines[-1] + 1
        self.calls = []
        self.pending = None
        """Give one, and the next operation returns it."""
        self.num_progressed = 0

    @property
    def members(self):
        return range(self.size) if super().members else ()

    def progress(self):
        self.num_progressed += 1

    def all_reduce(self, tensor, op="mean"):
        return self._handle("all_reduce", tensor)

    def broadcast(self, tensor, root=0):
        return self._handle("broadcast", tensor)

    def all_gather(self, tensor):
        return self._handle("all_gather", [tensor.clone() for _ in range(self.size)])

    def exchange(self, tensor, weights, *, out=None):
        self.calls.append(weights)
        return self._handle("exchange", tensor if out is None else out.copy_(tensor))

    def barrier(self):
        return self._handle("barrier", None)

    def window(self, name, num_elements, dtype=torch.float32, *, sources=None, device=None):
        return PretendedWindow(super().window(name, num_elements, dtype, sources=[0], device=device), self)

    def _handle(self, name, result):
        self.calls.append(name)
        pending, self.pending = self.pending, None
        if pending is None:
            return Done(result)
        pending.result = result
        return pending


class PretendedWindow(WrappedWindow):
    """Everybody's slots are the same one, and everybody has published the same."""

    def __init__(self, inner, group):
        super().__init__(inner, group, [0])

    def _write(self, to, write):
        return self.inner._write(0, write)

    def slot(self, source):
        return self.inner.slot(0)

    def publish(self, tensor, version):
        self.inner.publish(tensor, version)

    def fetch(self, peer):
        return self.inner.fetch(0)

    def read(self, peer, into, *, version=0):
        return self.inner.read(0, into, version=version)


class Pending(Handle):
    """Done when `is_over` is set, or never."""

    def __init__(self):
        self.is_over = False
        self.error = None
        self.result = None

    def wait(self, deadline=None):
        if not self.is_over:
            raise DeadlineExceeded("it is not over.")
        if self.error is not None:
            raise self.error
        return self.result

    def is_done(self):
        return self.is_over


class ManualSleeper(ClockSleeper):
    """Sleeps by moving its clock; so nothing takes any time."""

    def __init__(self):
        super().__init__(ManualClock())
        self.slept_s = 0.0

    def sleep(self, seconds):
        self.slept_s += seconds
        self.clock.advance(seconds)


def ones(num_elements=1000):
    """4 KB."""
    return torch.ones(num_elements)
