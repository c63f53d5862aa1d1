"""Bytes of the weights that one rank holds, as its target holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from nvfp4_sgl.checkpoint.names import Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import FP8_TILE_BYTES
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS
from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.choose import MODES, Target, multiplies_as_sm100
from nvfp4_sgl.targets.storages import hopper_operands, sm100_operands
from nvfp4_sgl.weights.gemms import TOGETHER, GemmSpec, Part, launched_gemms, step_gemms

VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it splits it over ranks."""

EXPERTS, MATRICES, VOCABULARY, OTHERS = "experts", "other matrices", "embedding and head", "router, norms, mHC, tables"


def weight_bytes(
    config: ModelConfig,
    storage: Callable[[str], Storage],
    target: Target,
    ranks: int,
    dtype_bytes: int,
    mode: ActivationMode | None = None,
) -> dict[str, int]:
    """Bytes by part on one of ``ranks``.

    Args:
        storage: of a matrix, by its name without suffix.
        dtype_bytes: of an element of the model dtype.
        mode: what enters GEMMs with quantised weights; the target's default unless given.

    Raises:
        ConfigError: the model cannot be split so.
    """
    specs, experts, matrices = tensor_specs(config), 0, 0
    as_sm100 = multiplies_as_sm100(target, mode or MODES[target][0])
    if as_sm100:
        gemms = step_gemms(config, ranks, lambda stem: sm100_operands(storage(stem)))
    elif target is Target.SM90:
        gemms = step_gemms(config, ranks, lambda stem: hopper_operands(storage(stem)), TOGETHER)
    else:
        gemms = step_gemms(config, ranks)
    for gemm, layers in gemms.items():
        nbytes = layers * _GEMM_BYTES[target](gemm)
        if target is Target.SM90 and as_sm100 and gemm.operands == "nvfp4" and gemm.gated:
            nbytes += layers * 4 * gemm.groups  # an alpha of one beside those of gate and up
        if gemm.part is Part.EXPERTS:
            experts += nbytes
        else:
            matrices += nbytes
    if target is Target.CPU:
        for gemm in launched_gemms(config, ranks):
            if gemm.part is Part.EXPERTS:
                experts += _cpu_alpha_bytes(gemm, storage)
            else:
                matrices += _cpu_alpha_bytes(gemm, storage)
    rows = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // ranks
    return {
        EXPERTS: experts,
        MATRICES: matrices,
        VOCABULARY: 2 * rows * config.hidden_size * dtype_bytes,
        OTHERS: sum(_other_bytes(spec, target, ranks) for spec in specs.values()),
    }


def _cpu_bytes(gemm: GemmSpec) -> int:
    """Decoded to fp32; alphas are counted apart."""
    return 4 * gemm.elements


def _sm90_bytes(gemm: GemmSpec) -> int:
    """NVFP4: whole tiles of codes and block scales, alphas as on SM100. FP8: whole tiles of codes and factors, a one.
    Others: dequantised to bf16, as "mxfp8" is in mode ``w4a4``."""
    if gemm.operands in ("bf16", "mxfp8"):
        return 2 * gemm.elements
    tiles = -(-gemm.rows // TILE_ROWS) * -(-gemm.k // TILE_K)
    if gemm.operands == "fp8":
        return gemm.groups * tiles * FP8_TILE_BYTES + 4
    return gemm.groups * (tiles * TILE_BYTES + 4 * _alphas_of_group(gemm))


def _sm100_bytes(gemm: GemmSpec) -> int:
    """NVFP4: codes, padded block scales, alphas. MXFP8: codes, padded block scales, two ones. Else bf16.

    What a GEMM multiplies says which.
    """
    rows = gemm.rows
    if gemm.operands == "bf16":
        return 2 * gemm.elements
    if gemm.operands == "mxfp8":
        return gemm.groups * (rows * gemm.k + scale_bytes(rows, gemm.k, block=mxfp8.BLOCK)) + 2 * 4
    return gemm.groups * (rows * gemm.k // 2 + scale_bytes(rows, gemm.k) + 4 * _alphas_of_group(gemm))


def _alphas_of_group(gemm: GemmSpec) -> int:
    """Global scales of a group: one a row of dense matrices, one a matrix of experts."""
    return (2 if gemm.gated else 1) if gemm.experts_per_token else gemm.rows


_GEMM_BYTES: Mapping[Target, Callable[[GemmSpec], int]] = {
    Target.CPU: _cpu_bytes,
    Target.SM90: _sm90_bytes,
    Target.SM100: _sm100_bytes,
}


def _cpu_alpha_bytes(gemm: GemmSpec, storage: Callable[[str], Storage]) -> int:
    """A global scale a row of the matrices that are NVFP4."""
    rows = zip(gemm.shards, gemm.shard_rows, strict=True)
    return 4 * sum(count for shard, count in rows if storage(shard.stem).is_nvfp4)


def _other_bytes(spec: TensorSpec, target: Target, ranks: int) -> int:
    """Bytes of a tensor that is no GEMM of :func:`step_gemms`; GPUs keep mHC's matrices as three bf16 parts."""
    name, on_cpu = spec.name, target is Target.CPU
    if spec.role.is_matrix or name in ("embed.weight", "head.weight"):
        return 0
    elements = prod(spec.shape)
    if spec.role is Role.TID2EID:
        return 8 * elements
    if spec.role is Role.FP32:
        if name.endswith(".attn_sink"):
            return 4 * (elements // ranks)
        return (6 if name.endswith("_fn") and not on_cpu else 4) * elements
    if name.endswith((".attn_norm.weight", ".ffn_norm.weight")) or name == "norm.weight":
        return (2 if on_cpu else 4) * elements
    return (4 if on_cpu and name.endswith(".weights_proj.weight") else 2) * elements
