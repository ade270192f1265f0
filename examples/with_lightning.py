"""Lightning learns to read digits; two lines let a group of workers share it.

shoal run -np 2 --strategy neighbor examples/with_lightning.py
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.data import digits
from shoal.integrations.lightning import ShoalStrategy


class Reader(lightning.LightningModule):
    """A small network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


trainer = lightning.Trainer(
    max_epochs=3,
    default_root_dir=sys.argv[1] if len(sys.argv) > 1 else "with-lightning",
    strategy=ShoalStrategy(),
)
trainer.fit(
    Reader(),
    DataLoader(TensorDataset(*digits()), batch_size=32, shuffle=True),
    DataLoader(TensorDataset(*digits(train=False)), batch_size=256),
)
