"""The reduction of a split-K cluster: sums in a fixed order, one tile after the other on the same cluster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import TILE_K, KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ExpertCase, ProductCase, RandomOperand, poisoned, run, swizzle_rows

STRICT = Options(strict_tensor_waits=True)


def sums(case: ProductCase, first: int, end: int) -> np.ndarray:
    """fp32 sums over the K of stages ``first`` to ``end``, of a kernel that does not split them."""

    def part(operand: RandomOperand) -> RandomOperand:
        codes, scales = (slice(first * TILE_K // size, end * TILE_K // size) for size in (2, 16))
        return RandomOperand(operand.packed[..., codes].contiguous(), operand.scales[..., scales].contiguous())

    weights, tokens = (part(operand) for operand in case.operands())
    shape = replace(case.shape, split_k=1)
    call = replace(
        replace(case, shape=shape).build()[0],
        weights=weights.packed,
        weight_scales=weights.swizzled(),
        tokens=tokens.packed.transpose(0, 1).contiguous(),
        token_scales=swizzle_rows(tokens.scales[0], shape.token_tile),
        row_scale=torch.ones(case.tokens, 1),
        alpha=torch.ones(1, case.features),
        out=poisoned(case.tokens, 1, case.features, output="fp32"),
    )
    run(call, Epilogue())
    return call.out[:, 0].numpy()


@pytest.mark.parametrize(("token_tile", "split"), [(8, 2), (8, 4), (16, 8), (64, 4)])
def test_slices_are_added_in_their_order(token_tile: int, split: int) -> None:
    """Slice 0, then slice 1 and so on, each rounded to fp32: to the last bit, on every CTA that owns a part."""
    case = ProductCase(KernelShape(token_tile, split_k=split, output="fp32"), token_tile, features=128, k=2048)
    call, epilogue = case.build()
    call = replace(call, row_scale=torch.ones(token_tile, 1), alpha=torch.ones(1, case.features))
    run(call, epilogue, STRICT)
    bounds = [part * (case.k // TILE_K) // split for part in range(split + 1)]
    slices = [sums(case, first, end) for first, end in itertools.pairwise(bounds)]

    def added(order: list[int]) -> np.ndarray:
        total = slices[order[0]]
        for part in order[1:]:
            total = total + slices[part]
        return total

    found, order = call.out[:, 0].numpy(), list(range(split))
    assert np.array_equal(found, added(order))
    if split > 2:
        assert not np.array_equal(found, added(order[::-1])), "the operands must tell orders apart"
        assert not np.array_equal(found, added([*order[1:], 0])), "the operands must tell orders apart"


@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize(("token_tile", "split"), [(8, 4), (16, 8), (64, 2)])
def test_clusters_take_tile_after_tile(token_tile: int, split: int, clusters: int) -> None:
    """The next tile's sums must not overwrite what an owner has still to add."""
    case = ProductCase(KernelShape(token_tile, split_k=split), 2 * token_tile, 264, 256 * split)
    case.check(Options("random", clusters, strict_tensor_waits=True), clusters)


@pytest.mark.parametrize("clusters", [1, 3])
def test_experts_share_clusters(clusters: int) -> None:
    shape = KernelShape(8, gated=True, grouped=True, split_k=4, output="nvfp4")
    case = ExpertCase(shape, (3, 0, 9, 8), features=160, k=1024)
    case.check(Options("random", 4, strict_tensor_waits=True), clusters)
