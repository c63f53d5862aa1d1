"""Answers of a server that drafts: the target's own, whatever is guessed, and everything that goes with them.

What the draft guesses is planted (``tests/support/planted_faults``), so that guesses are accepted and rejected at every
position; the draft's passes run all the same. Answers are held against the decoder without a server.
"""

from __future__ import annotations

import json
import random
import re
import sys
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT
from tests.serving.conftest import FAULTS
from tests.support.given_up import POOLS, Plan, check_nothing_is_left, pools, wait_until_idle
from tests.support.golden import TOLERANCE, Golden
from tests.support.metrics import scrape, value
from tests.support.prompts import draw_ids
from tests.support.sampling import allowed, ask, require_bias, require_penalties
from tests.support.server import Server
from tests.support.updates import until, update

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs import demo, evaluate
from programs.draft_rounds import Rounds
from small_model import measure

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

STEPS, TOKENS = 3, 60
PROMPT = draw_ids(100, 11, 512)
"""Its answer crosses position 128, where entries of both kinds of compressor close."""
TRIES = 4
"""Attempts at having three requests run at once."""
MARGIN = 1e-3
"""By which a token may be less likely than another one: sums take another order in a pass of several tokens."""

Guess = Callable[..., None]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: Callable[[str], Path]) -> Path:
    return tiny_checkpoints("nvfp4-full")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], checkpoint: Path, planted: Path) -> Server:
    environment = {
        "PYTHONPATH": str(FAULTS),
        "PLANTED_FAULT": "guesses, nan, full pool",
        "PLANTED_GUESSES": str(planted / "guesses"),
        "PLANTED_NAN": str(planted / "token"),
    }
    flags = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(STEPS), "--enable-metrics")
    return serve(checkpoint, *flags, environment=environment)


@pytest.fixture(scope="module")
def rows() -> int:
    """Rows of a round."""
    return STEPS + 1


@pytest.fixture(scope="module")
def draft() -> str:
    """What the server says of its draft."""
    return f"MTP, {STEPS} steps"


@pytest.fixture
def guess(planted: Path) -> Iterator[Guess]:
    """``guess(sequences, wrong)``: what is guessed from now on, and at which positions modulo 256 wrongly."""
    file = planted / "guesses"

    def write(sequences: Sequence[Sequence[int]], wrong: Sequence[int] = ()) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"sequences": sequences, "wrong": list(wrong)}))
        new.rename(file)

    yield write
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, requests=1, capacity=1024)


def check(decoder: Standalone, prompt: Sequence[int], answer: dict[str, Any]) -> list[int]:
    """The answer's ids, each the likeliest of the decoder, with the decoder's log-probability."""
    ids: list[int] = answer["output_ids"]
    decoder.reset()
    said = decoder.extend({0: [*prompt, *ids]})[0][len(prompt) - 1 : -1].log_softmax(-1)
    chosen = said[torch.arange(len(ids)), torch.tensor(ids)]
    assert (said.amax(-1) - chosen).max() < MARGIN
    assert (logprobs(answer) - chosen).abs().max() < TOLERANCE
    return ids


def logprobs(answer: dict[str, Any]) -> torch.Tensor:
    """Those of the answer's tokens."""
    return torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])


@pytest.fixture(scope="module")
def answer(server: Server, decoder: Standalone) -> list[int]:
    """The answer to :data:`PROMPT`."""
    return check(decoder, PROMPT, server.generate(PROMPT, TOKENS))


def test_a_random_draft_changes_nothing(server: Server, decoder: Standalone) -> None:
    """Hardly any guess is right, and each round gives its own token."""
    found = server.generate(PROMPT, TOKENS)
    check(decoder, PROMPT, found)
    assert found["meta_info"]["spec_accept_length"] < 1.5


def test_right_guesses(
    server: Server, decoder: Standalone, guess: Guess, answer: list[int], rows: int, draft: str
) -> None:
    guess([[*PROMPT, *answer]])
    found = server.generate(PROMPT, TOKENS)
    assert check(decoder, PROMPT, found) == answer
    meta = found["meta_info"]
    assert meta["spec_verify_ct"] == -(-(TOKENS - 1) // rows)
    assert meta["spec_accept_rate"] > 0.95
    assert server.info()["draft"] == draft


@pytest.mark.parametrize("seed", range(3))
def test_guesses_right_and_wrong(
    server: Server, decoder: Standalone, guess: Guess, answer: list[int], seed: int
) -> None:
    """Rejections everywhere: at each place of a window of 4, and around the end of one of 128."""
    wrong = random.Random(seed).sample(range(256), 100)
    guess([[*PROMPT, *answer]], wrong)
    found = server.generate(PROMPT, TOKENS)
    assert check(decoder, PROMPT, found) == answer
    assert 1.2 < found["meta_info"]["spec_accept_length"] < 3.5


@pytest.mark.parametrize("right", range(STEPS + 1))
def test_every_length_of_a_round(
    server: Server, decoder: Standalone, guess: Guess, answer: list[int], right: int
) -> None:
    """As many guesses of every round are right, and the next one is not."""
    first = len(PROMPT) + 1
    wrong = [*range(first + right, 256, right + 1)] if right < STEPS else []
    guess([[*PROMPT, *answer]], wrong)
    found = server.generate(PROMPT, TOKENS)
    assert check(decoder, PROMPT, found) == answer
    assert found["meta_info"]["spec_verify_ct"] == -(-(TOKENS - 1) // (right + 1))


@pytest.mark.parametrize(("step", "offset"), [(step, offset) for step in (1, 2, 4) for offset in range(step)])
def test_rejections_around_the_end_of_a_window(
    server: Server, decoder: Standalone, guess: Guess, answer: list[int], step: int, offset: int
) -> None:
    """At positions 120 to 136, each residue of 4 among them, in each row of a round."""
    guess([[*PROMPT, *answer]], range(120 + offset, 137, step))
    found = server.generate(PROMPT, 40)
    assert check(decoder, PROMPT, found) == answer[:40]


def test_wrong_guesses(server: Server, decoder: Standalone, guess: Guess, answer: list[int]) -> None:
    guess([[*PROMPT, *answer]], range(256))
    found = server.generate(PROMPT, TOKENS)
    assert check(decoder, PROMPT, found) == answer and found["meta_info"]["spec_num_correct_drafts"] == 0


def test_sixteen_requests_at_once(server: Server, decoder: Standalone, guess: Guess) -> None:
    """Prompts of every length, some with a page in common, right and wrong guesses in a batch."""
    prompts = [[*draw_ids(256, 5, 512), *draw_ids(7 * n, n, 512)] for n in range(1, 4)]
    prompts += [draw_ids(n * n + 1, 100 + n, 512) for n in range(13)]

    def answers() -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            found = threads.map(lambda ids: server.generate(ids, 12), prompts)
            return [check(decoder, ids, one) for ids, one in zip(prompts, found, strict=True)]

    first = answers()
    guess([[*ids, *found] for ids, found in zip(prompts, first, strict=True)], range(0, 256, 5))
    assert answers() == first


@pytest.mark.parametrize(
    ("prompt", "tokens"), [(2100, 40), pytest.param(100, 10_000, marks=(pytest.mark.full, pytest.mark.timeout(7200)))]
)
def test_far_into_a_sequence(server: Server, checkpoint: Path, guess: Guess, prompt: int, tokens: int) -> None:
    """A prompt of several chunks, or a long answer; guesses are random at first, then right and wrong."""
    ids, decoder = draw_ids(prompt, 17, 512), Standalone(checkpoint, requests=1, capacity=prompt + tokens)
    first = check(decoder, ids, server.generate(ids, tokens))
    guess([[*ids, *first]], range(0, 256, 5))
    found = server.generate(ids, tokens)
    assert check(decoder, ids, found) == first and found["meta_info"]["spec_accept_length"] > 1.5


def test_chunks_and_cached_pages(server: Server) -> None:
    server.command("/flush_cache?timeout=30", {})
    Golden.ask(server)


def test_stops(server: Server, guess: Guess, answer: list[int], rows: int) -> None:
    """Within a round: what was accepted behind the end of an answer is not sent."""
    guess([[*PROMPT, *answer]])
    end = next(n for n in range(9, TOKENS) if answer[n] not in answer[:n] and n % rows)
    stopped = server.generate(PROMPT, TOKENS, stop_token_ids=[answer[end]], ignore_eos=False)
    assert stopped["output_ids"] == answer[: end + 1]
    assert len(stopped["meta_info"]["output_token_logprobs"]) == end + 1
    text = server.generate(PROMPT, TOKENS)["text"]
    stop = text[len(text) // 2 :][:3]
    assert server.generate(PROMPT, TOKENS, stop=[stop])["text"] == text[: text.find(stop)]


def test_log_probabilities_of_the_likeliest(
    server: Server, decoder: Standalone, guess: Guess, answer: list[int]
) -> None:
    guess([[*PROMPT, *answer]], range(0, 256, 3))
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "top_logprobs_num": 3,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
    }
    meta = server.post("/generate", body)["meta_info"]
    decoder.reset()
    said = decoder.extend({0: [*PROMPT, *answer]})[0][len(PROMPT) - 1 : -1].log_softmax(-1).topk(3)
    found = torch.tensor([[value for value, _, _ in row] for row in meta["output_top_logprobs"]])
    assert (found - said.values).abs().max() < TOLERANCE


@pytest.mark.parametrize("right", [False, True], ids=["drafted", "guessed"])
def test_a_grammar(server: Server, guess: Guess, right: bool) -> None:
    """The answer of a drafted server is that of guesses that are right, and follows the grammar."""
    regex = "[a-f]{5}(-[0-9]{2}){4}"
    first = server.generate(PROMPT, TOKENS, regex=regex, ignore_eos=False)
    if right:
        guess([[*PROMPT, *first["output_ids"]]], range(0, 256, 7))
    found = server.generate(PROMPT, TOKENS, regex=regex, ignore_eos=False)
    assert found["output_ids"] == first["output_ids"] and re.fullmatch(regex, found["text"])


def test_several_answers(server: Server, guess: Guess, answer: list[int]) -> None:
    guess([[*PROMPT, *answer]], range(0, 256, 3))
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "n": 3}
    found = server.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
    assert [one["output_ids"] for one in found] == [answer] * 3


def test_several_sampled_answers(server: Server, checkpoint: Path, guess: Guess, answer: list[int]) -> None:
    """Each draws for itself; seeds are refused by name, as by servers without drafts."""
    guess([[*PROMPT, *answer]], range(0, 256, 3))
    sampling = {"temperature": 1.0, "top_k": 3, "max_new_tokens": 20, "ignore_eos": True, "n": 3}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3}
    found = server.post("/generate", body)
    assert len({tuple(one["output_ids"]) for one in found}) == 3
    for one in found:
        tops = one["meta_info"]["output_top_logprobs"]
        for token, top in zip(one["output_ids"], tops, strict=True):
            assert token in {likely for _, likely, _ in top}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.generate(PROMPT, 5, sampling_seed=1)
    assert error.value.code == 400 and "sampling_seed" in error.value.read().decode()


def test_sampling(server: Server, checkpoint: Path, guess: Guess, answer: list[int]) -> None:
    """Every row of a round draws of what its request's top-p, top-k and min-p leave, in a batch of all kinds."""
    guess([[*PROMPT, *answer]])
    vocabulary, warm = read_config_json(checkpoint)["vocab_size"], {"temperature": 1.0}
    kinds = [
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.3},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"temperature": 0},
    ]
    ways = [warm | {"max_new_tokens": 10, "ignore_eos": True} | kind for kind in kinds] * 3
    answers = ask(server, [PROMPT] * len(ways), ways, top_logprobs_num=vocabulary)
    for found, way in zip(answers, ways, strict=True):
        tops = found["meta_info"]["output_top_logprobs"]
        for token, top in zip(found["output_ids"], tops, strict=True):
            logprobs = {one: value for value, one, _ in sorted(top, reverse=True)}
            assert token in allowed(logprobs, way if way["temperature"] else {"top_k": 1}), way
    assert len({tuple(found["output_ids"]) for found in answers}) > len(kinds)
    require_bias(server, PROMPT)


def test_penalties(server: Server, checkpoint: Path, guess: Guess) -> None:
    """Those of every row of a round, whichever guesses are right."""
    ids, vocabulary = draw_ids(40, 8, 512), read_config_json(checkpoint)["vocab_size"]
    require_penalties(server, ids, vocabulary, count=12, overlapped=False)
    sampling = {"frequency_penalty": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.3, "min_new_tokens": 20}
    first = server.generate(ids, 30, **sampling)["output_ids"]
    for wrong in (range(0), range(0, 256, 3)):
        guess([[*ids, *first]], wrong)
        found = server.generate(ids, 30, **sampling)
        assert found["output_ids"] == first
    assert found["meta_info"]["spec_accept_length"] > 1.5


def test_logits_that_are_not_finite(server: Server, planted: Path, guess: Guess, answer: list[int]) -> None:
    """In the middle of a round: the request fails, its neighbour does not, and nothing of it is cached."""
    guess([[*PROMPT, *answer]])
    before = Golden.ask(server)
    place = next(n for n in range(9, TOKENS) if answer[n] not in (*PROMPT, *answer[:n]))
    (planted / "token").write_text(str(answer[place]))
    try:
        other = [token for token in draw_ids(50, 3, 512) if token != answer[place]]
        with ThreadPoolExecutor(2) as threads:
            beside = threads.submit(server.generate, other, 8, logit_bias={str(answer[place]): -100})
            with pytest.raises(urllib.error.HTTPError) as error:
                server.generate(PROMPT, TOKENS)
            assert error.value.code == 500
            assert f"token {place + 2} of the answer) are NaN" in error.value.read().decode()
            assert len(beside.result()["output_ids"]) == 8
    finally:
        (planted / "token").unlink()
    server.command("/flush_cache?timeout=30", {})
    before.assert_same(Golden.ask(server))


def test_an_abort_in_the_middle_of_a_round(server: Server, planted: Path, guess: Guess, answer: list[int]) -> None:
    """While a pass over several of its tokens runs; its neighbour in the batch is answered."""
    guess([[*PROMPT, *answer]])
    place = next(n for n in range(20, TOKENS) if answer[n] not in (*PROMPT, *answer[:n]))
    other = [token for token in draw_ids(50, 3, 512) if token != answer[place]]
    held = planted / "HELD"
    before = server.generate(other, 30, logit_bias={str(answer[place]): -100})["output_ids"]
    (planted / "HOLD").write_text(str(answer[place]))
    body = {"input_ids": PROMPT, "rid": "held", "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}
    body["sampling_params"]["ignore_eos"] = True
    try:
        with ThreadPoolExecutor(2) as threads:
            ended = threads.submit(server.post, "/generate", body)
            beside = threads.submit(server.generate, other, 30, logit_bias={str(answer[place]): -100})
            until(held.exists)
            server.command("/abort_request", {"rid": "held"})
            held.unlink()
            found = ended.result()
            assert found["meta_info"]["finish_reason"]["type"] == "abort"
            assert found["output_ids"] == answer[: len(found["output_ids"])] and len(found["output_ids"]) < TOKENS
            assert beside.result()["output_ids"] == before
    finally:
        for file in (held, planted / "HOLD"):
            file.unlink(missing_ok=True)
    wait_until_idle(server)
    check_nothing_is_left(server)


def test_requests_that_are_retracted(
    server: Server, decoder: Standalone, planted: Path, guess: Guess, answer: list[int]
) -> None:
    """By a pause, and by a decode that finds the pool full: in the middle of answers that guesses have made longer.

    They start again behind what they have said. One has a penalty, and one a grammar.
    """
    guess([[*PROMPT, *answer]], range(0, 256, 5))
    place = next(n for n in range(12, TOKENS) if answer[n] not in (*PROMPT, *answer[:n]))
    never: dict[str, Any] = {"logit_bias": {str(answer[place]): -100}}
    others = [
        ([token for token in draw_ids(300, 3, 512) if token != answer[place]], never | {"frequency_penalty": -0.2}),
        ([token for token in draw_ids(40, 4, 512) if token != answer[place]], never | {"regex": "([a-f]{3}-){40}"}),
    ]
    hold, held, full = (planted / name for name in ("HOLD", "HELD", "FULL"))
    with ThreadPoolExecutor(3) as threads:

        def ask() -> tuple[Future[dict[str, Any]], list[Future[dict[str, Any]]]]:
            return (
                threads.submit(server.generate, PROMPT, TOKENS),
                [threads.submit(server.generate, ids, 20, **sampling) for ids, sampling in others],
            )

        before = [one.result() for one in ask()[1]]

        def retracted(way: str) -> list[int]:
            """Retractions of each of three requests, whose answers are those without any."""
            hold.write_text(str(answer[place]))
            try:
                first, beside = ask()
                until(held.exists)
                if way == "pause":
                    server.command("/pause_generation", {"mode": "retract"})
                else:
                    full.touch()
                held.unlink()
                if way == "pause":
                    until(lambda: all(pools(server)[name]["used"] == 0 for name in POOLS))
                    server.command("/continue_generation", {})
                found = [one.result() for one in (first, *beside)]
            finally:
                for file in (hold, held, full):
                    file.unlink(missing_ok=True)
            assert check(decoder, PROMPT, found[0]) == answer
            for one, other in zip(found[1:], before, strict=True):
                assert one["output_ids"] == other["output_ids"]
                assert (logprobs(one) - logprobs(other)).abs().max() < TOLERANCE
            return [one["meta_info"]["num_retractions"] for one in found]

        # On a busy machine the first request may get ahead of the others: again then.
        assert any(retracted("pause") == [1, 1, 1] for _ in range(TRIES))
        assert any(sum(retracted("full pool")) == 1 for _ in range(TRIES))
    check_nothing_is_left(server)


def test_details_of_a_chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "return_spec_tokens_details": True}
    details = server.post("/v1/chat/completions", body)["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] > 0 and details["spec_accept_length"] >= 1


def test_an_update_of_model_and_draft(
    server: Server, checkpoint: Path, decoder: Standalone, answer: list[int], tmp_path: Path
) -> None:
    """Both are replaced by those of another checkpoint, and one without a draft is refused by name."""
    write_tiny(tmp_path / "none", "nvfp4-full", seed=2, draft="none")
    status, message = update(server, tmp_path / "none")
    assert status == 400 and "draft: served MTP, found none" in message
    write_tiny(tmp_path / "other", "nvfp4-full", seed=2)
    try:
        assert update(server, tmp_path / "other")[0] == 200
        other = Standalone(tmp_path / "other", requests=1, capacity=1024)
        assert check(other, PROMPT, server.generate(PROMPT, TOKENS)) != answer
    finally:
        assert update(server, checkpoint)[0] == 200
    assert check(decoder, PROMPT, server.generate(PROMPT, TOKENS)) == answer


def test_requests_that_are_given_up(server: Server) -> None:
    rng = random.Random(7)
    plans = [Plan.draw(number, rng) for number in range(32)]
    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(lambda plan: plan.run(server), plans))
    assert outcomes.count("given up") >= 8 and outcomes.count("complete") >= 8
    wait_until_idle(server)
    check_nothing_is_left(server)


def test_the_start_does_not_say_that_the_draft_is_left_out(server: Server) -> None:
    (config,) = re.findall(r"nvfp4_sgl: config: (.*)", server.text())
    assert "verified" in config and "left out" not in config and "mtp.*" not in server.text()


def test_what_answers_and_metrics_say_of_rounds(server: Server, guess: Guess, answer: list[int]) -> None:
    guess([[*PROMPT, *answer]], range(256))
    server.generate(PROMPT, TOKENS)  # gauges follow --decode-log-interval, 40 passes
    guess([[*PROMPT, *answer]], range(0, 256, 5))
    before = scrape(server)
    meta, rounds = server.generate(PROMPT, TOKENS)["meta_info"], Rounds()
    after = scrape(server)
    rounds.add(meta)
    assert (rounds.count, rounds.guesses) == (meta["spec_verify_ct"], STEPS)
    # The first token is the prefill's; what the last round gives behind the end of the answer is not sent.
    assert 0 <= rounds.tokens * rounds.count - (TOKENS - 1) <= STEPS

    def gained(name: str) -> float:
        return value(after, name) - value(before, name)

    assert (
        gained("sglang:spec_verify_calls_total") == rounds.count and gained("sglang:generation_tokens_total") == TOKENS
    )
    assert (value(after, "sglang:spec_num_steps"), value(after, "sglang:spec_num_draft_tokens")) == (STEPS, STEPS + 1)
    assert 1 <= value(after, "sglang:spec_accept_length") <= STEPS + 1
    assert 0 <= value(after, "sglang:spec_accept_rate") <= 1
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    assert len(told := set(re.findall(r"sglang:spec_\w+", page))) == 5 and told <= set(after)


def test_programs_say_what_rounds_gave(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Say it", "pattern": ""}\n{"question": "And?", "pattern": ""}\n')
    drafts = evaluate.questions(server.url, questions, 20, 2)["drafts"]
    assert drafts["rounds"] > 5 and drafts["guesses"] == STEPS and 1 <= drafts["tokens"] < 1.5
    demo.write_on(server.url, "a=7;b=3;k=5;?a", demo.Timings())
    assert len(re.findall(r"tokens a round, of \d+ rounds", capsys.readouterr().out)) == 2


def test_a_trained_draft(serve: Callable[..., Server]) -> None:
    """The small model's own: many guesses are right, behind prompts of two chunks, and answers are the decoder's."""
    flags = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "1", "--chunked-prefill-size", "256")
    assert rounds_of_a_trained_draft(serve, "small_model", *flags) < 3 * 31 / 1.2


def rounds_of_a_trained_draft(serve: Callable[..., Server], example: str, *flags: str) -> int:
    """Rounds of 32 tokens of each of three documents."""
    model = ROOT / "examples" / example
    server, decoder, rounds = serve(model, *flags), Standalone(model, requests=1, capacity=1024), 0
    for document in measure.far_documents(3):
        prompt = document.ids[:512]
        found = server.generate(prompt, 32)
        check(decoder, prompt, found)
        rounds += found["meta_info"]["spec_verify_ct"]
    return rounds
