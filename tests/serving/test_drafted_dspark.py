"""The same answers of a server that drafts with DSpark; and its guesses, against the draft without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.serving import test_drafted
from tests.serving.conftest import FAULTS
from tests.serving.test_drafted import MARGIN, PROMPT, TOKENS, check, rounds_of_a_trained_draft
from tests.support.draft_alone import DraftAlone
from tests.support.prompts import draw_ids
from tests.support.server import Server
from tests.support.updates import update

pytestmark = test_drafted.pytestmark

BLOCK = 5

planted, guess, decoder, answer = (
    test_drafted.planted,
    test_drafted.guess,
    test_drafted.decoder,
    test_drafted.answer,
)
test_a_random_draft_changes_nothing = test_drafted.test_a_random_draft_changes_nothing
test_right_guesses = test_drafted.test_right_guesses
test_guesses_right_and_wrong = test_drafted.test_guesses_right_and_wrong
test_wrong_guesses = test_drafted.test_wrong_guesses
test_sixteen_requests_at_once = test_drafted.test_sixteen_requests_at_once
test_chunks_and_cached_pages = test_drafted.test_chunks_and_cached_pages
test_stops = test_drafted.test_stops
test_log_probabilities_of_the_likeliest = test_drafted.test_log_probabilities_of_the_likeliest
test_a_grammar = test_drafted.test_a_grammar
test_several_answers = test_drafted.test_several_answers
test_sampling = test_drafted.test_sampling
test_penalties = test_drafted.test_penalties
test_logits_that_are_not_finite = test_drafted.test_logits_that_are_not_finite
test_requests_that_are_retracted = test_drafted.test_requests_that_are_retracted
test_requests_that_are_given_up = test_drafted.test_requests_that_are_given_up


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "dspark"
    write_tiny(path, "nvfp4-full", seed=1, draft="dspark")
    return path


@pytest.fixture(scope="module")
def environment(planted: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(FAULTS),
        "PLANTED_FAULT": "guesses, nan, full pool, rounds",
        "PLANTED_GUESSES": str(planted / "guesses"),
        "PLANTED_NAN": str(planted / "token"),
        "PLANTED_ROUNDS": str(planted / "rounds"),
    }


@pytest.fixture(scope="module")
def server(serve: Callable[..., Server], checkpoint: Path, environment: dict[str, str]) -> Server:
    return serve(checkpoint, "--speculative-algorithm", "DSPARK", "--enable-metrics", environment=environment)


@pytest.fixture(scope="module")
def rows() -> int:
    return BLOCK + 1


@pytest.fixture(scope="module")
def draft() -> str:
    return f"DSpark, blocks of {BLOCK} tokens"


def test_rounds_of_every_length(server: Server, decoder: Standalone, guess: test_drafted.Guess) -> None:
    """Guesses right up to each place of a block: positions that are wrong are as far apart as rounds are long."""
    first = check(decoder, PROMPT, server.generate(PROMPT, 24))
    for length in range(1, BLOCK + 1):
        # The first answer comes with the prompt; each round then accepts ``length`` rows, the last of them a new token.
        guess([[*PROMPT, *first]], range(len(PROMPT) + length, 256, length))
        found = server.generate(PROMPT, 24)
        assert check(decoder, PROMPT, found) == first
        assert found["meta_info"]["spec_verify_ct"] == -(-23 // length)


@pytest.mark.parametrize("kind", ["answered", "cached"])
def test_guesses_of_the_draft_alone(
    server: Server, decoder: Standalone, checkpoint: Path, planted: Path, guess: test_drafted.Guess, kind: str
) -> None:
    """Behind a prompt and rounds that accept some guesses, and behind a page that another request has left."""
    prompt = PROMPT if kind == "answered" else draw_ids(300, 12, 512)
    require_guesses_of_the_draft(server, decoder, checkpoint, planted / "rounds", prompt, 30, BLOCK)


def require_guesses_of_the_draft(
    server: Server, decoder: Standalone, checkpoint: Path, lines: Path, prompt: list[int], count: int, block: int
) -> None:
    """Every block's guesses are the likeliest tokens of the draft, of which ``lines`` of rounds are written."""
    first: list[int] = server.generate(prompt, count)["output_ids"]
    sequence = [*prompt, *first]
    drafted = DraftAlone(checkpoint, decoder, sequence)
    lines.unlink()
    again = server.generate(prompt, count)
    assert again["output_ids"] == first and again["meta_info"]["cached_tokens"] == len(prompt) // 256 * 256
    rounds = [json.loads(line)[0] for line in lines.read_text().splitlines()]
    assert len(rounds) == again["meta_info"]["spec_verify_ct"]
    for length, (anchor, *guesses) in rounds:
        assert anchor == sequence[length] and len(guesses) == block
        assert drafted.disagreement(length, guesses) < MARGIN


def test_an_update_of_model_and_draft(
    server: Server, checkpoint: Path, decoder: Standalone, planted: Path, answer: list[int], tmp_path: Path
) -> None:
    """Both are replaced by those of another checkpoint, and one with another draft is refused by name."""
    write_tiny(tmp_path / "mtp", "nvfp4-full", seed=2, draft="mtp")
    status, message = update(server, tmp_path / "mtp")
    assert status == 400 and "draft: served DSpark, found MTP" in message
    write_tiny(tmp_path / "other", "nvfp4-full", seed=2, draft="dspark")
    try:
        assert update(server, tmp_path / "other")[0] == 200
        other = Standalone(tmp_path / "other", requests=1, capacity=1024)
        assert check(other, PROMPT, server.generate(PROMPT, TOKENS)) != answer
        require_guesses_of_the_draft(server, other, tmp_path / "other", planted / "rounds", PROMPT, 20, BLOCK)
    finally:
        assert update(server, checkpoint)[0] == 200
    assert check(decoder, PROMPT, server.generate(PROMPT, TOKENS)) == answer


def test_blocks_of_another_size(
    serve: Callable[..., Server],
    checkpoint: Path,
    environment: dict[str, str],
    planted: Path,
    decoder: Standalone,
    guess: test_drafted.Guess,
) -> None:
    """Than the checkpoint's: ``--speculative-dspark-block-size`` says how many tokens are guessed at once."""
    flags = ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "3")
    server = serve(checkpoint, *flags, environment=environment)
    assert server.info()["draft"] == "DSpark, blocks of 3 tokens"
    require_guesses_of_the_draft(server, decoder, checkpoint, planted / "rounds", PROMPT, 20, 3)
    first = check(decoder, PROMPT, server.generate(PROMPT, 20))
    guess([[*PROMPT, *first]])
    found = server.generate(PROMPT, 20)
    assert check(decoder, PROMPT, found) == first and found["meta_info"]["spec_verify_ct"] == -(-19 // 4)


def test_a_trained_draft(serve: Callable[..., Server]) -> None:
    """The shipped one is of a model with three layers; SGLang's own choice of layers to capture takes four."""
    rounds = rounds_of_a_trained_draft(serve, "small_model_dspark", "--speculative-algorithm", "DSPARK")
    assert rounds < 3 * 31 / 1.5
