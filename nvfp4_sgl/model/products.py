"""The matrix products of one decoder layer as a rank computes them: sizes only, for planning kernels.

Sizes follow from the checkpoint's tensors (``checkpoint.names``) and from what is merged and split over ranks
(``model.attention``, ``model.moe``, ``model.parallel``). Plain matrices (router, index weights, head) are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.weights.parallel import TensorParallel


@dataclass(frozen=True)
class LayerProduct:
    """``groups`` products of [tokens, k] by [features, k]; with ``gated`` a gate and an up matrix each.

    Attributes:
        name: the checkpoint's names of what is merged.
        experts_per_token: 0 for products of all tokens; else how many of the groups each token goes through.
        shared: the last of the groups is one that every token goes through, the shared expert.
        output: what is written; "nvfp4" is quantised again for the product that follows.
    """

    name: str
    features: int
    k: int
    groups: int = 1
    gated: bool = False
    experts_per_token: int = 0
    shared: bool = False
    output: Literal["bf16", "fp32", "nvfp4"] = "bf16"


def layer_products(config: ModelConfig, ranks: int = 1, apart: int = 0) -> list[LayerProduct]:
    """Every distinct product of the decoder's layers on one of ``ranks``; each kind of layer has its own merges.

    Args:
        apart: layers whose shared expert is none of these products.

    Raises:
        ConfigError: the model cannot be split so.
    """
    return list(step_products(config, ranks, apart))


def step_products(config: ModelConfig, ranks: int = 1, apart: int = 0) -> Counter[LayerProduct]:
    """The products that a pass through all layers launches on one of ``ranks``, each with the number of its layers.

    Args:
        apart: as in :func:`layer_products`.

    Raises:
        ConfigError: the model cannot be split so.
    """
    TensorParallel(size=ranks).check(config)
    found: Counter[LayerProduct] = Counter()
    for kind in LayerKind:
        layers = config.layer_kinds.count(kind)
        if layers:
            found.update(dict.fromkeys(_attention(config, kind, ranks), layers))
    for shared, layers in ((True, len(config.layer_kinds) - apart), (False, apart)):
        if layers:
            found.update(dict.fromkeys(_experts(config, ranks, shared), layers))
    return found


def _experts(config: ModelConfig, ranks: int, shared: bool) -> list[LayerProduct]:
    """The routed experts' products; the shared expert is one more group, if it is among them."""
    d, inner = config.hidden_size, config.moe_intermediate_size // ranks
    groups, visits = config.n_routed_experts + shared, config.num_experts_per_tok + shared
    return [
        LayerProduct("experts.w1 + w3", inner, d, groups, True, visits, shared=shared, output="nvfp4"),
        LayerProduct("experts.w2", d, inner, groups, False, visits, shared=shared),
    ]


def _attention(config: ModelConfig, kind: LayerKind, ranks: int) -> list[LayerProduct]:
    layer = config.layer_kinds.index(kind)
    stem = f"layers.{layer}.attn."
    linear = {
        name.removeprefix(stem): spec.shape
        for name, spec in tensor_specs(config).items()
        if name.startswith(stem) and spec.role is Role.LINEAR
    }
    from_x = [name for name in linear if name in ("wq_a", "wkv") or "compressor" in name]
    columns = sum(linear[name][0] for name in from_x)
    products = [LayerProduct(" + ".join(from_x), columns, config.hidden_size, output="fp32")]
    heads, index = linear["wq_b"][0] // ranks, linear.get("indexer.wq_b")
    if index is None:
        products.append(LayerProduct("wq_b", heads, config.q_lora_rank))
    else:
        products.append(LayerProduct("wq_b + indexer.wq_b", heads + index[0], config.q_lora_rank))
    groups = config.o_groups // ranks
    products.append(LayerProduct("wo_a", config.o_lora_rank, linear["wo_a"][1], groups))
    products.append(LayerProduct("wo_b", config.hidden_size, linear["wo_b"][1] // ranks))
    return products
