"""Log-probabilities that a server answered with, where activations are bf16, and what rounding costs the CPU reference.

Rounding to bf16, and in mode ``w4a4`` to NVFP4 before each GEMM, against fp32 activations that are never quantised.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from tests.support.server import Server

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities of every position: with bf16 activations, quantised in w4a4, and with fp32 ones."""

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


class References:
    """Log-probabilities by the CPU reference on packed rows, of several sequences at once.

    Each in a process of one thread: the server's processes spin beside them, and all threads of an operator wait for
    one that shares its core. On an H200's host of 16 cores a sequence of 2500 tokens took 16 threads 85 s.
    """

    def __init__(self, pool: ProcessPoolExecutor):
        self._pool = pool

    def begin(self, ids: Sequence[int]) -> Future[Rounded]:
        return self._pool.submit(_compute, list(ids))


_models: list[Standalone] = []
"""Models of a worker process of :func:`references`."""


def _load(checkpoint: Path, capacity: int, mode: ActivationMode) -> None:
    torch.set_num_threads(1)
    for dtype, entering in ((torch.bfloat16, mode), (torch.float32, ActivationMode.W4A16)):
        _models.append(Standalone(checkpoint, packed=True, dtype=dtype, mode=entering, requests=1, capacity=capacity))


def _compute(ids: Sequence[int]) -> Rounded:
    results = []
    for model in _models:
        model.reset()
        results.append(model.extend({0: ids})[0].log_softmax(-1))
    return results[0], results[1]


@contextmanager
def references(checkpoint: Path, capacity: int, mode: ActivationMode = ActivationMode.W4A16) -> Iterator[References]:
    """References for sequences of up to ``capacity`` tokens; ``mode`` is that of the rounded ones."""
    processes = max(1, (os.cpu_count() or 1) // 2)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_load, initargs=(checkpoint, capacity, mode)) as pool:
        yield References(pool)


def errors(
    answers: Sequence[dict[str, Any]], prompts: Sequence[Sequence[int]], references: References
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute errors of the log-probabilities that the server gave, and of the bf16 reference's of the same tokens."""
    awaited = [references.begin([*ids, *answer["output_ids"]]) for answer, ids in zip(answers, prompts, strict=True)]
    ours, theirs = [], []
    for answer, ids, future in zip(answers, prompts, awaited, strict=True):
        rows, columns, values = _given(answer, ids)
        rounded, exact = future.result()
        ours.append((values - exact[rows, columns]).abs())
        theirs.append((rounded[rows, columns] - exact[rows, columns]).abs())
    return torch.cat(ours), torch.cat(theirs)


def whole_vocabulary(size: int) -> dict[str, Any]:
    """Fields of a request's body that ask for the log-probabilities of all tokens at all positions."""
    return {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": list(range(size))}


def distances(
    answers: Sequence[dict[str, Any]], prompts: Sequence[Sequence[int]], references: References
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square distances of positions to fp32 activations, of the server's answers to requests for
    :func:`whole_vocabulary` and of the rounded reference."""
    awaited = [references.begin([*ids, *answer["output_ids"]]) for answer, ids in zip(answers, prompts, strict=True)]
    ours, theirs = [], []
    for answer, future in zip(answers, awaited, strict=True):
        meta = answer["meta_info"]
        # The first token of a prompt has nothing before it; the last one generated is fed to nothing.
        rows = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
        given = torch.tensor([[value for value, _, _ in sorted(row, key=lambda entry: entry[1])] for row in rows])
        rounded, exact = (known[: len(given)] for known in future.result())
        assert given.shape == exact.shape and bool(torch.isfinite(given).all())
        ours.append((given - exact).square().mean(-1).sqrt())
        theirs.append((rounded - exact).square().mean(-1).sqrt())
    return torch.cat(ours), torch.cat(theirs)


def _given(answer: dict[str, Any], ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, tokens, and the log-probabilities that the server gave them."""
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"]
    given = [(len(ids) - 1 + n, token, value) for n, (value, token, _) in enumerate(meta["output_token_logprobs"])]
    for position, (value, token, _) in enumerate(meta.get("input_token_logprobs") or []):
        if value is not None and token == ids[position]:
            given.append((position - 1, token, value))
    rows, columns = torch.tensor([(row, token) for row, token, _ in given]).unbind(1)
    values = torch.tensor([value for _, _, value in given])
    assert bool(torch.isfinite(values).all())
    return rows, columns, values
