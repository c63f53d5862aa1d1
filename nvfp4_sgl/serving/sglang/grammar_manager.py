"""SGLang's queue of requests whose grammars are being compiled."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed


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
    """Set how long a ``GrammarManager`` waits for grammars before a step; it waits longer if no request is running."""
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
