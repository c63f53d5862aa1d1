"""Flags of speculative decoding, which is not implemented."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, Row, refused, without_effect

SPECULATION: Mapping[str, Row] = {
    **refused(
        OFF,
        *("speculative_algorithm", "speculative_draft_model_path", "enable_multi_layer_eagle", "speculative_adaptive"),
        *("uno_lora_path", "decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "spec_trace_dir"),
    ),
    **without_effect(
        "for --speculative-algorithm, which is refused",
        *("speculative_draft_model_revision", "speculative_draft_load_format", "speculative_num_steps"),
        *("speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_dflash_block_size"),
        *("speculative_dspark_block_size", "speculative_dspark_sps_table_path"),
        *("speculative_dspark_confidence_sts_path", "speculative_dspark_align_verify_tokens_to_graph_tier"),
        *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        *("speculative_use_rejection_sampling", "speculative_token_map", "speculative_attention_mode"),
        *("speculative_draft_attention_backend", "speculative_dsa_topk_backend", "speculative_draft_kv_cache_dtype"),
        *("speculative_draft_window_size", "speculative_moe_runner_backend", "speculative_moe_a2a_backend"),
        *("speculative_enable_w4a4_mxfp4_megamoe", "speculative_draft_model_quantization"),
        *("_speculative_draft_quantization_explicitly_set", "speculative_adaptive_config", "decoupled_spec_rank"),
        *("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth", "speculative_ngram_match_type"),
        *("speculative_ngram_max_trie_depth", "speculative_ngram_capacity", "speculative_ngram_external_corpus_path"),
        *("speculative_ngram_external_sam_budget", "speculative_ngram_external_corpus_max_tokens"),
        *("speculative_domino_candidate_pool_size", "speculative_use_block_verification"),
        *("speculative_draft_sink_size", "decrypted_draft_config_file"),
    ),
}
