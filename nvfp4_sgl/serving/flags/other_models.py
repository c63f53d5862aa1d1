"""Flags of other kinds of models: with state spaces, images, adapters or diffusion."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, Row, refused, without_effect

OTHER_MODELS: Mapping[str, Row] = {
    **refused(
        OFF,
        *("enable_lora", "lora_paths", "dllm_algorithm", "enable_mis", "enable_mm_global_cache"),
        *("enable_prefix_mm_cache", "mm_enable_dp_encoder", "trust_mm_content_hashes"),
    ),
    **without_effect(
        "for --enable-lora, which is refused",
        *("enable_lora_overlap_loading", "max_lora_rank", "lora_target_modules", "max_loaded_loras"),
        *("max_loras_per_batch", "lora_eviction_policy", "lora_backend", "max_lora_chunk_size"),
        *("experts_shared_outer_loras", "lora_use_virtual_experts", "lora_strict_loading"),
        *("lora_drain_wait_threshold",),
    ),
    **without_effect("for --dllm-algorithm, which is refused", "dllm_algorithm_config", "dllm_fdfo"),
    **without_effect(
        "for models with state spaces or linear attention",
        *("mamba_backend", "max_mamba_cache_size", "mamba_ssm_dtype", "mamba_max_states_per_path"),
        *("enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds", "mamba_full_memory_ratio"),
        *("mamba_radix_cache_strategy", "uses_mamba_radix_cache", "mamba_track_interval"),
        *("enable_int8_mamba_checkpoint", "int8_mamba_ckpt_size", "linear_attn_backend"),
        *("linear_attn_decode_backend", "linear_attn_prefill_backend", "linear_attn_verify_backend"),
        *("enable_linear_replayssm", "linear_replayssm_cache_len", "enable_linear_replayssm_spec"),
        *("enable_scattered_sconv",),
    ),
    **without_effect(
        "for models that read images, video or sound",
        *("language_model_only", "mm_attention_backend", "enable_precise_embedding_interpolation"),
        *("enable_broadcast_mm_inputs_process", "mm_process_config", "mm_processor_worker_num", "mm_io_worker_num"),
        *("allowed_media_domains", "media_url_max_file_size_mb", "mm_preprocess_cache_size_mb"),
        *("limit_mm_data_per_request", "image_processor_backend", "mm_global_cache_backend"),
        *("disable_fast_image_processor", "mm_feature_transport", "asr_max_buffer_seconds"),
        *("asr_max_concurrent_sessions",),
    ),
    **without_effect(
        "for Qwen4", "ple_offload_embedding", "ple_offload_backend", "ple_offload_dir", "qsa_indexer_dtype"
    ),
    **without_effect("for Apple's MLX", "mlx_enable_sampling"),
}
