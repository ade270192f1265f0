"""A loop of Accelerate's learns to read digits; six lines let a group of workers share it.

shoal run -np 2 --strategy all-reduce examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits
from shoal.integrations.accelerate import attach

accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(*digits()), batch_size=16, shuffle=True)

group = shoal.init()
strategy = shoal.from_args(group)
loader = shoal.shard(loader, group)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with attach(accelerator, strategy, model, optimizer):
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
