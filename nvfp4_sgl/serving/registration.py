"""Everything that the package installs into a process of SGLang.

Arguments matter in the process that resolves them; the model class, the backend and the pools matter where a
scheduler runs. Only a scheduler process has imported SGLang's scheduler when plugins load (the launcher imports it
later), so only there :mod:`.scheduler_start` is imported; a scheduler that somehow misses it stops, since it knows no
attention backend of our name.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvfp4_sgl.architectures import is_served
from nvfp4_sgl.errors import ConfigError, Nvfp4SglError
from nvfp4_sgl.process_exit import EXIT_CODE, describe
from nvfp4_sgl.serving import (
    aborts,
    answer_parser,
    arguments,
    chat_template,
    guard,
    handlers,
    interrupts,
    requests,
    resolution,
    stages,
    stop_sequences,
    token_bytes,
    tokenizing,
    tool_calls,
    update_request,
)
from nvfp4_sgl.serving.drafts import dspark_arguments
from nvfp4_sgl.serving.sglang import hooking, ledger

logger = logging.getLogger(__name__)


def register_all() -> None:
    """Called once in each process of SGLang."""
    ledger.require_supported_version()
    print_errors_as_one_message()
    arguments.register()
    hooking.install_hooks(
        {
            "parse_quantization": hide_quantization,
            "load_hf_config": load_hf_config,
            "normalize_sampling": requests.normalize_sampling,
            "verify_sampling": requests.verify_sampling,
            "resolved_arguments": arguments.redacted,
        }
    )
    if ledger.is_imported("tokenizer_manager") or multiprocessing.parent_process() is None:
        hooking.install_hooks(
            {
                "normalize_request": requests.normalize_request,
                "abort_after_stream": aborts.abort_after_stream,
                "prepare_arguments": resolution.prepare,
                "resolve_arguments": resolution.resolve,
                "check_arguments": resolution.resolve,
                "resolve_dspark": dspark_arguments.resolve,
                "launch_server": arguments.launch_server,
                "launch_schedulers": interrupts.spare_children,
                "launch_detokenizer": interrupts.spare_children,
                "run_http_server": guard.serve_guarded,
                "warm_up_server": stages.warm_up_server,
                "child_failed": guard.name_the_dead,
                "chat_sampling": requests.bound_tools,
                "responses_sampling": handlers.responses_sampling,
                "check_response_model": handlers.check_response_model,
                "message_chat": handlers.continue_last_message,
                "message_answer": stop_sequences.convert_response,
                "message_stream": stop_sequences.stream_message,
                "chat_stream": stop_sequences.note_in_chat,
                "load_chat_template": chat_template.load_chat_template,
                "init_output_parser": answer_parser.prepare,
                "output_deltas": tool_calls.output_deltas,
                "finish_output": tool_calls.finish_output,
                "chat_parser": tool_calls.chat_parser,
                "responses_parser": tool_calls.responses_parser,
                "parse_call_text": tool_calls.parse_call_text,
                "cut_at_stop": answer_parser.cut_at_stop,
                "has_byte_tokens": token_bytes.has_byte_tokens,
                "validate_in_front_end": requests.validate_in_front_end,
                "validate_for_transport": requests.validate_for_transport,
                "update_weights": update_request.update_weights,
                "dispatch_update": update_request.dispatch_update,
                **tokenizing.HOOKS,
            }
        )
    if ledger.is_imported("detokenizer"):
        hooking.install_hooks({"printable": token_bytes.printable})
    if ledger.is_imported("scheduler"):
        from nvfp4_sgl.serving.scheduler_start import register_scheduler

        register_scheduler()


def is_ours(hf_config: Any) -> bool:
    """Whether a parsed config names an architecture of ours, or its draft."""
    return is_served(getattr(hf_config, "architectures", None), drafts=True)


def hide_quantization(original: Callable[..., Any], model_config: Any) -> Any:
    """SGLang sees our checkpoints as unquantised: their matrices never pass through its layers."""
    return None if is_ours(model_config.hf_config) else original(model_config)


def load_hf_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As :func:`hide_quantization`, for code that reads ``hf_config.quantization_config`` itself.

    What follows from overridden sizes of random weights (``compress_ratios``) is overridden, too.
    """
    overrides = kwargs.get("model_override_args")
    if overrides and arguments.is_our_checkpoint(args[0]):
        kwargs["model_override_args"] = arguments.complete_overrides(args[0], overrides)
    try:
        config = original(*args, **kwargs)
    except OSError as error:
        if Path(args[0]).exists():
            raise
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"--model-path {args[0]}: expected a local directory or a name that the hub knows, found no such directory"
            f" ({cause}); correct it, or download the checkpoint first (hf download)"
        ) from error
    if is_ours(config):
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        if (captured := getattr(config, "dspark_target_layer_ids", None)) is not None:
            # SGLang reads DSpark's field second. First it chooses layers as DFlash does, which takes four or more.
            config.target_layer_ids = captured
    return config


def print_errors_as_one_message() -> None:
    """Print uncaught errors of ours, the launcher's that they cause, and Ctrl-C during a start without a traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Nvfp4SglError):
            print(describe(error), file=sys.stderr, flush=True)
        elif f"died during initialization (exit code: {EXIT_CODE})" in str(error):
            print("nvfp4-sgl: error: a scheduler process stopped; its error is above", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt) and arguments.serves_ours():
            print("\nnvfp4-sgl: interrupted", file=sys.stderr, flush=True)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
