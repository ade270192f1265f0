"""Hugging Face's Trainer learns to read digits; two lines let a group of workers share it.

shoal run -np 2 --strategy local-sgd --local-steps 8 examples/with_trainer.py
"""

import sys

from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from shoal.data import digits
from shoal.integrations.transformers import share


class Digits(TensorDataset):
    """Items under the names that the model takes."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"pixel_values": image, "labels": label}


config = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
args = TrainingArguments(
    output_dir=sys.argv[1] if len(sys.argv) > 1 else "with-trainer",
    num_train_epochs=2,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    eval_strategy="epoch",
    report_to=[],
)
trainer = Trainer(
    model=ViTForImageClassification(config),
    args=args,
    train_dataset=Digits(*digits()),
    eval_dataset=Digits(*digits(train=False)),
)
share(trainer)
trainer.train()
