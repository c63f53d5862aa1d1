"""Messages and warnings of SGLang that are left out, by the logger or module that says them."""

from __future__ import annotations

LEFT_OUT = {
    "sglang.srt.model_executor.model_runner_components.load_model_utils": {
        "Using FP8 KV cache but no scaling factors": (
            "packed entries carry a scale for each 64 values, and have no factors beside them"
        ),
    },
    "sglang.srt.configs.model_config": {
        "Auto-detected DSV4 routed-expert layout": (
            "knows FP8 and MXFP4 alone; how experts are stored is read from their tensors"
        ),
    },
    "sglang.srt.arg_groups.model_overrides.deepseek_v4": {
        "Use dsv4 attention backend": "the backend is this package's",
        "Setting swa_full_tokens_ratio to": "the CPU has another ratio",
    },
    "sglang.srt.model_executor.pool_configurator": {
        "DSV4 SWA sizing": "said twice, first of a pool that is not built",
        "DSV4 memory calculation": "of that pool, with 584-byte rows also where rows are exact",
        "DSV4 pool sizes": "said twice, first of that pool; the line of the one that is built stays",
    },
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup": {
        "Disable prefill CUDA graph because": "SGLang's own graphs of prompts, in whose place a server has others here",
    },
    "sglang.srt.distributed.bootstrap": {
        "init_cpu_threads_env and shared memory based AllReduce": "belongs to CPU kernels that are not used",
    },
    "sglang.srt.entrypoints.openai.serving_rerank": {
        "Using fallback token IDs for yes/no": "ids of another vocabulary, for an endpoint that is not offered",
    },
    "sglang.srt.entrypoints.engine": {
        "server_args=": "19 thousand characters, before what follows from the model; /server_info has what holds",
    },
}
"""Why a message is left out, by SGLang's logger and how it begins."""

LEFT_OUT_ON_CPU = {
    "sglang.srt.speculative.dspark_components.dspark_draft_sampler": {
        "DSpark draft proposal": "is folded into a graph, it says, and a CPU has none",
    },
}
"""More of them, on a server without a GPU."""

IMPORT_WARNINGS = {
    "sglang.srt.layers.quantization.awq.awq": "Only CUDA, HIP and XPU support AWQ",
    "sglang.srt.layers.quantization.gguf": "Only CUDA, MUSA and NPU support GGUF",
    "sglang.kernels.ops.attention.fla.utils": "Triton is not supported on current platform",
}
"""How warnings of SGLang's modules begin, which they give when they are imported: of what no part of our model uses."""
