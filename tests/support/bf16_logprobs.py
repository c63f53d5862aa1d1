"""Log-probabilities that a server answered with, where activations are bf16, and what bf16 costs the CPU reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nvfp4_sgl.model.standalone import Standalone
from tests.support.server import Server

References = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]

TOKENS = 16
"""Tokens generated unless a test needs another number."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(25, 500, (length,), generator=generator).tolist()


def generate(server: Server, ids: Sequence[int], tokens: int = TOKENS, **body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    request = {"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling, **body}
    answer: dict[str, Any] = server.post("/generate", request)
    return answer


def references(checkpoint: Path, capacity: int) -> References:
    """Log-probabilities of every position, by the CPU reference with bf16 and with fp32 activations, on packed rows."""
    models = [
        Standalone(checkpoint, packed=True, dtype=dtype, requests=1, capacity=capacity)
        for dtype in (torch.bfloat16, torch.float32)
    ]

    def compute(ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        results = []
        for model in models:
            model.reset()
            results.append(model.extend({0: ids})[0].log_softmax(-1))
        return results[0], results[1]

    return compute


def errors(answer: dict[str, Any], ids: Sequence[int], references: References) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute errors of the log-probabilities that the server gave, and of the bf16 reference's of the same tokens."""
    meta, produced = answer["meta_info"], answer["output_ids"]
    assert len(produced) == meta["completion_tokens"]
    rounded, exact = references([*ids, *produced])
    given = [(len(ids) - 1 + n, token, value) for n, (value, token, _) in enumerate(meta["output_token_logprobs"])]
    for position, (value, token, _) in enumerate(meta.get("input_token_logprobs") or []):
        if value is not None and token == ids[position]:
            given.append((position - 1, token, value))
    rows, columns = torch.tensor([(row, token) for row, token, _ in given]).unbind(1)
    values = torch.tensor([value for _, _, value in given])
    assert bool(torch.isfinite(values).all())
    return (values - exact[rows, columns]).abs(), (rounded[rows, columns] - exact[rows, columns]).abs()
