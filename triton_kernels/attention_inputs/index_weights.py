"""The indexer's head weights of up to 8 tokens: a small bf16 GEMM in the launch that prepares attention.

``weights[t, h] = sum_k x[t, k] · weight[h, k]``, fp32. The matrix is never quantised (specification §5, §8.1). As
a GEMM of its own it would be one more launch of a decode layer. Its programs depend on nothing else in the launch.

Supports up to ``MAX_TOKENS`` tokens, any number of heads and any width. Floor: the weight read once, 2·H·d bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks

from ..common.constants import constant
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import prefetch_constants

MAX_TOKENS = 8
"""Tokens of a pass at most: a program holds all of them, so that it reads its rows of the weight once. For more
tokens ``experts.router_logits`` computes the weights in a launch of its own, or a library's GEMM."""
ROWS_PER_PROGRAM = tl.constexpr(1)
"""Rows of the weight, that is heads, of one program."""
VALUES_PER_STEP = tl.constexpr(4096)
"""Values of the tokens that a program holds in one step of its loop. With 512 columns a step whatever the tokens, a
token of 4096 columns waits eight times for memory (``launch/results/tunings_h200.md``)."""


def padded_tokens(tokens: int) -> int:
    """The number of tokens that the kernel is compiled for; 0 for more than it takes."""
    return next_power_of_2(tokens) if tokens <= MAX_TOKENS else 0


class IndexWeightArguments(NamedTuple):
    """:class:`IndexWeights` as a kernel takes them; strides in elements, PADDED (a power of two) a constant."""

    x: Tensor
    weight: Tensor
    out: Tensor
    heads: int
    width: int
    x_row: int
    out_row: int
    programs: int
    PADDED: tl.constexpr


@dataclass(frozen=True)
class IndexWeights:
    """Operands of the head weights of a pass of up to ``MAX_TOKENS`` tokens.

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
        """Number of programs of the GEMM."""
        return cdiv(self.weight.shape[0], ROWS_PER_PROGRAM.value)

    def check(self, tokens: int) -> None:
        """Refuse what the kernel cannot read, by ``OperandTypeError`` or ``OperandValueError``; metadata only."""
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
        """Return the arguments of :func:`project_index_weights`."""
        tokens, width = self.x.shape
        return IndexWeightArguments(
            x=self.x,
            weight=self.weight,
            out=self.out,
            heads=self.weight.shape[0],
            width=width,
            x_row=self.x.stride(0),
            out_row=self.out.stride(0),
            programs=self.programs,
            PADDED=constant(padded_tokens(tokens)),
        )


@triton.jit
def prefetch_index_weights(program, of):
    """Ask L2 for the rows that :func:`project_index_weights` multiplies, of up to 8192 columns."""
    row = tl.minimum(program * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM), of.heads - 1)
    column = tl.minimum(tl.arange(0, 128) * 64, of.width - 1)
    prefetch_constants(of.weight + row[:, None] * of.width + column[None, :])


@triton.jit
def project_index_weights(program, tokens, of):
    """Multiply ROWS_PER_PROGRAM rows of the weight with every token, and store the results.

    Sums are fp32, added in the order of the blocks of columns. program: int32, 0 to ``of.programs - 1``.
    tokens: of the pass. of: :class:`IndexWeightArguments`.
    """
    row = program * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    token = tl.arange(0, of.PADDED)
    total = tl.zeros((of.PADDED, ROWS_PER_PROGRAM), tl.float32)
    COLUMNS: tl.constexpr = VALUES_PER_STEP // of.PADDED
    for first in range(0, of.width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (column < of.width)[None, :]
        x_mask, w_mask = (token < tokens)[:, None] & inside, (row < of.heads)[:, None] & inside
        x = tl.load(of.x + token[:, None] * of.x_row + column[None, :], mask=x_mask, other=0.0).to(tl.float32)
        w = tl.load(of.weight + row[:, None] * of.width + column[None, :], mask=w_mask, other=0.0).to(tl.float32)
        total += tl.sum(x[:, None, :] * w[None, :, :], axis=2)
    mask = (token < tokens)[:, None] & (row < of.heads)[None, :]
    tl.store(of.out + token[:, None] * of.out_row + row[None, :], total, mask=mask)
