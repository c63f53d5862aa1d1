"""``/v1/chat/completions`` through the ``openai`` client: prompts, answers, reasoning, tools.

What the prompt must look like is written out here from DeepSeek's published format. Answers are compared with the
token ids that the server returns with them, split and decoded by hand.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.chat import MODEL, client, joined, printable_bias

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TOKENS = 24
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
HELLO = {"role": "user", "content": "Grüße, 世界 🚀"}
THINKING = {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"}
"""Thinking without the paragraph that higher efforts put first."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "unit": {"type": "string", "enum": ["K", "C"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": True},
}


@pytest.fixture(scope="module")
def ask(server, tokenizer) -> Any:
    """``ask(messages, **fields)``: a greedy answer in printable ASCII, unless told otherwise."""
    api, bias = client(server), printable_bias(tokenizer)

    def complete(messages: Sequence[dict[str, Any]] = (HELLO,), **fields: Any) -> Any:
        extra = {"logit_bias": bias, **fields.pop("extra_body", {})}
        defaults = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
        return api.chat.completions.create(**{**defaults, **fields}, extra_body=extra)

    return complete


@pytest.fixture(scope="module")
def prompt_of(ask, tokenizer) -> Any:
    """``prompt_of(messages, **fields)``: the served prompt as text, whose ids are its only encoding."""

    def prompt(messages: Sequence[dict[str, Any]], **fields: Any) -> str:
        extra = {**fields.pop("extra_body", {}), "return_prompt_token_ids": True}
        answer = ask(messages, max_tokens=1, extra_body=extra, **fields)
        ids = answer.choices[0].model_extra["prompt_token_ids"]
        assert answer.usage.prompt_tokens == len(ids)
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        return text

    return prompt


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompt_of_one_turn(prompt_of):
    assert prompt_of([HELLO]) == f"{BOS}{USER}Grüße, 世界 🚀{ASSISTANT}{END_THINK}"


def test_prompt_with_system_and_history(prompt_of):
    """No newlines between turns; reasoning of earlier turns is dropped."""
    messages = [
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "assistant", "content": "Hello.", "reasoning_content": "Somebody greets me."},
        {"role": "user", "content": "And?\n"},
    ]
    history = f"{BOS}Be brief.{USER}Grüße, 世界 🚀{ASSISTANT}{END_THINK}Hello.{EOS}{USER}And?\n{ASSISTANT}"
    assert prompt_of(messages) == history + END_THINK
    assert prompt_of(messages, extra_body=THINKING) == history + THINK


def test_prompt_of_thinking_by_effort(prompt_of):
    end = f"{USER}Grüße, 世界 🚀{ASSISTANT}{THINK}"
    assert prompt_of([HELLO], extra_body=THINKING) == BOS + end
    for effort in ({}, {"reasoning_effort": "high"}):
        prompt = prompt_of([HELLO], extra_body={"chat_template_kwargs": {"thinking": True}, **effort})
        assert prompt.startswith(f"{BOS}Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
        assert prompt.endswith("\n\n" + end)
    assert prompt_of([HELLO], reasoning_effort="none") == f"{BOS}{USER}Grüße, 世界 🚀{ASSISTANT}{END_THINK}"


def test_prompt_with_tools(prompt_of):
    """Tools follow the system text; calls are DSML, their results one user turn in the order of the calls."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome","days":2}'}}
    other = {"id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": '{"sun": 1}'},
    ]
    prompt = prompt_of(messages, tools=[WEATHER, CLOCK])
    system, _, turns = prompt.partition(USER)
    assert system.startswith(f"{BOS}Be brief.\n\n## Tools\n\n")
    assert '"name": "get_weather"' in system and '"name": "clock"' in system and '["Paris", "Rome"]' in system
    assert turns == (
        f"Grüße, 世界 🚀{ASSISTANT}{END_THINK}\n\n<{DSML}tool_calls>\n"
        f'<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">Rome</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="clock">\n</{DSML}invoke>\n</{DSML}tool_calls>{EOS}'
        f'{USER}<tool_result>{{"sun": 1}}</tool_result>\n\n<tool_result>noon</tool_result>{ASSISTANT}{END_THINK}'
    )
    assert "## Tools" not in prompt_of([HELLO], tools=[CLOCK], tool_choice="none")


# --- answers ------------------------------------------------------------------------------------------------------


def test_answer(ask, server, tokenizer):
    """The text is that of the ids, and the ids are those of ``/generate`` after the same prompt."""
    answer = ask(extra_body={"return_token_ids": True}, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    ids = choice.model_extra["response_token_ids"]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == tokenizer.decode(ids) and not choice.message.tool_calls
    assert choice.message.model_extra["reasoning_content"] is None
    assert answer.usage.completion_tokens == len(ids) == TOKENS
    prompt = tokenizer.encode(f"{BOS}{USER}{HELLO['content']}{ASSISTANT}{END_THINK}", add_special_tokens=False)
    native = server.generate(prompt, TOKENS, logit_bias=printable_bias(tokenizer))
    assert native["output_ids"] == ids
    for ours, (value, token, _) in zip(
        choice.logprobs.content, native["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert abs(ours.logprob - value) <= 1e-4 and ours.token == tokenizer.decode([token])
        assert ours.top_logprobs[0].token == ours.token and len(ours.top_logprobs) == 2


def test_stream(ask):
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks, "content") == ask().choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) >= TOKENS // 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_several_choices(ask):
    choices = ask(n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert {choice.message.content for choice in choices} == {ask().choices[0].message.content}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(stream, ask):
    whole = ask().choices[0].message.content
    stop = whole[10:13]
    expected = whole[: whole.index(stop)]
    answer = ask(stop=stop, stream=stream)
    assert (joined(answer, "content") if stream else answer.choices[0].message.content) == expected


def test_continued_assistant_message(ask, prompt_of):
    """The last assistant turn stays open."""
    whole = ask().choices[0].message.content
    messages = [HELLO, {"role": "assistant", "content": whole[:5]}]
    prompt = prompt_of(messages, extra_body={"continue_final_message": True})
    assert prompt == f"{BOS}{USER}{HELLO['content']}{ASSISTANT}{END_THINK}{whole[:5]}"


def test_response_format(ask, tokenizer):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    dense = {"logit_bias": printable_bias(tokenizer, spaces=False)}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ask(response_format=wanted, max_tokens=60, extra_body=dense).choices[0]
    value = json.loads(answer.message.content)
    assert answer.finish_reason == "stop"
    assert set(value) == {"ok", "n"} and type(value["ok"]) is bool and type(value["n"]) is int
    chunks = ask(response_format=wanted, max_tokens=60, extra_body=dense, stream=True)
    assert joined(chunks, "content") == answer.message.content


# --- reasoning ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thoughtful(ask, tokenizer) -> Any:
    """Fields under which the model thinks for a while, stops thinking and goes on; and that answer."""
    end = tokenizer.convert_tokens_to_ids(END_THINK)
    bias = printable_bias(tokenizer, allowed=[END_THINK])
    for strength in itertools.count(0.0, 0.5):
        extra = {**THINKING, "logit_bias": {**bias, str(end): strength}, "return_token_ids": True}
        choice = ask(extra_body=extra).choices[0]
        ids = choice.model_extra["response_token_ids"]
        if end in ids[1:-3]:
            return extra, choice
        assert strength < 40, "the model never stops thinking"


def test_reasoning_is_separated(thoughtful, tokenizer):
    _, choice = thoughtful
    ids = choice.model_extra["response_token_ids"]
    border = ids.index(tokenizer.convert_tokens_to_ids(END_THINK))
    reasoning, content = tokenizer.decode(ids[:border]), tokenizer.decode(ids[border + 1 :])
    assert choice.message.model_extra["reasoning_content"] == reasoning != ""
    assert choice.message.content == content.replace(END_THINK, "") != ""


def test_reasoning_in_a_stream(thoughtful, ask):
    extra, choice = thoughtful
    extra = {name: value for name, value in extra.items() if name != "return_token_ids"}
    chunks = list(ask(extra_body=extra, stream=True))
    assert joined(chunks, "reasoning_content") == choice.message.model_extra["reasoning_content"]
    assert joined(chunks, "content") == choice.message.content


def test_reasoning_as_content_on_demand(thoughtful, ask):
    extra, choice = thoughtful
    message = ask(extra_body={**extra, "separate_reasoning": False}).choices[0].message
    assert message.content.startswith(choice.message.model_extra["reasoning_content"])
    assert message.content.endswith(choice.message.content)
    assert not message.model_extra.get("reasoning_content")


def test_unfinished_reasoning_is_no_content(ask):
    message = ask(extra_body=THINKING).choices[0].message
    assert message.model_extra["reasoning_content"] and not message.content


def test_separate_reasoning_of_a_text(server):
    body = {"reasoning_parser": "deepseek-v4", "text": f"{THINK}one, two{END_THINK}three"}
    answer = server.post("/separate_reasoning", body)
    assert (answer["reasoning_text"], answer["text"]) == ("one, two", "three")


# --- tools --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calling(tokenizer) -> dict[str, Any]:
    """Under a tool's grammar: write the markup as the one token that it is, and no more whitespace than needed.

    The grammar leaves open whether a parameter is marked as text or as JSON; these are text, and a trained model knows.
    """
    bias = printable_bias(tokenizer, spaces=False, allowed=[DSML])
    liked = [DSML, *(text for text in ("t", "tr", "tru", "true") if text in tokenizer.get_vocab())]
    return {"logit_bias": bias | dict.fromkeys(map(str, tokenizer.convert_tokens_to_ids(liked)), 100)}


def check_weather_call(call: Any) -> None:
    assert call.type == "function" and call.id and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and arguments["unit"] in ("K", "C") and len(arguments) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_forced_tool_call(choice, ask, calling):
    answer = ask(
        tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=200, extra_body=calling
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and not (answer.message.content or "").strip()
    assert len(answer.message.tool_calls) == 1
    check_weather_call(answer.message.tool_calls[0])


def test_forced_tool_call_in_a_stream(ask, calling):
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    expected = ask(**fields, extra_body=calling).choices[0].message.tool_calls[0].function
    chunks = [chunk for chunk in ask(**fields, extra_body=calling, stream=True) if chunk.choices]
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert [piece.function.name for piece in pieces if piece.function.name] == [expected.name]
    assert "".join(piece.function.arguments or "" for piece in pieces) == expected.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_too_large_for_a_grammar(ask):
    parameters = {"type": "object", "properties": {"which": {"enum": ["x" * 70000]}}}
    large = {"type": "function", "function": {"name": "large", "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="tools: the structural_tag that tool_choice makes of them"):
        ask(tools=[large], tool_choice="required", max_tokens=1)


def test_no_call_unless_the_model_writes_one(ask):
    for choice in ("auto", "none"):
        message = ask(tools=[WEATHER], tool_choice=choice).choices[0].message
        assert not message.tool_calls and message.content


def test_tool_calls_of_a_text(server):
    """Raw and JSON parameters, two calls, text before them; a text without markup is left alone."""
    text = (
        f'I look.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">"Paris" & 世界</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="clock">\n</{DSML}invoke>\n</{DSML}tool_calls>'
    )
    body = {"tool_call_parser": "deepseekv4", "tools": [WEATHER, CLOCK], "text": text}
    answer = server.post("/parse_function_call", body)
    assert answer["normal_text"].strip() == "I look."
    calls = [(call["name"], json.loads(call["parameters"] or "{}")) for call in answer["calls"]]
    assert calls == [("get_weather", {"city": '"Paris" & 世界', "days": 3}), ("clock", {})]
    plain = server.post("/parse_function_call", {**body, "text": "No call, <b>only</b> text."})
    assert plain["calls"] == [] and plain["normal_text"] == "No call, <b>only</b> text."


def test_conversations_at_the_same_time(ask, calling, thoughtful):
    """Plain, thinking and calling requests in one batch keep to themselves."""
    extra, thought = thoughtful
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    plain = ask().choices[0].message.content
    requests = [{}, {"extra_body": extra}, {**tools, "extra_body": calling}] * 2
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [answer.choices[0].message for answer in threads.map(lambda fields: ask(**fields), requests)]
    for normal, thinking, call in (answers[:3], answers[3:]):
        assert normal.content == plain
        assert thinking.model_extra["reasoning_content"] == thought.message.model_extra["reasoning_content"]
        check_weather_call(call.tool_calls[0])
