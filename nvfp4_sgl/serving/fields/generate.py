"""Fields of ``/generate``: SGLang's ``GenerateReqInput`` and, within it, ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.limits import MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from nvfp4_sgl.serving.fields.checks import (
    INT64,
    MAX_TOKENS,
    array_of,
    boolean,
    either,
    integer,
    number,
    one_of,
    per_prompt,
    text,
    token_ids,
)
from nvfp4_sgl.serving.fields.field import Field, Table, object_of, offered, refused, without_effect
from nvfp4_sgl.serving.fields.limits import (
    MAX_CHOICES,
    MAX_STOPS,
    MAX_TOP_K,
    SEEDS,
)
from nvfp4_sgl.serving.fields.values import logit_bias, request_name

INTERNAL = "set by SGLang's own processes; leave it out"
NO_PICTURES = "not offered for this model, which takes text; leave it out"
ONE_SERVER = "not offered for this model: prefill and decode run in one server; leave it out"
NO_LORA = "not offered for this model: LoRA is not implemented; leave it out"
NOT_IMPLEMENTED = "not offered for this model; leave it out"
TOKEN_IDS_ONLY = "not offered: this model takes token ids; its first layers route by them"
NO_SEEDS = "not honoured by this server, since deterministic inference is not implemented; leave it out"


def off() -> Field:
    """A refused switch: ``false`` is harmless."""
    return refused(NOT_IMPLEMENTED, harmless=one_of(False), null=False)


MAX_STREAM_INTERVAL = 2**20
"""Bound on tokens between two events of a stream."""

STOP = either(text(1), array_of(text(1), most=MAX_STOPS))
"""Stop strings: an empty one would end every answer at once."""

SAMPLING_PARAMS: Table = {
    "max_new_tokens": offered(integer(0, MAX_TOKENS)),
    "stop": offered(STOP),
    "stop_token_ids": offered(token_ids(least=0, most=MAX_TOKENS)),
    "stop_regex": refused("not offered, since one search may hold up every other request; use stop"),
    "temperature": offered(number(0, MAX_TEMPERATURE)),
    "top_p": offered(number(0, 1, above=True)),
    "top_k": offered(either(one_of(-1), integer(1, MAX_TOP_K))),
    "min_p": offered(number(0, 1)),
    "frequency_penalty": offered(number(-2, 2)),
    "presence_penalty": offered(number(-2, 2)),
    "repetition_penalty": offered(number(MIN_REPETITION_PENALTY, 2)),
    "min_new_tokens": offered(integer(0, MAX_TOKENS)),
    "n": offered(integer(1, MAX_CHOICES), null=False),
    "beam_width": refused("beam search is not implemented for this model; leave it out", harmless=one_of(1)),
    "json_schema": offered(text(1)),
    "regex": offered(text(1)),
    "ebnf": offered(text(1)),
    "structural_tag": offered(text(1)),
    "ignore_eos": offered(boolean()),
    "skip_special_tokens": offered(boolean()),
    "spaces_between_special_tokens": offered(boolean()),
    "no_stop_trim": offered(boolean()),
    "stream_interval": offered(integer(1, MAX_STREAM_INTERVAL)),
    "logit_bias": offered(logit_bias()),
    "sampling_seed": offered(integer(-INT64 - 1, INT64), mode=SEEDS, why=NO_SEEDS),
    "custom_params": refused("read by custom logit processors, which are not offered; leave it out"),
    "watermark": refused(NOT_IMPLEMENTED),
    "stop_strs": refused(INTERNAL, null=False),
    "stop_regex_strs": refused(INTERNAL, null=False),
    "stop_str_max_len": refused(INTERNAL, null=False),
    "stop_regex_max_len": refused(INTERNAL, null=False),
    "is_normalized": refused(INTERNAL, null=False),
    "ebnf_full_assistant": refused(INTERNAL, null=False),
}

SAMPLING = object_of(SAMPLING_PARAMS, {"max_new_tokens": 2})

GENERATE: Table = {
    # the prompt
    "rid": offered(per_prompt(request_name())),
    "text": offered(per_prompt(text())),
    "input_ids": offered(either(token_ids(), array_of(token_ids(), least=1))),
    "input_embeds": refused(TOKEN_IDS_ONLY),
    "positional_embed_overrides": refused(TOKEN_IDS_ONLY),
    # sampling
    "sampling_params": offered(either(SAMPLING, array_of(SAMPLING, least=1))),
    "custom_logit_processor": refused("not offered: it is code that a client sends; leave it out"),
    "watermark": refused(NOT_IMPLEMENTED),
    "require_reasoning": offered(boolean(), null=False),
    "max_thinking_tokens": refused("needs --enable-strict-thinking, which is not offered; leave it out"),
    # what the answer holds
    "stream": offered(boolean(), null=False),
    "return_logprob": offered(per_prompt(boolean())),
    "logprob_start_len": offered(per_prompt(integer(-1, MAX_TOKENS))),
    "top_logprobs_num": offered(per_prompt(integer(0, MAX_TOKENS))),
    "token_ids_logprob": offered(either(token_ids(least=0), array_of(token_ids(least=0), least=1))),
    "return_text_in_logprobs": offered(boolean(), null=False),
    "return_flat_raw_top_logprobs": offered(boolean(), null=False),
    "return_flat_raw_output_top_logprobs": offered(boolean(), null=False),
    "return_flat_raw_top_logprobs_b64": offered(boolean(), null=False),
    "return_prompt_token_ids": offered(boolean(), null=False),
    "return_sampling_mask": off(),
    "sampling_logprobs_mode": refused(NOT_IMPLEMENTED),
    "return_hidden_states": off(),
    "return_routed_experts": off(),
    "routed_experts_start_len": refused(NOT_IMPLEMENTED, harmless=one_of(0), null=False),
    "return_indexer_topk": off(),
    "return_entropy": off(),
    # other requests
    "priority": offered(integer(-INT64 - 1, INT64)),
    "extra_key": offered(per_prompt(text())),
    "cache_salt": offered(per_prompt(text())),
    "session_params": refused("not offered: /open_session is not; send the whole prompt"),
    "session_id": without_effect(text(), "names a session to caches that are not offered"),
    "conversation_id": without_effect(text(), "SGLang 0.5.23 reads it nowhere"),
    "routing_key": without_effect(text(), "orders requests under --schedule-policy routing-key alone"),
    "routed_dp_rank": without_effect(one_of(0), "there is one data-parallel rank, 0"),
    "data_parallel_rank": without_effect(one_of(0), "there is one data-parallel rank, 0"),
    "no_logs": without_effect(
        boolean(), "SGLang 0.5.23 reads it nowhere; prompts are not logged by default", null=False
    ),
    # pictures and sound
    "image_data": refused(NO_PICTURES),
    "video_data": refused(NO_PICTURES),
    "audio_data": refused(NO_PICTURES),
    "mm_hashes": refused(NO_PICTURES),
    "mm_content_hashes": refused(NO_PICTURES),
    "use_audio_in_video": refused(NO_PICTURES, harmless=one_of(False), null=False),
    "video_config": refused(NO_PICTURES),
    "modalities": refused(NO_PICTURES),
    "max_dynamic_patch": refused(NO_PICTURES),
    "min_dynamic_patch": refused(NO_PICTURES),
    "image_max_dynamic_patch": refused(NO_PICTURES),
    "video_max_dynamic_patch": refused(NO_PICTURES),
    "images_config": refused(NO_PICTURES),
    "mm_processor_kwargs": refused(NO_PICTURES),
    "need_wait_for_mm_inputs": refused(INTERNAL),
    "num_items_assigned": refused(INTERNAL),
    "encoder_urls": refused(INTERNAL),
    # adapters, and servers of several parts
    "lora_path": refused(NO_LORA),
    "lora_id": refused(NO_LORA),
    "bootstrap_host": refused(ONE_SERVER),
    "bootstrap_port": refused(ONE_SERVER),
    "bootstrap_room": refused(ONE_SERVER),
    "bootstrap_pair_key": refused(ONE_SERVER),
    "decode_tp_size": refused(ONE_SERVER),
    "disagg_prefill_dp_rank": refused(ONE_SERVER),
    "kv_hints": refused("set by an orchestrator for caches that are not offered; leave it out"),
    # between SGLang's processes
    "http_worker_ipc": refused(INTERNAL),
    "background": refused(INTERNAL, harmless=one_of(False), null=False),
    "log_metrics": refused(INTERNAL, harmless=one_of(True), null=False),
    "custom_labels": refused(INTERNAL),
    "return_bytes": refused(INTERNAL, harmless=one_of(False), null=False),
    "external_trace_header": refused(INTERNAL),
    "received_time": refused(INTERNAL),
    "multi_item_delimiter_indices": refused(INTERNAL),
    "token_indices_to_pool": refused("set by /v1/score, from score_extraction_token; leave it out"),
}

PER_PROMPT: Mapping[str, int] = {
    "rid": 0,
    "sampling_params": 0,
    "return_logprob": 0,
    "logprob_start_len": 0,
    "top_logprobs_num": 0,
    "token_ids_logprob": 1,
    "extra_key": 0,
    "cache_salt": 0,
}
"""Fields that take one value, or an array of one for each prompt; and how deep arrays of one value are."""
