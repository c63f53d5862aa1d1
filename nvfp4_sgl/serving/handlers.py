"""Hooks that make SGLang's handlers of OpenAI's and Anthropic's paths follow their protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.requests import bound_tools, serves_our_model

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's, and SGLang's for chats; it has 0.7 for responses."""


def responses_sampling(
    original: Callable[..., dict[str, Any]],
    request: Any,
    default_max_tokens: int | None = None,
    default_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Hook around sampling parameters of a response: as many tokens as it asks for, two more than SGLang would have."""
    if not serves_our_model():
        return original(request, default_max_tokens, default_params, **kwargs)
    defaults = {"temperature": DEFAULT_TEMPERATURE, **(default_params or {})}
    params = bound_tools(original, request, default_max_tokens, defaults, **kwargs)
    if request.max_output_tokens is not None:
        given = (request.max_output_tokens, default_max_tokens)
        params["max_new_tokens"] = min(tokens for tokens in given if tokens is not None)
    return params


def check_response_model(original: Callable[..., Any], handler: Any, model: str | None) -> Any:
    """Hook around the check of a response's model: any name is the one model's, as in chats; no adapter has one."""
    if serves_our_model() and (model is None or ":" not in model):
        return None
    return original(handler, model)


def continue_last_message(original: Callable[..., Any], handler: Any, request: Any) -> Any:
    """Hook around the chat that a message request becomes: a last message of the assistant is continued.

    SGLang would have the model read it as the user's.
    """
    chat = original(handler, request)
    if serves_our_model():
        last = chat.messages[-1] if chat.messages else None
        if last is not None and last.role == "assistant" and isinstance(last.content, str) and not last.tool_calls:
            chat.continue_final_message = True
    return chat
