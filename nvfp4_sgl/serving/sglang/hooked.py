"""Functions of SGLang that hooks of ours wrap, by the key that :func:`.hooking.install_hooks` takes."""

from __future__ import annotations

from nvfp4_sgl.serving.sglang.private import Private

HOOKS = {
    "parse_quantization": Private(
        "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
        "SGLang must not choose an FP8 or ModelOpt path for our checkpoints: their matrices are our model's business",
        "self",
    ),
    "load_hf_config": Private(
        "sglang.srt.utils.hf_transformers.config.get_config",
        "same, for readers of hf_config.quantization_config",
        "model, trust_remote_code, revision, model_override_args, model_config_parser, **kwargs",
    ),
    "reject_out_of_tree_path": Private(
        "sglang.srt.mem_cache.kv_cache_configurator.reject_out_of_tree_path",
        "refuses DeepSeek-V4's pool on out-of-tree platforms",
        "platform, *, subsystem",
    ),
    "build_pool": Private(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsv4_kv_pool",
        "builds exact rows",
        "self, *, max_running_requests, full_max_total_num_tokens, swa_max_total_num_tokens, "
        "c4_max_total_num_tokens, c128_max_total_num_tokens, c4_state_pool_size, c128_state_pool_size, "
        "c4_state_dtype, c128_state_dtype, req_to_token_pool",
    ),
    "configure_pool": Private(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator", "sizes exact rows", "kvc"
    ),
    "prepare_replay": Private(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
        "_init_replay_attn_metadata_from_view",
        "builds a batch of slices for a backend before each replay; ours reads none",
        "self, forward_batch, *, raw_bs, bs, num_tokens, glue_key, attention_variant",
    ),
    "scheduler_init": Private(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        "one error instead of a traceback; the opening log lines",
        "self, server_args, port_args",
    ),
    "internal_state": Private(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "what is running, in /server_info",
        "self, recv_req",
    ),
    "validate_in_front_end": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "checks a prompt's length, but not its token ids",
        "self, obj, input_ids",
    ),
    "validate_in_scheduler": Private(
        "sglang.srt.managers.scheduler.validate_input_length",
        "same, for requests of other front ends",
        "req, max_req_input_len, allow_auto_truncate",
    ),
    "validate_when_admitted": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
        "where a request's log-probabilities are settled; SGLang checks their start against the prompt's end alone",
        "self, req",
    ),
    "validate_for_transport": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "sends the scheduler fields of types that it does not read, which ends it",
        "self, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids",
    ),
    "normalize_sampling": Private(
        "sglang.srt.sampling.sampling_params.SamplingParams.normalize",
        "answers an invalid stop_regex with status 500",
        "self, tokenizer",
    ),
    "verify_sampling": Private(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        "lets values through that end the scheduler",
        "self, vocab_size",
    ),
    "worker_info": Private(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        "lets prompts in that get an answer of no token, or wait for ever, and who comes later with them",
        "self",
    ),
    "normalize_request": Private(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        "expands a request n times before it looks at n; answers fields of the wrong type with status 500",
        "self",
    ),
    "abort_request": Private(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "aborts every request whose name begins with the one that is given",
        "self, recv_req",
    ),
    "abort_after_stream": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.create_abort_task",
        "aborts a later request of the same name, and the first of two when the second was refused",
        "self, obj",
    ),
    "prepare_arguments": Private(
        "sglang.srt.server_args.prepare_server_args", "ends with a traceback at an unknown log level", "argv"
    ),
    "resolve_arguments": Private(
        "sglang.srt.arg_groups.pipeline.run_resolution_pipeline",
        "asserts what flags may be given together",
        "server_args",
    ),
    "check_arguments": Private(
        "sglang.srt.arg_groups.validation_hook.check_server_args", "same, afterwards", "server_args"
    ),
    "launch_server": Private(
        "sglang.srt.entrypoints.http_server.launch_server",
        "binds its port after weights are loaded; an Engine has none",
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, run_detokenizer_process_func, "
        "execute_warmup_func, launch_callback",
    ),
    "launch_schedulers": Private(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        "a terminal sends Ctrl-C to every process; each ends with a traceback of its own",
        "server_args, port_args, run_scheduler_process_func, *, placement_group",
    ),
    "launch_detokenizer": Private(
        "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        "same",
        "server_args, port_args, run_detokenizer_process_func",
    ),
    "warm_up_server": Private(
        "sglang.srt.entrypoints.http_server._wait_and_warmup",
        "where the server is ready, in the launcher",
        "server_args, launch_callback, execute_warmup_func, post_warmup_callback",
    ),
    "child_failed": Private(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        "ends the server without saying which process died, if another one noticed it first",
        "self, signum, frame",
    ),
    "chat_sampling": Private(
        "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest.to_sampling_params",
        "makes a grammar of a client's tools, which is refused under another name",
        "self, stop, model_generation_config, tool_call_constraint, renderer_handles_response_format",
    ),
    "responses_sampling": Private(
        "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
        "same, for /v1/responses; generates two tokens fewer than max_output_tokens",
        "self, default_max_tokens, default_params, stop, tool_call_constraint",
    ),
    "check_response_model": Private(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model",
        "refuses names of the model that chats take",
        "self, model",
    ),
    "message_chat": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        "has a last message of the assistant read as the user's, where Anthropic's API continues it",
        "self, anthropic_request",
    ),
    "message_answer": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_response",
        "says end_turn of an answer that a stop sequence ended",
        "self, response",
    ),
    "message_stream": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._generate_anthropic_stream",
        "same, in a stream",
        "self, adapted_request, processed_request, anthropic_request, raw_request",
    ),
    "chat_stream": Private(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "where the stop sequence of a message's stream is known",
        "self, adapted_request, request, raw_request",
    ),
    "load_chat_template": Private(
        "sglang.srt.parser.template_manager.TemplateManager.load_chat_template",
        "derives from a template, or from the checkpoint's path, what contradicts the encoder that writes the prompts",
        "self, tokenizer_manager, chat_template_arg, model_path",
    ),
    "init_output_parser": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser.__init__",
        "reads malformed tool calls, "
        "with other arguments than the model wrote; loses the text before an incomplete character, "
        "and holds back text that is no stop string",
        "self, deepseek_recipe, *, thinking_stage, parse_tool_calls, parse_json_output, separate_reasoning, "
        "stream_reasoning, stop",
    ),
    "output_deltas": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser._deltas",
        "where calls are read instead",
        "self, chunks",
    ),
    "finish_output": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser.finish",
        "same, at the answer's end",
        "self, token_ids, finish_reason, *, keep_matched_stop",
    ),
    "chat_parser": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter._new_output_parser",
        "reads calls of functions that the request does not declare",
        "self, request",
    ),
    "responses_parser": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter._new_responses_parser",
        "same, for /v1/responses",
        "self, request, require_reasoning, separate_reasoning, parse_tool_calls",
    ),
    "parse_call_text": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe"
        ".DeepSeekRecipeChatEncodingAdapter.parse_function_call_text",
        "same, for /parse_function_call",
        "self, text, tools",
    ),
    "run_http_server": Private(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "where our middleware is installed",
        "server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, subprocess_watchdog, "
        "execute_warmup_func, launch_callback",
    ),
    "tokenize_texts": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
        "tokenises in the event loop, texts of any length",
        "self, texts, is_cross_encoder",
    ),
    "tokenize": Private(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
        "same",
        "self, adapted_request, request, raw_request",
    ),
    "detokenize": Private(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
        "decodes in the event loop, any number of ids; answers ids outside the vocabulary with status 500 or no text",
        "self, adapted_request, request, raw_request",
    ),
    "score": Private(
        "sglang.srt.entrypoints.openai.serving_score.OpenAIServingScore._handle_non_streaming_request",
        "joins the query to every item, without a bound; tokenises in the event loop where a token is extracted",
        "self, adapted_request, request, raw_request",
    ),
    "openai_request": Private(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "converts chats for clients that have hung up, as many at once as asyncio has threads",
        "self, request, raw_request",
    ),
    "messages": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_non_streaming",
        "renders and tokenises in the event loop",
        "self, chat_request, anthropic_request, raw_request",
    ),
    "messages_stream": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming",
        "same",
        "self, chat_request, anthropic_request, raw_request",
    ),
    "convert_chat": Private(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "a chat that was converted before is handed over here",
        "self, request, raw_request",
    ),
    "count_tokens": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_count_tokens",
        "renders and tokenises in the event loop",
        "self, request, raw_request",
    ),
    "responses": Private(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._make_request",
        "same",
        "self, request, prev_response, tokenizer, *, tool_adapter",
    ),
    "encode_chat": Private(
        "sglang.srt.parser.deepseek_recipe_renderer.DeepSeekRecipe.encode",
        "tokenises messages of any length",
        "self, body, *, task, effort_budget, image_urls",
    ),
    "update_weights": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "checks nothing before it pauses requests, and forgets --served-model-name",
        "self, obj, request",
    ),
    "dispatch_update": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
        "asks a scheduler that still runs requests whose clients have hung up",
        "self, obj",
    ),
    "replace_weights": Private(
        "sglang.srt.managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.update_weights_from_disk",
        "loads through its own loader, and leaves a model half replaced",
        "self, recv_req",
    ),
    "resolved_arguments": Private(
        "sglang.srt.server_args.ServerArgs.resolved_dict", "the log and /server_info print it, with the keys", "self"
    ),
    "grammar_queue": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.__init__",
        "compiles in the scheduler's process, without a bound on memory, and on after the client has left",
        "self, scheduler",
    ),
    "ready_grammars": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests",
        "where all ranks agree on the grammars that are ready, each by the clock of its own compilation",
        "self",
    ),
    "fill_grammar_mask": Private(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask",
        "a grammar that allows no token makes every probability NaN, which ends the scheduler",
        "self, vocab_mask, idx",
    ),
    "accept_prefill_grammar": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._apply_prefill_grammar",
        "where a request can be failed for its grammar, at its first token",
        "self, *, req, next_token_id, already_advanced",
    ),
    "accept_grammar_tokens": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._accept_grammar_tokens",
        "same, at later tokens",
        "self, req, tokens",
    ),
    "cache_grammar": Private(
        "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache",
        "its cache has no bound",
        "self, key, value",
    ),
    "send_tokens": Private(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
        "sends what a stop string may begin with, which nothing takes back",
        "self, *, req",
    ),
    "hold_back": Private(
        "sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix",
        "same: lets all tokens of a request wait or none, and knows no incomplete character",
        "self",
    ),
    "find_stop": Private(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        "takes the stop string that was given first, not the one that is complete first",
        "self, new_accepted_len",
    ),
    "cut_at_stop": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser._cut_at_stop_string",
        "finds no stop string that begins within a character, and encodes a half of one anew",
        "self, token_ids, stop, *, keep_stop",
    ),
    "printable": Private(
        "sglang.srt.managers.detokenizer_manager.find_printable_text",
        "ends at a space, now behind a Chinese character, now in front: what has been sent is sent again",
        "text",
    ),
    "has_byte_tokens": Private(
        "sglang.srt.entrypoints.openai.utils._is_byte_level_tokenizer",
        "takes a tokenizer whose first ids are DeepSeek's special tokens for one without bytes",
        "tokenizer",
    ),
    "copy_inputs": Private(
        "sglang.kernels.ops.memory.small_copy.try_small_copy",
        "is compiled again for other addresses and batch sizes",
        "dsts, srcs",
    ),
    "sample": Private(
        "sglang.srt.layers.sampler.Sampler.forward",
        "samples from NaN logits, whatever comes of it",
        "self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, "
        "*, logprob_logits",
    ),
    "share_requests": Private(
        "sglang.srt.managers.scheduler_components.request_receiver"
        ".SchedulerRequestReceiver._broadcast_reqs_across_ranks",
        "hands requests to all ranks over sockets, in every step",
        "self, recv_reqs, local_reqs",
    ),
    "check_token_ids": Private(
        "sglang.srt.managers.schedule_batch.Req._check_vocab_boundary_finish",
        "ends a request at an id outside the vocabulary, but as if it had finished well",
        "self, new_accepted_tokens",
    ),
    "update_finish_state": Private(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "takes an abort for the end of a request before it looks at the id",
        "self, new_accepted_len",
    ),
    "prefill_result": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_prefill",
        "caches the chunks of a prompt without a look at the ids that they bring",
        "self, batch, result",
    ),
    "release_request": Private(
        "sglang.srt.mem_cache.common.release_kv_cache",
        "after it, pages of a failed request can be dropped",
        "req, tree_cache, *, checkpoint",
    ),
    "decode_result": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_decode",
        "where the lengths of a decode pass are known on the host, for metrics",
        "self, batch, result",
    ),
    "publish_metrics": Private(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        "when gauges are set",
        "self, stats",
    ),
    "draft_decode_backend": Private(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
        "knows backends by names of its own",
        "self",
    ),
    "draft_extend_backend": Private(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", "same", "self"
    ),
    "build_tree": Private(
        "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
        "a kernel, as the next ones are",
        "parent_list, top_scores_index, seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token, "
        "retrieve_next_sibling, topk, spec_steps, num_verify_tokens, tree_mask_mode",
    ),
    "draft_slots": Private(
        "sglang.kernels.ops.speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        "slots that steps of a draft write",
        "req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, positions, mrope",
    ),
    "bonus_tokens": Private(
        "sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func",
        "the last token of a round",
        "accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size",
    ),
    "write_slots": Private(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "the table of slots, for tokens to be drafted",
        "req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size",
    ),
    "last_slots": Private(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "takes a kernel unless it knows the backend by its name",
        "req_to_token, req_pool_indices_tensor, prefix_lens_tensor",
    ),
    "select_guess": Private(
        "sglang.srt.speculative.spec_utils.select_top_k_tokens",
        "is compiled from the second step on",
        "i, topk_p, topk_index, hidden_states, scores, topk",
    ),
    "clear_rejected": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool.DeepSeekV4TokenToKVPool.clear_unaccepted_c128_draft_states",
        "a kernel, for compressors that read rows of rejected tokens",
        "self, req_pool_indices, seq_lens, accept_lens, num_draft_tokens",
    ),
    "keep_round": Private(
        "sglang.srt.managers.overlap_utils.FutureMap.stash",
        "five launches, to keep by request slot what a round leaves",
        "self, future_indices, payload",
    ),
    "sample_round": Private(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        "takes the same penalties for all tokens of a round, forgets min_p, and needs kernels above temperature 0",
        "verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k, *, watermark_state, "
        "watermark_full_mask",
    ),
    "round_logprobs": Private(
        "sglang.srt.layers.logprob_processor.compute_spec_logprobs",
        "looks up the log-probability of a token that is none",
        "batch, logits_output, predict, *, accept_index, chain_stride",
    ),
    "resolve_dspark": Private(
        "sglang.srt.arg_groups.speculative_hook._handle_dspark", "refuses DSpark on a CPU", "server_args"
    ),
    "draft_worker": Private(
        "sglang.srt.speculative.draft_worker_common.build_draft_tp_worker",
        "DSpark's worker names an attention backend of SGLang's",
        "*, server_args, gpu_id, nccl_port, target_model_config, algo_label, attention_backend_override, "
        "draft_worker_cls, random_seed, load_group",
    ),
    "block_round": Private(
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
        "records lengths on a stream, which a CPU has not",
        "self, batch, on_publish, grammar_barrier, coordination_plan",
    ),
    "guess_block": Private(
        "sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block",
        "six launches a token, and kernels that are compiled for each number of requests",
        "*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, noise, tp_sync, logits_out, "
        "greedy_draft",
    ),
    "draft_backends": Private(
        "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.init_attention_backends",
        "has a pass of its own write the draft's context behind the target's",
        "self",
    ),
    "place_context": Private(
        "sglang.srt.speculative.dspark_components.dspark_kv_inject.TargetHiddenKvInjector.place_prefill",
        "finds rows of SGLang's pools by kernels; the target's pass has planned ours",
        "self, batch",
    ),
    "inject_context": Private(
        "sglang.srt.speculative.dspark_components.dspark_kv_inject.TargetHiddenKvInjector.inject_prefill",
        "same",
        "self, placement, *, target_hidden, token_indices, target_hidden_is_projected",
    ),
    "commit_context": Private(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.commit_hidden",
        "same",
        "self, *, batch, layout, hidden_strided, verify_window, logits_output, commit_lens, bs, run_compact",
    ),
    "verify_block": Private(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.run_non_compact",
        "takes the same penalties for all tokens of a round",
        "self, *, batch, draft_input, verify_ids_2d, verify_window, sampling_info",
    ),
    "accept_block": Private(
        "sglang.srt.speculative.dspark_components.dspark_verify.TargetVerifyExecutor.accept_and_finalize",
        "forgets min_p and seeds, and needs kernels above temperature 0",
        "self, *, folded_accept, bs, verify_ids_2d, target_logits, draft_block, sampling_info, draft_input, layout, "
        "prefix_lens, draft_tokens, simulate_bonus_sampling_info",
    ),
}
