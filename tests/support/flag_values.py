"""A value that each flag of SGLang that works can be given, where its choices do not say so."""

from __future__ import annotations

from collections.abc import Mapping

VALUES: Mapping[str, tuple[str, ...]] = {
    "context_length": ("4k",),
    "json_model_override_args": ("{}",),
    "mem_fraction_static": ("0.4",),
    "max_running_requests": ("8",),
    "max_queued_requests": ("64",),
    "max_total_tokens": ("8192",),
    "chunked_prefill_size": ("512",),
    "prefill_decode_interval": ("2",),
    "prefill_decode_interval_min_bs": ("2",),
    "max_prefill_tokens": ("4096",),
    "prefill_max_requests": ("4",),
    "default_priority_value": ("1",),
    "priority_scheduling_preemption_threshold": ("5",),
    "schedule_conservativeness": ("0.7",),
    "swa_full_tokens_ratio": ("0.6",),
    "swa_prefix_tails": ("4",),
    "radix_eviction_policy_config": ("{}",),
    "scheduler_recv_interval": ("2",),
    "min_free_slots_delay": ("2",),
    "nccl_port": ("29555",),
    "dist_timeout": ("100",),
    "dist_init_addr": ("127.0.0.1:29556",),
    "tp_size": ("2",),
    "device": ("cpu",),
    "base_gpu_id": ("0",),
    "gpu_id_step": ("1",),
    "numa_node": ("0",),
    "random_seed": ("3",),
    "watchdog_timeout": ("200",),
    "soft_watchdog_timeout": ("100",),
    "gc_threshold": ("700", "10", "10"),
    "host": ("127.0.0.1",),
    "port": ("31555",),
    "fastapi_root_path": ("/models",),
    "api_key": ("user",),
    "admin_api_key": ("operator",),
    "served_model_name": ("deepseek",),
    "weight_version": ("7",),
    "default_chat_template_kwargs": ('{"thinking": false}',),
    "preferred_sampling_params": ('{"top_p": 0.9}',),
    "stream_interval": ("2",),
    "batch_notify_size": ("4",),
    "dynamic_batch_tokenizer_batch_size": ("8",),
    "dynamic_batch_tokenizer_batch_timeout": ("0.001",),
    "sampling_mask_max_tokens": ("100",),
    "constrained_json_max_whitespace_cnt": ("4",),
    "log_level": ("info",),
    "log_level_http": ("warning",),
    "log_requests_target": ("stdout",),
    "uvicorn_access_log_exclude_prefixes": ("/metrics",),
    "crash_dump_folder": ("dumps",),
    "load_snapshot_publish_interval": ("5",),
    "tokenizer_metrics_custom_labels_header": ("x-labels",),
    "tokenizer_metrics_allowed_custom_labels": ("team",),
    "extra_metric_labels": ('{"team": "one"}',),
    "bucket_time_to_first_token": ("0.1", "1", "10"),
    "bucket_inter_token_latency": ("0.1", "1"),
    "bucket_e2e_request_latency": ("1", "10"),
    "prompt_tokens_buckets": ("custom", "10", "100"),
    "generation_tokens_buckets": ("default",),
    "gc_warning_threshold_secs": ("1",),
    "decode_log_interval": ("1",),
    "trace_modules": ("request",),
    "otlp_traces_endpoint": ("localhost:4317",),
    "otlp_service_name": ("service",),
    "export_metrics_to_file_dir": ("metrics",),
    "cuda_graph_config": ('{"decode": {"max_bs": 8}}',),
    "cuda_graph_max_bs_decode": ("8",),
    "cuda_graph_bs_decode": ("1", "2", "4"),
    "speculative_algorithm": ("EAGLE",),
    "speculative_num_steps": ("2",),
    "speculative_eagle_topk": ("1",),
    "speculative_num_draft_tokens": ("4",),
}

TOGETHER: Mapping[str, tuple[str, ...]] = {
    "export_metrics_to_file": ("--export-metrics-to-file-dir", "metrics"),
    "retraction_policy": ("--enable-priority-scheduling",),
    "radix_eviction_policy": ("--radix-eviction-policy-config", '{"threshold": 100}'),
    "speculative_num_steps": ("--speculative-algorithm", "NEXTN"),
    "speculative_eagle_topk": ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    "speculative_num_draft_tokens": ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
}
"""What a flag, with one of its values, needs beside it."""

ALONE = (
    *("--enable-tokenizer-batch-encode", "--skip-tokenizer-init", "--disable-radix-cache", "--tp-size"),
    *("--speculative-algorithm", "--speculative-num-steps", "--speculative-eagle-topk"),
    "--speculative-num-draft-tokens",
)
"""Flags that exclude others."""
NEEDS_FILES = (
    *("model_path", "tokenizer_path", "speculative_draft_model_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
)
"""Flags that name files, and are tried with such by tests of their own."""
NEEDS_MORE = ("enable_ssl_refresh", "ssl_keyfile_password", "enable_trace")
"""Flags that need files or packages that tests lack."""
