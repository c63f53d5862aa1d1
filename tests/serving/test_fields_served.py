"""Each field of the tables at a server: values inside its range are served, values outside are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nvfp4_sgl.serving.endpoints import PATHS, Kind
from nvfp4_sgl.serving.fields.bodies import BODIES
from nvfp4_sgl.serving.fields.checks import depth_of
from nvfp4_sgl.serving.fields.field import Field, Table, Verdict
from nvfp4_sgl.serving.fields.generate import PER_PROMPT, SAMPLING_PARAMS
from tests.support.golden import Golden
from tests.support.posting import Answer, post, post_all
from tests.support.request_bodies import BASES, PROMPT, SAMPLING
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

UP_TO_THE_MODEL = {
    *("max_new_tokens", "min_new_tokens", "logprob_start_len", "top_logprobs_num"),
    *("json_schema", "structural_tag", "ebnf", "return_flat_raw_top_logprobs_b64", "rid", "text", "input_ids"),
    *("prompt", "messages", "tools", "tool_choice", "reasoning_effort", "items", "label_token_ids", "query"),
    *("score_extraction_token", "temperature", "continue_final_message", "add_generation_prompt", "tokens"),
}
"""Fields of which some values inside their range are refused: for the model's size, or for what they go with."""


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Server]:
    """The server, whose answers must be the same after all of this."""
    server: Server = serve(checkpoint)
    before = Golden.ask(server)
    yield server
    before.assert_same(Golden.ask(server))


def body(path: str, name: str, value: Any) -> dict[str, Any]:
    """A body of ``path`` with a field, and of ``/generate`` with as many prompts as the field has entries."""
    base = {**BASES[path], name: value}
    if path == "/generate" and name in PER_PROMPT and depth_of(value) > PER_PROMPT[name]:
        base["input_ids"] = [PROMPT] * max(1, len(value))
    if name == "text" and path == "/generate":
        del base["input_ids"]
    if name == "messages":
        base.pop("prompt", None)
    return base


def sampling(name: str, value: Any) -> dict[str, Any]:
    short = {"regex": "ab"} if (name, value) == ("max_new_tokens", None) else {}
    return {"input_ids": PROMPT, "sampling_params": {**SAMPLING, **short, name: value}}


def values(table: Table, *, inside: bool) -> Iterator[tuple[str, Field, Any]]:
    for name, field in table.items():
        if inside and field.null:
            yield name, field, None
        if field.check is not None:
            yield from ((name, field, value) for value in (field.check.inside if inside else field.check.outside))
        elif not inside:
            yield name, field, "x"


CASES = ("sampling_params", *BASES)


def ask(server: Server, which: str, *, inside: bool) -> Sequence[tuple[str, Field, Answer]]:
    within = which == "sampling_params"
    path = "/generate" if within else which
    asked = list(values(SAMPLING_PARAMS if within else BODIES[path], inside=inside))
    bodies = (sampling(name, value) if within else body(path, name, value) for name, _, value in asked)
    answers = post_all(server, ((path, one) for one in bodies), admin=PATHS[path] is Kind.ADMINISTRATIVE)
    found = [(name, field, answer) for (name, field, _), answer in zip(asked, answers, strict=True)]
    assert server.is_ready()
    return found


@pytest.mark.parametrize("which", CASES)
def test_values_inside_are_served(which: str, server: Server) -> None:
    if which == "/pause_generation":
        return  # whoever pauses a server must let it go on: test_a_pause
    for name, field, answer in ask(server, which, inside=True):
        may_fail = (
            which == "/abort_request"
            or name in UP_TO_THE_MODEL
            or (field.verdict is Verdict.OFFERED and not field.is_offered)
        )
        assert answer.status == 200 or (may_fail and answer.is_refusal), answer


@pytest.mark.parametrize("which", CASES)
def test_values_outside_are_refused_by_name(which: str, server: Server) -> None:
    for name, _, answer in ask(server, which, inside=False):
        assert answer.status == 400 and answer.is_refusal and name in answer.text, answer


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract", None])
def test_a_pause(mode: str | None, server: Server) -> None:
    assert post(server, "/pause_generation", {"mode": mode} if mode else {}, admin=True).status == 200
    assert post(server, "/continue_generation", {}, admin=True).status == 200
    assert post(server, "/generate", BASES["/generate"]).status == 200


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
TEXTS = ("", "x", '{"name": "f", "arguments": {"x": 1}}', "a</think>b", "<tool_call>f</tool_call>")


def test_only_this_models_parsers_run(server: Server) -> None:
    """Others' regular expressions may take for ever: this text did, by ``pythonic``."""
    endless = "[f(" + "a=," * 40 + "!"
    for name in ("pythonic", "no such parser", "deepseekv32"):
        answer = post(server, "/parse_function_call", {"text": endless, "tools": TOOLS, "tool_call_parser": name})
        assert answer.status == 400 and "deepseekv4" in answer.text
    answer = post(server, "/separate_reasoning", {"text": "x", "reasoning_parser": "deepseek-r1"})
    assert answer.status == 400 and "deepseek-v4" in answer.text
    texts = (*TEXTS, endless, "word " * 13107, "<｜DSML｜tool_calls>\n" * 3000)
    calls = [{"text": text, "tools": TOOLS, "tool_call_parser": "deepseekv4"} for text in texts]
    requests: list[tuple[str, Any]] = [("/parse_function_call", body) for body in calls]
    requests += [("/separate_reasoning", {"text": text, "reasoning_parser": "deepseek-v4"}) for text in texts]
    for answer in post_all(server, requests):
        assert answer.status == 200, answer
    longer = {"text": "x" * (2**16 + 1), "tools": [], "tool_call_parser": "deepseekv4"}
    assert post(server, "/parse_function_call", longer).status == 400


@pytest.mark.parametrize("tokens", [[-1], [512], [[30], [512]], [2**40]])
def test_ids_outside_the_vocabulary_are_no_text(tokens: Any, server: Server) -> None:
    for path in ("/detokenize", "/v1/detokenize"):
        answer = post(server, path, {"tokens": tokens})
        assert answer.status == 400 and "token id" in answer.text
    assert post(server, "/detokenize", {"tokens": [0, 511]}).status == 200


def test_tokenize_and_models_say_the_same_length(server: Server) -> None:
    length = server.get("/v1/models")["data"][0]["max_model_len"]
    assert server.post("/tokenize", {"prompt": "x"})["max_model_len"] == length
