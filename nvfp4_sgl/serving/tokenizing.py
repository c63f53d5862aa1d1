"""Hooks that take SGLang's tokenising, and rendering of chats, out of the front end's event loop.

Without them one long text stops every other request, ``/health`` and SIGTERM for as long as it takes. Text that is
longer than any prompt is refused first. Every place where SGLang's front end tokenises is in a table of
``tests/serving/test_tokenizing_places.py``, with the hook that covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from nvfp4_sgl.serving.requests import serves_our_model, tokens_fault
from nvfp4_sgl.serving.sglang import front_end, http_server
from nvfp4_sgl.serving.text_limits import TextLimit, contents, longest_token, score_fault
from nvfp4_sgl.serving.workers import LONG_BODY_BYTES, ClientGone, ClientLeft, in_worker, run_to_end

TOKENISED_APART = ("score_extraction_token", "query_embed_overrides", "item_embed_overrides")
"""Fields of ``/v1/score`` with which SGLang tokenises texts in the event loop."""

_limit: TextLimit | None = None


def limit_texts(manager: Any) -> None:
    """Bound texts by the tokenizer and the pool of SGLang's ``TokenizerManager``; not where it cuts prompts short."""
    global _limit
    backend = getattr(manager.tokenizer, "backend_tokenizer", None)
    longest = longest_token(backend) if backend is not None else None
    if longest is not None and not manager.allow_auto_truncate:
        _limit = TextLimit(manager.model_config.context_len, longest)


def require_short(name: str, *texts: Any) -> None:
    """:class:`ValueError`, which becomes status 400, if one of ``texts`` is longer than a prompt can be."""
    for text in texts:
        if _limit is not None and isinstance(text, str) and (fault := _limit.text_fault(name, [text])):
            raise ValueError(fault)


def pieces(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """``texts`` in groups that take little time each, so that a client's departure is seen between them."""
    group: list[Any] = []
    length = 0
    for text in texts:
        group.append(text)
        length += len(text)
        if length > LONG_BODY_BYTES:
            yield group
            group, length = [], 0
    if group:
        yield group


async def tokenize_texts(original: Callable[..., Any], manager: Any, texts: Any, cross_encoder: bool = False) -> Any:
    """Hook around tokenising for ``/generate`` and what is built on it."""
    if not serves_our_model() or not texts or cross_encoder:
        return await original(manager, texts, cross_encoder)
    single = isinstance(texts, str)
    require_short("text", *([texts] if single else texts))
    if single and manager.async_dynamic_batch_tokenizer is not None:  # has a thread of its own
        return await original(manager, texts)
    if single:
        return await in_worker(run_to_end, original, manager, texts)
    ids: list[Any] = []
    for group in pieces(texts):
        ids += (await in_worker(run_to_end, original, manager, group))[0]
    return ids, None


async def tokenize(original: Callable[..., Any], serving: Any, adapted: Any, request: Any, raw: Any) -> Any:
    """Hook around ``/tokenize``; its answer is written in the worker, too, since it may hold millions of ids."""
    if not serves_our_model():
        return await original(serving, adapted, request, raw)
    prompt = request.prompt
    batch = isinstance(prompt, list)
    require_short("prompt", *(prompt if batch else [prompt]))
    answers = []
    for group in pieces(prompt) if batch and prompt else [prompt]:
        asked = request.model_copy(update={"prompt": group})
        answers.append(await in_worker(run_to_end, original, serving, asked, asked, raw))
        if not hasattr(answers[-1], "tokens"):
            return answers[-1]  # an error
    return await in_worker(joined, answers)


def joined(answers: Sequence[Any]) -> Any:
    """The HTTP response of ``/tokenize`` for answers to parts of a batch, or to one request."""
    first, *others = answers
    for other in others:
        first.tokens += other.tokens
        first.count += other.count
    return http_server.json_response(first)


async def detokenize(original: Callable[..., Any], serving: Any, adapted: Any, request: Any, raw: Any) -> Any:
    """Hook around ``/detokenize``."""
    if not serves_our_model():
        return await original(serving, adapted, request, raw)
    tokens = request.tokens
    for ids in tokens if tokens and isinstance(tokens[0], list) else [tokens]:
        if _limit is not None and (fault := _limit.ids_fault("tokens", ids)):
            raise ValueError(fault)
    if fault := tokens_fault(request.tokens, serving.tokenizer_manager.model_config.vocab_size):
        raise ValueError(fault)
    return await in_worker(run_to_end, original, serving, adapted, request, raw)


async def score(original: Callable[..., Any], serving: Any, adapted: Any, request: Any, raw: Any) -> Any:
    """Hook around ``/v1/score``: what it makes of query and items is tokenised as prompts of ``/generate`` are."""
    if serves_our_model():
        if fault := score_fault(_limit, request.query, request.items):
            raise ValueError(fault)
        for name in TOKENISED_APART if isinstance(request.query, str) else ():
            if getattr(request, name) is not None:
                raise ValueError(f"{name}: not offered for texts; send query and items as token ids")
    return await original(serving, adapted, request, raw)


# --- chats ------------------------------------------------------------------------------------------------------


_converted: dict[int, Future[Any]] = {}
"""Chats converted to prompts in a worker, by the ``id`` of the request, until SGLang's handler asks for them."""


async def _convert_first(chat: Any, request: Any, raw: Any, handle: Callable[[], Any]) -> Any:
    """Convert ``request`` in a worker, then ``handle`` it."""
    if front_end.chat_fault(chat, request):
        return await handle()  # which says so
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(await in_worker(front_end.converted_chat, chat, request, raw))
    except Exception as error:
        outcome.set_exception(error)
    _converted[id(request)] = outcome
    try:
        return await handle()
    finally:
        _converted.pop(id(request), None)


async def chat(original: Callable[..., Any], serving: Any, request: Any, raw: Any) -> Any:
    """Hook around SGLang's handler of OpenAI's requests, for chats."""
    if not serves_our_model() or not front_end.serves_chats(serving):
        return await original(serving, request, raw)
    return await _convert_first(serving, request, raw, lambda: original(serving, request, raw))


async def messages(original: Callable[..., Any], serving: Any, request: Any, anthropic: Any, raw: Any) -> Any:
    """Hook around SGLang's handlers of ``/v1/messages``, which convert in the event loop."""
    if not serves_our_model():
        return await original(serving, request, anthropic, raw)
    chat = serving.openai_serving_chat
    return await _convert_first(chat, request, raw, lambda: original(serving, request, anthropic, raw))


def convert_chat(original: Callable[..., Any], serving: Any, request: Any, raw: Any = None) -> Any:
    """Hook around the conversion of a chat: what :func:`_convert_first` has made of it, if it has."""
    outcome = _converted.pop(id(request), None)
    return original(serving, request, raw) if outcome is None else outcome.result()


async def aside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around a coroutine that waits for nothing but renders and tokenises a chat."""
    if not serves_our_model():
        return await original(*args, **kwargs)
    try:
        return await in_worker(run_to_end, partial(original, *args, **kwargs))
    except ClientLeft as left:
        raise ClientGone from left


def encode_chat(original: Callable[..., Any], recipe: Any, body: Any, **kwargs: Any) -> Any:
    """Hook around SGLang's call of deepseek-recipe."""
    if _limit is not None and (fault := _limit.text_fault("messages", contents(body["messages"]))):
        raise ValueError(fault)
    return original(recipe, body, **kwargs)


HOOKS: dict[str, Callable[..., Any]] = {
    "tokenize_texts": tokenize_texts,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "score": score,
    "openai_request": chat,
    "messages": messages,
    "messages_stream": messages,
    "convert_chat": convert_chat,
    "count_tokens": aside,
    "responses": aside,
    "encode_chat": encode_chat,
}
"""Hooks of the front end, by their names in :data:`nvfp4_sgl.serving.sglang.hooked.HOOKS`."""
