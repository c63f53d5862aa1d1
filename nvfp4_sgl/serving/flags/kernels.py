"""Flags of kernels, CUDA graphs and compilers."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.config import ARCHITECTURE
from nvfp4_sgl.serving.flags.row import OFF, Refused, Row, Works, refused, without_effect, works

BACKEND = "nvfp4_sgl"
"""Name of our attention backend."""

OWN_ATTENTION = (
    f"architecture {ARCHITECTURE} runs on this package's own backend, '{BACKEND}';"
    " leave the flag out (or set NVFP4_SGL_DISABLE=1 for SGLang's own model)"
)
COMPILES = (
    "expected pytorch: FlashInfer compiles kernels at a client's first request, others are for other devices;"
    " leave the flag out"
)
GRAPHS = "tests/gpu/test_server.py::test_graphs_and_eager_decode_give_the_same_bits"
SIZES = "sizes of passes that SGLang captures; each is captured and replayed alike: " + GRAPHS

KERNELS: Mapping[str, Row] = {
    "attention_backend": Refused((None, BACKEND), OWN_ATTENTION),
    "prefill_attention_backend": Refused((None, BACKEND), OWN_ATTENTION),
    "decode_attention_backend": Refused((None, BACKEND), OWN_ATTENTION),
    "sampling_backend": Refused((None, "pytorch"), COMPILES),
    **works(GRAPHS, "disable_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_max_bs_decode"),
    **works(SIZES, "cuda_graph_bs_decode", "disable_cuda_graph_padding"),
    **works(
        "tests/serving/test_sglang_private.py::test_graphs_of_prompts_are_refused_in_json_too", "cuda_graph_config"
    ),
    "cuda_graph_backend_decode": Works(GRAPHS, (None, "full", "disabled"), ("breakable",)),
    "cuda_graph_backend_prefill": Refused(),  # SGLang's own graphs of prompts, which know nothing of our layers
    **works("tests/serving/test_prompt_graphs.py::test_what_stands_against_them", "disable_prefill_cuda_graph"),
    **without_effect(
        "for SGLang's own graphs of prompts, which are refused",
        *("cuda_graph_max_bs_prefill", "cuda_graph_bs_prefill"),
        *("cuda_graph_prefill_max_context", "cuda_graph_max_seq_len_prefill"),
    ),
    "bf16_gemm_backend": Refused(("auto", "torch")),
    "dsv4_attn_backend": Refused((None, "auto", "flashmla")),  # the others lay pages out differently
    "dsv4_prefill_backend": Refused((None, "auto", "flashmla_sparse")),
    **refused(
        OFF,
        *("debug_cuda_graph", "enable_torch_compile", "enable_torch_compile_debug_mode"),
        *("enable_deterministic_inference", "rl_on_policy_target", "enable_deepseek_v4_fp4_indexer"),
        *("enable_nvidia_megakernel", "enable_amd_monokernel"),
    ),
    **without_effect("for --enable-torch-compile, which is refused", "torch_compile_max_bs"),
    **without_effect(
        "for SGLang's own layers, which do not run",
        *("fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "disable_flashinfer_autotune"),
        *("flashinfer_autotune_skip_ops", "enable_fused_qk_norm_rope", "prefill_kv_cache_dequant_dtype"),
    ),
    **without_effect(
        "for SGLang's own attention, which does not run",
        *("enable_lean_attention", "dsa_prefill_backend", "dsa_decode_backend", "dsa_paged_mqa_logits_backend"),
        *("dsa_topk_backend", "dsa_triton_union", "enable_dsa_fused_indexer", "triton_attention_reduce_in_fp32"),
        *("triton_attention_num_kv_splits", "triton_attention_split_tile_size", "flashinfer_mla_disable_ragged"),
    ),
}
