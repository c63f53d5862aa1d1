"""Hooks that have SGLang read tool calls by :mod:`nvfp4_sgl.serving.tool_markup`, whichever endpoint asks.

SGLang hands the answer's tokens to deepseek-recipe, which knows a tag by its token, not by its text, and reads on where
markup is malformed: arguments are lost or invented. Here it only decodes, and tells reasoning from the answer. A call
within the reasoning counts, as it does for deepseek-recipe: models leave out ``</think>`` before one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Container, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from nvfp4_sgl.serving.requests import serves_our_model
from nvfp4_sgl.serving.sglang import answer_parsers, settings
from nvfp4_sgl.serving.tool_markup import MARK, TOKEN, Call, MarkupScanner

FORWARD_UNKNOWN = "SGLANG_FORWARD_UNKNOWN_TOOLS"
"""Environment variable of SGLang: a call of a function that the request does not declare is one nevertheless."""

SCANNERS = "nvfp4_sgl_scanners"
"""Attribute of an output parser: a :class:`Scanners`, or ``None`` where tool calls are not read."""

_scanned: ContextVar[tuple[Container[str] | None, bool]] = ContextVar("scanned", default=(None, False))
"""Arguments of the scanners of output parsers that are made: names of functions, and whether markup may be spelled."""


class Scanners:
    """The scanners of one answer's reasoning and content, and how many calls they have read."""

    def __init__(self, names: Container[str] | None, spelled: bool):
        self.reasoning, self.content = MarkupScanner(names), MarkupScanner(names, spelled=spelled)
        self._calls = 0

    def read(self, reasoning: str, content: str, *, final: bool = False) -> Any:
        """Read more of both; returns what is certain, as SGLang's ``RecipeOutputDelta``."""
        thought, calls = self.reasoning.feed(reasoning, final=final or bool(content))
        said, more = self.content.feed(content, final=final)
        pieces = [piece for call in calls + more for piece in self._pieces(call)]
        return answer_parsers.output_delta(thought, said, pieces)

    def _pieces(self, call: Call) -> Iterator[tuple[int, str, str | None]]:
        """Index, arguments and name of the pieces that streams send of a call."""
        yield self._calls, "", call.name
        yield self._calls, call.arguments, None
        self._calls += 1


class MarkingProcessor:
    """deepseek-recipe's ``StreamProcessor``, with :data:`MARK` in its chunks for each token of tool markup."""

    def __init__(self, processor: Any, token: int | None, tokens: Callable[[Sequence[int]], Any]):
        self._processor, self._token, self._tokens = processor, token, tokens

    @property
    def finished(self) -> bool:
        return bool(self._processor.finished)

    def finish(self) -> Any:
        return self._processor.finish()

    def push(self, chunk: Any) -> list[Any]:
        if chunk.kind != "tokens":
            return list(self._processor.push(chunk))
        chunks: list[Any] = []
        for run in split(chunk.token_ids, self._token):
            if not self._processor.finished:
                pushed = self._processor.push(self._tokens(run))
                chunks += map(MarkedChunk, pushed) if run == [self._token] else pushed
        return chunks


class MarkedChunk:
    """A chunk of deepseek-recipe's that ends with the text of the markup's token, marked."""

    def __init__(self, chunk: Any):
        self._chunk = chunk

    def to_json(self) -> str:
        answer = json.loads(self._chunk.to_json())
        delta = answer["choices"][0]["delta"]
        for name in ("reasoning_content", "content"):
            if (delta.get(name) or "").endswith(TOKEN):
                delta[name] = delta[name].removesuffix(TOKEN) + MARK
        return json.dumps(answer)


def split(ids: Sequence[int], token: int | None) -> Iterator[list[int]]:
    """``ids`` in runs, each ``token`` alone."""
    run: list[int] = []
    for one in ids:
        if one == token:
            if run:
                yield run
            yield [one]
            run = []
        else:
            run.append(one)
    if run:
        yield run


@contextlib.contextmanager
def declared(tools: Sequence[Any], choice: Any = None) -> Iterator[None]:
    """Output parsers made inside read calls of ``tools`` alone, each a tool of a chat or of ``/v1/responses``.

    choice: the request's ``tool_choice``. One that forces a call has a grammar of nothing else, by text: there the
    model may spell a tag in other tokens than its own.
    """
    names = {(getattr(tool, "function", None) or tool).name for tool in tools}
    forced = choice is not None and choice not in ("auto", "none")
    before = _scanned.set((None if settings.environment_flag(FORWARD_UNKNOWN) else names, forced))
    try:
        yield
    finally:
        _scanned.reset(before)


def init_output_parser(
    original: Callable[..., None],
    parser: Any,
    *args: Any,
    parse_tool_calls: bool,
    parse_json_output: bool = False,
    **kwargs: Any,
) -> None:
    """Hook around the making of an output parser: deepseek-recipe reads no tool calls, and no JSON.

    It would blank what stands around an object or an array: markup, and the whole of an answer in JSON of another type.
    SGLang has every answer in JSON written under a grammar, so there is nothing to look for.
    """
    other = not serves_our_model()
    ours = parse_tool_calls and not other
    options = {"parse_tool_calls": parse_tool_calls and other, "parse_json_output": parse_json_output and other}
    original(parser, *args, **options, **kwargs)
    setattr(parser, SCANNERS, Scanners(*_scanned.get()) if ours else None)
    if ours:
        answer_parsers.replace_processor(parser, TOKEN, MarkingProcessor)


def output_deltas(original: Callable[..., Any], parser: Any, chunks: list[Any]) -> Any:
    """Hook around what an output parser makes of deepseek-recipe's chunks."""
    delta = original(parser, chunks)
    scanners = getattr(parser, SCANNERS)
    return delta if scanners is None else scanners.read(delta.reasoning, delta.content)


def finish_output(original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the end of an answer: what was withheld is content."""
    delta = original(parser, *args, **kwargs)
    scanners = getattr(parser, SCANNERS)
    return delta if scanners is None else delta.merge(scanners.read("", "", final=True))


def chat_parser(original: Callable[..., Any], adapter: Any, request: Any) -> Any:
    """Hook around the output parser of a chat: only tools that it declares, in messages too, are called."""
    tools = [*(request.tools or ())]
    for message in request.messages:
        tools += getattr(message, "tools", None) or ()
    with declared(tools, request.tool_choice):
        return original(adapter, request)


def responses_parser(original: Callable[..., Any], adapter: Any, request: Any, *args: Any) -> Any:
    """As :func:`chat_parser`, for ``/v1/responses``."""
    with declared([tool for tool in request.tools or () if getattr(tool, "name", None)], request.tool_choice):
        return original(adapter, request, *args)


def parse_call_text(original: Callable[..., Any], adapter: Any, text: str, tools: Sequence[Any]) -> Any:
    """As :func:`chat_parser`, for ``/parse_function_call``."""
    with declared(tools or ()):
        return original(adapter, text, tools)
