"""Flags of the HTTP server, of chats and of what a client may send."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, ONE, Refused, Row, Works, refused, without_effect, works

ORDINARY = "tests/serving/test_ordinary_flags.py::test_answers_are_those_of_transformers"
PARSERS_TEST = "tests/serving/test_startup_errors.py::test_contradicting_or_unsupported_flag"
FRONT_END = "concerns what SGLang's front end returns, after the model has answered"

REASONING = (
    *("apertus2509", "beam", "cohere_command4", "deepseek-r1", "deepseek-v3", "deepseek-v41", "dots", "gemma4"),
    *("gigachat35", "glm45", "gpt-oss", "granite_thinking_parser", "hunyuan", "inkling", "interns1", "iquest_q1"),
    *("k2_horizon", "kimi", "kimi_k2", "kimi_k3", "ling3", "mimo", "minimax", "minimax-append-think", "minimax-m3"),
    *("mistral", "muse", "nanbeige", "nemotron_3", "poolside_v1", "qwen3", "qwen3-thinking", "response_template"),
    *("step3", "step3p5"),
)
"""SGLang's parsers of other models' reasoning."""
TOOLS = (
    *("apertus2509", "beam", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv41", "dots"),
    *("gemma4", "gigachat3", "gigachat35", "glm", "glm45", "glm47", "gpt-oss", "hermes", "hunyuan", "inkling"),
    *("interns1", "iquest_q1", "k2_horizon", "kimi_k2", "kimi_k3", "lfm2", "ling3", "llama3", "mimo", "minicpm5"),
    *("minimax-m2", "minimax-m3", "mistral", "muse", "nanbeige", "poolside_v1", "pythonic", "qwen", "qwen25"),
    *("qwen3_coder", "response_template", "spark25", "step3", "step3p5", "trinity"),
)
"""SGLang's parsers of other models' tool calls."""

FRONT_END_FLAGS: Mapping[str, Row] = {
    **works(
        ORDINARY,
        *("served_model_name", "weight_version", "fastapi_root_path", "return_input_ids", "return_output_ids"),
        *("preferred_sampling_params", "stream_interval", "batch_notify_size", "allow_auto_truncate"),
        *("stream_response_default_include_usage", "enable_dynamic_batch_tokenizer"),
        *("dynamic_batch_tokenizer_batch_size", "dynamic_batch_tokenizer_batch_timeout"),
        *("default_chat_template_kwargs", "constrained_json_disable_any_whitespace"),
        *("constrained_json_max_whitespace_cnt",),
    ),
    **works("tests/serving/test_http_port.py::test_a_port_where_another_listens_is_refused", "host", "port"),
    **works("tests/serving/test_life_and_death.py::test_servers_answer_alike", "skip_server_warmup"),
    **works("tests/serving/test_endpoints.py::test_server_refuses_without_the_key", "api_key", "admin_api_key"),
    **works("tests/serving/test_metrics.py::test_answers_say_what_was_cached", "enable_cache_report"),
    **works(
        "encrypts what Uvicorn sends, beneath the HTTP application",
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password", "enable_ssl_refresh"),
    ),
    **works(FRONT_END, "incremental_streaming_output", "disable_tokenizer_batch_decode"),
    **works("concerns how SGLang's front end tokenizes texts", "enable_tokenizer_batch_encode"),
    **works("bounds what SGLang keeps for return_sampling_mask, a field of requests", "sampling_mask_max_tokens"),
    "sampling_defaults": Works(ORDINARY, ("model", "openai")),
    "reasoning_parser": Works(PARSERS_TEST, (None, "auto", "deepseek-v4"), REASONING),
    "tool_call_parser": Works(PARSERS_TEST, (None, "auto", "deepseekv4"), TOOLS),
    "grammar_backend": Works(
        "tests/serving/test_api_completions.py::test_json_schema",
        (None, "xgrammar", "none"),
        ("llguidance", "outlines"),
    ),
    "tokenizer_worker_num": Refused(ONE),
    "detokenizer_worker_num": Refused(ONE),
    **refused(
        OFF,
        # other front ends, which this package's middleware does not stand in front of
        *("enable_http2", "grpc_mode", "smg_grpc_mode", "grpc_port", "grpc_worker_threads", "sidecar", "sidecar_args"),
        *("enable_http_worker_reuseport", "warmups"),
        # other prompts than DeepSeek's encoder writes
        *("chat_template", "hf_chat_template_name", "trust_request_chat_template"),
        # code that a client sends, tools that the server calls
        *("enable_custom_logit_processor", "tool_server"),
        # answers that are kept without bound
        *("enable_response_store", "enable_streaming_session"),
        # what the model returns beside logits
        *("enable_return_hidden_states", "return_hidden_states_mode", "enable_return_aux_hidden_states"),
        *("aux_hidden_state_capture", "enable_return_routed_experts", "enable_return_indexer_topk"),
        # other ways to sample
        *("enable_strict_thinking", "enable_watermark", "watermark_config"),
    ),
    **without_effect(
        "for other front ends, which are refused",
        *("http2_max_concurrent_streams", "http2_initial_connection_window_size", "grpc_response_timeout_secs"),
        *("smg_http_sidecar_port",),
    ),
    **without_effect(
        "for --enable-watermark, which is refused",
        *("watermark_key", "watermark_key_b", "watermark_context_window", "watermark_mixing_probability"),
        *("watermark_max_probability", "watermark_default_enabled", "watermark_enforce_all"),
    ),
    **without_effect("for --enable-return-aux-hidden-states, which is refused", "return_aux_hidden_state_layer_ids"),
    **without_effect(
        "for --grammar-backend outlines and llguidance, which are refused",
        *("constrained_json_whitespace_pattern", "disable_outlines_disk_cache"),
    ),
    "completion_template": Refused((None,), "no path completes code with a middle; leave the flag out"),
}
