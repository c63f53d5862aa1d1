"""Flags of processes, devices and how ranks share the work."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, ONE, Row, refused, without_effect, works

COLLECTIVES = "chooses how SGLang's own communicators send, beneath the sums that this package asks for"

PARALLEL: Mapping[str, Row] = {
    **works("tests/serving/test_tensor_parallel.py::test_log_probabilities", "tp_size"),
    **works("tests/packaging/test_targets.py::test_options_that_a_target_does_not_have", "device"),
    **works("where ranks of one host find each other, in SGLang", "nccl_port", "dist_timeout", "dist_init_addr"),
    **works("chooses the GPU before a rank starts; this package uses the current one", "base_gpu_id", "gpu_id_step"),
    **works("binds a rank before the model is built", "numa_node"),
    **works(COLLECTIVES, "disable_custom_all_reduce", "enable_p2p_check", "pre_warm_nccl"),
    **works(
        "an Engine's own handler; this package's stands around it: tests/serving/test_process_ends.py",
        "custom_sigquit_handler",
    ),
    **refused(
        ONE,
        *("pp_size", "dp_size", "ep_size", "nnodes", "attn_dp_size", "attn_cp_size", "dcp_size", "moe_dp_size"),
        *("dwdp_size", "moe_dense_tp_size", "shared_experts_tp_size"),
    ),
    **refused(
        OFF,
        *("node_rank", "gated_launch_port", "enable_dp_attention", "enable_dp_attention_local_control_broadcast"),
        *("enable_dp_lm_head", "enable_tp_lm_head_all_to_all", "enable_attn_tp_input_scattered"),
        *("enable_shared_experts_attn_tp", "enable_dense_mlp_attn_tp", "enable_layernorm_sp"),
        *("disable_attn_tp_gather", "enable_prefill_cp", "enable_dsa_cache_layer_split", "enable_cp_decode_attn_tp"),
        *("enable_kv_cache_sharding", "enable_cp_tp_group_sharing", "use_ray", "enable_pdmux"),
        *("enable_pd_role_switch", "encoder_only", "language_only", "enable_adaptive_dispatch_to_encoder"),
        *("enable_nccl_nvls", "enable_symm_mem", "enable_mscclpp", "enable_torch_symm_mem"),
        *("enable_quant_communications", "enable_flashinfer_allreduce_fusion", "enable_aiter_allreduce_fusion"),
        *("flashinfer_allreduce_fusion_backend", "disaggregation_mode", "disaggregation_decode_enable_radix_cache"),
        *("disaggregation_decode_enable_offload_kvcache", "disaggregation_enable_kv_checksum"),
        *("decoupled_spec_role", "enable_two_batch_overlap", "enable_single_batch_overlap"),
    ),
    **without_effect(
        "for more than one data-parallel or context-parallel rank, which is refused",
        *("load_balance_method", "dcp_comm_backend", "dcp_replicate_q_proj", "cp_strategy"),
    ),
    **without_effect("for --pp-size, which is refused", "pp_max_micro_batch_size", "pp_async_batch_depth"),
    **without_effect(
        "this package's layers sum over ranks in their own way", "boundary_reduction", "speculative_boundary_reduction"
    ),
    **without_effect(
        "switches off what is off",
        *("enforce_disable_flashinfer_allreduce_fusion", "disable_aiter_allreduce_fusion_in_prefill"),
        *("disable_aiter_allreduce_fusion_in_decode",),
    ),
    **without_effect("for --enable-two-batch-overlap, which is refused", "tbo_token_distribution_threshold"),
    **without_effect("for --enable-pdmux, which is refused", "pdmux_config_path", "sm_group_num"),
    **without_effect(
        "for --disaggregation-mode, which is refused",
        *("disaggregation_transfer_backend", "disaggregation_bootstrap_port", "disaggregation_ib_device"),
        *("disaggregation_decode_retraction_backup", "num_reserved_decode_tokens", "disaggregation_decode_extra_slots"),
        *("disaggregation_decode_polling_interval", "optimistic_prefill_attempts"),
        *("disaggregation_decode_host_receive_threshold", "disaggregation_decode_allocation_policy"),
    ),
    **without_effect(
        "for --encoder-only and --language-only, which are refused",
        *("encoder_transfer_backend", "encoder_urls", "encoder_bootstrap_port", "encoder_register_urls"),
    ),
}
