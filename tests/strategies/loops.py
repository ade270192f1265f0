"""Models that are hard to share, and what each must come to: one worker that has everybody's batches."""

import logging

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Branches(nn.Module):
    """Workers may take different ways through it; `never` is on none of them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)

    def forward(self, x, way):
        return getattr(self, way)(torch.tanh(self.stem(x)))


class Tied(nn.Module):
    """One weight in two modules, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x, way=None):
        return self.second(torch.tanh(self.first(x) * self.scale))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)

    def forward(self, x, way=None):
        hidden = torch.tanh(self.first(x))
        return self.third(checkpoint(self.second, hidden, use_reentrant=True))


class CheckpointedTwice(Checkpointed):
    """The second layer is in two backward passes inside of the one."""

    def forward(self, x, way=None):
        hidden = checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=True)
        return self.third(checkpoint(self.second, hidden, use_reentrant=True))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x, way=None):
        return self.head(self.table((x.abs() * 3).long().clamp(max=8)).mean(1))


MODELS = {
    "branches": Branches,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "checkpointed twice": CheckpointedTwice,
    "words": Words,
    "many small": lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(100)]),
    "one large": lambda: nn.Linear(6, 30_000, bias=False),
    "mixed dtypes": lambda: nn.Sequential(nn.Linear(6, 5), Cast(torch.float64), nn.Linear(5, 3).double()),
}


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def make(name, seed):
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def way(rank, step):
    """The right branch is taken by rank 1 alone, now and then."""
    return "right" if rank == 1 and step % 3 == 1 else "left"


def loss_of(model, rank, step):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    is_branched = isinstance(model, Branches | Tied | Checkpointed | Words)
    output = model(x, way(rank, step)) if is_branched else model(x)
    return output.square().mean()


def plain(name, size, num_steps, clip=None):
    """What all must come to."""
    model, optimizer = make(name, 0)
    for step in range(num_steps):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(size)) / size).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def distance(model, other):
    return max(
        (mine - theirs).abs().max().item()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
    )


class LogLines(logging.Handler):
    """Keeps the lines that are logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())
