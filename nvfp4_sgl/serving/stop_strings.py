"""Hooks in the scheduler that hold back tokens which may become part of a stop string.

SGLang holds back tokens whose text ends like the beginning of a stop string, with three gaps. It misreads an incomplete
character, looks for a stop string in as many tokens as the tokenizer would need, and sends 50 tokens of an unstreamed
answer unchecked. Text that was sent is not taken back when the stop string is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving import answer_text
from nvfp4_sgl.serving.sglang import request_state


def send_tokens(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    """Hook around SGLang's choice of the tokens to send: hold back what a stop string may begin with."""
    stops = req.sampling_params.stop_strs
    if not stops or req.finished():
        original(accumulator, req=req)
        return
    ending = answer_text.longest(stops) + answer_text.MAX_CHARACTER_BYTES  # no more than the beginning of a stop string
    first = max(0, len(req.output_ids) - ending)
    window, decode = list(req.output_ids[first:]), req.tokenizer.decode
    tokens = first + answer_text.split(window, answer_text.sendable(decode(window), stops), decode)[0]
    if tokens > req.send_token_offset:
        with request_state.answer_ends_at(req, tokens):
            original(accumulator, req=req)


def hold_back(original: Callable[..., bool], req: Any) -> bool:
    """Hook around SGLang's own question whether to let all tokens wait: :func:`send_tokens` has chosen some."""
    return False


def find_stop(original: Callable[..., bool], req: Any, new_accepted_len: int = 1) -> bool:
    """Hook around SGLang's search for stop strings: the first to be complete ends the answer, not the first given."""
    found = original(req, new_accepted_len)
    if found:
        text, stops = req.tail_str(new_accepted_len), req.sampling_params.stop_strs
        request_state.match_stop(req, answer_text.first_complete(text, stops))
    return found


HOOKS: dict[str, Callable[..., Any]] = {"send_tokens": send_tokens, "hold_back": hold_back, "find_stop": find_stop}
"""What is installed into the scheduler of our model, by name in :data:`nvfp4_sgl.serving.sglang.hooked.HOOKS`."""
