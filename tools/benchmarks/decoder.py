"""A decoder with Qwen2.5's shape in plain torch and random weights, for the GPU benchmark on machines with only torch.
Megatron's model differs: its layers and optimizer have their own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    groups: int
    intermediate: int
    vocabulary: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def flops_per_token(self, length: int) -> float:
        """FLOPs of a forward and backward pass over sequences of ``length`` tokens: a multiply-add is 2, causal
        attention half of its square. What is computed twice to save memory counts once."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.groups)
        products = self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden
        return 6 * products + 6 * self.layers * self.hidden * length


SHAPES = {
    "0.5B": Shape(896, 24, 14, 2, 4864, 151936),
    "1.5B": Shape(1536, 28, 12, 2, 8960, 151936),
}


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys = 2 * shape.groups * shape.head_size
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=1e-6) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, shape.hidden + keys)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, groups = self.shape.heads, self.shape.groups
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2)
        q, k, v = parts.split((heads, groups, groups), dim=1)
        q, k = (part * cos + torch.cat((-part.chunk(2, -1)[1], part.chunk(2, -1)[0]), -1) * sin for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Tokens [B, S] to the last hidden states [B, S, hidden]; ``embedding.weight`` is also the output weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, size = self.embedding(tokens), self.shape.head_size
        frequencies = 1e6 ** -(torch.arange(0, size, 2, device=tokens.device) / size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)
