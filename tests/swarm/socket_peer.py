"""One peer of a run on real sockets: `socket_peer.py JOIN NUM_STEPS [client]`; a line for each commit."""

import json
import sys
import time

import torch

from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings


def main(join, num_steps, is_client, num_elements=50_000):
    goal = torch.linspace(-1, 1, num_elements)
    settings = SwarmSettings(target_samples=40, minority_after_s=20.0, min_peers=3)
    joined = [join] if join != "-" else []
    with connect(*joined, listen=None if is_client else "127.0.0.1:0") as swarm:
        print(json.dumps({"address": str(swarm.address)}), flush=True)
        start = torch.zeros(num_elements)
        with BlockingSwarmRun(swarm, "sockets", start, CommittedSGD(0.1), settings=settings) as run:
            told = -1
            while True:
                state = swarm.run(look(run.run))
                if state["steps"] > told and state["is_member"]:
                    told = state["steps"]
                    print(json.dumps(state), flush=True)
                if state["steps"] >= num_steps:
                    break
                run.add(run.parameters() - goal, 10)
                time.sleep(0.05)


async def look(run):
    return {
        "name": run.state.name.hex(),
        "bits": run.state.fingerprint(),
        "steps": run.state.num_steps,
        "round": run.state.round,
        "is_member": run.is_member,
        "way": run.context.me.way,
        "members": len(run.members),
        "is_first": run.is_member and run.members[0] == run.context.me,
        "is_balanced": run.ledger.is_balanced,
        "committed": run.ledger.num_committed,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "client" in sys.argv)
