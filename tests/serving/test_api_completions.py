"""``/v1/completions`` through the ``openai`` client, against the server's native ``/generate`` and its tokenizer."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.support.chat import MODEL, client, printable_bias

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

PROMPT = "Once there was a small house at the edge of the forest"
TOKENS = 32


@pytest.fixture(scope="module")
def bias(tokenizer) -> dict[str, int]:
    return printable_bias(tokenizer)


@pytest.fixture(scope="module")
def ask(server, bias) -> Any:
    """``ask(**fields)``: a greedy completion of :data:`PROMPT` in printable ASCII, unless told otherwise."""
    api = client(server)

    def complete(**fields: Any) -> Any:
        extra = {"logit_bias": bias, **fields.pop("extra_body", {})}
        defaults = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        return api.completions.create(**{**defaults, **fields}, extra_body=extra)

    return complete


@pytest.fixture(scope="module")
def native(server, bias) -> dict[str, Any]:
    """The same from ``/generate``: ids, log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "logit_bias": bias}
    body = {"text": PROMPT, "return_logprob": True, "top_logprobs_num": 3, "sampling_params": sampling}
    answer: dict[str, Any] = server.post("/generate", body)
    assert len(answer["output_ids"]) == TOKENS
    return answer


@pytest.fixture(scope="module")
def whole(ask) -> str:
    """The unconstrained answer, asked for once."""
    text: str = ask().choices[0].text
    return text


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_plain(ask, native, tokenizer):
    answer = ask()
    choice = answer.choices[0]
    assert choice.text == tokenizer.decode(native["output_ids"]) and choice.text.isascii()
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.prompt_tokens == len(tokenizer(PROMPT).input_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + TOKENS


def test_stream(ask, whole):
    """Chunks come one by one and add up to the unstreamed answer; usage closes the stream if asked for."""
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole
    texts = [chunk for chunk in chunks if chunk.choices]
    assert len(texts) >= TOKENS // 2
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_prompts_as_text_ids_or_list(ask, tokenizer, whole):
    ids = tokenizer(PROMPT).input_ids
    assert ask(prompt=ids).choices[0].text == whole
    several = ask(prompt=["Another prompt", PROMPT]).choices
    assert [choice.index for choice in several] == [0, 1]
    assert several[1].text == whole != several[0].text
    assert ask(prompt=[[7, 30, 31], ids]).choices[1].text == whole


def test_concurrent_streams(ask):
    prompts = [f"{PROMPT} number {n}" for n in range(8)]
    alone = [ask(prompt=prompt).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        streamed = list(threads.map(lambda prompt: text_of(ask(prompt=prompt, stream=True)), prompts))
    assert streamed == alone and len(set(alone)) > 1


def test_echo_returns_the_prompt_unchanged(ask):
    prompt = 'Grüße, 世界 🚀\n\t"quoted" <｜User｜> ﬁ e\u0301'
    answer = ask(prompt=prompt, echo=True, max_tokens=3).choices[0].text
    assert answer.startswith(prompt) and len(answer) > len(prompt)
    assert text_of(ask(prompt=prompt, echo=True, max_tokens=3, stream=True)) == answer


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_logprobs(ask, native):
    found = ask(logprobs=3).choices[0].logprobs
    expected = native["meta_info"]
    for ours, (value, _, _) in zip(found.token_logprobs, expected["output_token_logprobs"], strict=True):
        assert abs(ours - value) <= 1e-4
    assert set(found.text_offset) == {-1}  # docs/compatibility.md says so
    for token, best, rows in zip(found.tokens, found.top_logprobs, expected["output_top_logprobs"], strict=True):
        values = list(best.values())
        assert token == next(iter(best)) and values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert all(abs(a - row[0]) <= 1e-4 for a, row in zip(values, rows, strict=False))


def test_logprobs_in_a_stream(ask):
    chunks = [chunk.choices[0].logprobs for chunk in ask(logprobs=1, stream=True) if chunk.choices]
    streamed = [value for part in chunks if part for value in part.token_logprobs]
    whole = ask(logprobs=1).choices[0].logprobs.token_logprobs
    assert len(streamed) == len(whole) == TOKENS
    assert max(abs(a - b) for a, b in zip(streamed, whole, strict=True)) <= 1e-4


# --- sampling -----------------------------------------------------------------------------------------------------


def test_n_greedy_choices_are_equal(ask):
    answer = ask(n=3)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 1
    assert answer.usage.completion_tokens == 3 * TOKENS


def test_n_sampled_choices_differ(ask):
    choices = ask(n=4, temperature=1.5).choices
    assert sorted(choice.index for choice in choices) == [0, 1, 2, 3]
    assert len({choice.text for choice in choices}) > 1


def test_n_in_a_stream(ask, whole):
    """Chunks of several choices come interleaved, each under its index."""
    texts = ["", "", ""]
    for chunk in ask(n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [whole] * 3


def test_sampling_follows_the_distribution(ask):
    """How often the likeliest first token is drawn, in 128 draws, against its probability."""
    draws = 128
    first = ask(max_tokens=1, logprobs=1).choices[0]
    p = math.exp(first.logprobs.token_logprobs[0])
    assert 0.02 < p < 0.98, "choose another prompt: this one tells nothing"
    count = sum(choice.text == first.text for choice in ask(max_tokens=1, n=draws, temperature=1).choices)
    assert abs(count - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)) + 1


@pytest.mark.parametrize(
    "only", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}], ids=str
)
def test_narrow_sampling_is_greedy(only, ask, whole):
    assert ask(temperature=1, **only).choices[0].text == whole


def test_logit_bias_bans_and_forces(ask, native, bias):
    banned = native["output_ids"][0]
    answer = ask(max_tokens=8, extra_body={"logit_bias": {**bias, str(banned): -1000}, "return_token_ids": True})
    assert banned not in answer.choices[0].model_extra["token_ids"]
    forced = ask(max_tokens=5, extra_body={"logit_bias": {"97": 1000}, "return_token_ids": True})
    assert forced.choices[0].model_extra["token_ids"] == [97] * 5


def test_penalties_change_a_repetition(ask):
    """A token made very likely is repeated, until a penalty makes it less likely than others."""
    often = ask(extra_body={"logit_bias": {"97": 1000}}).choices[0].text
    penalised = ask(frequency_penalty=2, extra_body={"logit_bias": {"97": 12}}).choices[0].text
    assert len(set(often)) == 1 < len(set(penalised))


# --- where an answer ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_max_tokens(tokens, ask, whole):
    answer = ask(max_tokens=tokens)
    assert answer.usage.completion_tokens == tokens and answer.choices[0].finish_reason == "length"
    assert whole.startswith(answer.choices[0].text)


def test_end_token_ends_and_min_tokens_delays(ask, bias):
    eager = {**bias, "1": 1000}
    at_once = ask(extra_body={"logit_bias": eager})
    assert at_once.choices[0].text == "" and at_once.choices[0].finish_reason == "stop"
    assert at_once.usage.completion_tokens == 1
    later = ask(extra_body={"logit_bias": eager, "min_tokens": 6})
    assert later.usage.completion_tokens == 7 and later.choices[0].finish_reason == "stop"
    ignored = ask(max_tokens=9, extra_body={"logit_bias": eager, "ignore_eos": True})
    assert ignored.usage.completion_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("first", "length"), [(9, 1), (12, 3), (10, 30), (0, 4)])
def test_stop_string(first, length, stream, ask, whole):
    """The text ends before the stop string, wherever token borders are, and no stream shows a part of it."""
    stop = whole[first : first + length]
    expected = whole[: whole.index(stop)]
    if stream:
        chunks = [chunk for chunk in ask(stop=[stop], stream=True) if chunk.choices]
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = ask(stop=["never written \u2028", stop])
        choice = answer.choices[0]
        text, reason = choice.text, choice.finish_reason
        assert choice.model_extra["matched_stop"] == stop
        assert answer.usage.completion_tokens < TOKENS
    assert text == expected and reason == "stop"


def test_stop_string_is_kept_on_demand(ask, whole):
    stop = whole[12:15]
    kept = ask(stop=stop, extra_body={"no_stop_trim": True}).choices[0].text
    assert kept.startswith(whole[: whole.index(stop)] + stop)


def test_very_long_stop_strings_change_nothing(ask, whole):
    stops = [whole + "!" * 2000, "x" * 1500, "界" * 400]
    assert ask(stop=stops).choices[0].text == whole
    assert text_of(ask(stop=stops, stream=True)) == whole


def test_stop_token_ids(ask, native, tokenizer):
    ids = native["output_ids"]
    position = next(n for n in range(5, TOKENS) if ids[n] not in ids[:n])
    answer = ask(extra_body={"stop_token_ids": [ids[position]]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == tokenizer.decode(ids[:position])
    assert answer.usage.completion_tokens == position + 1


# --- grammars -----------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}


def check_against_schema(text: str) -> None:
    """Parsed and checked by hand, with nothing of the grammar's implementation."""
    value = json.loads(text)
    assert list(value) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    assert isinstance(value["name"], str) and len(value["name"]) <= 10
    assert type(value["count"]) is int and 0 <= value["count"] <= 99
    assert value["kind"] in ("red", "green")
    assert 1 <= len(value["tags"]) <= 3 and all(type(tag) is bool for tag in value["tags"])


@pytest.fixture(scope="module")
def dense(tokenizer) -> dict[str, int]:
    return printable_bias(tokenizer, spaces=False)


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_schema(temperature, ask, dense):
    extra = {"json_schema": json.dumps(SCHEMA), "logit_bias": dense}
    answer = ask(max_tokens=120, temperature=temperature, n=2, extra_body=extra)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_against_schema(choice.text)


def test_without_the_schema_it_is_no_json(ask, dense):
    with pytest.raises(json.JSONDecodeError):
        json.loads(ask(max_tokens=120, extra_body={"logit_bias": dense}).choices[0].text)


def test_regex_and_grammar(ask):
    pattern = "[0-9]{3}-(ab|cd){1,3}x"
    assert re.fullmatch(pattern, ask(extra_body={"regex": pattern, "logit_bias": {}}).choices[0].text)
    text = "née 世界 🚀"
    constrained = {"ebnf": f'root ::= "{text}"', "logit_bias": {}}
    assert ask(extra_body=constrained).choices[0].text == text
    chunks = [chunk.choices[0].text for chunk in ask(extra_body=constrained, stream=True) if chunk.choices]
    assert "".join(chunks) == text, "characters that span tokens must not be split in a stream"
    assert all("\ufffd" not in chunk for chunk in chunks)


def test_grammar_concerns_its_request_alone(ask, whole):
    constrained = {"ebnf": 'root ::= "a" [b-z]{20}'}
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda n: ask(extra_body=constrained if n % 2 else {}), range(6)))
    assert [answer.choices[0].text for answer in answers[::2]] == [whole] * 3
    assert all(answer.choices[0].text[0] == "a" and len(answer.choices[0].text) == 21 for answer in answers[1::2])


def test_model_list(server):
    assert [model.id for model in client(server).models.list()] != []


def test_errors_in_a_stream_reach_the_client(ask):
    """Refused before the first chunk: status 400, as without a stream."""
    with pytest.raises(openai.BadRequestError):
        ask(prompt=[30, 100_000], stream=True)
