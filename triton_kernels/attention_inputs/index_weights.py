"""The indexer's head weights of few tokens: a small bf16 product in the launch that prepares attention.

``weights[t, h] = sum_k x[t, k] · weight[h, k]``, fp32. The matrix is never quantised (DEEPSEEK_V4.md §5, §8.1); as
a GEMM of its own it would be one more launch of a decode layer. Its programs depend on nothing else in the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

MAX_TOKENS = 8
"""Tokens of a pass up to which the product is made here; a program holds all of them, so that it reads the weight once.
More are a library GEMM's."""
ROWS = tl.constexpr(2)
"""Rows of the weight of one program."""
BLOCK = tl.constexpr(512)
"""Columns that a program multiplies at a time."""


class IndexWeightArguments(NamedTuple):
    """:class:`IndexWeights` as a kernel takes them; strides in elements, PADDED (a power of two) a constant."""

    x: Tensor
    weight: Tensor
    out: Tensor
    tokens: int
    heads: int
    width: int
    x_row: int
    out_row: int
    programs: int
    PADDED: tl.constexpr


@dataclass(frozen=True)
class IndexWeights:
    """The product of a pass of up to ``MAX_TOKENS`` tokens.

    Attributes:
        x: bf16 [T, d], the last dimension contiguous: the layer's normalised input.
        weight: bf16 [H, d], contiguous.
        out: fp32 [T, H], the last dimension contiguous; written.
    """

    x: Tensor
    weight: Tensor
    out: Tensor

    @property
    def programs(self) -> int:
        return triton.cdiv(self.weight.shape[0], ROWS.value)

    def check(self, tokens: int) -> None:
        """Refuse what the kernel cannot read; metadata only."""
        checks.require_range("index weights: tokens", tokens, 1, MAX_TOKENS)
        checks.require_dimensions("index weights: weight", self.weight, 2, "[H, d]")
        heads, width = self.weight.shape
        checks.require_shape("index weights: x", self.x, (tokens, width), "[T, d]")
        checks.require_shape("index weights: out", self.out, (tokens, heads), "[T, H]")
        for name, tensor in (("x", self.x), ("weight", self.weight)):
            checks.require_dtype(f"index weights: {name}", tensor, torch.bfloat16)
        checks.require_dtype("index weights: out", self.out, torch.float32)
        checks.require_rows("index weights: x", self.x)
        checks.require_rows("index weights: out", self.out)
        checks.require_contiguous("index weights: weight", self.weight)
        checks.require_same_device("x", self.x, weight=self.weight, out=self.out)

    def arguments(self) -> IndexWeightArguments:
        tokens, width = self.x.shape
        return IndexWeightArguments(
            x=self.x,
            weight=self.weight,
            out=self.out,
            tokens=tokens,
            heads=self.weight.shape[0],
            width=width,
            x_row=self.x.stride(0),
            out_row=self.out.stride(0),
            programs=self.programs,
            PADDED=tl.constexpr(triton.next_power_of_2(tokens)),
        )


@triton.jit
def project_index_weights(program, of):
    """ROWS rows of the weight with every token; sums in the order of the columns' blocks."""
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, of.PADDED)
    total = tl.zeros((of.PADDED, ROWS), tl.float32)
    for first in range(0, of.width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < of.width)[None, :]
        x_mask, w_mask = (token < of.tokens)[:, None] & inside, (row < of.heads)[:, None] & inside
        x = tl.load(of.x + token[:, None] * of.x_row + column[None, :], mask=x_mask, other=0.0).to(tl.float32)
        w = tl.load(of.weight + row[:, None] * of.width + column[None, :], mask=w_mask, other=0.0).to(tl.float32)
        total += tl.sum(x[:, None, :] * w[None, :, :], axis=2)
    mask = (token < of.tokens)[:, None] & (row < of.heads)[None, :]
    tl.store(of.out + token[:, None] * of.out_row + row[None, :], total, mask=mask)
