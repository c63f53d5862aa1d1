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
from nvfp4_sgl.model.products import LayerProduct, hopper_products, step_products, stored_products
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.choose import MODES, Target, multiplies_as_sm100
from nvfp4_sgl.targets.storages import hopper_operands, sm100_operands

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
        products = stored_products(config, ranks, lambda stem: sm100_operands(storage(stem)))
    elif target is Target.SM90:
        products = hopper_products(config, ranks, lambda stem: hopper_operands(storage(stem)))
    else:
        products = step_products(config, ranks)
    for product, layers in products.items():
        nbytes = layers * _PRODUCT_BYTES[target](product)
        if target is Target.SM90 and as_sm100 and product.operands == "nvfp4" and product.gated:
            nbytes += layers * 4 * product.groups  # an alpha of one beside those of gate and up
        if product.experts_per_token or product.name.startswith("shared_experts."):
            experts += nbytes
        else:
            matrices += nbytes
    if target is Target.CPU:
        experts += 4 * sum(_alphas(s, config, ranks, storage) for s in specs.values() if s.role is Role.EXPERT_LINEAR)
        matrices += 4 * sum(_alphas(s, config, ranks, storage) for s in specs.values() if s.role is Role.LINEAR)
        shared = 4 * sum(_alphas(s, config, ranks, storage) for s in specs.values() if ".shared_experts." in s.name)
        experts, matrices = experts + shared, matrices - shared
    rows = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // ranks
    return {
        EXPERTS: experts,
        MATRICES: matrices,
        VOCABULARY: 2 * rows * config.hidden_size * dtype_bytes,
        OTHERS: sum(_other_bytes(spec, target, ranks) for spec in specs.values()),
    }


def _cpu_bytes(product: LayerProduct) -> int:
    """Decoded to fp32; alphas are counted apart."""
    return 4 * _elements(product)


def _sm90_bytes(product: LayerProduct) -> int:
    """NVFP4: whole tiles of codes and block scales, alphas as on SM100. FP8: whole tiles of codes and factors, a one.
    Others: dequantised to bf16, as "mxfp8" is in mode ``w4a4``."""
    if product.operands in ("bf16", "mxfp8"):
        return 2 * _elements(product)
    tiles = -(-_rows(product) // TILE_ROWS) * -(-product.k // TILE_K)
    if product.operands == "fp8":
        return product.groups * tiles * FP8_TILE_BYTES + 4
    return product.groups * (tiles * TILE_BYTES + 4 * _alphas_of_group(product))


def _sm100_bytes(product: LayerProduct) -> int:
    """NVFP4: codes, padded block scales, alphas. MXFP8: codes, padded block scales, two ones. Else bf16.

    What a product multiplies says which.
    """
    rows = _rows(product)
    if product.operands == "bf16":
        return 2 * _elements(product)
    if product.operands == "mxfp8":
        return product.groups * (rows * product.k + scale_bytes(rows, product.k, block=mxfp8.BLOCK)) + 2 * 4
    return product.groups * (rows * product.k // 2 + scale_bytes(rows, product.k) + 4 * _alphas_of_group(product))


def _rows(product: LayerProduct) -> int:
    """Weight rows of a group."""
    return product.features * (2 if product.gated else 1)


def _alphas_of_group(product: LayerProduct) -> int:
    """Global scales of a group: one a row of dense matrices, one a matrix of experts."""
    return (2 if product.gated else 1) if product.experts_per_token else _rows(product)


_PRODUCT_BYTES: Mapping[Target, Callable[[LayerProduct], int]] = {
    Target.CPU: _cpu_bytes,
    Target.SM90: _sm90_bytes,
    Target.SM100: _sm100_bytes,
}


def _elements(product: LayerProduct) -> int:
    return product.groups * product.features * product.k * (2 if product.gated else 1)


def _alphas(spec: TensorSpec, config: ModelConfig, ranks: int, storage: Callable[[str], Storage]) -> int:
    """Rows of a matrix on a rank, if it is NVFP4."""
    if not storage(spec.name).is_nvfp4:
        return 0
    is_split = spec.name.endswith((".w1", ".w3", ".wo_a")) or spec.name.endswith(".attn.wq_b")
    return spec.shape[0] // ranks if is_split else spec.shape[0]


def _other_bytes(spec: TensorSpec, target: Target, ranks: int) -> int:
    """Bytes of a tensor that is no GEMM of :func:`step_products`; GPUs keep mHC's matrices as three bf16 parts."""
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
