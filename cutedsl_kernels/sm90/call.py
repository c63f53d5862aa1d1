"""The tensors of one launch, and the numbers that a compiled kernel takes of them. No checks here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..sm100.arguments import Arguments
from ..sm100.clusters import Clusters
from .layout import TILE_K, TILE_ROWS
from .shape import KernelShape


@dataclass(frozen=True)
class Call:
    """The tensors and sizes of one launch.

    Attributes:
        weights: uint8 [groups, ceil(features / 128), ceil(k / 128), 9216], as ``layout.pack_tiles`` makes them.
        tokens: bf16 [rows, k] or [rows, groups, k], the last dimension contiguous.
        out: bf16 or fp32 [rows, features] or [rows, groups, features].
        alpha: fp32 [groups, features], the weights' global scales.

    Raises:
        ValueError: a CTA of the cluster would have nothing to add up.
    """

    shape: KernelShape
    weights: Tensor
    tokens: Tensor
    out: Tensor
    alpha: Tensor

    def __post_init__(self) -> None:
        k_tiles = -(-self.k // TILE_K)
        if self.shape.split_k > k_tiles:
            raise ValueError(f"split_k {self.shape.split_k}: K = {self.k} has only {k_tiles} stages")

    @property
    def features(self) -> int:
        return self.out.shape[-1]

    @property
    def k(self) -> int:
        return self.tokens.shape[-1]

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups(self) -> int:
        return self.weights.shape[0]

    @property
    def tiles(self) -> int:
        """Of all groups, one for a cluster at a time."""
        return -(-self.features // TILE_ROWS) * -(-self.rows // self.shape.token_tile) * self.groups

    def clusters(self, active: Clusters) -> int:
        """Persistent clusters for a GPU that runs so many at a time: no more than there is work for."""
        return max(1, min(self.tiles, active.of(self.shape.cluster)))

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(read, written) by the kernel."""
        return [self.weights, self.tokens, self.alpha], [self.out]

    def arguments(self, clusters: int) -> Arguments:
        """The launch on ``clusters`` persistent clusters; 0 for what these kernels do not have."""
        tokens, out = self.tokens, self.out
        return Arguments(
            weights=self.weights.data_ptr(),
            weight_scales=0,
            tokens=tokens.data_ptr(),
            token_scales=0,
            out=out.data_ptr(),
            out_scales=0,
            row_scale=0,
            row_weight=0,
            alpha=self.alpha.data_ptr(),
            offsets=0,
            counts=0,
            features=self.features,
            k=self.k,
            rows=self.rows,
            groups=self.groups,
            clusters=clusters,
            token_row=tokens.stride(0),
            token_group=tokens.stride(1) if tokens.dim() == 3 else 0,
            token_scale_row=0,
            token_scale_group=0,
            out_row=out.stride(0),
            out_group=out.stride(1) if out.dim() == 3 else 0,
            row_scale_row=0,
            row_scale_group=0,
            alpha_feature=self.alpha.stride(-1),
            alpha_group=self.alpha.stride(0),
            out_scale_row=0,
        )
