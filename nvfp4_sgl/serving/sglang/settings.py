"""SGLang's arguments: as given, as resolved, and as this process uses them; its environment variables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvfp4_sgl.serving.sglang.ledger import find

REDACTED = "<redacted>"
"""What is printed in place of a key."""


def given_arguments(server_args: Any) -> dict[str, Any]:
    """The user's arguments, before any default or resolution (``ServerArgs._raw_input``)."""
    return dict(server_args._raw_input)


def unset_arguments() -> dict[str, Any]:
    """Every argument as it is when no flag is given."""
    record = find("ServerArgs")(model_path="none")
    return {field.name: getattr(record, field.name) for field in find("record_fields")(type(record))}


def can_trace() -> bool:
    """Whether the packages that ``--enable-trace`` needs are installed."""
    return bool(find("opentelemetry_imported"))


def served_arguments() -> Any:
    """The ``ServerArgs`` that this process serves."""
    return find("get_context")().server_args


def model_path() -> Path:
    """Directory of the served checkpoint."""
    return Path(find("resolution_result")(served_arguments(), "model_path"))


def resolved(name: str) -> Any:
    """An argument as resolved."""
    return find("resolution_result")(served_arguments(), name)


def url() -> str:
    """URL at which SGLang asks this server itself."""
    return str(served_arguments().url())


def replace(why: str, **values: Any) -> None:
    """Make this process use ``values`` from now on."""
    find("get_context")().override(f"nvfp4_sgl.{why}", **values)


def resolving(server_args: Any) -> Any:
    """Arguments as far as they are resolved."""
    return find("resolving_view")(server_args)


def declare(server_args: Any, source: str, **values: Any) -> None:
    """Resolve arguments that the user left out to ``values``, in the name of ``source``."""
    find("declare_resolution")(server_args, source, **values)


def given_prefill_graphs(config: Any) -> Any:
    """Backend of CUDA graphs of prefill passes that ``--cuda-graph-config`` names; ``None`` if it names none.

    Args:
        config: the argument as given: ``None``, settings by phase, or SGLang's ``CudaGraphConfig``.
    """
    phases = config.to_dict() if hasattr(config, "to_dict") else config or {}
    return (phases.get("prefill") or {}).get("backend")


def has_no_graphs() -> bool:
    """Whether no pass of this server runs in a CUDA graph."""
    return bool(find("cuda_graph_fully_disabled")())


def draft_algorithm() -> str | None:
    """``--speculative-algorithm`` as resolved; ``None`` if nothing is drafted."""
    found = resolved("speculative_algorithm")
    return None if found is None else str(found)


def drafts_blocks() -> bool:
    """Whether a draft guesses all tokens of a round at once, as DSpark does."""
    return draft_algorithm() == "DSPARK"


def draft_block() -> int:
    """Tokens that a round guesses: one less than it verifies."""
    return int(resolved("speculative_num_draft_tokens")) - 1


def draft_steps() -> int:
    """``--speculative-num-steps`` as resolved; 0 if nothing is drafted."""
    return 0 if draft_algorithm() is None else int(resolved("speculative_num_steps"))


def round_tokens() -> int:
    """``--speculative-num-draft-tokens`` as resolved, tokens of a verify pass; 0 if nothing is drafted."""
    return 0 if draft_algorithm() is None else int(resolved("speculative_num_draft_tokens"))


def environment_flag(name: str) -> bool:
    """Whether SGLang takes the environment variable ``name`` as set to true."""
    return bool(getattr(find("envs"), name).get())


def largest_prefill() -> int:
    """Tokens of the largest prefill pass: a chunk, or without chunked prefill what a batch may hold."""
    return int(prefill_chunk() or resolved("max_prefill_tokens"))


def prefill_chunk() -> int | None:
    """Tokens of a prefill chunk in this process's scheduler; ``None`` without chunked prefill."""
    chunk = find("get_context")().config_leaf("chunked_prefill_size")
    return int(chunk) if chunk and chunk > 0 else None


def set_prefill_chunk(tokens: int) -> None:
    """Set the prefill chunk of this process's scheduler, which is still being built."""
    replace("fit_chunk", chunked_prefill_size=tokens)


def sizes_window_by_ratio() -> bool:
    """Whether the window pool is a share of all tokens, as :class:`DSV4PoolConfigurator` decides: else by requests."""
    by_requests = prefill_chunk() is not None and resolved("max_running_requests") is not None
    return bool(resolved("_swa_full_tokens_ratio_explicitly_set")) or not by_requests


def redact_launch_command(server_args: Any, secrets: Sequence[str]) -> None:
    """Replace ``secrets`` in the command line that ``/server_info`` shows."""
    command = getattr(server_args, "_launch_command", None)
    if command is not None:
        for secret in secrets:
            command = command.replace(secret, REDACTED)
        server_args._launch_command = command
