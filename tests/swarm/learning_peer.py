"""A peer on real sockets that learns to read digits until it is killed: `learning_peer.py JOIN NUMBER`.

It prints its address, then a line for each step of the run that it sees.
"""

import json
import random
import sys
import time

import torch

from shoal.data import digits
from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings

BATCH = 16
TARGET_SAMPLES = 200


def logits(vector, images):
    return images.flatten(1) @ vector[:-10].view(-1, 10) + vector[-10:]


def main(join, number):
    torch.set_num_threads(1)
    images, labels = digits()
    unseen, right = digits(train=False)
    num_elements = images[0].numel() * 10 + 10
    choice = random.Random(int(number))
    settings = SwarmSettings(target_samples=TARGET_SAMPLES, patience=3.0)
    with connect(*([join] if join != "-" else []), listen="127.0.0.1:0") as swarm:
        print(json.dumps({"address": str(swarm.address)}), flush=True)
        optimizer = CommittedSGD(learning_rate=0.5)
        with BlockingSwarmRun(
            swarm, "digits", torch.zeros(num_elements), optimizer, settings=settings
        ) as run:
            told = -1
            while True:
                time.sleep(choice.uniform(0.2, 0.6))
                state = swarm.run(look(run))
                if not state["is_member"]:
                    continue
                vector = run.parameters()
                if state["steps"] > told:
                    told = state["steps"]
                    accuracy = float((logits(vector, unseen).argmax(1) == right).float().mean())
                    print(json.dumps({**state, "accuracy": accuracy}), flush=True)
                rows = torch.tensor([choice.randrange(len(images)) for _ in range(BATCH)])
                vector.requires_grad_()
                loss = torch.nn.functional.cross_entropy(logits(vector, images[rows]), labels[rows])
                run.add(torch.autograd.grad(loss, vector)[0], BATCH)


async def look(run):
    member = run.run
    return {
        "steps": member.state.num_steps,
        "samples": member.state.num_samples,
        "bits": member.state.fingerprint(),
        "fork": member.state.fork.hex(),
        "is_member": member.is_member,
        "members": len(member.members),
        "is_balanced": member.ledger.is_balanced,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
