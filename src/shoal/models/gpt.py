"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3, table 2).

A decoder-only transformer that predicts the next token; the embedding of tokens is also its last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class GptShape:
    """What tells one network of the family from another."""

    num_layers: int
    num_heads: int
    width: int
    vocabulary_size: int
    max_tokens: int
    """Positions that it has learned embeddings of: the longest sequence."""


NANO = GptShape(num_layers=3, num_heads=3, width=48, vocabulary_size=256, max_tokens=64)
SMALL = GptShape(num_layers=12, num_heads=12, width=768, vocabulary_size=50257, max_tokens=1024)


class GptBlock(nn.Module):
    """Causal self-attention and two wide layers, each after a norm and beside a shortcut."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the output of the block."""
        batch_size, num_tokens, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch_size, num_tokens, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch_size, num_tokens, width))
        return cast(torch.Tensor, x + self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """Embeddings of tokens and positions, blocks, and the logits of each position's next token."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary_size, shape.width)
        self.positions = nn.Embedding(shape.max_tokens, shape.width)
        self.blocks = nn.Sequential(*(GptBlock(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                # what is added to the shortcuts is drawn smaller, the more layers add to them
                is_added = name.endswith(("projection.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * shape.num_layers) if is_added else 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes logits of shape (batch, tokens, vocabulary) of tokens of shape (batch, tokens)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        return functional.linear(x, self.tokens.weight)


def gpt_nano() -> Gpt:
    """Builds a GPT of 100,272 parameters that reads 64 bytes at most: for tests and laptops."""
    return Gpt(NANO)


def gpt_small() -> Gpt:
    """Builds the smallest GPT-2, of 124.4 million parameters."""
    return Gpt(SMALL)
