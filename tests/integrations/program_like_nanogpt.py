"""A loop that brings up a DDP of its own where it finds RANK."""

import contextlib
import os

import torch
from points import LR, NUM_EPOCHS, Plane, Points, main
from torch.nn.parallel import DistributedDataParallel

import shoal

ddp = int(os.environ.get("RANK", -1)) != -1  # is this a ddp run?
if ddp:
    torch.distributed.init_process_group(backend="gloo")


def train(strategy, batch_size, folder, num_accumulated):
    group, points = strategy.group, Points()
    torch.manual_seed(1337 + group.rank)
    numbers = shoal.shard(torch.arange(len(points)), group)

    def batches():
        for ids in numbers[torch.randperm(len(numbers))].split(batch_size):
            yield {"x": points.x[ids], "labels": points.y[ids], "ids": ids}

    model = plane = Plane()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if ddp:
        model = DistributedDataParallel(model)
    distances = []
    with strategy.attach(model, optimizer, stays=True):
        for _ in range(NUM_EPOCHS):
            for index, batch in enumerate(batches()):
                is_last = (index + 1) % num_accumulated == 0
                with contextlib.nullcontext() if is_last else strategy.accumulate():
                    (model(**batch)["loss"] / num_accumulated).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    distances.append(strategy.consensus_distance())
    if group.rank == 0:
        folder.mkdir(parents=True)
        (folder / "saved-by-0").touch()
    return plane, distances, NUM_EPOCHS


main(train)
