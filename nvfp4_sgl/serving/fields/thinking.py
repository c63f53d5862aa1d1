"""Whether a request asks for reasoning, by the words of several servers, in SGLang's one word for this model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]


SWITCHES = ("enable_thinking", "thinking", "chat_template_kwargs")
"""Fields that only switch reasoning."""


class Contradiction(ValueError):
    """Two fields of a body cannot both be followed; the message names them."""


def with_one_switch(body: Body) -> Body:
    """``body`` with every switch of reasoning in ``chat_template_kwargs.thinking``, and efforts in
    ``reasoning_effort``.

    Raises:
        Contradiction: two of the fields say different things.
    """
    switch = agreed(wishes(body))
    kwargs = {name: value for name, value in (body.get("chat_template_kwargs") or {}).items() if value is not None}
    effort = agreed(efforts(body))
    for name in ("enable_thinking", "reasoning_effort", "thinking"):
        kwargs.pop(name, None)
    if switch is not None:
        kwargs["thinking"] = switch
    if switch and effort == "none":
        raise Contradiction("reasoning effort 'none': another field asks for reasoning; leave one of them out")
    rest = {name: value for name, value in body.items() if name not in SWITCHES}
    if kwargs:
        rest["chat_template_kwargs"] = kwargs
    if "input" in body:  # a response's, which has reasoning.effort and more in it
        reasoning = dict(body.get("reasoning") or {})
        if "generate_summary" in reasoning:
            reasoning.setdefault("summary", reasoning.pop("generate_summary"))
        if body.get("reasoning") is not None or effort is not None:
            rest["reasoning"] = reasoning if effort is None else {**reasoning, "effort": effort}
        return rest
    rest.pop("reasoning", None)
    if effort is not None:
        rest["reasoning_effort"] = effort
    return rest


def wishes(body: Body) -> Iterator[tuple[str, bool]]:
    """Each field that switches reasoning on or off, and what it says."""
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        yield "thinking.type", thinking["type"] != "disabled"
    elif thinking is not None:
        yield "thinking", thinking
    if body.get("enable_thinking") is not None:
        yield "enable_thinking", body["enable_thinking"]
    kwargs = body.get("chat_template_kwargs") or {}
    for name in ("thinking", "enable_thinking"):
        if kwargs.get(name) is not None:
            yield f"chat_template_kwargs.{name}", kwargs[name]
    enabled = (body.get("reasoning") or {}).get("enabled")
    if enabled is not None:
        yield "reasoning.enabled", enabled


def efforts(body: Body) -> Iterator[tuple[str, str]]:
    """Each field that names an effort, and which."""
    kwargs, reasoning = body.get("chat_template_kwargs") or {}, body.get("reasoning") or {}
    for name, value in (
        ("reasoning_effort", body.get("reasoning_effort")),
        ("reasoning.effort", reasoning.get("effort")),
        ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort")),
    ):
        if value is not None:
            yield name, value


def agreed(said: Iterator[tuple[str, Any]]) -> Any:
    """The one value of all fields, ``None`` if there are none; :class:`Contradiction` if two differ."""
    first: tuple[str, Any] | None = None
    for name, value in said:
        if first is not None and value != first[1]:
            raise Contradiction(f"{name}: found {value!r}, but {first[0]} is {first[1]!r}; send one of them")
        first = first or (name, value)
    return first[1] if first else None
