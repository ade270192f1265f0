"""A group of two whose other member does what this one does, or is lost."""

import torch

from shoal.core import PeerLost
from shoal.group import Done, Handle
from shoal.group.solo import SoloGroup


class Broken(Handle):
    def wait(self, deadline=None):
        raise PeerLost("rank 1 is lost: its process ended.", peer=1)

    def is_done(self):
        return True


class Mirror(SoloGroup):
    """Everything that is exchanged comes out as it went in; `calls` are the operations."""

    def __init__(self):
        super().__init__()
        self.size = 2
        self.is_peer_lost = False
        self.calls = []

    @property
    def members(self):
        return () if self._has_left else (0, 1)

    def _handle(self, name, result):
        self.calls.append(name)
        return Broken() if self.is_peer_lost else Done(result)

    def all_reduce(self, tensor, op="mean"):
        return self._handle("all_reduce", tensor)

    def exchange(self, tensor, weights, *, out=None):
        if out is not None:
            out.copy_(tensor)
        return self._handle("exchange", tensor if out is None else out)

    def broadcast(self, tensor, root=0):
        return self._handle("broadcast", tensor)

    def all_gather(self, tensor):
        return Done([tensor.clone(), tensor.clone()])

    def window(self, *arguments, **named):
        window = super().window(*arguments, **named)
        read = window.read
        window.read = lambda peer, into, *, version=0: read(0, into, version=version)
        fetch = window.fetch
        window.fetch = lambda peer: fetch(0)
        return window

    def empty(self, num_elements, dtype=torch.float32, *, device=None):
        self.calls.append("empty")
        return torch.zeros(num_elements, dtype=dtype)

    def free(self, tensor):
        self.calls.append("free")


class Wide(Mirror):
    """Of any size, for what looks at no other member."""

    def __init__(self, size):
        super().__init__()
        self.size = size
