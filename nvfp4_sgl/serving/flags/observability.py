"""Flags of logs, metrics, traces and dumps."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, Row, Works, refused, without_effect, works

ORDINARY = "tests/serving/test_ordinary_flags.py::test_answers_are_those_of_transformers"
LABELS = "names, labels and buckets of SGLang's metrics"

OBSERVABILITY: Mapping[str, Row] = {
    **works("tests/serving/test_metrics.py::test_entries_of_one_request", "enable_metrics"),
    **works(
        ORDINARY,
        *("log_level", "log_level_http", "log_requests", "log_requests_target", "crash_dump_folder"),
        *("decode_log_interval", "enable_request_time_stats_logging", "export_metrics_to_file"),
        *("export_metrics_to_file_dir", "uvicorn_access_log_exclude_prefixes", "show_time_cost"),
        *("enable_metrics_for_all_schedulers", "extra_metric_labels", "bucket_time_to_first_token"),
        *("prompt_tokens_buckets", "generation_tokens_buckets", "gc_warning_threshold_secs"),
        *("load_snapshot_publish_interval",),
    ),
    **works(
        LABELS,
        *("tokenizer_metrics_custom_labels_header", "tokenizer_metrics_allowed_custom_labels"),
        *("bucket_inter_token_latency", "bucket_e2e_request_latency"),
    ),
    **works("an Engine's own collectors, which read what SGLang counts", "stat_loggers"),
    **works(
        "tests/serving/test_flags.py::test_tracing_needs_its_packages",
        *("enable_trace", "trace_modules", "otlp_traces_endpoint", "otlp_service_name"),
    ),
    **works(
        "annotates passes, or frees memory, while SGLang captures graphs",
        *("enable_profile_cuda_graph", "enable_cudagraph_gc"),
    ),
    "log_requests_level": Works(ORDINARY, (0, 1, 2, 3)),
    "log_requests_format": Works(ORDINARY, ("text", "json")),
    **refused(
        OFF,
        # figures that SGLang derives from layers that it does not know
        "enable_mfu_metrics",
        # hooks on SGLang's own layers
        *("enable_layerwise_nvtx_marker", "forward_hooks", "msprobe_dump_config", "debug_tensor_dump_output_folder"),
        *("debug_tensor_dump_input_file",),
        # what other programs subscribe to
        *("kv_events_config", "load_publish_endpoint", "enable_forward_pass_metrics"),
    ),
    **without_effect("for --debug-tensor-dump-output-folder, which is refused", "debug_tensor_dump_layers"),
    **without_effect(
        "for --enable-forward-pass-metrics, which is refused",
        *("forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name"),
    ),
}
