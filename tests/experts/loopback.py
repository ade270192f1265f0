"""An expert server and its clients in this process, over loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shoal.core import Address, LoopThread, Peer
from shoal.experts.client.client import ExpertClient
from shoal.experts.expert import Expert
from shoal.experts.server.server import ExpertServer
from shoal.experts.settings import ClientSettings, ServerSettings
from shoal.transport import Endpoint


class Served:
    """A running server, as a test sees it."""

    def __init__(self, loop: LoopThread, server: ExpertServer, address: Address) -> None:
        self.loop = loop
        self.server = server
        self.address = address
        self.peer = Peer(address)


@contextlib.contextmanager
def serving(
    *experts: Expert, settings: ServerSettings | None = None, helpers: Sequence[LoopThread] = ()
) -> Iterator[Served]:
    """Serve experts for as long as the block lasts."""
    with LoopThread("server") as loop, contextlib.ExitStack() as closing:
        endpoint = Endpoint(helpers=helpers)
        loop.run(endpoint.__aenter__())
        closing.callback(lambda: loop.run(endpoint.__aexit__(None, None, None)))
        server = ExpertServer(endpoint, experts, settings)
        loop.run(server.__aenter__())
        closing.callback(lambda: loop.run(server.__aexit__(None, None, None)))
        yield Served(loop, server, loop.run(endpoint.listen(Address("127.0.0.1", 0))))


@contextlib.contextmanager
def client_of(settings: ClientSettings | None = None) -> Iterator[ExpertClient]:
    """A client without a swarm."""
    with ExpertClient(settings=settings) as client:
        yield client


def linear_expert(
    uid: str = "expert0", num_features: int = 8, lr: float = 0.1, dtype: torch.dtype = torch.float32
) -> Expert:
    """A small one that learns by plain gradient steps."""
    torch.manual_seed(sum(uid.encode()))
    module = nn.Linear(num_features, num_features).to(dtype)
    return Expert(
        uid,
        module,
        ((torch.zeros(3, num_features, dtype=dtype),), {}),
        optimizer=torch.optim.SGD(module.parameters(), lr=lr),
    )
