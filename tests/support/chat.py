"""An ``openai`` client for a test server, and ways to keep a model of random weights to text that can be compared."""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable
from typing import Any

import openai
from transformers import PreTrainedTokenizerFast

from tests.support.server import Server

MODEL = "tiny"
"""Any name will do: SGLang serves one model and does not compare."""

BANNED = -1000
"""A logit bias that no logit makes up for; a grammar can still force the token."""


def client(server: Server) -> openai.OpenAI:
    """A client that reports the first error instead of trying again."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def printable_bias(
    tokenizer: PreTrainedTokenizerFast, *, spaces: bool = True, allowed: Collection[str] = ()
) -> dict[str, int]:
    """``logit_bias`` under which the model writes printable ASCII and the tokens ``allowed``, and never stops.

    Random weights write broken UTF-8, of which a decoded text shows too little to compare anything with. Without
    ``spaces`` no token has whitespace, which JSON grammars allow in any amount.
    """
    characters = frozenset(string.printable[:94] + (" " if spaces else ""))
    bias = {}
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        printable = text != "" and characters.issuperset(text) and not text.endswith("think>")
        if not printable and text not in allowed:
            bias[str(token)] = BANNED
    return bias


def joined(chunks: Iterable[Any], field: str) -> str:
    """``field`` of all deltas of a chat stream's first choice."""
    return "".join(getattr(chunk.choices[0].delta, field, None) or "" for chunk in chunks if chunk.choices)
