"""A checkpoint with a chat template is served as one without: DeepSeek's encoder and parsers, and tool calls by them.

Its path has a word in it from which SGLang would conclude another template. The model's answers are forced by grammars.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat import MODEL, client, joined
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{ '<｜User｜>' + message['content'] }}{%- endfor %}"
    "{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{%- endif %}"
)
"""SGLang concludes from it that answers begin with ``<think>``."""

PROMPT = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
DSML = "｜DSML｜"
DSML_ID = 8
CALL = (
    f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="x" string="true">1</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}tool_calls>"
)
MALFORMED = {
    "JSON": CALL.replace(f'<{DSML}parameter name="x" string="true">1</{DSML}parameter>', '{"x":"1"}'),
    "bare word": CALL.replace('string="true">1', 'string="false">hello'),
    "no string=": CALL.replace(' string="true"', ""),
    "undeclared": CALL.replace('"f"', '"g"'),
    "given twice": CALL.replace("\n</", f'\n<{DSML}parameter name="x" string="true">2</{DSML}parameter>\n</', 1),
    "cut off": CALL[: CALL.index(f"</{DSML}invoke")],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}},
    }
]


def literally(text: str) -> dict[str, Any]:
    """Fields of a request that is answered with ``text``, markup in its own token."""
    return {"ebnf": f"root ::= {json.dumps(text, ensure_ascii=False)}", "logit_bias": {str(DSML_ID): 100}}


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Server], tiny_checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Server:
    path = tmp_path_factory.mktemp("check") / "my-points"
    shutil.copytree(tiny_checkpoints("nvfp4-full"), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    default = literally(f"I call{MALFORMED['bare word']}")
    return serve(path, "--preferred-sampling-params", json.dumps(default))


def ask(server: Server, text: str, **fields: Any) -> Any:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 300,
    }
    return client(server).chat.completions.create(**body, **fields, extra_body=literally(text))


def test_the_template_changes_nothing(server: Server, tiny_checkpoints: Callable[[str], Path]) -> None:
    info = server.get("/server_info")
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("deepseek-v4", "deepseekv4")
    assert server.text().count("chat template is not used") == 1
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "return_prompt_token_ids": True}
    ids = server.post("/v1/chat/completions", {"model": MODEL, **chat})["choices"][0]["prompt_token_ids"]
    assert AutoTokenizer.from_pretrained(tiny_checkpoints("nvfp4-full")).decode(ids) == PROMPT


def test_answers_keep_to_their_grammar(server: Server) -> None:
    answer = ask(server, "It is <b>so</b>.").choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is <b>so</b>.", "stop")
    assert not answer.message.model_extra.get("reasoning_content")


def test_a_call_is_read(server: Server) -> None:
    answer = ask(server, f"I call{CALL} now", tools=TOOLS).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x": "1"}')
    assert (answer.message.content, answer.finish_reason) == ("I call now", "tool_calls")
    chunks = list(ask(server, f"I call{CALL} now", tools=TOOLS, stream=True))
    pieces = [piece.function for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert joined(chunks, "content") == "I call now" and [piece.name for piece in pieces] == ["f", None]
    assert "".join(piece.arguments or "" for piece in pieces) == '{"x": "1"}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("fault", ["no string=", "cut off"])
def test_malformed_markup_is_content(fault: str, server: Server) -> None:
    text = f"I call{MALFORMED[fault]}"
    answer = ask(server, text, tools=TOOLS).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")
    chunks = list(ask(server, text, tools=TOOLS, stream=True))
    assert joined(chunks, "content") == text and chunks[-1].choices[0].finish_reason == "stop"
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_malformed_markup_in_responses(server: Server) -> None:
    """The answer is the one of ``--preferred-sampling-params``."""
    api = client(server)
    tools = [{**TOOLS[0]["function"], "type": "function"}]
    fields: dict[str, Any] = {
        "model": api.models.list().data[0].id,
        "input": "Hi",
        "max_output_tokens": 300,
        "tools": tools,
    }
    answer = api.responses.create(**fields)
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == f"I call{MALFORMED['bare word']}"
    events = list(api.responses.create(**fields, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text


def test_malformed_markup_in_a_text(server: Server) -> None:
    body = {"tool_call_parser": "deepseekv4", "tools": TOOLS}
    assert len(server.post("/parse_function_call", {**body, "text": CALL})["calls"]) == 1
    for text in (f"I call{markup}" for markup in MALFORMED.values()):
        assert server.post("/parse_function_call", {**body, "text": text}) == {"normal_text": text, "calls": []}
