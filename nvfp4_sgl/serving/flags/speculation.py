"""Flags of speculative decoding. What they may be together, and with a checkpoint, :mod:`..drafts.checks` says."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.serving.flags.row import OFF, Row, refused, without_effect, works

SPECULATION: Mapping[str, Row] = {
    **works(
        "tests/serving/test_drafted.py",
        *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
        "speculative_draft_model_path",
    ),
    **works("tests/serving/test_drafted_dspark.py", "speculative_dspark_block_size"),
    **refused((None, 1.0), "speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
    **refused((*OFF, "prefill"), "speculative_attention_mode"),
    **refused(
        OFF,
        *("enable_multi_layer_eagle", "speculative_adaptive", "speculative_use_rejection_sampling"),
        *("speculative_token_map", "speculative_draft_load_format", "speculative_draft_attention_backend"),
        *("speculative_draft_kv_cache_dtype", "speculative_draft_window_size", "speculative_draft_sink_size"),
        *("speculative_draft_model_quantization", "speculative_use_block_verification"),
        *("uno_lora_path", "decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "spec_trace_dir"),
    ),
    **without_effect(
        "for drafts of other models",
        *("speculative_draft_model_revision", "speculative_dsa_topk_backend", "speculative_moe_runner_backend"),
        *("speculative_moe_a2a_backend", "speculative_enable_w4a4_mxfp4_megamoe", "decrypted_draft_config_file"),
        "_speculative_draft_quantization_explicitly_set",
    ),
    **without_effect(
        "for rounds of several sizes by DSpark's confidence head, which are refused",
        *("speculative_dspark_sps_table_path", "speculative_dspark_confidence_sts_path"),
        "speculative_dspark_align_verify_tokens_to_graph_tier",
    ),
    **without_effect(
        "for another --speculative-algorithm, which is refused",
        *(
            "speculative_dflash_block_size",
            "speculative_adaptive_config",
            "decoupled_spec_rank",
            "speculative_domino_candidate_pool_size",
        ),
        *("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth", "speculative_ngram_match_type"),
        *("speculative_ngram_max_trie_depth", "speculative_ngram_capacity", "speculative_ngram_external_corpus_path"),
        *("speculative_ngram_external_sam_budget", "speculative_ngram_external_corpus_max_tokens"),
    ),
}
