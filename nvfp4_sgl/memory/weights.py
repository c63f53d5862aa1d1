"""Bytes of the weights that one rank holds, as its target holds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from nvfp4_sgl.checkpoint.drafts import Draft
from nvfp4_sgl.checkpoint.names import CONFIDENCE, Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.weights.gemms import Part
from nvfp4_sgl.weights.parallel import Ownership

FINAL_NORM = re.compile(r"(mtp\.\d+\.)?norm\.weight")
"""The norm in front of the LM head, of the model or of a draft."""
VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this before it splits it over ranks."""

EXPERTS, MATRICES, VOCABULARY, OTHERS = "experts", "other matrices", "embedding and head", "router, norms, mHC, tables"


def weight_bytes(
    config: ModelConfig,
    storage: Callable[[str], Storage],
    target: str,
    owner: Ownership,
    dtype_bytes: int,
    mode: ActivationMode | None = None,
    stage: range | None = None,
) -> dict[str, int]:
    """Bytes by part on the rank that is ``owner``.

    Args:
        storage: of a matrix, by its name without suffix.
        dtype_bytes: of an element of the model dtype.
        mode: what enters GEMMs with quantised weights; the target's default unless given.
        stage: layers, all unless given; the embedding is with the first, the final collapse and the head with the last.

    Raises:
        ConfigError: the model cannot be split so.
    """
    layers, experts, matrices = config.stage(stage), 0, 0
    ends = (layers.start == 0) + (layers.stop == config.num_hidden_layers)
    specs = [spec for spec in tensor_specs(config).values() if _is_of(spec, layers, config)]
    chosen = descriptor(target, mode)
    for gemm in chosen.gemms(config, owner, storage, stage):
        nbytes = chosen.gemm_bytes(gemm, storage)
        if gemm.part is Part.EXPERTS:
            experts += nbytes
        else:
            matrices += nbytes
    heads = len(owner.heads(config))
    rows = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // owner.size
    return {
        EXPERTS: experts,
        MATRICES: matrices,
        VOCABULARY: ends * rows * config.hidden_size * dtype_bytes,
        OTHERS: sum(_other_bytes(spec, heads, on_gpu=chosen.on_gpu) for spec in specs),
    }


def draft_weight_bytes(
    config: ModelConfig, draft: Draft, target: str, owner: Ownership, mode: ActivationMode | None = None
) -> int:
    """Bytes of a draft on the rank that is ``owner``. Embedding and LM head are the model's.

    Args:
        mode: as of :func:`weight_bytes`.

    Raises:
        ConfigError: the model cannot be split so.
    """
    chosen, heads = descriptor(target, mode), len(owner.heads(config))
    storage = draft.storages.__getitem__
    gemms = chosen.draft_gemms(config, draft.projections, draft.stages, owner, storage)
    others = (_other_bytes(spec, heads, on_gpu=chosen.on_gpu) for spec in draft.specs.values())
    return sum(chosen.gemm_bytes(gemm, storage) for gemm in gemms) + sum(others)


def _is_of(spec: TensorSpec, layers: range, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a stage."""
    first, _, rest = spec.name.partition(".")
    if first == "layers":
        return int(rest.partition(".")[0]) in layers
    return layers.start == 0 if first == "embed" else layers.stop == config.num_hidden_layers


def _other_bytes(spec: TensorSpec, heads: int, *, on_gpu: bool) -> int:
    """Bytes of a tensor that is in no :class:`.GemmSpec`, on a rank of so many ``heads``.

    GPUs keep mHC's matrices as three bf16 parts.
    """
    name = spec.name
    if spec.role.is_matrix or name in ("embed.weight", "head.weight") or name.endswith(CONFIDENCE):
        return 0
    elements = prod(spec.shape)
    if spec.role is Role.TID2EID:
        return 8 * elements
    if spec.role is Role.FP32:
        if name.endswith(".attn_sink"):
            return 4 * heads
        return (6 if name.endswith("_fn") and on_gpu else 4) * elements
    if name.endswith((".attn_norm.weight", ".ffn_norm.weight")) or FINAL_NORM.fullmatch(name):
        return (4 if on_gpu else 2) * elements
    return (4 if not on_gpu and name.endswith(".weights_proj.weight") else 2) * elements
