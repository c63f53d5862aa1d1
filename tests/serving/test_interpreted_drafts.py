"""A server that drafts with a GPU's decoder, draft and backend, where there is no GPU: the kernels are interpreted.

Prompts run as in graphs: padded, from tensors of their own. ``tests/gpu/test_drafted_server.py`` runs more on a GPU,
``tests/gpu/test_prompt_graphs.py`` prompts in graphs there, and ``test_drafted.py`` more on the CPU's target.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import bf16_logprobs, native
from tests.support.bf16_logprobs import References, distances, errors, prompt, whole_vocabulary
from tests.support.calm import write_calm
from tests.support.guesses import Guesses
from tests.support.interpreted_server import FLAGS, SHAPES, environment
from tests.support.server import Server, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

CASES = (
    ("sm_100a", "mtp", ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2")),
    pytest.param(
        ("sm_90a", "mtp", ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2")), marks=pytest.mark.full
    ),
    *(
        pytest.param(
            (target, "dspark", ("--speculative-algorithm", "DSPARK", "--speculative-dspark-block-size", "2")),
            marks=pytest.mark.full,
        )
        for target in ("sm_90a", "sm_100a")
    ),
)
LAYERS = {"mtp": 3, "dspark": 4}
"""Of the target, by the draft; SGLang's DSpark worker takes no fewer than four."""
PROMPTS, TOKENS = [prompt(length) for length in (6, 2)], 6
"""What is asked at once; answers close ratio-4 windows."""
PADDED = 9
"""Tokens of the graph of prompts."""
WRONG = (7, 8)
"""Positions at which guesses are wrong."""
FACTOR = 1.5
"""Bound of the median distance of a position, as a multiple of what rounding costs the CPU reference."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case[:2]))
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(case: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft's matrices are FP8 and MXFP4, as in releases."""
    folder = tmp_path_factory.mktemp("tiny")
    shapes = SHAPES | {"num_hidden_layers": LAYERS[case[1]]}
    return write_calm(folder, seed=3, format="nvfp4-experts", draft=case[1], **shapes)


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> Guesses:
    return Guesses(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def server(serve: ServerPool, case: Any, checkpoint: Path, guesses: Guesses) -> Server:
    target, _, flags = case
    planted = {"PLANTED_FAULT": "guesses", "PLANTED_GUESSES": str(guesses.file), "INTERPRETED_PROMPTS": str(PADDED)}
    return serve(checkpoint, *FLAGS, *flags, environment=environment(target) | planted)


@pytest.fixture(scope="module")
def references(case: Any, checkpoint: Path) -> Iterator[References]:
    with bf16_logprobs.references(checkpoint, capacity=256, mode=native.MODES[case[0]]) as computed:
        yield computed


def ask(server: Server) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": sampling, **whole_vocabulary(512)}
    answers: list[dict[str, Any]] = server.post("/generate", body)
    return answers


def test_answers_do_not_depend_on_guesses(server: Server, guesses: Guesses, references: References, case: Any) -> None:
    """With guesses of a random draft, and with guesses that are right and wrong."""
    first = ask(server)
    sequences = [[*ids, *found["output_ids"]] for ids, found in zip(PROMPTS, first, strict=True)]
    guesses.write(sequences, WRONG)
    second = ask(server)
    assert server.info()["prompt_graphs"]["replays"] >= 2
    assert [found["output_ids"] for found in second] == [found["output_ids"] for found in first]
    rounds = [found["meta_info"]["spec_verify_ct"] for found in (*first, *second)]
    print(f"rounds: {rounds}")
    assert all(TOKENS // 2 <= one < TOKENS for one in rounds[:2])  # a random draft is seldom right
    assert rounds[2:] == [3, 2]
    compare = distances if case[0] == "sm_100a" else errors
    for answers in (first, second):
        ours, theirs = compare(answers, PROMPTS, references)
        print(f"median {ours.median():.3f}, largest {ours.max():.3f}; reference {theirs.median():.3f}")
        assert ours.median() <= FACTOR * theirs.median()
