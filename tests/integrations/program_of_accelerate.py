"""A loop of Accelerate's."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from points import LR, NUM_EPOCHS, Plane, Points, main
from torch.utils.data import DataLoader

import shoal
from shoal.integrations.accelerate import attach


def train(strategy, batch_size, folder, num_accumulated):
    plugin = GradientAccumulationPlugin(num_steps=num_accumulated)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    plane = Plane()
    optimizer = torch.optim.SGD(plane.parameters(), lr=LR)
    loader = shoal.shard(DataLoader(Points(), batch_size, shuffle=True), strategy.group)
    model, optimizer, loader = accelerator.prepare(plane, optimizer, loader)
    distances = []
    with attach(accelerator, strategy, model, optimizer, stays=True):
        for _ in range(NUM_EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    distances.append(strategy.consensus_distance())
    if accelerator.is_main_process:
        folder.mkdir(parents=True)
        (folder / f"saved-by-{strategy.group.rank}").touch()
    return plane, distances, NUM_EPOCHS


main(train)
