"""Flags of the scheduler, the KV cache and the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import Refused, Row, Works, refused, without_effect, works

ORDINARY = "tests/serving/test_ordinary_flags.py::test_answers_are_those_of_transformers"
SCHEDULER = "chooses which requests run, in SGLang's scheduler; each batch is planned alone"

SCHEDULING: Mapping[str, Row] = {
    **works(
        ORDINARY,
        *("max_running_requests", "max_total_tokens", "chunked_prefill_size", "max_prefill_tokens"),
        *("max_queued_requests", "prefill_max_requests", "enable_priority_scheduling", "default_priority_value"),
        *("schedule_conservativeness", "priority_scheduling_preemption_threshold", "random_seed", "watchdog_timeout"),
        *("soft_watchdog_timeout", "gc_threshold", "prefill_decode_interval", "prefill_decode_interval_min_bs"),
        *("swa_full_tokens_ratio", "scheduler_recv_interval"),
    ),
    **works(
        SCHEDULER,
        *("disable_priority_preemption", "abort_on_priority_when_disabled", "schedule_low_priority_values_first"),
        "min_free_slots_delay",
    ),
    **works("tests/serving/test_tensor_parallel.py::test_log_probabilities", "mem_fraction_static"),
    **works("tests/serving/test_server_info.py::test_defaults", "sleep_on_idle"),
    **works("tests/serving/test_logprobs_variants.py::test_chunked_prefill", "disable_overlap_schedule"),
    **works("every prompt is computed, as the first one of tests/serving/test_logprobs.py", "disable_radix_cache"),
    **works("sizes the window pool in SGLang, by pages: tests/serving/test_small_window_pool.py", "swa_prefix_tails"),
    **works("parameters of --radix-eviction-policy", "radix_eviction_policy_config"),
    "schedule_policy": Works(
        SCHEDULER,
        (
            *("fcfs", "lof", "lpm", "dfs-weight", "hrrn", "random", "priority", "shortest-prefill-first"),
            "routing-key",
        ),
    ),
    "retraction_policy": Works(ORDINARY, ("length", "priority")),
    "radix_eviction_policy": Works(
        "chooses which prefixes are dropped, by whole pages, in SGLang's prefix cache",
        ("lru", "lfu", "slru", "priority", "tlru"),
    ),
    "page_size": Works("tests/serving/test_startup_errors.py::test_contradicting_or_unsupported_flag", (None, 256)),
    "kv_canary": Refused(),
    "radix_cache_backend": Refused(),
    "hicache_storage_backend": Refused(),
    "offload_group_size": Refused((-1,)),
    **refused(
        (None, False, 0, ""),
        *("enable_dynamic_chunking", "disable_hybrid_swa_memory", "prefill_only_disable_kv_cache"),
        *("enable_page_major_kv_layout", "enable_unified_memory", "enable_mixed_chunk", "enable_session_radix_cache"),
        *("enable_prefill_delayer", "enable_hierarchical_cache", "enable_unified_cache_external_linker"),
        *("enable_hisparse", "enable_lmcache", "enable_flexkv", "cpu_offload_gb", "kt_weight_path"),
        *("enable_paged_experts", "enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay"),
        *("enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"),
        *("enable_linker_mla_dedup", "strip_thinking_cache"),
    ),
    **without_effect("SGLang 0.5.23 reads it nowhere", "num_continuous_decode_steps"),
    **without_effect("for SGLang's own DeepSeek attention", "disable_chunked_prefix_cache"),
    **without_effect("for NPUs", "c128_page_size"),
    **without_effect("for --kv-canary, which is refused", "kv_canary_real_data", "kv_canary_sweep_interval"),
    **without_effect(
        "for --enable-prefill-delayer, which is refused",
        *("prefill_delayer_max_delay_passes", "prefill_delayer_token_usage_low_watermark"),
        *("prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets"),
        *("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms"),
    ),
    **without_effect(
        "for --enable-hierarchical-cache, which is refused",
        *("hicache_host_memory_mode", "hicache_ratio", "hicache_size", "hicache_write_policy", "hicache_io_backend"),
        *("hicache_mem_layout", "hicache_storage_prefetch_policy", "hicache_storage_backend_extra_config"),
        *("hicache_storage_prefetch_retry_poll_interval", "hicache_storage_prefetch_retry_max_attempts"),
        *("hicache_host_memory_fraction", "file_storage_path"),
    ),
    **without_effect(
        "for --enable-unified-cache-external-linker, which is refused",
        *("unified_cache_external_linker_backend", "unified_cache_external_linker_config"),
    ),
    **without_effect("for --enable-hisparse, which is refused", "hisparse_config"),
    **without_effect("for --enable-lmcache, which is refused", "lmcache_config_file"),
    **without_effect("for --enable-flexkv, which is refused", "flexkv_config_file"),
    **without_effect("for --enable-paged-experts, which is refused", "paged_experts_num_resident"),
    **without_effect(
        "for --offload-group-size, which is refused",
        *("offload_num_in_group", "offload_prefetch_step", "offload_mode"),
    ),
    **without_effect(
        "for --kt-weight-path, which is refused",
        *("kt_method", "kt_cpuinfer", "kt_threadpool_count", "kt_num_gpu_experts"),
        *("kt_max_deferred_experts_per_token",),
    ),
}
