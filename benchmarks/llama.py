"""A small Llama in plain torch, for the benchmarks of the engine and of states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        inner: Width of the feed-forward layers.
        heads: Number of attention heads; keys and values have half as many.
        words: Size of the vocabulary.
    """

    layers: int = 8
    hidden: int = 512
    inner: int = 1376
    heads: int = 8
    words: int = 4096


class Attention(nn.Module):
    """Causal attention with grouped keys and values, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key = nn.Linear(shape.hidden, shape.hidden // 2, bias=False)
        self.value = nn.Linear(shape.hidden, shape.hidden // 2, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, positions), rotate(key, positions), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer; it becomes an FSDP unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.before_inner = nn.RMSNorm(shape.hidden)
        self.inner = FeedForward(shape)

    def forward(self, x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), positions)
        return x + self.inner(self.before_inner(x))


class Llama(nn.Module):
    """A language model: token ids to the loss of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.embedding = nn.Embedding(shape.words, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, positions = self.embedding(ids), rotary_positions(ids.shape[1], self.width)
        for block in self.blocks:
            x = block(x, positions)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def rotary_positions(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary positions, each of shape (length, width)."""
    speed = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = (torch.arange(length)[:, None] * speed).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions to queries or keys."""
    left, right = x.chunk(2, dim=-1)
    return x * positions[0] + torch.cat((-right, left), dim=-1) * positions[1]
