"""Training during which workers are stopped for a while, as their work in `workers`."""

import os
import signal
import threading
import time

import torch
from torch import nn

import shoal
from shoal.core import PeerLost
from shoal.group import share

NUM_STEPS = 60
STOP_AT = 15
STEP_S = 0.002


def train(group, arguments):
    """Train, while the `victims` are stopped for `stop_s`; how it went on this rank."""
    pids = share(group, os.getpid())
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(group.rank)
    outcome = {"digests": [digest(model)], "peer": None, "what": ""}
    victims = arguments["victims"]
    stopper = threading.Thread(target=stop, args=([pids[rank] for rank in victims], arguments["stop_s"]))
    is_stopping = victims and group.rank == min(rank for rank in range(group.size) if rank not in victims)
    try:
        with shoal.from_args(group, strategy=arguments["strategy"]).attach(model, optimizer):
            for step in range(NUM_STEPS):
                if is_stopping and step == STOP_AT:
                    stopper.start()
                time.sleep(STEP_S)
                x = torch.rand(8, 4, generator=generator)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                optimizer.step()
                outcome["digests"].append(digest(model))
    except PeerLost as error:
        outcome |= {"peer": error.peer, "what": error.what, "lost": sorted(group.lost)}
        group.close(error)
    finally:
        if stopper.ident is not None:
            stopper.join()
    return {"lost": sorted(group.lost), **outcome}


def digest(model):
    """The parameters, to the last bit."""
    return [parameter.view(torch.int32).tolist() for parameter in model.state_dict().values()]


def stop(pids, stop_s):
    """All at once, for so long."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(stop_s)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
