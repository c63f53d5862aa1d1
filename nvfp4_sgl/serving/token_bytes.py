"""Tokens that are parts of characters: in the text of the detokenizer, and in ``bytes`` of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving import answer_text
from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import answer_parsers


def has_byte_tokens(original: Callable[..., bool], tokenizer: Any) -> bool:
    """Hook around SGLang's guess whether tokens are spelled in bytes, which DeepSeek's special tokens make it miss."""
    return original(tokenizer) or (serves_our_model() and answer_parsers.is_byte_level(tokenizer))


def printable(original: Callable[[str], str], text: str) -> str:
    """Hook around what the detokenizer sends of a text that ends in an incomplete character: all but that."""
    return text[: answer_text.sendable(text, ())] if serves_our_model() else original(text)
