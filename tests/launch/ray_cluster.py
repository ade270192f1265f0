"""A Ray cluster of two nodes on this machine, as a process: it prints the address, then does what it reads.

`kill` kills the second node as if its power had failed, `add` adds it anew, the end of its input ends it all.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    print(cluster.address, file=answers)
    for line in sys.stdin:
        if line == "add\n":
            second = cluster.add_node(**NODE)
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
    main()
