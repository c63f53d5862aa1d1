"""Sparse attention: few heads by mma.sync and 64 by tcgen05, one program a query and several that add their parts."""

from __future__ import annotations

from dataclasses import replace

import torch

from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_arrivals
from nvfp4_sgl.triton_kernels.attention.tiling import BLACKWELL, FEW_HEADS, Tiling
from tests.sm100.triton.cases.case import Outputs, case
from tests.sm100.triton.cases.rows import BF16
from tests.triton.test_attention import problem, turns_of


def attend(
    heads: int, widths: list[int], tiling: Tiling, splits: int, *, packed: bool = True, raw: bool = True
) -> Outputs:
    """Raw queries are normalised and turned by the kernel, and the output is turned back."""
    made = problem(heads, widths, tokens=2, packed=packed, seed=heads)
    arrivals = new_arrivals(2, heads, "cpu")
    given = {}
    if raw:
        given = {"turns": turns_of(torch.tensor([70_001, 3]), inverse_frequencies(64, 1e4)), "query_eps": 1e-6}
    lengths = torch.tensor([widths[0], widths[0] // 2])
    out = made.run("cpu", tiling=tiling, splits=splits, arrivals=arrivals, window_lengths=lengths, **given)
    return {"out": out, "arrivals": arrivals}


@case("attend", bounds={"out": BF16})
def few_heads() -> Outputs:
    return attend(5, [40, 20], FEW_HEADS, 1)


@case("attend", bounds={"out": BF16})
def few_heads_split() -> Outputs:
    return attend(5, [70, 40], FEW_HEADS, 3)


@case("attend", bounds={"out": BF16})
def many_heads() -> Outputs:
    return attend(24, [70, 20], BLACKWELL, 1)


@case("attend", bounds={"out": BF16}, full=True)
def many_heads_split() -> Outputs:
    return attend(70, [130, 70], BLACKWELL, 3)


@case("attend", bounds={"out": BF16}, full=True)
def many_heads_of_plain_rows() -> Outputs:
    return attend(24, [70, 20], replace(BLACKWELL, stages=1), 1, packed=False, raw=False)
