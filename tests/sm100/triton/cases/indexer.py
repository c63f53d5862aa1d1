"""The indexer: its queries, scores by tcgen05 in FP8 and bf16, and the choice of the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_sgl.limits import CHUNK_SCORES
from nvfp4_sgl.triton_kernels.indexer.query import prepare_queries
from nvfp4_sgl.triton_kernels.indexer.scores import PREFILL
from nvfp4_sgl.triton_kernels.indexer.topk import new_candidates, select_entries
from tests.sm100.triton.cases.case import Outputs, case, close
from tests.triton.support.passes import new_pass
from tests.triton.test_indexer import SINGLE, Layer, adversarial_queries
from tests.triton.test_topk import at_sight, random_scores

SCORES = close(2.0**-19, 2.0**-20)
"""Sums of 128 products and of the heads, in another order; some cancel."""


def cos_sin_of(positions: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(positions.float(), torch.logspace(0, -4, 32))
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)


@case("_query_kernel")
def index_queries() -> Outputs:
    q, cos_sin = adversarial_queries(16), cos_sin_of(torch.tensor([0, 1, 127, 65535, 300001, 1048574, 9]))
    weights = torch.randn(7, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes = torch.full((7, 16, 128), 0x7B, dtype=torch.uint8)
    scaled = torch.full((7, 16), torch.nan)
    prepare_queries(q, weights, cos_sin, 0.022, codes.view(torch.float8_e4m3fn), scaled)
    return {"codes": codes, "scaled": scaled}


@case("_cos_sin_kernel", "_scores_kernel", bounds={"scores": SCORES})
def index_scores_of_a_decode_step() -> Outputs:
    made = new_pass([(4 * n, 4 * n + 1) for n in (3, 4, 65, 130)], "cpu")
    return {"scores": Layer(made, 5).scores(192, 4, "cpu", tiling=SINGLE)}


@case("_cos_sin_kernel", "_query_kernel", "_scores_kernel", bounds={"scores": SCORES}, full=True)
def index_scores_of_prompts() -> Outputs:
    made = new_pass([(300, 304), (0, 7), (30, 31)], "cpu")
    return {"scores": Layer(made, 16).scores(128, 2, "cpu", tiling=replace(PREFILL, warps=4))}


@case("_cos_sin_kernel", "_query_kernel", "_scores_kernel", bounds={"scores": SCORES}, full=True)
def exact_index_scores() -> Outputs:
    made = new_pass([(300, 302), (7, 8)], "cpu")
    return {"scores": Layer(made, 16, exact=True).scores(80, 1, "cpu", tiling=None)}


def with_ties(scores: Tensor) -> None:
    scores[:, ::7] = scores[:, :1]


def nearly_equal(scores: Tensor) -> None:
    """Nine in ten lie so near each other that a histogram over all has them in one bin."""
    near = torch.rand(scores.shape, generator=torch.Generator().manual_seed(1))
    scores.copy_(torch.where(near < 0.9, 1 + near * 1e-3, scores))


def equal(scores: Tensor) -> None:
    scores.fill_(1.0)


def choose(visible: list[int], columns: int, topk: int, change: Callable[[Tensor], None] = with_ties) -> Outputs:
    made, scores = new_pass(at_sight(visible), "cpu"), random_scores(len(visible), columns)
    change(scores)
    slots = torch.full((len(visible), topk), -77, dtype=torch.int32)
    lengths = torch.full((len(visible),), -77, dtype=torch.int32)
    candidates = new_candidates(len(visible), columns, topk, "cpu")
    select_entries(scores, made.batch, topk, slots, lengths, candidates=candidates)
    return {"slots": slots, "lengths": lengths, "semaphores": candidates.semaphores}


@case("_select_kernel")
def choice_of_few() -> Outputs:
    return choose([0, 1, 7, 8, 9, 200], 200, 8)


@case("_select_kernel")
def choice_of_a_release() -> Outputs:
    """Flash's 512 of rows that have four scores for each thread."""
    outputs: Outputs = {}
    for columns in (1024, 2048):
        found = choose([511, 513, columns - 1, columns], columns, 512)
        outputs |= {f"{name} of {columns}": tensor for name, tensor in found.items()}
    return outputs


@case("_select_kernel")
def choice_of_nearly_equal_scores() -> Outputs:
    """Rows so long that a bound comes first; most scores share a bin of the first histogram."""
    return choose([6000], 6000, 512, nearly_equal)


@case("_select_kernel")
def choice_of_equal_scores() -> Outputs:
    """Rows are counted in a loop, those in which no bound is found among them."""
    return choose([1024, 4200], 4200, 512, equal)


@case("_select_kernel")
def choice_among_chunks() -> Outputs:
    return choose([2, 64, CHUNK_SCORES, CHUNK_SCORES + 65], CHUNK_SCORES + 80, 64)
