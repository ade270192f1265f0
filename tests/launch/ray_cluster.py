"""A Ray cluster of two nodes on this machine, as a process: it prints the address, then does what it reads.

`kill` kills the second node as if its power had failed, `add` adds it anew, the end of its input ends it all.
Its argument is how many CPUs each node has. `Cluster` is what starts it and speaks with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# on a busy machine Ray gives up its own start after 30 s, and what runs at niceness 15 hardly runs at all
PATIENCE = {"RAY_raylet_start_wait_time_s": "120", "RAY_worker_niceness": "0"}


class Cluster:
    """Two nodes, in a process of their own."""

    def __init__(self, log, num_cpus=1):
        # of a short name, as sockets are in it; Ray itself leaves what it has written there
        self._folder = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **PATIENCE, "RAY_TMPDIR": self._folder.name},
        )
        self.address = self._process.stdout.readline().strip()

    def ask(self, words):
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self):
        with self._folder, self._process:
            self._process.stdin.close()
            self._process.wait(40)


def main(num_cpus) -> None:
    node = {"num_cpus": int(num_cpus), "object_store_memory": 80 << 20}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    second = cluster.add_node(**node)
    cluster.wait_for_nodes()
    print(cluster.address, file=answers)
    for line in sys.stdin:
        if line == "add\n":
            second = cluster.add_node(**node)
        else:
            for pid in tree_of(second.all_processes["raylet"][0].process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            cluster.remove_node(second, allow_graceful=False)
        print("done", file=answers)
    cluster.shutdown()


def tree_of(pid):
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for parent in found:  # grows meanwhile
        found += children.get(parent, [])
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
