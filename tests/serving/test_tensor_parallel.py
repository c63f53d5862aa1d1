"""A server of two ranks on the CPU: its answers, weights that are replaced while it runs, and the death of a rank.

The tests run in this order on one server, which begins with the weights of one checkpoint and ends with another's.
"""

from __future__ import annotations

import functools
import re
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.serving.grammar_process import TITLE
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support.damage import change_json, copy_checkpoint, damaged_copy
from tests.support.golden import Golden
from tests.support.logprobs import TOKENS, check, check_concurrently, generate
from tests.support.oracle import cached_hf_model
from tests.support.prompts import clear_ids, draw_ids
from tests.support.server import Server, wait_for_none
from tests.support.server_processes import process
from tests.support.updates import Background, until, update

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

DEATH_SECONDS = 10
LARGEST_ERROR = 1e-3
"""Bound on errors of log-probabilities in fp32 over some hundred tokens; the two checkpoints differ by more than 1."""
PAGES, PAGE = 2, 256
RUNNING_TOKENS = 400
"""Tokens of an answer that is not finished when the new checkpoint has been verified, in about a second."""


@pytest.fixture(scope="module")
def old(tiny_checkpoints: Callable[[str], Path]) -> Path:
    return tiny_checkpoints("nvfp4-full")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "new"
    write_tiny(path, "nvfp4-full", seed=2)
    return path


@pytest.fixture
def server(serve: Callable[..., Server], old: Path) -> Server:
    return serve(old, "--tp-size", "2", "--served-model-name", "tiny")


@functools.cache
def alone(checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, requests=1, capacity=2048)


def distance(checkpoint: Path, prompt: list[int], answer: dict[str, Any]) -> float:
    """Largest difference of an answer's log-probabilities from those of ``checkpoint``, run alone."""
    ids, outputs = [*prompt, *answer["output_ids"]], answer["meta_info"]["output_token_logprobs"]
    model = alone(checkpoint)
    model.reset()
    logits = model.extend({0: ids})[0]
    chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    return float((chosen - torch.tensor([value for value, _, _ in outputs])).abs().max())


def test_log_probabilities(server: Server, old: Path) -> None:
    oracle = cached_hf_model(old)
    prompts = {length: clear_ids(oracle, length, seed=length) for length in (1, 127, 128, 129, 131, 513)}
    for length in (1, 129, 513):
        check(generate(server, prompts[length], logprob_start_len=0), prompts[length], oracle)
    check_concurrently(server, oracle, [(prompts[n], TOKENS) for n in (127, 128, 131, 513)])


def test_ranks_take_the_first_ones_grammars(server: Server) -> None:
    """One process compiles for both, and both fail a request whose grammar takes too much."""
    process(server, TITLE)

    def ask(regex: str) -> tuple[int, str]:
        body = {"input_ids": [30, 31], "sampling_params": {"regex": regex, "max_new_tokens": 8, "temperature": 0}}
        try:
            return 200, server.post("/generate", body)["text"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    with ThreadPoolExecutor(6) as threads:
        hostile = threads.submit(ask, "a?" * 20000)
        answers = list(threads.map(ask, ["[ab]{3}", "[ab]{3}", "x(yz)+", "[ab]{3}", "(a|"]))
    assert [status for status, _ in answers] == [200, 200, 200, 200, 400]
    assert all(re.fullmatch("[ab]{3}", answers[n][1]) for n in (0, 1, 3)) and answers[2][1].startswith("xyz")
    status, message = hostile.result()
    assert status == 400 and "compiling the grammar takes more than" in message
    assert ask("[ab]{3}") == answers[0], "kept"


def test_an_abort_comes_to_both_ranks(server: Server) -> None:
    """Requests go on to be answered alike: the ranks agree on what runs."""
    prompt = draw_ids(40, 9, 512)
    expected = generate(server, prompt)["output_ids"]
    body = {"input_ids": prompt, "rid": "long", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
    running = Background(lambda: server.status("/generate", body))
    until(lambda: server.info()["pools"]["requests"]["used"] > 0)
    server.command("/abort_request", {"rid": "long"})
    running.wait()
    until(lambda: server.info()["pools"]["requests"]["used"] == 0)
    assert generate(server, prompt)["output_ids"] == expected


def change_what_is_computed(config: dict[str, Any]) -> None:
    config.update(routed_scaling_factor=2.25, rope_theta=20000)
    config["rope_scaling"].pop("rope_theta", None)


def test_checkpoints_that_do_not_fit_change_nothing(server: Server, old: Path, new: Path, tmp_path: Path) -> None:
    before = Golden.ask(server)
    other = copy_checkpoint(new, tmp_path / "other config")
    change_json(other / "config.json", change_what_is_computed)
    expected = {
        damaged_copy(new, tmp_path / "nan", "NaN block scale"): ("weight_scale", "block scales", "found nan"),
        damaged_copy(new, tmp_path / "missing", "missing tensor"): ("weight_scale", "missing"),
        damaged_copy(new, tmp_path / "shape", "wrong shape"): ("[2048, 64]", "[2047, 64]"),
        other: ("'routed_scaling_factor'", "'rope_theta'", "second server"),
        tmp_path / "nowhere": ("nowhere", "expected a directory"),
    }
    for path, words in expected.items():
        status, message = update(server, path)
        assert status == 400 and all(word in message for word in words), message
    fields = {"flush_cache": False, "load_format": "dummy", "keep_pause": True, "no_such_field": 1, "manifest": {}}
    for name, value in [*fields.items(), ("model_path", 5), ("model_path", [str(new)]), ("model_path", None)]:
        status, message = update(server, new, **{name: value})
        assert status == 400 and message.startswith(f"{name}:"), message
    server.command("/pause_generation", {"mode": "retract"})
    status, message = update(server, new)
    server.command("/continue_generation", {})
    assert status == 400 and "paused" in message
    before.assert_same(Golden.ask(server))
    assert str(old) in server.info()["weights"]


def test_running_requests_finish_first_and_new_ones_wait(server: Server, old: Path, new: Path) -> None:
    """None is answered with weights of both, and none with what another has left in the prefix cache."""
    prompt, waiting = draw_ids(PAGES * PAGE + 40, 7, 512), draw_ids(30, 8, 512)
    assert generate(server, prompt)["meta_info"]["cached_tokens"] == 0
    assert generate(server, prompt)["meta_info"]["cached_tokens"] == PAGES * PAGE
    running = Background(lambda: generate(server, prompt, RUNNING_TOKENS))
    until(lambda: server.info()["pools"]["requests"]["used"] > 0)
    updating = Background(lambda: update(server, new, weight_version="second"))
    until(lambda: f"{new} verified" in server.text() and "Start update_weights" in server.text())
    later = Background(lambda: generate(server, waiting))
    assert running.thread.is_alive(), "the request is too short to see anything"
    assert update(server, new)[1].startswith("another update")
    status, message = updating.wait()
    assert status == 200 and str(new) in message
    assert distance(old, prompt, running.wait()) <= LARGEST_ERROR < 1 < distance(new, prompt, running.wait())
    assert distance(new, waiting, later.wait()) <= LARGEST_ERROR < 1 < distance(old, waiting, later.wait())
    answer = generate(server, prompt)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert distance(new, prompt, answer) <= LARGEST_ERROR
    assert generate(server, prompt)["meta_info"]["cached_tokens"] == PAGES * PAGE


def test_what_is_served_is_said(server: Server, new: Path) -> None:
    assert server.get("/v1/models")["data"][0]["id"] == "tiny"
    live, state = server.get("/model_info"), server.get("/server_info")["internal_states"][0]
    for found in (live, state):
        assert (found["model_path"], found["weight_version"]) == (str(new), "second")
    assert str(new) in state["nvfp4_sgl"]["weights"]
    assert state["nvfp4_sgl"]["requests"] == "shared memory"


def test_a_dead_rank_ends_the_server(server: Server) -> None:
    """Whether the other rank notices first, in a collective, or the launcher."""
    process(server, "sglang::scheduler_TP1").kill()
    assert server.process.wait(DEATH_SECONDS) != 0
    assert not wait_for_none(server.process.pid, DEATH_SECONDS)
    assert "process scheduler_1 (tensor-parallel rank 1) has ended with SIGKILL" in server.text()
