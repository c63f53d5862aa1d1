"""Every kernel shape in every asynchrony mode; long, so only with ``--full``."""

from __future__ import annotations

from itertools import product

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES, Output
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ExpertCase, ProductCase

MODES = [
    Options(strict_tensor_waits=True),
    Options("random", 11, strict_tensor_waits=True),
    *(Options("starved", 12, engine, strict_tensor_waits=True) for engine in ("tma_load", "tma_store", "tensor")),
]


def shapes() -> list[KernelShape]:
    """All valid ones up to clusters of four pairs."""
    found = []
    outputs: tuple[Output, ...] = ("bf16", "fp32", "nvfp4")
    kinds = list(product((False, True), (False, True), (1, 2, 4, 8)))
    pairs = ((False, 1, 1), (True, 1, 1), (True, 2, 1), (True, 1, 2), (True, 2, 2))
    for tile, output, (gated, grouped, split), (pair, tokens, weights) in product(TOKEN_TILES, outputs, kinds, pairs):
        try:
            found.append(
                KernelShape(
                    tile,
                    split_k=split,
                    output=output,
                    pair=pair,
                    gated=gated,
                    grouped=grouped,
                    shared_tokens=tokens,
                    shared_weights=weights,
                )
            )
        except ValueError:
            continue
    return found


def name(value: KernelShape | Options) -> str:
    if isinstance(value, Options):
        return f"{value.mode} {value.starve or ''}".strip()
    kinds = "grouped " * value.grouped + "gated " * value.gated
    kinds += f"{value.shared_tokens}x{value.shared_weights} pairs " * value.pair + f"split {value.split_k} "
    return f"{kinds}{value.token_tile} {value.output}"


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.parametrize("shape", shapes(), ids=name)
def test_every_shape_in_every_mode(shape: KernelShape, mode: Options) -> None:
    tile, k = shape.token_tile, max(320, shape.tile_k * shape.split_k + 64)
    if shape.grouped or shape.gated:
        counts = (3, 0, tile + 1) if shape.grouped else (tile + 1,)
        ExpertCase(shape, counts, features=192, k=k, seed=5).check(mode)
    else:
        ProductCase(shape, tile + 1, features=200, k=k, seed=5).check(mode)
