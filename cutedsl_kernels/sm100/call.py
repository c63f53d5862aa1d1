"""The tensors of one launch on SM100, on the host; operators have checked them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from ..common.arguments import Arguments
from ..common.call import GemmCall
from ..common.clusters import Clusters
from ..errors import WorkspaceError
from ..workspace import workspace
from .shape import MAX_STREAM_K_CLUSTERS, SCALE_ATOM_BLOCKS, SCALE_ATOM_BYTES, KernelShape


@dataclass(frozen=True, kw_only=True)
class Call(GemmCall):
    """The tensors and sizes of one launch.

    Attributes:
        weights: codes [groups, features, k]: uint8, two a byte, of NVFP4, E4M3 of MXFP8. ``weight_scales``: E4M3 or
            UE8M0, swizzled, one padded matrix after the other. Rows of gated kernels: ``shape.GATE_ROWS`` gates, as
            many ups, and so on.
        tokens: codes [rows, k] or [rows, groups, k], the last dimension contiguous.
        token_scales: swizzled as scale_layout.py says. Whole atoms of each group side by side, as one matrix, if
            ``tokens`` has groups.
        out: bf16 or fp32 [rows, features] or [rows, groups, features]; for NVFP4 output uint8 codes. Gated kernels have
            half as many features here.
        out_scales: E4M3 of NVFP4 output, swizzled like ``token_scales``.
        row_scale: fp32 [rows], [rows, groups], or [1] for a constant.
        alpha: fp32, the weights' global scales: [features] for a plain GEMM, [groups] for experts, [groups, 2] for
            gates and ups, or [groups, features].
        offsets, counts: int32 [experts] of a grouped kernel.
        workspace: of a kernel whose pairs share tiles (``shape.stream_k``): uint8, 16-byte aligned, as many as
            ``shape.workspace_bytes`` says, of which the counters are zero (workspace.py).
    """

    shape: KernelShape
    weight_scales: Tensor
    token_scales: Tensor
    row_scale: Tensor
    out_scales: Tensor | None = None
    workspace: Tensor | None = None

    @property
    def stage_k(self) -> int:
        return self.shape.tile_k

    @property
    def features(self) -> int:
        return self.weights.shape[1]

    @property
    def k(self) -> int:
        return self.weights.shape[2] * self.shape.byte_elements

    @property
    def blocks(self) -> int:
        shape = self.shape
        across = -(-self.features // (shape.tile_features * shape.shared_tokens))
        down = -(-self.rows // (shape.token_tile * (1 if shape.grouped else shape.shared_weights)))
        return across * down * (1 if shape.grouped else self.groups)

    def with_workspace(self, active: Clusters) -> Self:
        return replace(self, workspace=workspace(self.out.device, active)) if self.shape.stream_k else self

    def copied(self) -> dict[str, Tensor]:
        scales = {"weight_scales": self.weight_scales, "token_scales": self.token_scales}
        return super().copied() | scales | ({} if self.out_scales is None else {"out_scales": self.out_scales})

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        read = [self.weights, self.weight_scales, self.tokens, self.token_scales, self.row_scale, self.alpha]
        read += [t for t in (self.row_weight, self.offsets, self.counts) if t is not None]
        return read, [self.out] + [t for t in (self.out_scales, self.workspace) if t is not None]

    def _check_workspace(self, clusters: int) -> None:
        needed = self.shape.workspace_bytes(clusters)
        found = 0 if self.workspace is None else self.workspace.numel()
        if clusters > MAX_STREAM_K_CLUSTERS or found < needed:
            raise WorkspaceError(
                f"workspace: expected {needed} bytes for at most {MAX_STREAM_K_CLUSTERS} clusters, found {found} for"
                f" {clusters}"
            )

    def measure(self, clusters: int) -> Arguments:
        """As :meth:`GemmCall.measure`.

        Raises:
            WorkspaceError: pairs share tiles, and the workspace is too small or absent.
        """
        if self.shape.stream_k:
            self._check_workspace(clusters)
        found, row_scale = super().measure(clusters), self.row_scale
        matrix_atoms = -(-self.k // (SCALE_ATOM_BLOCKS * self.shape.block))
        return found._replace(
            token_row=found.token_row * self.shape.byte_elements,
            token_group=found.token_group * self.shape.byte_elements,
            token_scale_row=matrix_atoms * (self.groups if self.tokens.dim() == 3 else 1) * SCALE_ATOM_BYTES,
            token_scale_group=matrix_atoms * SCALE_ATOM_BYTES,
            row_scale_row=0 if row_scale.numel() == 1 else row_scale.stride(0),
            row_scale_group=row_scale.stride(1) if row_scale.dim() == 2 else 0,
            out_scale_row=-(-self.outputs // 64) * SCALE_ATOM_BYTES,
        )
