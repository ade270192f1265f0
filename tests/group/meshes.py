"""Meshes whose workers all live in this process, as if each were a machine of its own."""

import concurrent.futures
import contextlib

from shoal.core.identity import new_secret
from shoal.group.cluster.mesh import Mesh


@contextlib.contextmanager
def open_meshes(size, **settings):
    secret = new_secret()
    with contextlib.ExitStack() as stack:
        meshes = [Mesh(rank, secret, **settings) for rank in range(size)]
        peers = {}
        for mesh in meshes:
            peers[mesh.rank] = mesh.listen()
            stack.callback(mesh.close, ConnectionAbortedError())
        with concurrent.futures.ThreadPoolExecutor(size) as threads:
            connecting = [threads.submit(connect, mesh, peers) for mesh in meshes]
            for future in connecting:
                future.result(30)
        yield meshes


def connect(mesh, peers):
    mesh.connect({rank: peer for rank, peer in peers.items() if rank != mesh.rank})
