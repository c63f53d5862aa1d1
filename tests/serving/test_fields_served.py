"""Each field of the tables at a server: values inside its range are served, values outside are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.serving.fields.checks import depth_of
from nvfp4_sgl.serving.fields.field import Field, Table, Verdict
from nvfp4_sgl.serving.fields.generate import GENERATE, PER_PROMPT, SAMPLING_PARAMS
from tests.support.golden import Golden
from tests.support.posting import Answer, post, post_all
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SAMPLING = {"max_new_tokens": 2, "temperature": 0}
UP_TO_THE_MODEL = {
    *("max_new_tokens", "min_new_tokens", "logprob_start_len", "top_logprobs_num"),
    *("json_schema", "structural_tag", "ebnf", "return_flat_raw_top_logprobs_b64", "rid", "text", "input_ids"),
}
"""Fields of which some values inside their range are refused: for the model's size, or for what they go with."""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints) -> Path:
    return tiny_checkpoints("nvfp4-full")


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Server]:
    """The server, whose answers must be the same after all of this."""
    server: Server = serve(checkpoint)
    before = Golden.ask(server)
    yield server
    before.assert_same(Golden.ask(server))


def generate(name: str, value: Any) -> dict[str, Any]:
    """A body of ``/generate`` with a field, and with as many prompts as it has entries."""
    prompts: Any = [30, 31, 32]
    if name in PER_PROMPT and depth_of(value) > PER_PROMPT[name]:
        prompts = [prompts] * max(1, len(value))
    body = {"sampling_params": SAMPLING, name: value}
    return body if name in ("text", "input_ids") else {"input_ids": prompts, **body}


def sampling(name: str, value: Any) -> dict[str, Any]:
    short = {"regex": "ab"} if (name, value) == ("max_new_tokens", None) else {}
    return {"input_ids": [30, 31, 32], "sampling_params": {**SAMPLING, **short, name: value}}


def values(table: Table, *, inside: bool) -> Iterator[tuple[str, Field, Any]]:
    for name, field in table.items():
        if inside and field.null:
            yield name, field, None
        if field.check is not None:
            yield from ((name, field, value) for value in (field.check.inside if inside else field.check.outside))
        elif not inside:
            yield name, field, "x"


CASES = {"/generate": (GENERATE, generate), "sampling_params": (SAMPLING_PARAMS, sampling)}


def ask(server: Server, which: str, *, inside: bool) -> Sequence[tuple[str, Field, Answer]]:
    table, body = CASES[which]
    asked = list(values(table, inside=inside))
    answers = post_all(server, (("/generate", body(name, value)) for name, _, value in asked))
    found = [(name, field, answer) for (name, field, _), answer in zip(asked, answers, strict=True)]
    assert post(server, "/health_generate", {}).status in (200, 405)
    assert server.is_ready()
    return found


@pytest.mark.parametrize("which", CASES)
def test_values_inside_are_served(which: str, server: Server) -> None:
    for name, field, answer in ask(server, which, inside=True):
        may_fail = name in UP_TO_THE_MODEL or (field.verdict is Verdict.OFFERED and not field.is_offered)
        assert answer.status == 200 or (may_fail and answer.is_refusal), answer


@pytest.mark.parametrize("which", CASES)
def test_values_outside_are_refused_by_name(which: str, server: Server) -> None:
    for name, _, answer in ask(server, which, inside=False):
        assert answer.status == 400 and answer.is_refusal and name in answer.text, answer
