"""Bytes of the weights of a GEMM on a rank, as a target holds them.

Each function takes the GEMM and the storage of a matrix by its name without suffix.
"""

from __future__ import annotations

from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import FP8_TILE_BYTES
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS
from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.targets.target import StorageOf
from nvfp4_sgl.weights.gemms import GemmSpec


def decoded(gemm: GemmSpec, storage: StorageOf) -> int:
    """Bytes on a CPU: decoded to fp32; each row of an NVFP4 matrix keeps its global scale."""
    rows = zip(gemm.shards, gemm.shard_rows, strict=True)
    return 4 * (gemm.elements + sum(count for shard, count in rows if storage(shard.stem).is_nvfp4))


def hopper(gemm: GemmSpec, storage: StorageOf) -> int:
    """Bytes on Hopper. NVFP4: whole tiles of codes and block scales, alphas as on SM100. Others: dequantised to bf16.

    FP8: whole tiles of codes and factors, and an alpha of one.
    """
    if gemm.kind in ("bf16", "mxfp8"):
        return 2 * gemm.elements
    tiles = -(-gemm.rows // TILE_ROWS) * -(-gemm.k // TILE_K)
    if gemm.kind == "fp8":
        return gemm.groups * tiles * FP8_TILE_BYTES + 4
    return gemm.groups * (tiles * TILE_BYTES + 4 * _alphas_of_group(gemm))


def hopper_w4a4(gemm: GemmSpec, storage: StorageOf) -> int:
    """As :func:`hopper`, with an alpha of one beside those of gate and up in NVFP4; "mxfp8" is dequantised to bf16."""
    ones = 4 * gemm.groups if gemm.gated and gemm.kind == "nvfp4" else 0
    return hopper(gemm, storage) + ones


def sm100(gemm: GemmSpec, storage: StorageOf) -> int:
    """Bytes on SM100. NVFP4: codes, padded block scales, alphas. MXFP8: the same, two ones as alphas. Else bf16."""
    rows = gemm.rows
    if gemm.kind == "bf16":
        return 2 * gemm.elements
    if gemm.kind == "mxfp8":
        return gemm.groups * (rows * gemm.k + scale_bytes(rows, gemm.k, block=mxfp8.BLOCK)) + 2 * 4
    return gemm.groups * (rows * gemm.k // 2 + scale_bytes(rows, gemm.k) + 4 * _alphas_of_group(gemm))


def _alphas_of_group(gemm: GemmSpec) -> int:
    """Global scales of a group: one a row of dense matrices, one a matrix of experts."""
    return (2 if gemm.gated else 1) if gemm.experts_per_token else gemm.rows
