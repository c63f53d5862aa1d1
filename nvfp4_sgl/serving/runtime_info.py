"""Describes what runs: model class, backend, activation mode, cache rows, implementation of every boundary.

Logged in two lines when the scheduler is up, and part of ``/server_info`` as ``internal_states[*]["nvfp4_sgl"]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl import __version__
from nvfp4_sgl.serving import arguments, kv_pool, shared_requests, stages
from nvfp4_sgl.serving.backend import require_own_backend
from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM
from nvfp4_sgl.serving.sglang import scheduling, settings


def describe_runtime(runner: Any) -> dict[str, Any] | None:
    """A JSON-ready description of what ``runner`` (SGLang's ModelRunner) runs, ``None`` if the model is not ours."""
    model = runner.model
    if not isinstance(model, DeepseekV4ForCausalLM):
        return None
    return {
        "version": __version__,
        "weights": model.verified.describe(),
        "routing": "by the model"
        if not model.uniform_experts
        else f"SIMULATED: uniform, not by scores ({arguments.UNIFORM_EXPERTS})",
        "model_class": _name(model),
        "attention_backend": _name(runner.attn_backend),
        "kv_pool": _name(runner.token_to_kv_pool),
        "kv_rows": kv_pool.describe_rows(getattr(runner.token_to_kv_pool, "row_dtype", None)),
        "activation_mode": getattr(model.activation_mode, "value", model.activation_mode),
        "dtype": str(runner.model_config.dtype).removeprefix("torch."),
        "target": model.choice.target,
        "note": model.choice.note,
        "sampling": str(settings.resolved("sampling_backend")),
        "requests": shared_requests.way(),
        "rank_sums": describe_sums(model),
        "draft": describe_draft(),
        "prompt_graphs": describe_prompts(runner.attn_backend),
        "boundaries": model.choice.boundaries.names(),
    }


def describe_sums(model: DeepseekV4ForCausalLM) -> str:
    """The way in which sums over tensor-parallel ranks are formed, in words."""
    share = model.context.parallel
    if share.size == 1:
        return "none, with one rank"
    if share.exchange is None:
        return "by SGLang's all-reduce"
    assert model.decoder is not None
    layers: list[Any] = [*model.decoder.layers]
    sublayers = [sublayer for layer in layers for sublayer in (layer.attn, layer.ffn)]
    pushed = sum(sublayer.sends for sublayer in sublayers)
    return (
        f"pushed by {pushed} of {len(sublayers)} sublayers in passes of up to {share.exchange.tokens} tokens, else by"
        " SGLang's all-reduce"
    )


def describe_draft() -> str:
    """The draft in use, and how far ahead it guesses, in words."""
    if settings.drafts_blocks():
        return f"DSpark, blocks of {settings.draft_block()} tokens"
    return f"MTP, {settings.draft_steps()} steps" if settings.draft_algorithm() else "none"


def describe_prompts(backend: Any) -> dict[str, Any]:
    """Tokens of the prompt passes that are captured, the padding's included, and how many passes ran so."""
    prompts = getattr(backend, "prompts", None)
    if prompts is None:
        return {"tokens": [], "replays": 0}
    return {"tokens": sorted({shape.tokens for shape in prompts.shapes}), "replays": prompts.replays}


def log(scheduler: Any) -> None:
    """Log the last lines of the start: each boundary's implementation, then the modes; nothing for other models."""
    info = describe_runtime(scheduler.tp_worker.model_runner)
    if info is None:
        return
    require_own_backend(scheduler.tp_worker.model_runner.attn_backend)
    words = [f"target {info['target']}", info["activation_mode"], info["dtype"], info["kv_rows"]]
    words += [f"sampling by {info['sampling']}", f"routing {info['routing']}"]
    if settings.served_arguments().tp_size > 1:
        words.append(f"sums over ranks {info['rank_sums']}")
    if info["draft"] != "none":
        words.append(f"draft {info['draft']}")
    if info["note"]:
        words.append(f"NOTE: {info['note']}")
    stages.say("boundaries", *(f"{name} {where.rpartition('.')[2]}" for name, where in info["boundaries"].items()))
    stages.begun(*words)


def add_to_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Hook: add :func:`describe_runtime`, how full the pools are and the forecast of memory to ``/server_info``."""
    output = original(scheduler, request)
    info = describe_runtime(scheduler.tp_worker.model_runner)
    if info is not None:
        memory = scheduler.tp_worker.model_runner.model.memory.as_json()
        output.internal_state["nvfp4_sgl"] = {**info, "pools": scheduling.pool_occupancy(scheduler), "memory": memory}
    return output


def _name(item: Any) -> str:
    return f"{type(item).__module__}.{type(item).__name__}"
