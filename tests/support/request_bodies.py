"""Valid bodies for each path that has a table of fields, to which tests add one field or many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROMPT = [30, 31, 32]
SAMPLING = {"max_new_tokens": 2, "temperature": 0}

BASES: Mapping[str, Mapping[str, Any]] = {
    "/generate": {"input_ids": PROMPT, "sampling_params": SAMPLING},
    "/tokenize": {"prompt": "The quick"},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "hi"}]},
    "/detokenize": {"tokens": PROMPT},
    "/v1/detokenize": {"tokens": [PROMPT, []]},
    "/v1/score": {"query": PROMPT, "items": [PROMPT, [33]], "label_token_ids": [40, 41]},
    "/v1/embeddings": {},
    "/parse_function_call": {"text": "x", "tools": [], "tool_call_parser": "deepseekv4"},
    "/separate_reasoning": {"text": "a</think>b", "reasoning_parser": "deepseek-v4"},
    "/abort_request": {"rid": "no such request"},
    "/configure_logging": {},
    "/continue_generation": {},
    "/flush_cache": {},
    "/pause_generation": {},
}
"""A body of each path that a server on a CPU answers with 200, but for ``/v1/embeddings``, which is refused."""

MESSAGES = [{"role": "user", "content": "hi"}]

OPENAI_BASES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"model": "default", "prompt": "x", "max_tokens": 2},
    "/v1/messages": {"model": "default", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "default", "messages": MESSAGES},
    "/v1/responses": {"model": "default", "input": "x", "max_output_tokens": 2},
}
"""The same of the paths that OpenAI and Anthropic define."""
