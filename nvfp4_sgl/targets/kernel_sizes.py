"""Checks that the Triton kernels take a model's sizes, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import (
    CHUNK_SCORES,
    HEAD_DIM,
    INDEX_HEAD_DIM,
    MAX_CANDIDATES,
    MAX_HIDDEN_SIZE,
    MAX_INDEX_HEADS,
    MAX_INDEX_TOPK,
    MAX_NORM_WIDTH,
    MAX_QUERY_EPS,
    MAX_ROUTED_EXPERTS,
    MAX_SWIGLU_LIMIT,
    MIN_CSA_WINDOW,
    MIN_SWIGLU_LIMIT,
    ROPE_DIM,
    STREAMS,
)


def check_kernel_sizes(where: str, config: ModelConfig, longest: int) -> None:
    """Refuse sizes that a Triton kernel does not take.

    Args:
        where: the target, which errors begin with.
        longest: tokens of the longest sequence that may come.

    Raises:
        ConfigError: names the field of config.json, what is expected and what was found.
    """
    for field, fits, expected in _limits(config):
        if not fits:
            raise ConfigError(
                f"{where}: {field} is {getattr(config, field)}, expected {expected}: no kernel takes another; serve"
                " another model, or this one on a CPU"
            )
    chunks = -(-(longest // LayerKind.CSA.value) // CHUNK_SCORES)
    if LayerKind.CSA in config.layer_kinds and chunks > 1 and config.index_topk * chunks > MAX_CANDIDATES:
        tokens = MAX_CANDIDATES // config.index_topk * CHUNK_SCORES * LayerKind.CSA.value
        raise ConfigError(
            f"{where}: index_topk is {config.index_topk}, expected at most {MAX_CANDIDATES // chunks} for sequences of"
            f" {longest} tokens; use a --context-length of at most {tokens}, or another model"
        )


def _limits(config: ModelConfig) -> Iterator[tuple[str, bool, str]]:
    """Fields of ``config`` that kernels limit: (field, whether its value is taken, what is expected)."""
    window = config.sliding_window
    yield "hidden_size", config.hidden_size <= MAX_HIDDEN_SIZE, f"at most {MAX_HIDDEN_SIZE}"
    yield "hc_mult", config.hc_mult == STREAMS, str(STREAMS)
    yield "q_lora_rank", config.q_lora_rank <= MAX_NORM_WIDTH, f"at most {MAX_NORM_WIDTH}"
    yield "head_dim", config.head_dim == HEAD_DIM, str(HEAD_DIM)
    yield "qk_rope_head_dim", config.qk_rope_head_dim == ROPE_DIM, str(ROPE_DIM)
    yield "sliding_window", window & (window - 1) == 0, "a power of two"
    yield "n_routed_experts", config.n_routed_experts <= MAX_ROUTED_EXPERTS, f"at most {MAX_ROUTED_EXPERTS}"
    limited = MIN_SWIGLU_LIMIT <= config.swiglu_limit <= MAX_SWIGLU_LIMIT
    yield "swiglu_limit", limited, f"{MIN_SWIGLU_LIMIT:g} to {MAX_SWIGLU_LIMIT:g}"
    yield "rms_norm_eps", config.rms_norm_eps <= MAX_QUERY_EPS, f"at most {MAX_QUERY_EPS:g}"
    if LayerKind.CSA in config.layer_kinds:  # other layers have no indexer, nor state in rings of window pages
        yield "sliding_window", window >= MIN_CSA_WINDOW, f"at least {MIN_CSA_WINDOW}"
        yield "index_head_dim", config.index_head_dim == INDEX_HEAD_DIM, str(INDEX_HEAD_DIM)
        yield "index_n_heads", config.index_n_heads <= MAX_INDEX_HEADS, f"at most {MAX_INDEX_HEADS}"
        yield "index_topk", config.index_topk <= MAX_INDEX_TOPK, f"at most {MAX_INDEX_TOPK}"
