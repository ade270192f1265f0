"""Lightning's Trainer."""

import lightning
import torch
from points import LR, NUM_EPOCHS, Plane, Points, main
from torch.utils.data import DataLoader

from shoal.integrations.lightning import ShoalStrategy


class Module(lightning.LightningModule):
    def __init__(self, strategy, num_accumulated):
        super().__init__()
        self.plane = Plane()
        self.distances = []
        self._strategy, self._num_accumulated = strategy, num_accumulated

    def training_step(self, batch, index):
        return self.plane(**batch)["loss"]

    def validation_step(self, batch, index):
        self.log("loss", self.plane(**batch)["loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)

    def on_train_batch_end(self, outputs, batch, index):
        if (index + 1) % self._num_accumulated == 0:
            self.distances.append(self._strategy.consensus_distance())


def train(strategy, batch_size, folder, num_accumulated):
    module = Module(strategy, num_accumulated)
    trainer = lightning.Trainer(
        strategy=ShoalStrategy(strategy, stays=True),
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=num_accumulated,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    loader = DataLoader(Points(), batch_size, shuffle=True)
    trainer.fit(module, loader, DataLoader(Points(), len(Points())))
    return module.plane, module.distances, trainer.current_epoch


main(train)
