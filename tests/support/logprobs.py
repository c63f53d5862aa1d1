"""Log-probabilities that a server answered with, against the oracle fed with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import DeepseekV4ForCausalLM

from tests.support.oracle import hf_logits
from tests.support.server import Server

BOUND = 1e-4
"""Largest difference of a log-probability in fp32."""

TOKENS = 12
"""Tokens generated unless a test needs more."""


def check(answer: dict[str, Any], ids: Sequence[int], oracle: DeepseekV4ForCausalLM, cached: int | None = None) -> None:
    """Every log-probability of an answer, and greedy ids, against the oracle fed with the same tokens."""
    meta = answer["meta_info"]
    produced = answer["output_ids"]
    expected = hf_logits(oracle, [*ids, *produced]).log_softmax(-1)
    outputs = meta["output_token_logprobs"]
    assert [token for _, token, _ in outputs] == produced and len(produced) == meta["completion_tokens"]
    rows = expected[len(ids) - 1 : -1]
    assert rows.argmax(-1).tolist() == produced
    ours = torch.tensor([value for value, _, _ in outputs])
    assert (ours - rows.gather(1, torch.tensor(produced)[:, None])[:, 0]).abs().max().item() <= BOUND
    for position, (value, token, _) in enumerate(meta.get("input_token_logprobs") or []):
        # SGLang reports token 0 in place of the vocabulary's last id.
        if value is not None and ids[position] != expected.shape[1] - 1:
            assert token == ids[position]
            assert abs(value - expected[position - 1, token].item()) <= BOUND, f"position {position}"
    if cached is not None:
        assert meta["cached_tokens"] == cached


def flush(server: Server) -> None:
    """Empty the prefix cache as soon as nothing runs: an answer may be there before its request has ended."""
    server.command("/flush_cache?timeout=30", {})


def generate(
    server: Server, ids: Sequence[int], tokens: int = TOKENS, *, ignore_eos: bool = True, **body: Any
) -> dict[str, Any]:
    """Greedy continuation with log-probabilities; ``body`` adds fields to the request."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
    request = {"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling, **body}
    answer: dict[str, Any] = server.post("/generate", request)
    return answer


def check_concurrently(
    server: Server, oracle: DeepseekV4ForCausalLM, requests: Sequence[tuple[list[int], int]], *, ignore_eos: bool = True
) -> list[dict[str, Any]]:
    """Send all requests (ids, tokens) at once; returns the answers after checking each."""
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(lambda request: generate(server, *request, ignore_eos=ignore_eos), requests))
    for answer, (ids, _) in zip(answers, requests, strict=True):
        check(answer, ids, oracle)
    return answers
