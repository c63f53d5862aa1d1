"""The matrix products of one decoder layer as a rank computes them: sizes only, for planning kernels.

Sizes follow from the checkpoint's tensors (``checkpoint.names``) and from what is merged and split over ranks
(``model.attention``, ``model.moe``, ``model.parallel``). Plain matrices (router, index weights, head) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.weights.parallel import TensorParallel

Operands = Literal["nvfp4", "mxfp8", "fp8", "bf16"]
"""What a product multiplies: weights and activations alike on SM100, weights with bf16 activations on Hopper. "mxfp8"
is SM100's, "fp8" Hopper's. Those of bf16 are a library's."""


@dataclass(frozen=True)
class LayerProduct:
    """``groups`` products of [tokens, k] by [features, k]; with ``gated`` a gate and an up matrix each.

    Attributes:
        name: the checkpoint's names of what is merged.
        experts_per_token: 0 for products of all tokens; else how many of the groups each token goes through.
        shared: the last of the groups is one that every token goes through, the shared expert.
        output: what is written; "nvfp4" is quantised again for the product that follows.
        operands: what is multiplied, where the target multiplies several kinds.
    """

    name: str
    features: int
    k: int
    groups: int = 1
    gated: bool = False
    experts_per_token: int = 0
    shared: bool = False
    output: Literal["bf16", "fp32", "nvfp4"] = "bf16"
    operands: Operands = "nvfp4"


def layer_products(config: ModelConfig, ranks: int = 1) -> list[LayerProduct]:
    """Every distinct product of the decoder's layers on one of ``ranks``, all in NVFP4; each kind of layer has its own
    merges.

    Raises:
        ConfigError: the model cannot be split so.
    """
    return list(step_products(config, ranks))


def step_products(config: ModelConfig, ranks: int = 1) -> Counter[LayerProduct]:
    """The products that a pass through all layers launches on one of ``ranks``, each with the number of its layers, all
    of it in NVFP4.

    Raises:
        ConfigError: the model cannot be split so.
    """
    return Counter(launched_products(config, ranks))


def launched_products(config: ModelConfig, ranks: int = 1) -> list[LayerProduct]:
    """The products that a pass launches on one of ``ranks``, in their order, all of it in NVFP4.

    Raises:
        ConfigError: the model cannot be split so.
    """
    TensorParallel(size=ranks).check(config)
    attention = {kind: _attention(config, kind, ranks) for kind in set(config.layer_kinds)}
    experts = _experts(config, ranks, shared=True)
    return [product for kind in config.layer_kinds for product in (*attention[kind], *experts)]


def stored_products(config: ModelConfig, ranks: int, operands: Callable[[str], Operands]) -> Counter[LayerProduct]:
    """The products of a pass on one of ``ranks`` where what is multiplied goes by the matrix, as on SM100.

    Of matrices that read the same activation those of one kind are merged. A shared expert that is not NVFP4 runs
    apart; its matrices are all of one kind.

    Args:
        operands: of a matrix, by its name without suffix.

    Raises:
        ConfigError: the model cannot be split so.
    """
    TensorParallel(size=ranks).check(config)
    found: Counter[LayerProduct] = Counter()
    inner, d = config.moe_intermediate_size // ranks, config.hidden_size
    merges = {kind: _merges(config, kind, ranks) for kind in LayerKind if kind in config.layer_kinds}
    for layer, layer_kind in enumerate(config.layer_kinds):
        for merge in merges[layer_kind]:
            kinds = {name: operands(f"layers.{layer}.attn.{name}") for name in merge.rows}
            for kind in dict.fromkeys(kinds.values()):
                rows = {name: count for name, count in merge.rows.items() if kinds[name] == kind}
                found[replace(merge.of(rows), operands=kind)] += 1
        kind = operands(f"layers.{layer}.ffn.shared_experts.w1")
        found.update(_experts(config, ranks, shared=kind == "nvfp4"))
        if kind != "nvfp4":
            found[LayerProduct("shared_experts.w1 + w3", inner, d, gated=True, operands=kind)] += 1
            found[LayerProduct("shared_experts.w2", d, inner, operands=kind)] += 1
    return found


def hopper_products(config: ModelConfig, ranks: int, operands: Callable[[str], Operands]) -> Counter[LayerProduct]:
    """The products of a pass on one of ``ranks`` on Hopper, where matrices that read the same activation are one
    product: of their kind if all are of one, else of bf16.

    Routed experts are NVFP4 if all of a layer are, else of bf16, and the shared one with them. Beside NVFP4 ones a
    shared expert that is not NVFP4 runs apart, its gate and up as one product without SwiGLU.

    Args:
        operands: of a matrix, by its name without suffix.

    Raises:
        ConfigError: the model cannot be split so.
    """
    TensorParallel(size=ranks).check(config)
    found: Counter[LayerProduct] = Counter()
    inner, d = config.moe_intermediate_size // ranks, config.hidden_size
    merges = {kind: _merges(config, kind, ranks) for kind in LayerKind if kind in config.layer_kinds}
    for layer, layer_kind in enumerate(config.layer_kinds):
        for merge in merges[layer_kind]:
            kind = common_operands(operands(f"layers.{layer}.attn.{name}") for name in merge.rows)
            found[replace(merge.of(merge.rows), operands=kind)] += 1
        stem = f"layers.{layer}.ffn"
        routed = common_operands(
            operands(f"{stem}.experts.{expert}.{matrix}")
            for expert in range(config.n_routed_experts)
            for matrix in ("w1", "w2", "w3")
        )
        shared = common_operands(operands(f"{stem}.shared_experts.{matrix}") for matrix in ("w1", "w2", "w3"))
        if routed != "nvfp4":
            found.update(replace(product, operands="bf16") for product in _experts(config, ranks, shared=True))
            continue
        found.update(_experts(config, ranks, shared=shared == "nvfp4"))
        if shared != "nvfp4":
            found[LayerProduct("shared_experts.w1 + w3", 2 * inner, d, operands=shared)] += 1
            found[LayerProduct("shared_experts.w2", d, inner, operands=shared)] += 1
    return found


def common_operands(kinds: Iterable[Operands]) -> Operands:
    """The kind of all ``kinds`` if they are one, else bf16."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else "bf16"


def _experts(config: ModelConfig, ranks: int, shared: bool) -> list[LayerProduct]:
    """The routed experts' products; the shared expert is one more group, if it is among them."""
    d, inner = config.hidden_size, config.moe_intermediate_size // ranks
    groups, visits = config.n_routed_experts + shared, config.num_experts_per_tok + shared
    return [
        LayerProduct("experts.w1 + w3", inner, d, groups, True, visits, shared=shared, output="nvfp4"),
        LayerProduct("experts.w2", d, inner, groups, False, visits, shared=shared),
    ]


@dataclass(frozen=True)
class _Merge:
    """Matrices of an attention layer that read the same activation: weight rows by name, on one rank."""

    rows: dict[str, int]
    k: int
    groups: int = 1
    output: Literal["bf16", "fp32"] = "bf16"

    def of(self, rows: dict[str, int]) -> LayerProduct:
        """The product of some of them."""
        return LayerProduct(" + ".join(rows), sum(rows.values()), self.k, self.groups, output=self.output)


def _attention(config: ModelConfig, kind: LayerKind, ranks: int) -> list[LayerProduct]:
    return [merge.of(merge.rows) for merge in _merges(config, kind, ranks)]


def _merges(config: ModelConfig, kind: LayerKind, ranks: int) -> list[_Merge]:
    """What is merged in a layer of that kind, on one of ``ranks``."""
    stem = f"layers.{config.layer_kinds.index(kind)}.attn."
    linear = {
        name.removeprefix(stem): spec.shape
        for name, spec in tensor_specs(config).items()
        if name.startswith(stem) and spec.role is Role.LINEAR
    }
    from_x = {name: shape[0] for name, shape in linear.items() if name in ("wq_a", "wkv") or "compressor" in name}
    from_q = {"wq_b": linear["wq_b"][0] // ranks}
    if "indexer.wq_b" in linear:
        from_q["indexer.wq_b"] = linear["indexer.wq_b"][0]
    return [
        _Merge(from_x, config.hidden_size, output="fp32"),
        _Merge(from_q, config.q_lora_rank),
        _Merge({"wo_a": config.o_lora_rank}, linear["wo_a"][1], config.o_groups // ranks),
        _Merge({"wo_b": config.hidden_size}, linear["wo_b"][1] // ranks),
    ]
