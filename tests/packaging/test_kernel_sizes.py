"""The sizes that are asked for before a model is loaded are those that the kernels take."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4_sgl.targets import kernel_sizes
from nvfp4_sgl.triton_kernels.attention import sparse_attention
from nvfp4_sgl.triton_kernels.attention_inputs import compressor
from nvfp4_sgl.triton_kernels.entries import index_entry, kv_entry
from nvfp4_sgl.triton_kernels.experts import routing, swiglu
from nvfp4_sgl.triton_kernels.hyper_connection import site, streams
from nvfp4_sgl.triton_kernels.indexer import query, scores, topk


@pytest.mark.parametrize(
    ("name", "of_kernels"),
    [
        ("STREAMS", [site.STREAMS]),
        ("MAX_HIDDEN_SIZE", [site.MAX_WIDTH]),
        ("MAX_Q_LORA_RANK", [streams.RMS_NORM_MAX_WIDTH]),
        ("HEAD_DIM", [kv_entry.DIM]),
        ("ROPE_DIM", [kv_entry.ROPE_DIM, compressor.ROPE_DIM, query.ROPE_DIM]),
        ("INDEX_HEAD_DIM", [index_entry.DIM]),
        ("MIN_CSA_WINDOW", [compressor.MIN_WINDOW]),
        ("MAX_INDEX_HEADS", [scores.MAX_HEADS]),
        ("MAX_INDEX_TOPK", [topk.MAX_TOPK]),
        ("CHUNK_SCORES", [topk.CHUNK]),
        ("MAX_CANDIDATES", [topk.MAX_CANDIDATES]),
        ("MAX_EXPERTS", [routing.MAX_EXPERTS]),
        ("MIN_SWIGLU_LIMIT", [swiglu.MIN_LIMIT]),
        ("MAX_SWIGLU_LIMIT", [swiglu.MAX_LIMIT]),
        ("MAX_QUERY_EPS", [sparse_attention.MAX_QUERY_EPS]),
    ],
)
def test_each_is_the_kernels_own(name: str, of_kernels: list[Any]) -> None:
    assert {getattr(kernel_sizes, name)} == set(of_kernels)
