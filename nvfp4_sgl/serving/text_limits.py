"""Bound of the text of a prompt; a longer one is refused before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.serving.endpoints import MAX_BODY_BYTES

MAX_SCORED = 4 * MAX_BODY_BYTES
"""Bound on bytes, or token ids, of the prompts of one ``/v1/score``: SGLang joins the query to every item."""


@dataclass(frozen=True)
class TextLimit:
    """Bound on a text in bytes of UTF-8: no request holds more ``tokens``, and no token more ``token_bytes``."""

    tokens: int
    token_bytes: int

    @property
    def bytes(self) -> int:
        """The bound."""
        return self.tokens * self.token_bytes

    def text_fault(self, name: str, texts: Iterable[str]) -> str | None:
        """Why ``texts``, together one prompt in the field ``name``, are not tokenised, or ``None``."""
        found = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if found <= self.bytes:
            return None
        return (
            f"{name}: found {found} bytes of text; expected {self.bytes} or fewer, which are {self.tokens} tokens of a"
            f" request times {self.token_bytes} bytes of the longest token; send a shorter text"
        )

    def ids_fault(self, name: str, ids: Sequence[Any]) -> str | None:
        """Why a list of token ids is not decoded, or ``None``."""
        if len(ids) <= self.tokens:
            return None
        return f"{name}: found {len(ids)} token ids; expected {self.tokens} or fewer, as many as a request can have"


def longest_token(tokenizer: Any) -> int | None:
    """Most bytes of text in one token of a ``tokenizers.Tokenizer``; ``None`` if there is no bound.

    There is no bound if the tokenizer normalises text first, or strips spaces beside an added token.
    """
    settings = json.loads(tokenizer.to_str())
    normalizer, added = settings["normalizer"], settings["added_tokens"]
    if normalizer not in (None, {"type": "Sequence", "normalizers": []}):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)  # a character for each byte
    if (settings["decoder"] or {}).get("type") != "ByteLevel":
        longest *= 4
    return max([longest, *(len(token["content"].encode()) for token in added)])


def contents(messages: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """The texts in the ``content`` of chat messages; every prompt has these, whatever other fields it has."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )


def score_fault(limit: TextLimit | None, query: Any, items: Any) -> str | None:
    """Why query and items of ``/v1/score``, texts or token ids, are not joined, or ``None``."""
    query = query or ""
    items = [items] if isinstance(items, str) else items or []
    total = len(items) * len(query) + sum(map(len, items))
    if total > MAX_SCORED:
        unit = "characters" if isinstance(query, str) else "token ids"
        return f"query, items: joined they are {total} {unit}; expected {MAX_SCORED} or fewer; send several requests"
    longest = max((item for item in items if isinstance(item, str)), key=len, default="")
    return limit.text_fault("query and item", [query, longest]) if limit and isinstance(query, str) else None
