"""Base classes, functions and objects of SGLang, by the key that :func:`.ledger.find` takes; and modules."""

from __future__ import annotations

from nvfp4_sgl.serving.sglang.private import Private

NAMES = {
    "OpenAIServingChat": Private(
        "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat", "tells chats from OpenAI's other requests"
    ),
    "AttentionBackend": Private(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend", "base class of our attention backend"
    ),
    "TRTLLMMLABackend": Private(
        "sglang.srt.layers.attention.trtllm_mla_backend:TRTLLMMLABackend",
        "the worker captures draft extend for backends that it knows; ours is registered as this one",
    ),
    "maybe_create_verify_mask": Private(
        "sglang.srt.layers.attention.verify_mask:maybe_create_verify_mask",
        "a mask of the rows of a round alone",
        "*, is_draft_runner, skip_prefill, max_bs, max_context_len, num_draft_tokens, device, is_read, dtype",
    ),
    "VocabParallelEmbedding": Private(
        "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", "token embedding, split over TP ranks"
    ),
    "ParallelLMHead": Private(
        "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead", "LM head, split over TP ranks"
    ),
    "LogitsProcessor": Private(
        "sglang.srt.layers.logits_processor:LogitsProcessor", "logits, logprobs and their gathering"
    ),
    "CpuDeviceMixin": Private("sglang.srt.platforms.cpu:CpuDeviceMixin", "device queries of our CPU platform"),
    "SRTPlatform": Private("sglang.srt.platforms.interface:SRTPlatform", "base class of our CPU platform"),
    "PlatformCapabilities": Private(
        "sglang.srt.platforms.interface:PlatformCapabilities", "our CPU platform has no Triton and no graphs"
    ),
    "PlatformEnum": Private("sglang.srt.platforms.device_mixin:PlatformEnum", "marks the platform as out of tree"),
    "DeepSeekV4TokenToKVPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool", "base class of the exact-rows pool"
    ),
    "DeepSeekV4SingleKVPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4SingleKVPool", "base class of exact key/value pages"
    ),
    "DeepSeekV4IndexerPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4IndexerPool", "base class of exact index pages"
    ),
    "DSV4PoolConfigurator": Private(
        "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator", "sizes the pool; knows 584-byte rows only"
    ),
    "SamplingBatchInfo": Private(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo", "how a batch is sampled, for the warm-up"
    ),
    "LogitsProcessorOutput": Private(
        "sglang.srt.layers.logits_processor:LogitsProcessorOutput", "logits of a sampled batch, for the warm-up"
    ),
    "AcceptOuts": Private(
        "sglang.srt.speculative.dspark_components.dspark_verify:AcceptOuts", "what DSpark's rounds give"
    ),
    "last_slots": Private(
        "sglang.srt.mem_cache.allocation:get_last_loc",
        "allocation of a round's slots, for the warm-up, as the next one",
        "req_to_token, req_pool_indices_tensor, prefix_lens_tensor",
    ),
    "write_slots": Private(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        "same",
        "req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size",
    ),
    "block_slots": Private(
        "sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_uniform_func",
        "a kernel around a round, for the warm-up, as the next five",
        "req_pool_indices, req_to_token, start_offset, batch_size, draft_token_num, device, *, full_v2p, swa_v2p, "
        "full_out, swa_out, page_size, positions_out, anchor_src, anchor_out",
    ),
    "step_slots": Private(
        "sglang.kernels.ops.speculative.cache_locs:assign_draft_cache_locs_contiguous_func",
        "same",
        "req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, positions, mrope",
    ),
    "build_chain": Private(
        "sglang.kernels.ops.speculative.eagle:build_chain_tree",
        "same",
        "bonus_tokens, draft_tokens, seq_lens, tree_mask_buf, req_pool_indices, req_to_token, with_mrope",
    ),
    "commit_round": Private(
        "sglang.kernels.ops.speculative.eagle:prepare_verify_commit_outputs",
        "same",
        "predict, accept_index, accept_lens, seq_lens, num_draft_tokens, mamba_track_interval",
    ),
    "lay_out_extend": Private(
        "sglang.kernels.ops.speculative.eagle:prepare_draft_extend_layout",
        "same",
        "seq_lens, num_draft_tokens, with_mrope",
    ),
    "gather_round": Private(
        "sglang.kernels.ops.speculative.gather_spec_extras:gather_spec_extras",
        "same",
        "indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf",
    ),
    "Sampler": Private("sglang.srt.layers.sampler:Sampler", "samples the rows of a verify pass"),
    "clamp_position": Private(
        "sglang.kernels.ops.attention.clamp_position:clamp_position",
        "positions of a decode pass, for the warm-up",
        "seq_lens",
    ),
    "apply_token_bitmask": Private(
        "sglang.kernels.ops.grammar.bitmask_ops:apply_token_bitmask_inplace_triton",
        "masks of grammars, for the warm-up",
        "logits, bitmask, indices",
    ),
    "get_attn_backend": Private(
        "sglang.srt.model_executor.forward_context:get_attn_backend", "how the model reaches its backend", ""
    ),
    "get_available_gpu_memory": Private(
        "sglang.srt.utils.common:get_available_gpu_memory",
        "what is free before weights are loaded, as SGLang counts it",
        "device, gpu_id, distributed, empty_cache, cpu_group",
    ),
    "ServerArgs": Private("sglang.srt.server_args:ServerArgs", "arguments as they are when no flag is given"),
    "record_fields": Private("sglang.srt.arg_groups.arg_utils:record_fields", "names of the arguments", "cls"),
    "get_context": Private("sglang.srt.runtime_context:get_context", "the served arguments", ""),
    "envs": Private("sglang.srt.environ:envs", "SGLang's environment variables, parsed as it parses them"),
    "cuda_graph_fully_disabled": Private(
        "sglang.srt.model_executor.cuda_graph_config:cuda_graph_fully_disabled",
        "records need passes without graphs",
        "",
    ),
    "get_parallel": Private("sglang.srt.runtime_context:get_parallel", "tensor-parallel rank and size", ""),
    "graph_capture": Private(
        "sglang.srt.distributed.parallel_state:graph_capture", "collectives of captured prompts", "stream"
    ),
    "tensor_model_parallel_all_reduce": Private(
        "sglang.srt.distributed:tensor_model_parallel_all_reduce", "sum over TP ranks", "input_"
    ),
    "CustomAllReduceV2": Private(
        "sglang.srt.distributed.device_communicators.custom_all_reduce_v2:CustomAllReduceV2",
        "an all-reduce that waits for all ranks in every pass; pushed sums need one",
    ),
    "get_tp_group": Private(
        "sglang.srt.distributed:get_tp_group", "sums and rows of the TP ranks, divided by tokens; sampled tokens", ""
    ),
    "add_attention_backend_choices": Private(
        "sglang.srt.arg_groups.choices:add_attention_backend_choices", "--attention-backend nvfp4_sgl"
    ),
    "register_model_override": Private(
        "sglang.srt.arg_groups.overrides:register_model_override",
        "argument defaults of our architecture",
        "architecture",
    ),
    "register_resolution_hook": Private(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook",
        "pre-flight as the first resolution step",
        "name",
    ),
    "declare_resolution": Private(
        "sglang.srt.arg_groups.overrides:declare_resolution",
        "defaults of our architecture",
        "server_args, source, **fields",
    ),
    "resolving_view": Private(
        "sglang.srt.arg_groups.overrides:resolving_view", "arguments as resolved so far", "server_args"
    ),
    "resolution_result": Private(
        "sglang.srt.arg_groups.overrides:resolution_result", "arguments as resolved", "server_args, field, default"
    ),
    "register_attention_backend": Private(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend", "our backend's factory", "name"
    ),
    "RecipeOutputDelta": Private(
        "sglang.srt.parser.deepseek_recipe_output:RecipeOutputDelta", "what a parser of answers gives"
    ),
    "RecipeToolCallDelta": Private(
        "sglang.srt.parser.deepseek_recipe_output:RecipeToolCallDelta", "what it gives of a tool call"
    ),
    "EvictParams": Private(
        "sglang.srt.mem_cache.base_prefix_cache:EvictParams", "how much of the prefix cache is dropped"
    ),
    "opentelemetry_imported": Private(
        "sglang.srt.observability.trace:opentelemetry_imported", "whether --enable-trace can work"
    ),
    "UpdateWeightFromDiskReqOutput": Private(
        "sglang.srt.managers.io_struct:UpdateWeightFromDiskReqOutput",
        "what a scheduler answers to an update of weights",
    ),
    "msgpack_encode": Private(
        "sglang.srt.managers.io_struct:msgpack_encode", "how a request is sent to the scheduler", "obj"
    ),
    "msgpack_decode": Private("sglang.srt.managers.io_struct:msgpack_decode", "how the scheduler reads it", "data"),
    "FINISH_ABORT": Private("sglang.srt.managers.schedule_batch:FINISH_ABORT", "how a request is failed"),
    "FINISH_MATCHED_STR": Private(
        "sglang.srt.managers.schedule_batch:FINISH_MATCHED_STR", "how a stop string ends a request"
    ),
    "http_application": Private(
        "sglang.srt.entrypoints.http_server:app", "the FastAPI application that our middleware stands in front of"
    ),
    "global_state": Private("sglang.srt.entrypoints.http_server:_global_state", "whether the server is up"),
    "ModelRegistry": Private("sglang.srt.models.registry:ModelRegistry", "its models map an architecture to a class"),
    "HookRegistry": Private(
        "sglang.srt.plugins.hook_registry:HookRegistry", "installs hooks, of its _hooks those that its _patched lacks"
    ),
    "HookType": Private("sglang.srt.plugins.hook_registry:HookType", "a hook around a function"),
    "propagate_patch": Private(
        "sglang.srt.plugins.hook_registry:_propagate_patch",
        "looks through all modules for each hook; replaced by one search for all, for what SGLang calls it for",
        "original, wrapped, source_module",
    ),
    "hook_logger": Private("sglang.srt.plugins.hook_registry:logger", "says a line for each hook"),
}

MODULES = {
    "scheduler": Private("sglang.srt.managers.scheduler", "imported first in a process that runs a scheduler"),
    "detokenizer": Private("sglang.srt.managers.detokenizer_manager", "imported first in a process that decodes"),
    "tokenizer_manager": Private(
        "sglang.srt.managers.tokenizer_manager",
        "imported first in a front end; its global _REQUEST_STATE_WAIT_TIMEOUT is replaced",
    ),
    "hook_registry": Private(
        "sglang.srt.plugins.hook_registry", "its global _propagate_patch is replaced while it installs our hooks"
    ),
    "kv_cache_configurator": Private(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "its global DeepSeekV4TokenToKVPool, the class that it builds, is replaced",
    ),
}
"""Modules that are looked for among the imported ones, or of which a global is replaced."""
