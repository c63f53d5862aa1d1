"""A server of two ranks that drafts, with random weights: answers are the model's own, on both ranks the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyDraft, TinyFormat, tiny_config
from nvfp4_sgl.synthetic.tokenizer import write_tokenizer
from tests.serving.conftest import FAULTS
from tests.support.golden import TOLERANCE
from tests.support.guesses import Guesses
from tests.support.prompts import draw_ids
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

FLAGS = ("--load-format", "dummy", "--tp-size", "2")
DRAFTS = {
    "mtp": (("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"), "MTP, 2 steps"),
    "dspark": (("--speculative-algorithm", "DSPARK"), "DSpark, blocks of 5 tokens"),
}
"""Flags by the kind of draft, and what the server says of it."""
PROMPT, TOKENS = draw_ids(110, 4, 512), 30
"""Its answer crosses position 128."""


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, draft: str) -> Path:
    """config.json and a tokenizer."""
    folder = tmp_path_factory.mktemp("dummy")
    config = tiny_config(TinyFormat.NVFP4_FULL, {}, draft=TinyDraft(draft))
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])
    return folder


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> Guesses:
    return Guesses(tmp_path_factory.mktemp("planted"))


def errors(decoder: Standalone, answer: dict[str, Any]) -> tuple[float, float]:
    """Largest distance of the answer's log-probabilities to the decoder's, and to its likeliest tokens'."""
    ids: list[int] = answer["output_ids"]
    decoder.reset()
    said = decoder.extend({0: [*PROMPT, *ids]})[0][len(PROMPT) - 1 : -1].log_softmax(-1)
    chosen = said[torch.arange(len(ids)), torch.tensor(ids)]
    values = torch.tensor([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
    return float((values - chosen).abs().max()), float((said.amax(-1) - chosen).max())


def test_two_ranks(serve: Callable[..., Server], model: Path, draft: str, guesses: Guesses) -> None:
    """Greedy and drawn, with the draft's guesses and with planted ones, of which every third is wrong."""
    flags, words = DRAFTS[draft]
    guesses.clear()
    server = serve(model, *FLAGS, *flags, environment=guesses.environment(FAULTS, "nan rows"))
    decoder = Standalone(verify_dummy(model), requests=1, capacity=512)
    first = server.generate(PROMPT, TOKENS)
    guesses.write([[*PROMPT, *first["output_ids"]]], range(0, 256, 3))
    second, drawn = server.generate(PROMPT, TOKENS), server.generate(PROMPT, TOKENS, temperature=1.0)
    for greedy in (first, second):
        off, behind = errors(decoder, greedy)
        assert off < TOLERANCE and behind < 1e-3
    assert second["output_ids"] == first["output_ids"] and second["meta_info"]["spec_accept_length"] > 1.5
    assert errors(decoder, drawn)[0] < TOLERANCE and drawn["output_ids"] != first["output_ids"]
    assert server.info()["draft"] == words and "RANDOM" in server.info()["weights"]
