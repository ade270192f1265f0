"""What the programs of these tests learn, and what they tell of it."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import shoal

NUM_POINTS, NUM_EPOCHS, LR = 64, 3, 0.02


class Points(Dataset):
    """A plane with a little noise; each point comes with its number."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_POINTS, 4, generator=generator)
        noise = 0.1 * torch.randn(NUM_POINTS, generator=generator)
        self.y = self.x @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + noise

    def __len__(self):
        return NUM_POINTS

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index], "ids": index}


class Plane(nn.Module):
    """A linear model that remembers which points it was trained on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.seen = []

    def forward(self, x, labels, ids=None):
        if self.training:
            self.seen += ids.tolist()
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


def main(train):
    """Train in each way that the arguments ask for, in one start: importing the libraries takes longer.

    `train(strategy, batch_size, folder, num_accumulated)` gives the model, the distances of the workers from
    each other after each step, and the number of epochs that the trainer has counted.
    """
    group, points = shoal.init(), Points()
    for case in json.loads(sys.argv[2]):
        strategy = shoal.from_args(group, strategy=case["strategy"], **case.get("options", {}))
        folder = Path(sys.argv[1]) / case["name"]
        num_accumulated = case.get("num_accumulated", 1)
        model, distances, num_epochs = train(strategy, case["batch_size"], folder, num_accumulated)
        with torch.no_grad():
            loss = (model.linear(points.x).squeeze(-1) - points.y).square().mean().item()
        told = {"rank": group.rank, "name": case["name"], "seen": model.seen, "distances": distances}
        told |= {"loss": loss, "steps": strategy.steps, "num_epochs": num_epochs}
        print("RESULT", json.dumps(told), flush=True)
