"""Installs the package into a scheduler process, and starts the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.architectures import architectures
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.files import refuse_lost
from nvfp4_sgl.process_exit import stop
from nvfp4_sgl.serving import (
    aborts,
    arguments,
    backend,
    finite_logits,
    first_requests,
    grammar_compiler,
    grammars,
    kv_pool,
    metrics,
    prompt_graphs,
    requests,
    runtime_info,
    shared_requests,
    start_log,
    stop_strings,
    update_weights,
)
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend
from nvfp4_sgl.serving.drafts import first_rounds
from nvfp4_sgl.serving.drafts import hooks as drafts
from nvfp4_sgl.serving.drafts.backend import DraftBackend
from nvfp4_sgl.serving.drafts.dspark_backend import DsparkBackend
from nvfp4_sgl.serving.drafts.dspark_model import DsparkForCausalLM
from nvfp4_sgl.serving.drafts.model import MtpForCausalLM
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.model import require_own_model
from nvfp4_sgl.serving.sglang import hooking, models, parallel, settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.targets.choose import detect_target
from nvfp4_sgl.targets.target import descriptor


def register_scheduler() -> None:
    """Register model class, attention backend, pools and reports."""
    registry = models.import_registry_lazily("nvfp4_sgl.serving.architectures")
    for architecture in architectures():
        registry.models.update(architecture.classes())
    find("register_attention_backend")(BACKEND)(create_backend)
    hooking.install_hooks(
        {
            "reject_out_of_tree_path": kv_pool.allow_dsv4_pool,
            "build_pool": kv_pool.build_pool,
            "configure_pool": kv_pool.configure_pool,
            "scheduler_init": start_scheduler,
            "internal_state": runtime_info.add_to_internal_state,
            "worker_info": requests.worker_info,
            "validate_in_scheduler": requests.validate_in_scheduler,
            "validate_when_admitted": requests.validate_when_admitted,
            "grammar_queue": grammar_compiler.start,
            "ready_grammars": grammar_compiler.take_ready,
            "fill_grammar_mask": grammars.fill_mask,
            "accept_prefill_grammar": grammars.accept_prefill,
            "accept_grammar_tokens": grammars.accept_tokens,
            "cache_grammar": grammars.cache,
            "replace_weights": update_weights.replace_weights,
        }
    )


def create_backend(runner: Any) -> Any:
    """Factory of the attention backend ``nvfp4_sgl``; refuses any other model class."""
    if isinstance(runner.model, MtpForCausalLM):
        return DraftBackend(runner)
    if isinstance(runner.model, DsparkForCausalLM):
        return DsparkBackend(runner)
    require_own_model(runner.model)
    return Nvfp4AttentionBackend(runner)


def start_scheduler(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Build the scheduler; an error of ours ends the process with one message, and the launcher with it."""
    try:
        _start(original, scheduler, *args, **kwargs)
    except Nvfp4SglError as error:
        stop(error)
    except OSError as error:
        if settings.resolved("attention_backend") != BACKEND:
            raise
        try:
            refuse_lost(settings.model_path(), error)
        except Nvfp4SglError as lost:
            stop(lost)
        raise


def _start(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    ours = arguments.is_our_checkpoint(settings.model_path())
    if ours:
        start_log.leave_out_false_lines()
        if parallel.tp_rank() == 0:
            grammar_compiler.prepare()  # forks: before there are threads, and CPUs of its own
        arguments.use_bound_cpus(parallel.tp_rank())
        hooking.install_hooks(finite_logits.HOOKS | stop_strings.HOOKS | first_requests.HOOKS | backend.HOOKS)
        hooking.install_hooks({"abort_request": aborts.abort_request})
        if settings.draft_algorithm() is not None:
            on_gpu = descriptor(detect_target()).on_gpu
            hooking.install_hooks(drafts.hooks(on_gpu=on_gpu, blocks=settings.drafts_blocks()))
        first_requests.compile_nothing()
    original(scheduler, *args, **kwargs)
    if ours:
        prompt_graphs.capture(scheduler.tp_worker.model_runner)
        first_requests.warm_up(scheduler)
        if settings.draft_algorithm() is not None:
            first_rounds.warm_up(scheduler)
        shared_requests.share()
        metrics.watch(scheduler)
    runtime_info.log(scheduler)
