"""Log-probabilities of the served model against transformers on the same dequantised weights, within 1e-4.

Greedy ids must be equal too, but they alone prove little: dropping a compressor's state often leaves them unchanged.
"""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import DeepseekV4ForCausalLM

from tests.support.logprobs import BOUND, check, check_concurrently, flush, generate
from tests.support.oracle import cached_hf_model, hf_logits
from tests.support.prompts import clear_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

LENGTHS = (1, 5, 127, 128, 129, 131, 513, 1500)


@pytest.fixture(scope="module")
def oracle(checkpoint) -> DeepseekV4ForCausalLM:
    return cached_hf_model(checkpoint)


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_prompt(length, serve, checkpoint, oracle):
    """Log-probabilities of every prompt position and of the tokens that follow."""
    server = serve(checkpoint)
    flush(server)
    ids = clear_ids(oracle, length, seed=length)
    answer = generate(server, ids, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == length
    check(answer, ids, oracle, cached=0)


def test_prefix_hits(serve, checkpoint, oracle):
    """Hits end at a page boundary (256 tokens); the compressors' state must come back with the pages."""
    server = serve(checkpoint)
    flush(server)
    for length, more, cached in ((800, 77, 768), (513, 40, 512), (512, 1, 512), (300, 131, 256), (255, 3, 0)):
        base = clear_ids(oracle, length, seed=length)
        check(generate(server, base), base, oracle, cached=0)
        ids = base + clear_ids(oracle, more, seed=more)
        check(generate(server, ids), ids, oracle, cached=cached)
        check(generate(server, base), base, oracle)
    # A long decode from a hit closes windows of both ratios on top of restored state.
    ids = clear_ids(oracle, 800, seed=800)[:768] + clear_ids(oracle, 9, seed=2)
    check(generate(server, ids, tokens=140), ids, oracle, cached=768)


def test_sixteen_requests_some_aborted(serve, checkpoint, oracle):
    server = serve(checkpoint)
    lengths = (1, 3, 4, 5, 64, 127, 128, 129, 131, 200, 255, 256, 257, 300, 400, 513)
    requests = [(clear_ids(oracle, n, seed=40 + n), 20 + 3 * i) for i, n in enumerate(lengths)]
    stop = threading.Event()

    def aborted(seed: int) -> None:
        """Streams that hang up after a few chunks, one after the other."""
        while not stop.is_set():
            body = {
                "input_ids": clear_ids(oracle, 150 + seed, seed=90 + seed),
                "stream": True,
                "sampling_params": {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True},
            }
            request = urllib.request.Request(
                f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as stream:
                for _ in range(3):
                    stream.readline()

    with ThreadPoolExecutor(4) as others:
        for seed in range(4):
            others.submit(aborted, seed)
        try:
            check_concurrently(server, oracle, requests)
        finally:
            stop.set()


def test_top_logprobs(serve, checkpoint, oracle):
    """Top log-probabilities name the oracle's best tokens."""
    ids = clear_ids(oracle, 131, seed=131)
    answer = generate(serve(checkpoint), ids, top_logprobs_num=5)
    expected = hf_logits(oracle, [*ids, *answer["output_ids"]]).log_softmax(-1)[130:-1]
    best = expected.topk(5, dim=-1)
    for row, (values, tokens) in zip(answer["meta_info"]["output_top_logprobs"], zip(*best, strict=True), strict=True):
        assert [token for _, token, _ in row] == tokens.tolist()
        assert max(abs(a[0] - b) for a, b in zip(row, values.tolist(), strict=True)) <= BOUND
