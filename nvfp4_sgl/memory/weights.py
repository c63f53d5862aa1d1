"""Bytes of the weights that one rank holds, as its target holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from nvfp4_sgl.checkpoint.names import Role, Storage, TensorSpec, tensor_specs
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.formats.scale_layout import scale_bytes
from nvfp4_sgl.model.products import LayerProduct, step_products
from nvfp4_sgl.targets.choose import Target

VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it splits it over ranks."""

EXPERTS, MATRICES, VOCABULARY, OTHERS = "experts", "other matrices", "embedding and head", "router, norms, mHC, tables"


def weight_bytes(
    config: ModelConfig, storage: Callable[[str], Storage], target: Target, ranks: int, dtype_bytes: int
) -> dict[str, int]:
    """Bytes by part on one of ``ranks``.

    Args:
        storage: of a matrix, by its name without suffix.
        dtype_bytes: of an element of the model dtype.

    Raises:
        ConfigError: the model cannot be split so.
    """
    experts = matrices = 0
    for product, layers in step_products(config, ranks).items():
        nbytes = layers * _PRODUCT_BYTES[target](product)
        if product.experts_per_token:
            experts += nbytes
        else:
            matrices += nbytes
    specs = tensor_specs(config)
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
    """Dequantised to bf16."""
    return 2 * _elements(product)


def _sm100_bytes(product: LayerProduct) -> int:
    """Codes, padded block scales, alphas: one a row of dense matrices, one a matrix of experts."""
    rows = product.features * (2 if product.gated else 1)
    alphas = (2 if product.gated else 1) if product.experts_per_token else rows
    return product.groups * (rows * product.k // 2 + scale_bytes(rows, product.k) + 4 * alphas)


_PRODUCT_BYTES: Mapping[Target, Callable[[LayerProduct], int]] = {
    Target.CPU: _cpu_bytes,
    Target.SM90: _sm90_bytes,
    Target.SM100: _sm100_bytes,
}


def _elements(product: LayerProduct) -> int:
    return product.groups * product.features * product.k * (2 if product.gated else 1)


def _alphas(spec: TensorSpec, config: ModelConfig, ranks: int, storage: Callable[[str], Storage]) -> int:
    """Rows of a matrix on a rank, if it is NVFP4."""
    if storage(spec.name) is not Storage.NVFP4:
        return 0
    is_split = spec.name.endswith((".w1", ".w3", ".wo_a")) or spec.name.endswith(".attn.wq_b")
    return spec.shape[0] // ranks if is_split else spec.shape[0]


def _other_bytes(spec: TensorSpec, target: Target, ranks: int) -> int:
    """Of a tensor that is no GEMM of :func:`step_products`; GPUs keep mHC's matrices as three bf16 parts."""
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
