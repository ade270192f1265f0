"""The modules behind the expert classes that Shoal knows by name."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

from shoal.core import UsageError

_NUM_HEADS = 16


class FeedForward(nn.Module):
    """Two layers, four times as wide between them, with a residual and a norm after it."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_dim, 4 * hidden_dim)
        self.down = nn.Linear(4 * hidden_dim, hidden_dim)
        self.norm = nn.LayerNorm(hidden_dim, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden]` to the same."""
        inner = functional.gelu(self.up(x), approximate="tanh")
        y: torch.Tensor = self.norm(x + self.down(inner))
        return y


class Transformer(nn.Module):
    """An encoder layer that normalises after each part; its mask is True where there is only padding."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.layer = _encoder_layer(hidden_dim, 4 * hidden_dim)

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """`[batch, length, hidden]` and `[batch, length]` to the shape of the first.

        A sample that is nothing but padding is attended to in full: otherwise it would become NaN, and with
        it the gradient of all samples.
        """
        padding_mask = padding_mask & ~padding_mask.all(dim=1, keepdim=True)
        y: torch.Tensor = self.layer(x, src_key_padding_mask=padding_mask)
        return y


class Nop(nn.Module):
    """Gives its input itself: all that is left is the way there and back."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same tensor."""
        return x


class DelayedNop(nn.Module):
    """Gives its input itself, late."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.delay_s = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same tensor, after the delay; backward, which computes forward again, is as late.

        In evaluation there is no delay, so that a server's start does not wait for each of its experts.
        """
        if self.training:
            time.sleep(self.delay_s)
        return x


class DeterministicDropout(nn.Module):
    """Two layers behind a dropout whose mask is an input, so that backward drops what forward did."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.keep_probability = 0.8
        self.up = nn.Linear(hidden_dim, 2 * hidden_dim)
        self.down = nn.Linear(2 * hidden_dim, hidden_dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mask is True where an element is kept; in evaluation all are."""
        if self.training:
            x = x * mask / self.keep_probability
        y: torch.Tensor = self.down(functional.relu(self.up(x)))
        return y


class LahFeedForward(nn.Module):
    """Learning@home's block: three layers with norms between them, and a residual."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        inner_dim = 4 * hidden_dim
        self.layers = nn.Sequential(
            nn.Linear(hidden_dim, inner_dim),
            nn.LayerNorm(inner_dim),
            nn.ReLU(),
            nn.Linear(inner_dim, inner_dim),
            nn.LayerNorm(inner_dim),
            nn.ReLU(),
            nn.Linear(inner_dim, hidden_dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, hidden]` to the same."""
        y: torch.Tensor = x + self.layers(x)
        return y


class LahTransformer(nn.Module):
    """Learning@home's encoder layer: no mask, and an inner width that does not grow with the hidden one."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.layer = _encoder_layer(hidden_dim, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, length, hidden]` to the same."""
        y: torch.Tensor = self.layer(x)
        return y


def _encoder_layer(hidden_dim: int, inner_dim: int) -> nn.TransformerEncoderLayer:
    if hidden_dim % _NUM_HEADS:
        raise UsageError(
            f"A transformer's hidden dimension must be a multiple of {_NUM_HEADS}, its number of heads, "
            f"not {hidden_dim}."
        )
    return nn.TransformerEncoderLayer(
        hidden_dim, _NUM_HEADS, inner_dim, dropout=0.1, activation="gelu", batch_first=True
    )
