"""Every private name of SGLang that this package touches, as read from version 0.5.23.

Names are resolved when first used, not when this module is imported: SGLang loads our platform while it is itself
half imported. ``python -m nvfp4_sgl.serving.sglang_private`` resolves all of them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import tokenizers.decoders
import torch.distributed
from torch import Tensor

from nvfp4_sgl.config import ARCHITECTURE
from nvfp4_sgl.errors import UnsupportedError

VERSION = "0.5.23"
"""The only SGLang version that this package supports."""

BACKEND = "nvfp4_sgl"
"""Name of our attention backend."""

REDACTED = "<redacted>"
"""What is printed in place of a key."""


@dataclass(frozen=True)
class Private:
    """A private name: where it lives and why it is touched."""

    path: str
    why: str


CLASSES = {
    "OpenAIServingChat": Private(
        "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat", "tells chats from OpenAI's other requests"
    ),
    "AttentionBackend": Private(
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend", "base class of our attention backend"
    ),
    "VocabParallelEmbedding": Private(
        "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", "token embedding, split over TP ranks"
    ),
    "ParallelLMHead": Private(
        "sglang.srt.layers.vocab_parallel_embedding:ParallelLMHead", "LM head, split over TP ranks"
    ),
    "LogitsProcessor": Private(
        "sglang.srt.layers.logits_processor:LogitsProcessor", "logits, logprobs and their gathering"
    ),
    "CpuDeviceMixin": Private("sglang.srt.platforms.cpu:CpuDeviceMixin", "device queries of our CPU platform"),
    "SRTPlatform": Private("sglang.srt.platforms.interface:SRTPlatform", "base class of our CPU platform"),
    "PlatformCapabilities": Private(
        "sglang.srt.platforms.interface:PlatformCapabilities", "our CPU platform has no Triton and no graphs"
    ),
    "PlatformEnum": Private("sglang.srt.platforms.device_mixin:PlatformEnum", "marks the platform as out of tree"),
    "DeepSeekV4TokenToKVPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool", "base class of the exact-rows pool"
    ),
    "DeepSeekV4SingleKVPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4SingleKVPool", "base class of exact key/value pages"
    ),
    "DeepSeekV4IndexerPool": Private(
        "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4IndexerPool", "base class of exact index pages"
    ),
    "DSV4PoolConfigurator": Private(
        "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator", "sizes the pool; knows 584-byte rows only"
    ),
}
"""Classes that we derive from or build, available as attributes of this module."""

FUNCTIONS = {
    "SamplingBatchInfo": Private(
        "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo", "how a batch is sampled, for the warm-up"
    ),
    "LogitsProcessorOutput": Private("sglang.srt.layers.logits_processor:LogitsProcessorOutput", "same, its logits"),
    "clamp_position": Private("sglang.kernels.ops.attention.clamp_position:clamp_position", "same, positions"),
    "apply_token_bitmask": Private(
        "sglang.kernels.ops.grammar.bitmask_ops:apply_token_bitmask_inplace_triton", "same, masks of grammars"
    ),
    "get_attn_backend": Private(
        "sglang.srt.model_executor.forward_context:get_attn_backend", "how the model reaches its backend"
    ),
    "get_available_gpu_memory": Private(
        "sglang.srt.utils.common:get_available_gpu_memory",
        "what is free before weights are loaded, as SGLang counts it",
    ),
    "ServerArgs": Private("sglang.srt.server_args:ServerArgs", "arguments as they are when no flag is given"),
    "record_fields": Private("sglang.srt.arg_groups.arg_utils:record_fields", "same, their names"),
    "get_context": Private("sglang.srt.runtime_context:get_context", "the served arguments"),
    "envs": Private("sglang.srt.environ:envs", "SGLang's environment variables, parsed as it parses them"),
    "cuda_graph_fully_disabled": Private(
        "sglang.srt.model_executor.cuda_graph_config:cuda_graph_fully_disabled", "records need passes without graphs"
    ),
    "get_parallel": Private("sglang.srt.runtime_context:get_parallel", "tensor-parallel rank and size"),
    "tensor_model_parallel_all_reduce": Private(
        "sglang.srt.distributed:tensor_model_parallel_all_reduce", "sum over TP ranks"
    ),
    "get_tp_group": Private("sglang.srt.distributed:get_tp_group", "sums and rows of the TP ranks, divided by tokens"),
    "add_attention_backend_choices": Private(
        "sglang.srt.arg_groups.choices:add_attention_backend_choices", "--attention-backend nvfp4_sgl"
    ),
    "register_model_override": Private(
        "sglang.srt.arg_groups.overrides:register_model_override", "argument defaults of our architecture"
    ),
    "register_resolution_hook": Private(
        "sglang.srt.arg_groups.resolution_hooks:register_resolution_hook", "pre-flight as the first resolution step"
    ),
    "declare_resolution": Private("sglang.srt.arg_groups.overrides:declare_resolution", "defaults of our architecture"),
    "resolving_view": Private("sglang.srt.arg_groups.overrides:resolving_view", "arguments as resolved so far"),
    "resolution_result": Private("sglang.srt.arg_groups.overrides:resolution_result", "arguments as resolved"),
    "register_attention_backend": Private(
        "sglang.srt.layers.attention.attention_registry:register_attention_backend", "our backend's factory"
    ),
}
"""Functions that we call and objects that we ask, available as attributes of this module."""

HOOKS = {
    "parse_quantization": Private(
        "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
        "SGLang must not choose an FP8 or ModelOpt path for our checkpoints: their matrices are our model's business",
    ),
    "load_hf_config": Private(
        "sglang.srt.utils.hf_transformers.config.get_config", "same, for readers of hf_config.quantization_config"
    ),
    "reject_out_of_tree_path": Private(
        "sglang.srt.mem_cache.kv_cache_configurator.reject_out_of_tree_path",
        "refuses DeepSeek-V4's pool on out-of-tree platforms",
    ),
    "build_pool": Private(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_dsv4_kv_pool", "builds exact rows"
    ),
    "configure_pool": Private(
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator", "sizes exact rows"
    ),
    "scheduler_init": Private(
        "sglang.srt.managers.scheduler.Scheduler.__init__", "one error instead of a traceback; the opening log lines"
    ),
    "internal_state": Private(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state", "what is running, in /server_info"
    ),
    "validate_in_front_end": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "checks a prompt's length, but not its token ids",
    ),
    "validate_in_scheduler": Private(
        "sglang.srt.managers.scheduler.validate_input_length", "same, for requests of other front ends"
    ),
    "validate_when_admitted": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.process_req_with_grammar",
        "where a request's log-probabilities are settled; SGLang checks their start against the prompt's end alone",
    ),
    "validate_for_transport": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "sends the scheduler fields of types that it does not read, which ends it",
    ),
    "normalize_sampling": Private(
        "sglang.srt.sampling.sampling_params.SamplingParams.normalize", "answers an invalid stop_regex with status 500"
    ),
    "verify_sampling": Private(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify", "lets values through that end the scheduler"
    ),
    "worker_info": Private(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        "lets prompts in that get an answer of no token, or wait for ever, and who comes later with them",
    ),
    "normalize_request": Private(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        "expands a request n times before it looks at n; answers fields of the wrong type with status 500",
    ),
    "prepare_arguments": Private(
        "sglang.srt.server_args.prepare_server_args", "ends with a traceback at a level of logs that is none"
    ),
    "resolve_arguments": Private(
        "sglang.srt.arg_groups.pipeline.run_resolution_pipeline", "asserts what flags may be given together"
    ),
    "check_arguments": Private("sglang.srt.arg_groups.validation_hook.check_server_args", "same, afterwards"),
    "launch_server": Private(
        "sglang.srt.entrypoints.http_server.launch_server",
        "binds its port after weights are loaded; an Engine has none",
    ),
    "warm_up_server": Private(
        "sglang.srt.entrypoints.http_server._wait_and_warmup", "where the server is ready, in the launcher"
    ),
    "child_failed": Private(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        "ends the server without saying which process died, if another one noticed it first",
    ),
    "chat_sampling": Private(
        "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest.to_sampling_params",
        "makes a grammar of a client's tools, which is refused under another name",
    ),
    "responses_sampling": Private(
        "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
        "same, for /v1/responses; generates two tokens fewer than max_output_tokens",
    ),
    "check_response_model": Private(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._validate_model",
        "refuses names of the model that chats take",
    ),
    "message_chat": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        "has a last message of the assistant read as the user's, where Anthropic's API continues it",
    ),
    "message_answer": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._convert_response",
        "says end_turn of an answer that a stop sequence ended",
    ),
    "message_stream": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._generate_anthropic_stream", "same, in a stream"
    ),
    "chat_stream": Private(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "where the stop sequence of a message's stream is known",
    ),
    "load_chat_template": Private(
        "sglang.srt.parser.template_manager.TemplateManager.load_chat_template",
        "derives from a template, or from the checkpoint's path, what contradicts the encoder that writes the prompts",
    ),
    "init_output_parser": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser.__init__",
        "reads malformed tool calls, with other arguments than the model wrote; loses the text before an incomplete"
        " character, and holds back text that is no stop string",
    ),
    "output_deltas": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser._deltas", "where calls are read instead"
    ),
    "finish_output": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser.finish", "same, at the answer's end"
    ),
    "chat_parser": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter._new_output_parser",
        "reads calls of functions that the request does not declare",
    ),
    "responses_parser": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe.DeepSeekRecipeChatEncodingAdapter._new_responses_parser",
        "same, for /v1/responses",
    ),
    "parse_call_text": Private(
        "sglang.srt.entrypoints.openai.serving_deepseek_recipe"
        ".DeepSeekRecipeChatEncodingAdapter.parse_function_call_text",
        "same, for /parse_function_call",
    ),
    "run_http_server": Private(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", "where our middleware is installed"
    ),
    "tokenize_texts": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
        "tokenises in the event loop, texts of any length",
    ),
    "tokenize": Private(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request", "same"
    ),
    "detokenize": Private(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
        "decodes in the event loop, any number of ids; answers ids outside the vocabulary with status 500 or no text",
    ),
    "score": Private(
        "sglang.srt.entrypoints.openai.serving_score.OpenAIServingScore._handle_non_streaming_request",
        "joins the query to every item, without a bound; tokenises in the event loop where a token is extracted",
    ),
    "openai_request": Private(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "converts chats for clients that have hung up, as many at once as asyncio has threads",
    ),
    "messages": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_non_streaming",
        "renders and tokenises in the event loop",
    ),
    "messages_stream": Private("sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming", "same"),
    "convert_chat": Private(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "where what was converted before is handed over",
    ),
    "count_tokens": Private(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_count_tokens",
        "renders and tokenises in the event loop",
    ),
    "responses": Private(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses._make_request", "same"
    ),
    "encode_chat": Private(
        "sglang.srt.parser.deepseek_recipe_renderer.DeepSeekRecipe.encode", "tokenises messages of any length"
    ),
    "update_weights": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "checks nothing before it pauses requests, and forgets --served-model-name",
    ),
    "dispatch_update": Private(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_for_model_update_from_disk",
        "asks a scheduler that still runs requests whose clients have hung up",
    ),
    "replace_weights": Private(
        "sglang.srt.managers.scheduler_components.weight_updater"
        ".SchedulerWeightUpdaterManager.update_weights_from_disk",
        "loads through its own loader, and leaves a model half replaced",
    ),
    "resolved_arguments": Private(
        "sglang.srt.server_args.ServerArgs.resolved_dict", "the log and /server_info print it, with the keys"
    ),
    "grammar_queue": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.__init__",
        "compiles in the scheduler's process, without a bound on memory, and on after the client has left",
    ),
    "ready_grammars": Private(
        "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests",
        "where all ranks agree on the grammars that are ready, each by the clock of its own compilation",
    ),
    "fill_grammar_mask": Private(
        "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask",
        "a grammar that allows no token makes every probability NaN, which ends the scheduler",
    ),
    "accept_prefill_grammar": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._apply_prefill_grammar",
        "where a request can be failed for its grammar, at its first token",
    ),
    "accept_grammar_tokens": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._accept_grammar_tokens",
        "same, at later tokens",
    ),
    "cache_grammar": Private(
        "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.set_cache", "its cache has no bound"
    ),
    "send_tokens": Private(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
        "sends what a stop string may begin with, which nothing takes back",
    ),
    "hold_back": Private(
        "sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix",
        "same: lets all tokens of a request wait or none, and knows no incomplete character",
    ),
    "find_stop": Private(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        "takes the stop string that was given first, not the one that is complete first",
    ),
    "cut_at_stop": Private(
        "sglang.srt.parser.deepseek_recipe_output.DeepSeekRecipeOutputParser._cut_at_stop_string",
        "finds no stop string that begins within a character, and encodes a half of one anew",
    ),
    "printable": Private(
        "sglang.srt.managers.detokenizer_manager.find_printable_text",
        "ends at a space, now behind a Chinese character, now in front: what has been sent is sent again",
    ),
    "has_byte_tokens": Private(
        "sglang.srt.entrypoints.openai.utils._is_byte_level_tokenizer",
        "takes a tokenizer whose first ids are DeepSeek's special tokens for one without bytes",
    ),
    "copy_inputs": Private(
        "sglang.kernels.ops.memory.small_copy.try_small_copy", "is compiled again for other addresses and batch sizes"
    ),
    "sample": Private("sglang.srt.layers.sampler.Sampler.forward", "samples from NaN logits, whatever comes of it"),
    "check_token_ids": Private(
        "sglang.srt.managers.schedule_batch.Req._check_vocab_boundary_finish",
        "ends a request at an id outside the vocabulary, but as if it had finished well",
    ),
    "update_finish_state": Private(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "takes an abort for the end of a request before it looks at the id",
    ),
    "prefill_result": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_prefill",
        "caches the chunks of a prompt without a look at the ids that they bring",
    ),
    "release_request": Private(
        "sglang.srt.mem_cache.common.release_kv_cache", "after it, pages of a failed request can be dropped"
    ),
    "decode_result": Private(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_decode",
        "where the lengths of a decode pass are known on the host, for metrics",
    ),
    "publish_metrics": Private(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats", "when gauges are set"
    ),
}
"""Targets of the hooks that :mod:`nvfp4_sgl.serving.registration` installs."""

MODULES = {
    "recipe_output": Private(
        "sglang.srt.parser.deepseek_recipe_output", "RecipeOutputDelta and RecipeToolCallDelta, what a parser answers"
    ),
    "base_prefix_cache": Private("sglang.srt.mem_cache.base_prefix_cache", "EvictParams, what is to be dropped"),
    "trace": Private("sglang.srt.observability.trace", "opentelemetry_imported, whether it can trace"),
    "io_struct": Private(
        "sglang.srt.managers.io_struct", "UpdateWeightFromDiskReqOutput, what a scheduler answers; its codec"
    ),
    "schedule_batch": Private(
        "sglang.srt.managers.schedule_batch", "FINISH_ABORT and FINISH_MATCHED_STR, how a request is failed and stopped"
    ),
    "http_server": Private("sglang.srt.entrypoints.http_server", "its FastAPI application, app, and what it serves"),
    "scheduler": Private("sglang.srt.managers.scheduler", "imported first in a process that runs a scheduler"),
    "registry": Private("sglang.srt.models.registry", "ModelRegistry.models maps architecture to class"),
    "kv_cache_configurator": Private(
        "sglang.srt.mem_cache.kv_cache_configurator", "its global DeepSeekV4TokenToKVPool is the class that it builds"
    ),
    "detokenizer": Private("sglang.srt.managers.detokenizer_manager", "imported first in a process that decodes"),
    "tokenizer_manager": Private(
        "sglang.srt.managers.tokenizer_manager", "the front end of requests; its global _REQUEST_STATE_WAIT_TIMEOUT"
    ),
    "hook_registry": Private("sglang.srt.plugins.hook_registry", "HookRegistry, HookType"),
}
"""Modules of which a global is read or replaced."""


def __getattr__(name: str) -> Any:
    private = CLASSES.get(name) or FUNCTIONS.get(name)
    if private is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(private.path)


def require_supported_version() -> None:
    """:class:`UnsupportedError` unless the installed SGLang is :data:`VERSION`."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise UnsupportedError(
            f"SGLang {VERSION} is required, found {found}; run: pip install 'sglang=={VERSION}'"
            " (or set NVFP4_SGL_DISABLE=1 to run SGLang without this package)"
        )


# --- hooks ------------------------------------------------------------------------------------------------------


def install_hooks(around: dict[str, Callable[..., Any]]) -> None:
    """Wrap the functions named by keys of :data:`HOOKS`: ``hook(original, *args, **kwargs)``.

    SGLang logs and ignores a hook that it cannot apply; this raises :class:`UnsupportedError`.
    """
    module = importlib.import_module(MODULES["hook_registry"].path)
    module.logger.setLevel(logging.WARNING)  # else a line for each hook, among those of the start
    registry, kind = module.HookRegistry, module.HookType.AROUND
    for name, hook in around.items():
        registry.register(HOOKS[name].path, hook, kind)
    registry.apply_hooks()
    failed = [HOOKS[name].path for name in around if HOOKS[name].path not in registry._patched]
    if failed:
        raise UnsupportedError(
            f"SGLang {VERSION} refused hooks on {', '.join(failed)}; the log above says why."
            f" Reinstall it unmodified: pip install --force-reinstall --no-deps 'sglang=={VERSION}'"
        )


def import_registry_lazily(external_package: str) -> Any:
    """SGLang's ``ModelRegistry``, imported so that built-in models load only when one of them is asked for."""
    variable = "SGLANG_EXTERNAL_MODEL_PACKAGE"
    given = os.environ.get(variable)
    os.environ[variable] = given or external_package
    try:
        return importlib.import_module(MODULES["registry"].path).ModelRegistry
    finally:
        if given is None:
            del os.environ[variable]


@contextlib.contextmanager
def pool_class(replacement: Any) -> Iterator[None]:
    """Inside the context ``_build_dsv4_kv_pool`` builds ``replacement``."""
    module = importlib.import_module(MODULES["kv_cache_configurator"].path)
    name = "DeepSeekV4TokenToKVPool"
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


# --- arguments --------------------------------------------------------------------------------------------------


def given_arguments(server_args: Any) -> dict[str, Any]:
    """What the user asked for, before any default or resolution (``ServerArgs._raw_input``)."""
    return dict(server_args._raw_input)


def unset_arguments() -> dict[str, Any]:
    """Every argument as it is when no flag is given."""
    record = __getattr__("ServerArgs")(model_path="none")
    return {field.name: getattr(record, field.name) for field in __getattr__("record_fields")(type(record))}


def can_trace() -> bool:
    """Whether the packages that ``--enable-trace`` needs are installed."""
    return bool(importlib.import_module(MODULES["trace"].path).opentelemetry_imported)


def served_arguments() -> Any:
    """The ``ServerArgs`` that this process serves."""
    return __getattr__("get_context")().server_args


def model_path() -> Path:
    """Directory of the served checkpoint."""
    return Path(__getattr__("resolution_result")(served_arguments(), "model_path"))


def resolved(name: str) -> Any:
    """An argument as resolved."""
    return __getattr__("resolution_result")(served_arguments(), name)


def given_prefill_graphs(config: Any) -> Any:
    """Backend of CUDA graphs of prefill passes that ``--cuda-graph-config`` names; ``None`` if it names none.

    Args:
        config: the argument as given: ``None``, settings by phase, or SGLang's ``CudaGraphConfig``.
    """
    phases = config.to_dict() if hasattr(config, "to_dict") else config or {}
    return (phases.get("prefill") or {}).get("backend")


def has_no_graphs() -> bool:
    """Whether no pass of this server runs in a CUDA graph."""
    return bool(__getattr__("cuda_graph_fully_disabled")())


def environment_flag(name: str) -> bool:
    """Whether SGLang takes the environment variable ``name`` as set to true."""
    return bool(getattr(__getattr__("envs"), name).get())


def largest_prefill() -> int:
    """Tokens of the largest prefill pass: a chunk, or without chunked prefill what a batch may hold."""
    return int(prefill_chunk() or resolved("max_prefill_tokens"))


def prefill_chunk() -> int | None:
    """Tokens of a prefill chunk as this process's scheduler goes by them; ``None`` without chunked prefill."""
    chunk = __getattr__("get_context")().config_leaf("chunked_prefill_size")
    return int(chunk) if chunk and chunk > 0 else None


def set_prefill_chunk(tokens: int) -> None:
    """Have this process's scheduler, which is still being built, prefill in chunks of so many tokens."""
    __getattr__("get_context")().override("nvfp4_sgl.fit_chunk", chunked_prefill_size=tokens)


def sizes_window_by_ratio() -> bool:
    """Whether the window pool is a share of all tokens, as :class:`DSV4PoolConfigurator` decides: else by requests."""
    by_requests = prefill_chunk() is not None and resolved("max_running_requests") is not None
    return bool(resolved("_swa_full_tokens_ratio_explicitly_set")) or not by_requests


def shorten_requests(info: Any, *, pages: int) -> Any:
    """``info`` of :data:`HOOKS` ``worker_info`` with requests that leave so many ``pages`` of the pool free.

    SGLang bounds prompt + answer by the fifth entry less 1, and keeps prompts below the sixth.
    """
    tokens, size = info[0], int(resolved("page_size"))
    excess = max(0, info[4] - (tokens - pages * size + 1))
    return (*info[:4], info[4] - excess, info[5] - excess, *info[6:])


def is_healthy() -> bool:
    """Whether ``/health`` answers 200, in the process that serves it."""
    state = importlib.import_module(MODULES["http_server"].path)._global_state
    return str(getattr(state.tokenizer_manager.server_status, "name", "")) == "Up"


def http_application() -> Any:
    """SGLang's HTTP application, a FastAPI one."""
    return importlib.import_module(MODULES["http_server"].path).app


def filter_openapi(choose: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Let ``/openapi.json`` and ``/docs`` have what ``choose`` makes of the document that FastAPI writes."""
    app = http_application()
    original = app.openapi
    app.openapi = lambda: choose(original())


def wrap_http_application(wrapper: Callable[[Any], Any]) -> None:
    """Put ``wrapper(application)`` in front of every middleware of SGLang's HTTP application, added or to be added.

    But for CORS, which goes in front of that: a browser shows no answer that lacks its headers.
    """
    from starlette.middleware.cors import CORSMiddleware

    app = http_application()
    build = app.build_middleware_stack

    def stack() -> Any:
        cors = [entry for entry in app.user_middleware if entry.cls is CORSMiddleware]
        app.user_middleware = [entry for entry in app.user_middleware if entry.cls is not CORSMiddleware]
        application = wrapper(build())
        for entry in reversed(cors):
            application = entry.cls(application, *entry.args, **entry.kwargs)
        return application

    app.build_middleware_stack = stack


def json_response(answer: Any) -> Any:
    """The HTTP response that SGLang would make of ``answer``, a Pydantic model, made without the event loop."""
    from starlette.responses import Response

    return Response(answer.model_dump_json(), media_type="application/json")


def look_for_clients(seconds: float) -> None:
    """Have the front end look every so many seconds whether the client of a request that waits has left."""
    module: Any = importlib.import_module(MODULES["tokenizer_manager"].path)
    module._REQUEST_STATE_WAIT_TIMEOUT = seconds


def watched_processes(handler: Any) -> list[tuple[str, Any]]:
    """Name and ``multiprocessing`` process of a server's processes; names are ``scheduler_RANK`` and ``detokenizer``.

    Args:
        handler: SGLang's ``SignalHandler``.
    """
    watchdog = handler.tokenizer_manager._subprocess_watchdog
    if watchdog is None:
        return []
    return list(zip(watchdog._names, watchdog._processes, strict=True))


def redact_launch_command(server_args: Any, secrets: Sequence[str]) -> None:
    """Replace ``secrets`` in the command line that ``/server_info`` shows."""
    command = getattr(server_args, "_launch_command", None)
    if command is not None:
        for secret in secrets:
            command = command.replace(secret, REDACTED)
        server_args._launch_command = command


def transport_fault(message: Any) -> str | None:
    """Why the scheduler could not read ``message`` to it, or ``None``; its times are pickled when it is sent."""
    module = importlib.import_module(MODULES["io_struct"].path)
    try:
        module.msgpack_decode(module.msgpack_encode(msgspec.structs.replace(message, time_stats=None)))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        return str(error)
    return None


def abort(request: Any, message: str) -> None:
    """Have the scheduler finish ``request`` with status 400 and ``message``."""
    finish = importlib.import_module(MODULES["schedule_batch"].path).FINISH_ABORT
    request.to_finish = finish(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def fail(request: Any, message: str) -> None:
    """Finish ``request``, whose last token id is none, with status 500 and ``message``; none of its pages is kept."""
    finish = importlib.import_module(MODULES["schedule_batch"].path).FINISH_ABORT
    request.finished_reason = finish(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    request.skip_radix_cache_insert = True
    # The detokenizer ends at an id that is none: neither the answer nor its log-probabilities may take one there.
    request.output_ids[-1] = max(0, request.output_ids[-1])
    request.return_logprob = False


@contextlib.contextmanager
def answer_ends_at(request: Any, tokens: int) -> Iterator[None]:
    """Inside the context SGLang sends no more than the first ``tokens`` of the answer of ``request``, which goes on."""
    request.finished_len = tokens
    try:
        yield
    finally:
        request.finished_len = None


def match_stop(request: Any, stop: str | None) -> None:
    """Let ``stop``, unless it is ``None``, be the stop string that has ended ``request``, instead of another one."""
    finish = importlib.import_module(MODULES["schedule_batch"].path).FINISH_MATCHED_STR
    if stop is not None and isinstance(request.finished_reason, finish):
        request.finished_reason = finish(matched=stop)


def wrap_answer_processor(parser: Any, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper(processor, recipe, tokenizer)`` in the place of the processor of deepseek-recipe in ``parser``.

    Nor does SGLang's parser let tokens wait any more because a stop string may begin in them.
    """
    parser._processor = wrapper(parser._processor, parser._recipe, parser._hf_tokenizer)
    parser._stop_hold_chars = 0


def answer_tokenizer(parser: Any) -> Any:
    """The ``tokenizers.Tokenizer`` of SGLang's parser of answers."""
    return parser._hf_tokenizer


def is_byte_level(tokenizer: Any) -> bool:
    """Whether SGLang's tokenizer spells tokens in bytes, as byte-level BPE does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), tokenizers.decoders.ByteLevel)


def end_outside_vocabulary(request: Any, new_tokens: int) -> bool:
    """End ``request``, which is to be aborted, if an id outside the vocabulary is among its last ``new_tokens``.

    SGLang's own check of ids ends it, with the hooks on that, and the abort is void. Returns whether it has ended so.
    """
    if new_tokens < 1 or request.to_finish is None or request.finished():
        return False
    found = bool(request._check_vocab_boundary_finish(request.output_ids[-new_tokens:]))
    if found:
        request.to_finish = None
    return found


def sequence_length(request: Any) -> int:
    """Tokens of a scheduled request, prompt and answer."""
    return len(request.origin_input_ids) + len(request.output_ids)


def forget_prefixes(tree_cache: Any) -> None:
    """Drop every cached prefix that no running request uses."""
    params = importlib.import_module(MODULES["base_prefix_cache"].path).EvictParams
    full, swa = tree_cache.full_evictable_size(), tree_cache.swa_evictable_size()
    tree_cache.evict(params(num_tokens=full, swa_num_tokens=swa))


def page_allocator(scheduler: Any) -> Any:
    """What gives requests their pages."""
    return scheduler.token_to_kv_pool_allocator


def sampling_info(**fields: Any) -> Any:
    """How a batch is to be sampled; the fields are those of SGLang's ``SamplingBatchInfo``."""
    return __getattr__("SamplingBatchInfo")(**fields)


def positions(lengths: Tensor) -> Tensor:
    """Positions of a decode pass, int64 [B], by lengths, int64 [B]; a kernel."""
    return __getattr__("clamp_position")(lengths)


def mask_grammar(logits: Tensor, mask: Tensor) -> None:
    """Set ``logits`` [B, vocabulary] to -inf where the bits of ``mask``, int32 [B, vocabulary / 32], are 0."""
    __getattr__("apply_token_bitmask")(logits, mask)


def sample(scheduler: Any, logits: Tensor, info: Any) -> Tensor:
    """Token ids, int [B], that ``scheduler`` samples from fp32 [B, vocabulary], with all kinds of log-probabilities."""
    rows = len(logits)
    return scheduler.tp_worker.model_runner.sampler(
        __getattr__("LogitsProcessorOutput")(next_token_logits=logits),
        info,
        True,
        [2] * rows,
        [[0, 1]] * rows,
        torch.zeros(rows, dtype=torch.int64, device=logits.device),
    )


def decoding_lengths(batch: Any) -> list[int]:
    """Tokens of each request for which the decode pass of ``batch``, not yet processed, has brought a token.

    Under the overlap schedule a request that has ended runs one pass more.
    """
    return [sequence_length(one) for one in batch.reqs if not (one.finished() or one.is_retracted)]


def metric_labels(scheduler: Any) -> dict[str, Any] | None:
    """SGLang's own labels of the metrics of ``scheduler``; ``None`` if it publishes none."""
    reporter = scheduler.metrics_reporter
    return dict(reporter.metrics_collector.labels) if reporter.current_scheduler_metrics_enabled else None


def use_no_template(manager: Any) -> None:
    """Have SGLang's ``TemplateManager`` as it is for a checkpoint without a template."""
    manager._jinja_template_content_format = "string"


def replace_processor(parser: Any, token: str, replacement: Callable[..., Any]) -> None:
    """Have an output parser of SGLang's go through ``replacement(processor, id of token, chunk of token ids)``."""
    tokens = parser._recipe.InferenceChunk.tokens
    parser._processor = replacement(parser._processor, parser._hf_tokenizer.token_to_id(token), tokens)


def output_delta(reasoning: str, content: str, calls: Sequence[tuple[int, str, str | None]]) -> Any:
    """What an output parser of SGLang's answers; ``calls`` are index, arguments and name of pieces."""
    module = importlib.import_module(MODULES["recipe_output"].path)
    pieces = tuple(module.RecipeToolCallDelta(*call) for call in calls)
    return module.RecipeOutputDelta(reasoning=reasoning, content=content, tool_calls=pieces)


def has_grammars(manager: Any) -> bool:
    """Whether SGLang's ``GrammarManager`` compiles any."""
    return manager.grammar_backend is not None


def grammar_tokenizer(manager: Any) -> Any:
    """xgrammar's ``TokenizerInfo`` of a ``GrammarManager``."""
    return _compiling_backend(manager)._tokenizer_info


def use_grammar_compiler(manager: Any, executor: Any, compiler: Any) -> None:
    """Have a ``GrammarManager`` submit grammars to ``executor`` and compile them by ``compiler``, without its own bound
    on time, which counts scheduler steps."""
    manager.grammar_backend.executor = executor
    _compiling_backend(manager).grammar_compiler = compiler
    manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = sys.maxsize


def _compiling_backend(manager: Any) -> Any:
    """The backend for xgrammar, which one for reasoning models wraps."""
    return getattr(manager.grammar_backend, "grammar_backend", manager.grammar_backend)


def wait_for_grammars(manager: Any, seconds: float) -> None:
    """Let a ``GrammarManager`` wait so long for grammars before a step; 10 times as long if no request is running."""
    idle = manager.scheduler.running_batch.is_empty()
    manager.SGLANG_GRAMMAR_POLL_INTERVAL = seconds * (10 if idle else 1)


def waiting_grammars(manager: Any) -> list[Any]:
    """The futures of requests in the queue of a ``GrammarManager``."""
    return [request.grammar for request in manager.grammar_queue]


def from_first_rank(manager: Any, value: Any) -> Any:
    """``value`` of the first of the ranks that share the queue of a ``GrammarManager``; all of them call this."""
    found = [value]
    if manager.grammar_sync_size > 1:
        torch.distributed.broadcast_object_list(found, src=manager.grammar_sync_entry, group=manager.grammar_sync_group)
    return found[0]


def activation_mode(hf_config: Any) -> str | None:
    """``activation_mode`` of config.json or of ``--json-model-override-args``; ``None`` if neither has one."""
    return getattr(hf_config, "activation_mode", None)


# --- tensor parallelism -----------------------------------------------------------------------------------------


def tp_rank() -> int:
    """This process's tensor-parallel rank."""
    return int(__getattr__("get_parallel")().tp_rank)


def tp_size() -> int:
    """How many tensor-parallel ranks there are."""
    return int(__getattr__("get_parallel")().tp_size)


def tp_all_reduce(tensor: Tensor) -> Tensor:
    """Sum of ``tensor`` over the tensor-parallel ranks."""
    return __getattr__("tensor_model_parallel_all_reduce")(tensor)


def tp_reduce_scatter(tensor: Tensor) -> Tensor:
    """This rank's rows of the sum of ``tensor`` [size * n, ...] over the tensor-parallel ranks; contiguous."""
    own, group = tensor.new_empty(len(tensor) // tp_size(), *tensor.shape[1:]), __getattr__("get_tp_group")()
    if tensor.is_cpu:  # for which SGLang has these operators in its own CPU engine alone
        torch.distributed.reduce_scatter_single(own, tensor, group=group.device_group)
    else:
        group.reduce_scatter_tensor(own, tensor)
    return own


def tp_all_gather(tensor: Tensor) -> Tensor:
    """Every tensor-parallel rank's ``tensor`` [n, ...], in their order: [size * n, ...]; contiguous."""
    rows, group = tensor.new_empty(len(tensor) * tp_size(), *tensor.shape[1:]), __getattr__("get_tp_group")()
    if tensor.is_cpu:
        torch.distributed.all_gather_single(rows, tensor, group=group.device_group)
    else:
        group.all_gather_into_tensor(rows, tensor)
    return rows


def gather(updater: Any, value: Any) -> list[Any]:
    """``value`` of every tensor-parallel rank, in their order; all of them call this.

    Args:
        updater: the scheduler's ``SchedulerWeightUpdaterManager``.
    """
    found: list[Any] = [value] * tp_size()
    if len(found) > 1:
        torch.distributed.all_gather_object(found, value, group=updater.tp_cpu_group)
    return found


# --- replacing weights ------------------------------------------------------------------------------------------


def finish_update(updater: Any, request: Any) -> bool:
    """Say in this scheduler which checkpoint and version it serves, and forget the prefix cache; whether it could."""
    context = __getattr__("get_context")()
    context.override("nvfp4_sgl.update_weights", model_path=request.model_path)
    updater.record_weight_version_after_update(request.weight_version)
    return bool(updater.flush_cache(empty_cache=False))


def update_output(success: bool, message: str) -> Any:
    """What a scheduler answers to ``/update_weights_from_disk``."""
    return importlib.import_module(MODULES["io_struct"].path).UpdateWeightFromDiskReqOutput(
        success=success, message=message
    )


# --- the model and its pools ------------------------------------------------------------------------------------


def require_own_model(model: Any) -> None:
    """:class:`UnsupportedError` unless ``model`` is our DeepSeek-V4: no fallback to SGLang's own class."""
    from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM

    if not isinstance(model, DeepseekV4ForCausalLM):
        raise UnsupportedError(
            f"architecture {ARCHITECTURE}: expected the class of {DeepseekV4ForCausalLM.__module__},"
            f" found {type(model).__module__}.{type(model).__name__}; another plugin or"
            " SGLANG_EXTERNAL_MODEL_PACKAGE replaced it: remove that, or set NVFP4_SGL_DISABLE=1"
        )


def require_own_backend(backend: Any) -> None:
    """:class:`UnsupportedError` unless our model runs on our backend."""
    from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend

    if not isinstance(backend, Nvfp4AttentionBackend):
        raise UnsupportedError(
            f"architecture {ARCHITECTURE}: expected the attention backend '{BACKEND}', found {type(backend).__name__};"
            " leave the --attention-backend flags out"
        )


def full_to_swa_mapping(pool: Any) -> Tensor:
    """SWA slot of each full slot, int64 [full slots + one page, + 1]; kept up to date by SGLang's allocator."""
    return pool.full_to_swa_index_mapping


def swa_buffer(pool: Any, layer: int) -> Tensor:
    """Sliding-window pages of ``layer``: [pages, page bytes or 256 * head_dim]."""
    return pool.swa_kv_pool.kv_buffer[layer - pool._stage_start]


def compressed_buffer(pool: Any, layer: int) -> Tensor:
    """Pages of compressed entries of ``layer`` (ratio 4: 64 a page, ratio 128: 2 a page)."""
    item = pool.layer_mapping[layer]
    return item.compress_kv_pool.kv_buffer[item.compress_layer_id]


def index_buffer(pool: Any, layer: int) -> Tensor:
    """Pages of indexer keys of ``layer`` (64 a page)."""
    item = pool.layer_mapping[layer]
    return pool.index_pools[item.compress_ratio].index_k_with_scale_buffer[item.compress_layer_id]


def compress_state(pool: Any, layer: int, *, ring: int) -> Tensor:
    """Raw (kv, score) rows of the layer's compressor: [rows, 2 w], rows as in :mod:`nvfp4_sgl.cache.layout`."""
    return _state_rows(pool.compress_state_pools[layer], ring)


def index_compress_state(pool: Any, layer: int, *, ring: int) -> Tensor:
    """Raw (kv, score) rows of the compressor inside the layer's indexer."""
    return _state_rows(pool.indexer_compress_state_pools[layer], ring)


def _state_rows(states: Any, ring: int) -> Tensor:
    if states.ring_size != ring or states.online:
        raise UnsupportedError(
            f"SGLang keeps {states.ring_size} compressor state rows (online={states.online}), expected {ring};"
            " unset SGLANG_OPT_USE_ONLINE_COMPRESS and leave speculative decoding off"
        )
    return states.kv_score_buffer.kv_score


def pool_occupancy(scheduler: Any) -> dict[str, dict[str, int]]:
    """Capacity and occupancy of the token pools and request slots of SGLang's ``Scheduler``.

    ``cached`` tokens belong to finished requests and are given up on demand; ``used`` is what is left over: tokens of
    running requests, and any that leaked.
    """
    stats, requests = scheduler.pool_stats_observer.get_pool_stats(), scheduler.req_to_token_pool
    pools = {}
    for name in ("full", "swa"):
        values = {key: getattr(stats, f"{name}_{key}") for key in ("capacity", "available_size", "evictable_size")}
        if None not in values.values():
            capacity, free, cached = map(int, values.values())
            pools[name] = {"capacity": capacity, "free": free, "cached": cached, "used": capacity - free - cached}
    slots, free = int(requests.size), len(requests.free_slots)
    return {**pools, "requests": {"capacity": slots, "free": free, "cached": 0, "used": slots - free}}


def check_names() -> list[str]:
    """Paths in this module's tables that the installed SGLang lacks."""
    missing = []
    for table in (CLASSES, FUNCTIONS, HOOKS, MODULES):
        for private in table.values():
            try:
                resolve_name(private.path)
            except (ImportError, AttributeError):
                missing.append(private.path)
    return missing


if __name__ == "__main__":
    for path in check_names():
        print(f"missing: {path}")
    raise SystemExit(bool(check_names()))
