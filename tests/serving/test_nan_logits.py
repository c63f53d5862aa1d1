"""A request whose logits are NaN or infinite fails; its neighbours, the server and the prefix cache do not.

On real servers a fault is planted (``tests/support/planted_faults``): while a file is there, the streams of one token
id are NaN, and so are the keys and values that are made of them.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl.ops.greedy import FAILED, greedy_tokens
from nvfp4_sgl.serving import grammars
from nvfp4_sgl.serving.finite_logits import check_token_ids, has_failed, sample, update_finish_state
from nvfp4_sgl.serving.sglang import scheduling
from tests.support.golden import TOLERANCE
from tests.support.logprobs import flush
from tests.support.prompts import draw_ids
from tests.support.server import Server

FEW = 65
"""Prompts are drawn from ids below this, so that answers have tokens that no prompt has."""

PROMPT, TOKENS = 300, 12
"""More than a page of a prompt; the chunks of the second server are a page each."""
MARK = 300
"""A token that a prompt holds and nothing else."""


def some_rows() -> tuple[torch.Tensor, list[bool]]:
    """Rows of logits with outliers, and which of them cannot be sampled from."""
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(3)) * 30
    logits[0, ::7] = float("-inf")
    logits[1, 1:] = float("-inf")
    logits[2, 5], logits[2, 6] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    logits[3, 999] = float("nan")
    logits[4, 0] = float("inf")
    logits[5] = float("-inf")
    logits[6] = float("nan")
    logits[7, 3], logits[7, 4] = float("-inf"), float("nan")
    return logits, [False, False, False, True, True, True, True, True, False]


def test_rows_that_are_not_finite() -> None:
    logits, expected = some_rows()
    given = logits.clone()
    tokens, failed = greedy_tokens(logits)
    assert failed.tolist() == expected
    assert logits[failed].eq(0).all() and torch.equal(logits[~failed], given[~failed])
    assert tokens.dtype == torch.int64 and torch.equal(tokens, given.argmax(-1).masked_fill(failed, FAILED))
    assert [len(found) for found in greedy_tokens(torch.empty(0, 10))] == [0, 0]


def how(rows: int, **fields: Any) -> Any:
    """How SGLang samples a batch: greedily unless ``fields`` say otherwise."""
    ones = torch.ones(rows)
    greedy = {"is_all_greedy": True, "is_any_greedy": True}
    needs = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), False)
    values: dict[str, Any] = {"temperatures": ones[:, None], "top_ps": ones, "top_ks": ones.int(), "min_ps": 0 * ones}
    return scheduling.sampling_info(**(values | greedy | needs | {"vocab_size": 1000, "device": "cpu"} | fields))


def test_every_sampler_gets_rows_that_it_can_sample_from() -> None:
    logits, expected = some_rows()
    for dtype in (torch.int32, torch.int64):

        def multinomial(sampler: Any, output: Any, *_: Any, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.multinomial(output.next_token_logits.softmax(-1), 1)[:, 0].to(dtype)

        output = SimpleNamespace(next_token_logits=logits.clone())
        ids = sample(multinomial, None, output, how(len(logits), is_all_greedy=False), False)
        assert ids.dtype == dtype and ids.eq(FAILED).tolist() == expected and ids[1] == 0


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": True},
        {"logprob_logits": torch.zeros(9, 1000)},
        {"has_custom_logit_processor": True},
        {"sampling_mask_batch_indices": torch.tensor([1])},
        {"is_all_greedy": False},
    ],
    ids=lambda asked: next(iter(asked), "nothing"),
)
def test_greedy_batches_are_sampled_by_the_check(asked: dict[str, Any]) -> None:
    """SGLang's sampler is asked where it does more than to take the largest logits; the tokens are the same."""
    logits, expected = some_rows()
    fields = dict(asked)
    logprobs = fields.pop("logprobs", False)
    rest = {"logprob_logits": fields.pop("logprob_logits")} if "logprob_logits" in fields else {}
    asks, agreed = [], []
    sampler = SimpleNamespace(_sync_token_ids_across_tp=lambda tokens, info: agreed.append(tokens))

    def largest(sampler: Any, output: Any, *_: Any, **__: Any) -> torch.Tensor:
        asks.append(output)
        return output.next_token_logits.argmax(-1)

    output = SimpleNamespace(next_token_logits=logits.clone())
    ids = sample(largest, sampler, output, how(len(logits), **fields), logprobs, [], [], None, **rest)
    assert torch.equal(ids, logits.argmax(-1).masked_fill(torch.tensor(expected), FAILED))
    assert (len(asks), len(agreed)) == ((0, 1) if asked == {} else (1, 0))


def test_what_becomes_of_a_failed_request() -> None:
    """Ended by an error, with valid ids for the detokenizer and no page for the cache; others are left alone."""

    def outside(request: Any, tokens: list[int]) -> bool:
        return any(not 0 <= token < 500 for token in tokens)

    def scheduled(*answer: int) -> SimpleNamespace:
        return SimpleNamespace(
            origin_input_ids=[7] * 20,
            output_ids=[*answer],
            return_logprob=True,
            grammar=None,
            sampling_params=SimpleNamespace(min_new_tokens=5, stop_token_ids=None),
        )

    failed, well = scheduled(3, 4, FAILED), scheduled(3, 4, 5)
    assert check_token_ids(outside, failed, [FAILED]) and not check_token_ids(outside, well, [5])
    assert has_failed(failed) and not has_failed(well) and vars(well) == vars(scheduled(3, 4, 5))
    reason = failed.finished_reason.to_json()
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert "position 22 (token 3 of the answer)" in reason["message"]
    assert failed.output_ids == [3, 4, 0] and failed.skip_radix_cache_insert and not failed.return_logprob


@pytest.mark.parametrize(("grammar", "stops"), [(object(), None), (None, {1, 2})], ids=["grammar", "stop_token_ids"])
@pytest.mark.parametrize(("least", "named"), [(3, True), (2, False), (0, False)])
def test_an_end_before_the_least_tokens(least: int, named: bool, grammar: Any, stops: set[int] | None) -> None:
    """The third token may only be the end, which ``min_new_tokens`` forbids: the error names the field."""
    request: Any = SimpleNamespace(
        origin_input_ids=[7] * 20,
        output_ids=[3, 4, FAILED],
        return_logprob=True,
        grammar=grammar,
        sampling_params=SimpleNamespace(min_new_tokens=least, stop_token_ids=stops),
    )
    assert check_token_ids(lambda *_: True, request, [FAILED])
    message = request.finished_reason.to_json()["message"]
    words = f"min_new_tokens: found {least}, and a grammar or stop_token_ids that allow nothing but the end"
    assert message.startswith(words) == named
    assert "position 22 (token 3 of the answer)" in message and "only this request has failed" in message.lower()


def test_an_abort_does_not_hide_the_id() -> None:
    """The request fails all the same; an abort of one with valid ids, or of one without new ids, is left alone."""

    def scheduled(*answer: int, ended: bool = False) -> Any:
        request = SimpleNamespace(
            origin_input_ids=[7],
            output_ids=[*answer],
            return_logprob=True,
            to_finish="abort",
            finished=lambda: ended,
            grammar=None,
            sampling_params=SimpleNamespace(min_new_tokens=0, stop_token_ids=None),
        )
        request._check_vocab_boundary_finish = lambda tokens: check_token_ids(
            lambda _, tokens: min(tokens, default=0) < 0, request, tokens
        )
        return request

    left_alone: list[Any] = []
    failed, well, ended = scheduled(3, FAILED), scheduled(3, 4), scheduled(3, FAILED, ended=True)
    nothing_new, waiting = scheduled(3, FAILED), scheduled()
    for request in (failed, well, ended, waiting):
        update_finish_state(lambda request, _: left_alone.append(request), request)
    update_finish_state(lambda request, _: left_alone.append(request), nothing_new, 0)
    assert [id(request) for request in left_alone] == [id(one) for one in (well, ended, waiting, nothing_new)]
    assert has_failed(failed) and failed.to_finish is None and failed.output_ids == [3, 0]
    assert well.to_finish == "abort" and not has_failed(well)


def test_no_grammar_sees_the_id() -> None:
    grammar = SimpleNamespace(finished=False)
    request = SimpleNamespace(
        origin_input_ids=[7],
        output_ids=[FAILED],
        grammar=grammar,
        sampling_params=SimpleNamespace(min_new_tokens=0),
        finished=lambda: True,
        return_logprob=False,
    )
    check_token_ids(lambda *_: True, request, [FAILED])

    def accept(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("accepted")

    assert grammars.accept_tokens(accept, None, request, [FAILED]) == []
    grammars.accept_prefill(accept, None, req=request, next_token_id=FAILED)
    assert grammar.finished


# --- real servers -----------------------------------------------------------------------------------------------


CHUNKS = ("--disable-overlap-schedule", "--chunked-prefill-size", "256")
"""Flags of a server that caches a prompt's first page before it knows any of its logits."""


@pytest.fixture(scope="module", params=[(), CHUNKS], ids=["overlap", "chunks"])
def server(request: pytest.FixtureRequest, serve: Any, watched_arguments: Any) -> Server:
    checkpoint, flags, environment = watched_arguments
    running: Server = serve(checkpoint, *flags, *request.param, environment=environment)
    return running


@pytest.fixture
def plant(planted_nan: Path) -> Iterator[Path]:
    """The file that arms the fault; gone afterwards."""
    yield planted_nan
    planted_nan.unlink(missing_ok=True)


def prompt(seed: int, length: int = PROMPT) -> list[int]:
    return draw_ids(length, seed, FEW)


def post(server: Server, ids: list[int], **fields: Any) -> dict[str, Any]:
    """A request of ``TOKENS`` tokens; greedy unless ``sampling_params`` say otherwise."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **fields.pop("sampling_params", {})}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "return_text_in_logprobs": True}
    answer: dict[str, Any] = server.post("/generate", {**body, **fields})
    return answer


def fails(server: Server, ids: list[int], **fields: Any) -> str:
    """What a request is told that is answered with status 500."""
    with pytest.raises(urllib.error.HTTPError) as refusal:
        post(server, ids, **fields)
    assert refusal.value.code == 500
    return str(json.loads(refusal.value.read())["message"])


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]


def trigger(answer: list[int], *others: list[int]) -> tuple[int, int]:
    """The place and id of a token of ``answer``, past the first two, that is there once and nowhere else."""
    taken = set().union(*others)
    places = [n for n, token in enumerate(answer[:-1]) if n > 1 and token not in taken and answer.count(token) == 1]
    return places[0], answer[places[0]]


@pytest.mark.server
def test_the_neighbour_goes_on(server: Server, plant: Path) -> None:
    """At a token of the answer, with both requests in one batch."""
    victim, other = prompt(1), prompt(2, 200)
    good, expected = post(server, victim), post(server, other)
    place, token = trigger(good["output_ids"], victim, other, expected["output_ids"])
    flush(server)
    plant.write_text(str(token))
    with ThreadPoolExecutor() as pool:
        failing, going_on = pool.submit(fails, server, victim), pool.submit(post, server, other)
        message, answer = failing.result(), going_on.result()
    assert f"position {PROMPT + place + 1} (token {place + 2} of the answer)" in message and "NaN" in message
    assert answer["output_ids"] == expected["output_ids"]
    plant.unlink()
    assert post(server, victim)["output_ids"] == good["output_ids"]


def marked() -> list[int]:
    """A prompt with :data:`MARK` in its first page."""
    ids = prompt(3)
    ids[100] = MARK
    return ids


@pytest.fixture(scope="module")
def good(server: Server) -> dict[str, Any]:
    """The answer to :func:`marked` before anything has failed."""
    return post(server, marked())


@pytest.mark.server
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling_params": {"temperature": 0.7, "top_k": 1}},
        {"sampling_params": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05}},
        {"top_logprobs_num": 3, "token_ids_logprob": [5, 6], "logprob_start_len": 0},
        {"sampling_params": {"regex": "[a-z ]{40}", "temperature": 0.7}},
        {"return_logprob": False, "sampling_params": {"frequency_penalty": 0.5}},
    ],
    ids=["greedy", "top_k", "top_p and min_p", "logprobs", "grammar", "penalty"],
)
def test_the_prompt(fields: dict[str, Any], server: Server, good: dict[str, Any], plant: Path) -> None:
    """At the first token, and nothing of the prompt stays in the cache: its first page holds NaN."""
    flush(server)
    plant.write_text(str(MARK))
    assert f"position {PROMPT} (token 1 of the answer)" in fails(server, marked(), **fields)
    plant.unlink()
    again = post(server, marked())
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == good["output_ids"]
    assert max(abs(a - b) for a, b in zip(logprobs(again), logprobs(good), strict=True)) <= TOLERANCE


@pytest.mark.server
@pytest.mark.parametrize(
    ("length", "place", "text"),
    [(PROMPT, 200, False), (PROMPT, 200, True), (2100, 1100, False)],
    ids=["ids", "text of logprobs", "chunk after one that is cached"],
)
def test_an_abort_of_the_prompt(length: int, place: int, text: bool, server: Server, plant: Path) -> None:
    """While the pass over a place after the mark runs: the id of no token goes nowhere, and no page is kept."""
    ids = prompt(6, length)
    ids[100], ids[place] = MARK, MARK + 1
    fields = {"return_logprob": text, "return_text_in_logprobs": text}
    good = post(server, ids, **fields)["output_ids"]
    flush(server)
    hold, held = plant.with_name("HOLD"), plant.with_name("HELD")
    plant.write_text(str(MARK))
    hold.write_text(str(MARK + 1))
    body = {"input_ids": ids, "rid": "aborted", "sampling_params": {"max_new_tokens": TOKENS}, **fields}
    with ThreadPoolExecutor() as pool:
        aborted = pool.submit(server.status, "/generate", body)
        try:
            while not held.exists():
                assert not aborted.done()
                time.sleep(0.01)
            server.command("/abort_request", {"rid": "aborted"})
            time.sleep(0.2)  # until it has come to the scheduler's socket
        finally:
            hold.unlink(missing_ok=True)
            held.unlink(missing_ok=True)
        status = aborted.result()
    whole_prompt_in_a_pass = length < 1024 and "--chunked-prefill-size" not in server.arguments
    assert status == (500 if whole_prompt_in_a_pass else 200)
    plant.unlink()
    again = post(server, ids, **fields)
    assert again["meta_info"]["cached_tokens"] == 0 and again["output_ids"] == good


@pytest.mark.server
def test_a_later_token_under_a_grammar(server: Server, plant: Path) -> None:
    ids = prompt(4)
    fields: dict[str, Any] = {"sampling_params": {"regex": "[A-Za-z ]{40}", "temperature": 0.7, "top_k": 1}}
    good = post(server, ids, **fields)["output_ids"]
    _, token = trigger(good, ids)
    plant.write_text(str(token))
    assert "NaN" in fails(server, ids, **fields)
    plant.unlink()
    assert post(server, ids, **fields)["output_ids"] == good


@pytest.mark.server
def test_a_stream_ends_with_the_error(server: Server, plant: Path) -> None:
    ids = prompt(5)
    _, token = trigger(post(server, ids)["output_ids"], ids)
    plant.write_text(str(token))
    body = {"model": "any", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    assert all("error" not in event for event in parsed[:-1]) and len(parsed) > 1
    assert parsed[-1]["error"]["code"] == 500 and "NaN" in parsed[-1]["error"]["message"]


@pytest.mark.server
def test_nothing_leaks(server: Server) -> None:
    flush(server)
    pools = server.info()["pools"]
    assert {name: pool["used"] for name, pool in pools.items()} == dict.fromkeys(pools, 0)
