"""One peer of a run on real sockets, which prints a line for each commit: `socket_peer.py JOIN NUM_STEPS`.

A third argument is where it listens, `-` for nowhere; a fourth how many members are waited for, with more
patience the more there are.
"""

import json
import sys
import time

import torch

from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings


def main(join, num_steps, listen="127.0.0.1:0", min_peers=3, num_elements=50_000):
    goal = torch.linspace(-1, 1, num_elements)
    min_peers = int(min_peers)
    patience = min_peers / 3
    settings = SwarmSettings(target_samples=40, minority_after_s=20.0, min_peers=min_peers, patience=patience)
    joined = [join] if join != "-" else []
    with connect(*joined, listen=None if listen == "-" else listen) as swarm:
        print(json.dumps({"address": str(swarm.address)}), flush=True)
        start = torch.zeros(num_elements)
        with BlockingSwarmRun(swarm, "sockets", start, CommittedSGD(0.1), settings=settings) as run:
            told = -1
            while True:
                state = swarm.run(look(run))
                if state["steps"] > told and state["is_member"]:
                    told = state["steps"]
                    print(json.dumps(state), flush=True)
                if state["is_member"] and state["steps"] >= int(num_steps):
                    break
                run.add(run.parameters() - goal, 10)
                time.sleep(0.05 * patience**2)


async def look(member):
    run, facts = member.run, member.facts()
    return {
        "name": run.state.name.hex(),
        "bits": run.state.fingerprint(),
        "steps": run.state.num_steps,
        "round": run.state.round,
        "is_member": run.is_member,
        "way": facts.way,
        "ways": facts.ways,
        "links": facts.links,
        "members": len(run.members),
        "is_first": run.is_member and run.members[0] == run.context.me,
        "is_balanced": run.ledger.is_balanced,
        "committed": run.ledger.num_committed,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
