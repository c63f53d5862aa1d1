"""Keeps a grammar that a request brings from ending the scheduler, stalling it or filling its memory.

A grammar may reach a state in which no token is allowed: its mask would make every probability NaN. An ambiguous one
(``root ::= root root | "a"``) takes longer with every token, in the scheduler's own thread. Such a request is failed
with status 400; the others go on. :mod:`nvfp4_sgl.serving.grammar_compiler` compiles, and refuses what begins so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.finite_logits import FAILED, has_failed
from nvfp4_sgl.serving.grammar_process import AMBIGUOUS, MAX_MASK_SECONDS, NO_TOKEN
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import parallel, request_state

MAX_CACHED_GRAMMARS = 128
"""Bound on compiled grammars that are kept; SGLang keeps all."""

FAULT = "nvfp4_sgl_fault"
"""Attribute of a grammar object that says why its request cannot go on."""

MAX_CACHED_BYTES = 512 << 20
"""Bound on their memory."""

ALL_TOKENS = -1
"""A word of the mask with every bit set."""


def fill_mask(original: Callable[..., None], grammar: Any, mask: Any, row: int) -> None:
    """Hook around the filling of row ``row`` of ``mask``, int32 [requests, vocabulary / 32] on the host.

    A row that allows nothing is made to allow everything, so that sampling stays valid until the request is failed.
    """
    started = time.thread_time()  # of this thread alone: a busy machine is no fault of the grammar
    original(grammar, mask, row)
    seconds = time.thread_time() - started
    if not serves_our_model():
        return
    if not mask[row].any():
        mask[row] = ALL_TOKENS
        setattr(grammar, FAULT, NO_TOKEN)
    elif seconds > MAX_MASK_SECONDS and parallel.tp_size() == 1:
        # Ranks would come to different outcomes, so only a single one may use its clock.
        setattr(grammar, FAULT, AMBIGUOUS)


def accept_prefill(original: Callable[..., None], processor: Any, *, req: Any, **kwargs: Any) -> None:
    """Hook around the grammar's step over a request's first token: fail the request if its grammar has a fault."""
    if has_failed(req):
        req.grammar.finished = True
    elif (message := fault(req.grammar)) is None:
        original(processor, req=req, **kwargs)
    else:
        request_state.abort(req, message)
        req.grammar.finished = req.finished()


def accept_tokens(original: Callable[..., list[int]], processor: Any, req: Any, tokens: Any) -> list[int]:
    """As :func:`accept_prefill` for later tokens; the tokens that were accepted.

    With drafts SGLang asks before it looks at the ids: one that is none ends what a grammar is shown, and is kept for
    the check of ids that fails the request (:mod:`.finite_logits`).
    """
    if has_failed(req):
        return []
    if (message := fault(req.grammar)) is not None:
        request_state.abort(req, message)
        return []
    said = [tokens] if isinstance(tokens, int) else list(tokens)
    if FAILED not in said:
        return original(processor, req, tokens)
    good = said[: said.index(FAILED)]
    kept = original(processor, req, good)
    return [*kept, FAILED] if kept == good else kept


def fault(grammar: Any) -> str | None:
    """Why the request of ``grammar`` cannot go on, or ``None``; a grammar after a reasoning part wraps another."""
    inner = getattr(grammar, "grammar", None)
    found: str | None = getattr(grammar, FAULT, None) or getattr(inner, FAULT, None)
    return found


def cache(original: Callable[..., None], backend: Any, key: Any, value: Any) -> None:
    """Hook around the caching of a compiled grammar: drop all of them once there are too many.

    One that was refused is not kept: for want of time or memory, it may be compiled later. A backend for reasoning
    models wraps the one whose compiler keeps grammars, too, and does not reset it.
    """
    if not serves_our_model():
        original(backend, key, value)
    elif (size := memory(value)) is not None:
        kept = sum(memory(one) or 0 for one in backend.cache.values())
        if len(backend.cache) >= MAX_CACHED_GRAMMARS or kept + size > MAX_CACHED_BYTES:
            for one in (backend, getattr(backend, "grammar_backend", None)):
                if one is not None:
                    one.reset()
        original(backend, key, value)


def memory(grammar: Any) -> int | None:
    """Bytes of a compiled grammar; ``None`` for one that was refused."""
    context = getattr(getattr(grammar, "grammar", grammar), "ctx", None)
    return None if context is None else int(context.memory_size_bytes)
