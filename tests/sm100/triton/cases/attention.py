"""Sparse attention: few heads by mma.sync and 64 by tcgen05, one program a query and several that add their parts."""

from __future__ import annotations

from dataclasses import replace

import torch

from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_semaphores
from nvfp4_sgl.triton_kernels.attention.tiling import BLACKWELL, SIXTEEN_HEADS, Tiling
from tests.sm100.triton.cases.case import Outputs, case, next_codes, seldom
from tests.sm100.triton.cases.rows import BF16, outputs_of
from tests.triton.support.attention import cos_sin_of, problem
from tests.triton.support.rows import poisoned_rows

SUMS = seldom(0.01, 2.0**-7, 2.0**-24)
"""Outputs in bf16. Some are a millionth of the values that were added."""


def attend(
    heads: int,
    widths: list[int],
    tiling: Tiling,
    splits: int,
    *,
    packed: bool = True,
    raw: bool = True,
    groups: int | None = None,
) -> Outputs:
    """Raw queries are normalised and rotated by the kernel, and the output is rotated back.

    groups: the output is quantised, too, in so many groups.
    """
    made = problem(heads, widths, tokens=2, packed=packed, seed=heads)
    semaphores = new_semaphores(2, heads, "cpu")
    given = {}
    if raw:
        given = {"cos_sin": cos_sin_of(torch.tensor([70_001, 3]), inverse_frequencies(64, 1e4)), "query_eps": 1e-6}
    lengths = torch.tensor([widths[0], widths[0] // 2])
    out = torch.full_like(made.q, torch.nan)
    rows = None if groups is None else poisoned_rows(2, heads // groups * 512, "cpu", token_tile=8, groups=groups)
    made.launch(
        "cpu",
        tiling=tiling,
        splits=splits,
        semaphores=semaphores,
        window_lengths=lengths,
        out=out,
        out_rows=rows,
        **given,
    )
    found = {"out": out, "semaphores": semaphores}
    return found if rows is None else {**found, **outputs_of(rows)}


@case("attend", bounds={"out": SUMS})
def few_heads() -> Outputs:
    return attend(5, [40, 20], SIXTEEN_HEADS, 1)


@case("attend", bounds={"out": SUMS}, full=True)
def few_heads_split() -> Outputs:
    return attend(5, [70, 40], SIXTEEN_HEADS, 3)


QUANTISED = {"out": SUMS, "codes": next_codes(0.01), "block_scales": next_codes(0.01), "scale": BF16}


@case("attend", bounds=QUANTISED, full=True)
def few_heads_quantised() -> Outputs:
    return attend(8, [40, 20], SIXTEEN_HEADS, 1, groups=2)


@case("attend", bounds=QUANTISED)
def few_heads_split_and_quantised() -> Outputs:
    return attend(8, [70, 40], SIXTEEN_HEADS, 3, groups=1)


@case("attend", bounds={"out": SUMS})
def many_heads() -> Outputs:
    return attend(24, [70, 20], BLACKWELL, 1)


@case("attend", bounds=QUANTISED, full=True)
def many_heads_quantised() -> Outputs:
    return attend(64, [70, 20], BLACKWELL, 1, groups=8)


@case("attend", bounds={"out": SUMS}, full=True)
def many_heads_split() -> Outputs:
    return attend(70, [130, 70], BLACKWELL, 3)


@case("attend", bounds={"out": SUMS}, full=True)
def many_heads_of_plain_rows() -> Outputs:
    return attend(24, [70, 20], replace(BLACKWELL, stages=1), 1, packed=False, raw=False)
