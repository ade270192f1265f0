"""A member of a run, alone on its machine: `routed_member.py JOIN LISTEN SECRET_FILE NUM_MEMBERS NUM_STEPS`.

It trains once so many members are listed, until so many steps are made and something of its own is in,
stays until its input ends, and prints a line for each step. LISTEN is `-` for a peer behind a router, which
opens no port; JOIN is `-` for the first one.
"""

import json
import sys
import threading
import time

import torch

from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings
from shoal.transport import RelayLimits


def main(join, listen, secret_file, num_members, num_steps, num_elements=50_000):
    goal = torch.linspace(-1, 1, num_elements)
    settings = SwarmSettings(target_samples=10 * int(num_members), minority_after_s=60.0)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    joined = [] if join == "-" else [join]
    relaying = RelayLimits(max_registered=int(num_members) - 2)  # the last one stays a client
    listens = {} if listen == "-" else {"listen": listen, "relaying": relaying}
    with connect(*joined, secret_file=secret_file, **listens) as swarm:
        print(json.dumps({"id": str(swarm.peer_id)}), flush=True)
        start = torch.zeros(num_elements)
        with BlockingSwarmRun(swarm, "routed", start, CommittedSGD(0.1), settings=settings) as run:
            told, has_begun = -1, False
            while not is_over.is_set():
                state = swarm.run(look(run))
                if state["step"] > told:
                    told = state["step"]
                    print(json.dumps(state), flush=True)
                has_begun = has_begun or len(state["ways"]) == int(num_members)
                if has_begun and (told < int(num_steps) or not state["committed"]):
                    run.add(run.parameters() - goal, 10)
                time.sleep(0.05)


async def look(run):
    facts, state = run.facts(), run.run.state
    return {
        "step": state.num_steps,
        "name": state.name.hex(),
        "bits": state.fingerprint(),
        "ways": facts.ways,
        "links": dict(facts.links),
        "committed": facts.num_committed,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
