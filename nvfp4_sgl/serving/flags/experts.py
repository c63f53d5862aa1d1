"""Flags of SGLang's own mixture of experts, which this package's experts replace."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, Refused, Row, refused, without_effect

EXPERTS: Mapping[str, Row] = {
    **refused(
        OFF,
        *("moe_a2a_backend", "moe_runner_backend", "enable_w4a4_mxfp4_megamoe", "enable_megamoe_for_layernorm_sp"),
        *("ep_num_redundant_experts", "ep_dispatch_algorithm", "enable_eplb", "expert_distribution_recorder_mode"),
        *("expert_balancedness_report_mode", "elastic_ep_backend", "enable_elastic_expert_backup"),
        *("enable_waterfill", "ep_join_mode", "enable_fused_moe_sum_all_reduce"),
    ),
    "init_expert_location": Refused(("trivial",)),
    **without_effect("the shared expert is a GEMM of its own", "disable_shared_experts_fusion"),
    "enforce_shared_experts_fusion": Refused(),
    **without_effect(
        "for SGLang's own experts, which do not run",
        *("deepep_v2_mode", "flashinfer_mxfp4_moe_precision", "deepep_mode", "fuseep_mode"),
        *("deepep_dispatcher_output_dtype", "deepep_config", "flashinfer_a2a_dispatch_type"),
        *("disable_flashinfer_cutlass_moe_fp4_allgather", "mooncake_ib_device"),
    ),
    **without_effect(
        "for --enable-eplb, which is refused",
        *("eplb_algorithm", "eplb_rebalance_num_iterations", "eplb_rebalance_layers_per_chunk"),
        *("eplb_min_rebalancing_utilization_threshold",),
    ),
    **without_effect(
        "for --expert-distribution-recorder-mode, which is refused", "expert_distribution_recorder_buffer_size"
    ),
    **without_effect(
        "for --elastic-ep-backend, which is refused",
        *("ep_join_rank_offset", "elastic_ep_initial_size", "max_ep_size", "elastic_ep_scale_timeout"),
    ),
}
