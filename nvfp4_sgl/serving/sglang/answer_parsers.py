"""SGLang's parsers of answers and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers.decoders

from nvfp4_sgl.serving.sglang.ledger import find


def wrap_answer_processor(parser: Any, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper(processor, recipe, tokenizer)`` in the place of the processor of deepseek-recipe in ``parser``.

    Nor does SGLang's parser let tokens wait any more because a stop string may begin in them.
    """
    parser._processor = wrapper(parser._processor, parser._recipe, parser._hf_tokenizer)
    parser._stop_hold_chars = 0


def replace_processor(parser: Any, token: str, replacement: Callable[..., Any]) -> None:
    """Have an output parser of SGLang's go through ``replacement(processor, id of token, chunk of token ids)``."""
    tokens = parser._recipe.InferenceChunk.tokens
    parser._processor = replacement(parser._processor, parser._hf_tokenizer.token_to_id(token), tokens)


def output_delta(reasoning: str, content: str, calls: Sequence[tuple[int, str, str | None]]) -> Any:
    """A piece as SGLang's output parsers answer it; ``calls`` are index, arguments and name of pieces."""
    piece = find("RecipeToolCallDelta")
    pieces = tuple(piece(*call) for call in calls)
    return find("RecipeOutputDelta")(reasoning=reasoning, content=content, tool_calls=pieces)


def answer_tokenizer(parser: Any) -> Any:
    """The ``tokenizers.Tokenizer`` of SGLang's parser of answers."""
    return parser._hf_tokenizer


def is_byte_level(tokenizer: Any) -> bool:
    """Whether SGLang's tokenizer spells tokens in bytes, as byte-level BPE does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), tokenizers.decoders.ByteLevel)
