"""Flags of the checkpoint, its formats and how it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import Refused, Row, Works, refused, without_effect, works

QUANTIZED = "how the matrices are stored is read from the checkpoint's tensors; leave the flag out"
OWN_READER = "this package's own reader loads the weights"
DELETED = (
    "not implemented: the checkpoint is read again by updates of weights; remove the flag, and delete it afterwards"
)
FORMAT_TEST = "tests/serving/test_dummy_weights.py::test_a_server"
TARGET_TEST = "tests/packaging/test_targets.py::test_options_that_a_target_does_not_have"

MODEL: Mapping[str, Row] = {
    **works("the pre-flight reads it: tests/serving/test_startup_errors.py", "model_path"),
    **works("tests/serving/test_dummy_weights.py::test_a_server", "json_model_override_args"),
    **works(
        "tests/serving/test_life_and_death.py::test_the_longest_request_is_served_and_a_longer_one_refused",
        "context_length",
    ),
    **works(
        "read by the front end alone; ids outside the vocabulary are refused by test_bad_requests.py", "tokenizer_path"
    ),
    **works(
        "concerns code of a checkpoint that config.json names; this package reads config.json and tensors as data",
        "trust_remote_code",
    ),
    **works("tests/serving/test_dummy_weights.py::test_a_server", "skip_tokenizer_init"),
    "tokenizer_mode": Works("tests/serving/test_api_chat.py::test_answer", ("auto",), ("slow",)),
    "tokenizer_backend": Works("tests/serving/test_api_chat.py::test_answer", ("huggingface",), ("fastokens",)),
    "load_format": Works(
        FORMAT_TEST,
        ("auto", "safetensors", "dummy"),
        (
            *("pt", "npcache", "sharded_state", "presharded", "gguf", "bitsandbytes", "mistral", "layered"),
            *("expert_pack", "flash_rl", "fastsafetensors", "instanttensor", "private", "remote", "remote_instance"),
            "runai_streamer",
        ),
    ),
    "model_impl": Works(
        "tests/serving/test_startup_errors.py::test_contradicting_or_unsupported_flag", ("auto", "sglang")
    ),
    "model_config_parser": Works("tests/serving/test_logprobs.py::test_cold_prompt", ("auto", "hf")),
    "dtype": Works(
        TARGET_TEST,
        ("auto", "bfloat16", "float32", "float", "half", "float16"),
    ),
    "kv_cache_dtype": Works(
        TARGET_TEST,
        ("auto", "bf16", "bfloat16", "fp8_e4m3"),
        ("fp8_e5m2", "fp4_mx_block16", "mxfp8", "nvfp4"),
    ),
    "quantization": Refused((None,), QUANTIZED),
    "delete_ckpt_after_loading": Refused((None, False), DELETED),
    **refused(
        (None, False, "", "auto", "none"),
        *("quantization_param_path", "modelopt_quant", "modelopt_checkpoint_restore_path"),
        *("modelopt_checkpoint_save_path", "modelopt_export_path", "quantize_and_serve", "rl_quant_profile"),
        *("enable_tf32_matmul", "model_checksum", "decrypted_config_file"),
        *("checkpoint_engine_wait_weights_before_ready",),
        *("remote_instance_weight_loader_start_seed_via_transfer_engine",),
    ),
    "is_embedding": Refused(),
    "enable_multimodal": Refused(),
    "startup_weight_load_mode": Refused(("serial",)),
    "custom_weight_loader": Refused(),
    "weight_cache_mode": Refused(("off",)),
    **without_effect("for checkpoints that are downloaded; the path is a local directory", "revision", "download_dir"),
    **without_effect("the LM head is fp32 in any case", "enable_fp32_lm_head"),
    **without_effect(
        OWN_READER,
        *("model_loader_extra_config", "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load"),
    ),
    **without_effect(
        "for --load-format remote_instance, which is refused",
        *("remote_instance_weight_loader_seed_instance_ip", "remote_instance_weight_loader_seed_instance_service_port"),
        *("remote_instance_weight_loader_send_weights_group_ports", "remote_instance_weight_loader_backend"),
        *("engine_info_bootstrap_port", "modelexpress_config"),
    ),
    **without_effect("for --weight-cache-mode, which is refused", "weight_cache_socket", "weight_cache_timeout"),
}
