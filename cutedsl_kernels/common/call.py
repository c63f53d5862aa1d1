"""The tensors of one launch, as a compiled kernel of any architecture takes them; operators have checked them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from .arguments import Arguments
from .clusters import Clusters
from .shape import GemmShape


@dataclass(frozen=True, kw_only=True)
class GemmCall(ABC):
    """The tensors and sizes of one launch.

    Attributes:
        shape: the kernel's.
        weights: [groups, ...], in the layout of the architecture.
        tokens: [rows, ...] or [rows, groups, ...], the last dimension contiguous.
        out: [rows, outputs] or [rows, groups, outputs].
        alpha: fp32, the weights' global scales.
        offsets, counts: int32 [groups] of a grouped kernel, else None: each expert's first row, a multiple of the token
            tile, and its rows.
        row_weight: fp32 [rows] that results are multiplied by; None on Hopper.

    Raises:
        ValueError: a CTA of the cluster would have nothing to add up.
    """

    shape: GemmShape
    weights: Tensor
    tokens: Tensor
    out: Tensor
    alpha: Tensor
    offsets: Tensor | None = None
    counts: Tensor | None = None
    row_weight: Tensor | None = None

    def __post_init__(self) -> None:
        stages = -(-self.k // self.stage_k)
        if self.shape.split_k > stages:
            raise ValueError(f"split_k {self.shape.split_k}: K = {self.k} has only {stages} stages")

    @property
    @abstractmethod
    def stage_k(self) -> int:
        """Elements of K in a pipeline stage."""

    @property
    @abstractmethod
    def features(self) -> int:
        """Weight rows."""

    @property
    def outputs(self) -> int:
        """Output features."""
        return self.features // self.shape.rows_per_feature

    @property
    @abstractmethod
    def k(self) -> int:
        """Elements of K."""

    @property
    @abstractmethod
    def blocks(self) -> int:
        """Number of blocks of tiles in all groups, an upper bound for a grouped kernel; a cluster takes one at a
        time."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups(self) -> int:
        return self.weights.shape[0]

    @property
    def out_strides(self) -> tuple[int, int]:
        """Elements between rows of ``out``, and between its groups."""
        return self.out.stride(0), self.out.stride(1) if self.out.dim() == 3 else 0

    @property
    def token_strides(self) -> tuple[int, int]:
        """Elements of ``tokens`` between its rows, and between its groups."""
        return self.tokens.stride(0), self.tokens.stride(1) if self.tokens.dim() == 3 else 0

    @property
    def alpha_strides(self) -> tuple[int, int]:
        """Elements of ``alpha`` between features (between gate and up, if gated), and between groups."""
        if self.shape.gated:
            return 1, 2
        if self.shape.grouped and self.alpha.numel() == self.groups:
            return 0, 1
        return self.alpha.stride(-1), self.alpha.stride(0)

    def clusters(self, active: Clusters) -> int:
        """Persistent clusters to launch on a GPU that runs so many at a time: at most one a block."""
        return max(1, min(self.blocks, active.of(self.shape.cluster) * self.shape.ctas_per_sm))

    def with_workspace(self, active: Clusters) -> Self:
        """The call with the workspace that its kernel needs, on a GPU that runs so many clusters at a time."""
        return self

    def copied(self) -> dict[str, Tensor]:
        """Tensors that TMA reads and writes, by the operators' names; they must be aligned to 16 bytes."""
        return {"weights": self.weights, "tokens": self.tokens, "out": self.out}

    @abstractmethod
    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(read, written) by the kernel."""

    @abstractmethod
    def arguments(self, clusters: int) -> Arguments:
        """The compiled kernel's arguments, for a launch on ``clusters`` persistent clusters."""


def address(tensor: Tensor | None) -> int:
    """Address of the first element; 0 for a tensor that a kernel does not have."""
    return 0 if tensor is None else tensor.data_ptr()
