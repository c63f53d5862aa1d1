"""Servers with a GPU: their flags, the tiny checkpoint's sizes, and what two servers must answer alike."""

from __future__ import annotations

from typing import Any

import torch

from nvfp4_sgl.ops.modes import ActivationMode
from tests.support.bf16_logprobs import generate, prompt
from tests.support.server import Server

FLAGS = (
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
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


MEDIAN = {ActivationMode.W4A16: 1.3, ActivationMode.W4A4: 1.4}
"""Bound of the median error, by the reference's."""


def require_as_good(mode: ActivationMode, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The server's errors of log-probabilities are those of the rounded reference, in the median and at 90 %."""
    quantiles = torch.tensor([0.5, 0.9])
    print("error of log-probabilities, median and 90 %:", ours.quantile(quantiles), theirs.quantile(quantiles))
    # Quantiles of few values scatter: with 112 of them an H200 once gave 1.4, with 3695 at most 1.16. The upper one
    # scatters anyway, as flipped choices move all that follows: 1.46 between runs of the reference (test_decoder).
    # The bound of w4a4 is that of test_decoder.
    assert ours.quantile(0.5) <= (MEDIAN[mode] if len(ours) > 1000 else 2.0) * theirs.quantile(0.5)
    assert ours.quantile(0.9) <= 2.0 * theirs.quantile(0.9)
