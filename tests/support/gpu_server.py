"""Servers with a GPU: their flags, the tiny checkpoint's sizes, and what two servers must answer alike."""

from __future__ import annotations

from typing import Any

from tests.support.bf16_logprobs import generate, prompt
from tests.support.server import Server

FLAGS = (
    *("--sampling-backend", "pytorch", "--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
    *("--context-length", "16384", "--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16"),
    *("--chunked-prefill-size", "1024", "--swa-full-tokens-ratio", "0.5"),
)
SHAPES: dict[str, Any] = {"index_topk": 512, "num_attention_heads": 64, "o_groups": 8, "num_hidden_layers": 6}


def alone(server: Server) -> list[Any]:
    """Tokens and log-probabilities of greedy answers, one after the other."""
    return [generate(server, prompt(n, seed=7), 40)["meta_info"]["output_token_logprobs"] for n in (5, 129, 700)]


def outputs(server: Server) -> list[Any]:
    """Tokens and log-probabilities of greedy answers, alone and in a batch of a size that graphs are captured for.

    So the products have the same shapes in every server, with graphs or without, and the bits must be the same.
    """
    batch = [prompt(140, seed=20 + n) for n in range(4)]
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    together = server.post("/generate", {"input_ids": batch, "return_logprob": True, "sampling_params": sampling})
    return [*alone(server), *(answer["meta_info"]["output_token_logprobs"] for answer in together)]
