"""Groups over several machines whose members all live in this process: each machine is a list of ranks."""

import concurrent.futures
import contextlib
import functools
import itertools
import os

from shoal.group.base import GroupSettings
from shoal.group.cluster.group import assemble
from shoal.group.cluster.mesh import Mesh

SECRET = "s" * 40
_numbers = itertools.count()


@contextlib.contextmanager
def open_cluster(machines, cables=None, staging=None, **settings):
    """The groups by rank; with `cables` all that machines say to each other passes through those."""
    key = f"cluster {os.getpid()} {next(_numbers)}"
    size = sum(map(len, machines))
    where = {rank: index for index, ranks in enumerate(machines) for rank in ranks}
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(size) as threads:
        chosen = GroupSettings(key=key, **settings)
        meshes = [Mesh(rank, SECRET, silence_s=chosen.silence_s) for rank in range(size)]
        peers = [mesh.listen() for mesh in meshes]
        for mesh in meshes:
            stack.callback(mesh.close, ConnectionAbortedError())

        def join(mesh):
            others = {r: peers[r] for r in range(size) if where[r] != where[mesh.rank]}
            if cables is None:
                mesh.connect(others)
            else:
                others = {r: cables.lay(mesh.rank, r, peer) for r, peer in others.items()}
                mesh.connect(others, route=functools.partial(cables.route, mesh.rank))
            return assemble(machines, mesh, chosen, staging=staging)

        groups = list(threads.map(join, meshes, timeout=30))
        for group in groups:
            stack.callback(group.close, ConnectionAbortedError())
        yield groups
