"""Hooks around SGLang's parser of chats, which splits an answer's tokens into reasoning, content and calls of tools.

It hands the tokens to deepseek-recipe, which keeps the text of a push back while it ends in an incomplete character,
and drops all of it where the answer ends there. Here only whole characters are handed on; an incomplete last one is
U+FFFD, as in the text of ``/generate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving import answer_text, tool_calls
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import answer_parsers

MAX_TOKENS = 1024
"""Tokens that are decoded at once: ends are searched for in few tokens of a long answer."""


class WholeCharacters:
    """A ``StreamProcessor`` of deepseek-recipe whose answer may end anywhere.

    Args:
        recipe: the module deepseek-recipe.
        tokenizer: the ``tokenizers.Tokenizer`` of the checkpoint.
    """

    def __init__(self, processor: Any, recipe: Any, tokenizer: Any) -> None:
        self._processor, self._recipe, self._tokenizer = processor, recipe, tokenizer
        self._held: list[int] = []

    @property
    def finished(self) -> bool:
        return bool(self._processor.finished)

    def push(self, chunk: Any) -> list[Any]:
        """Adds the tokens of ``chunk``, or the end that it says, to the answer and returns the pieces."""
        if chunk.kind != "tokens":
            return [*self._flush(), *self._processor.push(chunk)]
        chunks = []
        for first in range(0, len(chunk.token_ids), MAX_TOKENS):
            ids = self._held + chunk.token_ids[first : first + MAX_TOKENS]
            count, _ = answer_text.split(ids, answer_text.sendable(self._decode(ids), ()), self._decode)
            self._held = ids[count:]
            chunks += self._push(ids[:count])
        return chunks

    def finish(self) -> list[Any]:
        """The rest of an answer that ends without a finish reason."""
        return [*self._flush(), *self._processor.finish()]

    def _flush(self) -> list[Any]:
        ids, self._held = self._held, []
        return self._push(ids)

    def _push(self, ids: list[int]) -> list[Any]:
        """Hand on ``ids``; what their text has of U+FFFD at its end goes as text, which is not kept back."""
        text = self._decode(ids)
        whole = len(text.rstrip(answer_text.REPLACEMENT))
        count, rest = answer_text.split(ids, whole, self._decode)
        chunk, chunks = self._recipe.InferenceChunk, []
        if tokens := ids[:count] + self._tokenizer.encode(rest, add_special_tokens=False).ids:
            chunks += self._processor.push(chunk.tokens(tokens))
        if text[whole:]:
            chunks += self._processor.push(chunk.text(text[whole:]))
        return chunks

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def prepare(original: Callable[..., None], parser: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around the making of a parser, outside of that which has it read calls of tools.

    No token waits in it for a stop string: :mod:`nvfp4_sgl.serving.stop_strings` has those wait that have to.
    """
    tool_calls.init_output_parser(original, parser, *args, **kwargs)
    if serves_our_model():
        answer_parsers.wrap_answer_processor(parser, WholeCharacters)


def cut_at_stop(
    original: Callable[..., list[int]], parser: Any, token_ids: list[int], stop: str, *, keep_stop: bool
) -> list[int]:
    """Hook around the cut of an answer that a stop string has ended: its tokens before that, or with ``keep_stop`` all.

    Where the stop string begins within a token, what is in front of it is encoded anew.
    """
    if not serves_our_model():
        return original(parser, token_ids, stop, keep_stop=keep_stop)
    tokenizer = answer_parsers.answer_tokenizer(parser)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    count, rest = answer_text.cut(token_ids, stop, decode, keep_stop=keep_stop)
    return [*token_ids[:count], *tokenizer.encode(rest, add_special_tokens=False).ids]
