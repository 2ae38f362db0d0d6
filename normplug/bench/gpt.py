"""A small GPT: what the language models that LayerNorm is used in have in common, and no more."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """A pre-norm decoder with learned positions and an untied head (Radford et al. 2019).

    Args:
        vocabulary: number of tokens.
        context: the longest input.
        layers: blocks.
        heads: attention heads; they divide `width`.
        width: of the residual stream.

    Shape: (N, T), int64, T up to `context` -> (N, T, vocabulary).
    """

    def __init__(
        self, *, vocabulary: int, context: int, layers: int, heads: int, width: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # 2 * layers branches add up in the residual stream.
                branch = name.endswith(("attention.out.weight", "mlp.2.weight"))
                std = 0.02 / math.sqrt(2 * layers) if branch else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and beside an identity."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(heads, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class CausalAttention(nn.Module):
    """Self-attention in which no token sees a later one."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) in and out."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (N, T, 3, heads, width / heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
