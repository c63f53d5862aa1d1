"""From tensors to the arguments of a compiled kernel. No checks here (see the operations) and no allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .shape import SCALE_ATOM_BYTES, SCALE_ATOM_ROWS, TILE_K, KernelShape


@dataclass(frozen=True)
class Call:
    """The tensors and sizes of one launch.

    Attributes:
        weights: uint8 [matrices, features, k/2]; ``weight_scales``: E4M3, swizzled, one padded matrix after the other.
            Gated kernels: two matrices per group, gate and up.
        tokens: uint8 [rows, k/2] or [rows, groups, k/2], the last dimension contiguous.
        token_scales: E4M3, swizzled. Rows by (k of all groups) as one matrix if ``tokens`` has groups. If the token
            tile is narrower than 128, every tile of rows has 128 rows of scales to itself.
        out: bf16 or fp32 [rows, features] or [rows, groups, features]; for NVFP4 output uint8 codes.
        out_scales: E4M3 of NVFP4 output, swizzled like ``token_scales``.
        row_scale: fp32 [rows], [rows, groups], or [1] for a constant.
        row_weight: fp32 [rows] or None.
        alpha: fp32, the weights' global scales: [features] for a plain product, [groups] or [groups, halves] per
            matrix, or [groups, features].
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
        return self.weights.shape[1]

    @property
    def k(self) -> int:
        return self.weights.shape[2] * 2

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups(self) -> int:
        return self.weights.shape[0] // self.shape.halves

    @property
    def blocks(self) -> int:
        """Blocks of tiles, one for a cluster at a time, of a batched kernel; of a grouped one the most there can be."""
        shape = self.shape
        across = -(-self.features // (shape.tile_features * shape.shared_tokens))
        down = -(-self.rows // (shape.token_tile * (1 if shape.grouped else shape.shared_weights)))
        return across * down * (1 if shape.grouped else self.groups)

    def clusters(self, multiprocessors: int) -> int:
        """Persistent clusters for a GPU: one CTA an SM, no more than there is work for."""
        return max(1, min(self.blocks, multiprocessors // self.shape.cluster))

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """(read, written) by the kernel."""
        read = [self.weights, self.weight_scales, self.tokens, self.token_scales, self.row_scale, self.alpha]
        read += [t for t in (self.row_weight, self.offsets, self.counts) if t is not None]
        return read, [self.out] + ([self.out_scales] if self.out_scales is not None else [])

    def arguments(self, clusters: int) -> tuple[Any, ...]:
        """What the compiled kernel takes, without the stream."""
        import cutlass
        from cutlass import Int32, Int64

        grouped_tokens = self.tokens.dim() == 3
        codes, scales = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
        out_type = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8}[self.shape.output]
        matrix_atoms = -(-self.k // 64)
        token_groups = self.groups if grouped_tokens else 1
        alpha_feature, alpha_matrix = self._alpha_strides()
        pointers = (
            _pointer(out_type, self.out, 16),
            None if self.out_scales is None else _pointer(cutlass.Uint8, self.out_scales, 16),
            _pointer(cutlass.Float32, self.row_scale, 4),
            None if self.row_weight is None else _pointer(cutlass.Float32, self.row_weight, 4),
            _pointer(cutlass.Float32, self.alpha, 4),
        )
        out_group = self.out.stride(1) if self.out.dim() == 3 else 0
        out_atoms = -(-self.features // 64) * SCALE_ATOM_BYTES
        scale_row = 0 if self.row_scale.numel() == 1 else self.row_scale.stride(0)
        scale_group = self.row_scale.stride(1) if self.row_scale.dim() == 2 else 0
        sizes = (self.out.stride(0), out_group, scale_row, scale_group, alpha_feature, alpha_matrix, out_atoms)
        token_strides = self.tokens.stride(0) * 2, self.tokens.stride(1) * 2 if grouped_tokens else 0
        scale_strides = matrix_atoms * token_groups * SCALE_ATOM_BYTES, matrix_atoms * SCALE_ATOM_BYTES
        return (
            _pointer(codes, self.weights, 16),
            _pointer(scales, self.weight_scales, 16),
            _pointer(codes, self.tokens, 16),
            _pointer(scales, self.token_scales, 16),
            pointers,
            None if self.offsets is None else _pointer(cutlass.Int32, self.offsets, 4),
            None if self.counts is None else _pointer(cutlass.Int32, self.counts, 4),
            Int32(self.features),
            Int32(self.k),
            Int32(self.rows),
            Int32(self.groups),
            tuple(Int64(stride) for stride in token_strides),
            tuple(Int64(stride) for stride in scale_strides),
            tuple(Int64(size) for size in sizes),
            Int32(clusters),
        )

    def _alpha_strides(self) -> tuple[int, int]:
        if self.alpha.numel() == self.groups * self.shape.halves and (self.shape.gated or self.shape.grouped):
            return 0, 1
        return 1, self.features


def scale_rows(rows: int, token_tile: int) -> int:
    """Rows of block scales that ``rows`` tokens take: whole atoms, one to each narrow token tile."""
    return -(-rows // token_tile) * SCALE_ATOM_ROWS if token_tile < SCALE_ATOM_ROWS else -(-rows // 128) * 128


def _pointer(dtype: Any, tensor: Tensor, alignment: int) -> Any:
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=alignment)
