"""Choices by the number of tokens of a pass: one policy in the Context, which every place of choice asks.

Kernels, tiles and splits are chosen for speed by the number of tokens. They set the order of sums, so a token's bits
depend on how many others there are. A policy that answers with one number for all passes makes choices that do not.
Sums over ranks are the collective's: the caller of :class:`~nvfp4_sgl.weights.parallel.TensorParallel` chooses it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvfp4_sgl.cutedsl_kernels.plan import Pin


class Choice(enum.Enum):
    """A choice by the number of tokens, besides that of GEMMs, which have :attr:`Policy.pin`."""

    ATTENTION = "tiling of attention, and how many programs share a query's keys"
    SITE = "tiling of hyper-connections, and how many programs share a token's columns"
    SMALL_GEMM = "kernel or library for the router's logits"
    INPUTS = "launches and warps that prepare attention, and whether index weights are computed there"
    DIVISION = "whether ranks divide the tokens of a pass"


@dataclass(frozen=True)
class Policy:
    """Choices for speed: all go by the number of tokens of the pass.

    Attributes:
        pin: what the plans of all GEMMs have in common; ``None`` plans each for speed.
    """

    pin: Pin | None = None

    def tokens(self, choice: Choice, count: int) -> int:
        """The number of tokens to choose for where there are ``count``; not less, but for :attr:`Choice.DIVISION`.

        Programs of one launch may wait for one another, so splits must fit the tokens that there are.
        """
        return count
