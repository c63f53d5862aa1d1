"""The tensors of one launch. No checks here (custom_ops.py has them) and nothing on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .clusters import Clusters
from .shape import TILE_K, KernelShape


@dataclass(frozen=True)
class Call:
    """The tensors and sizes of one launch.

    Attributes:
        weights: uint8 [groups, features, k/2]; ``weight_scales``: E4M3, swizzled, one padded matrix after the other.
            Rows of gated kernels: ``shape.GATE_ROWS`` gates, as many ups, and so on.
        tokens: uint8 [rows, k/2] or [rows, groups, k/2], the last dimension contiguous.
        token_scales: E4M3, swizzled as scale_layout.py says. Rows by (k of all groups) as one matrix if ``tokens`` has
            groups.
        out: bf16 or fp32 [rows, features] or [rows, groups, features]; for NVFP4 output uint8 codes. Gated kernels have
            half as many features here.
        out_scales: E4M3 of NVFP4 output, swizzled like ``token_scales``.
        row_scale: fp32 [rows], [rows, groups], or [1] for a constant.
        row_weight: fp32 [rows] or None.
        alpha: fp32, the weights' global scales: [features] for a plain product, [groups] for experts, [groups, 2] for
            gates and ups, or [groups, features].
        offsets, counts: int32 [experts] of a grouped kernel.
    """

    shape: KernelShape
    weights: Tensor
    weight_scales: Tensor
    tokens: Tensor
    token_scales: Tensor
    out: Tensor
    row_scale: Tensor
    alpha: Tensor
    out_scales: Tensor | None = None
    row_weight: Tensor | None = None
    offsets: Tensor | None = None
    counts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shape.split_k > -(-self.k // TILE_K):
            raise ValueError(f"split_k {self.shape.split_k}: K = {self.k} has only {-(-self.k // TILE_K)} stages")

    @property
    def features(self) -> int:
        """Weight rows."""
        return self.weights.shape[1]

    @property
    def outputs(self) -> int:
        """Output features."""
        return self.features // self.shape.rows_per_feature

    @property
    def k(self) -> int:
        return self.weights.shape[2] * 2

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups(self) -> int:
        return self.weights.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of tiles, one for a cluster at a time, of a batched kernel; of a grouped one the most there can be."""
        shape = self.shape
        across = -(-self.features // (shape.tile_features * shape.shared_tokens))
        down = -(-self.rows // (shape.token_tile * (1 if shape.grouped else shape.shared_weights)))
        return across * down * (1 if shape.grouped else self.groups)

    def clusters(self, active: Clusters) -> int:
        """Persistent clusters for a GPU that runs so many at a time: no more than there is work for."""
        return max(1, min(self.blocks, active.of(self.shape.cluster)))

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(read, written) by the kernel."""
        read = [self.weights, self.weight_scales, self.tokens, self.token_scales, self.row_scale, self.alpha]
        read += [t for t in (self.row_weight, self.offsets, self.counts) if t is not None]
        return read, [self.out] + ([self.out_scales] if self.out_scales is not None else [])
