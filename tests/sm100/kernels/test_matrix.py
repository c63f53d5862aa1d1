"""Every kernel shape in every asynchrony mode; long, so only with ``--full``."""

from __future__ import annotations

from itertools import product

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import TOKEN_TILES, Output
from nvfp4_sgl.cutedsl_kernels.sm100.shape import BlockScaledKind, KernelShape
from tests.sm100.emulator import Options
from tests.sm100.support.products import ExpertCase, ProductCase

MODES = [
    Options(strict_tensor_waits=True),
    Options("random", 11, strict_tensor_waits=True),
    *(Options("starved", 12, engine, strict_tensor_waits=True) for engine in ("tma_load", "tma_store", "tensor")),
]


def shapes() -> list[KernelShape]:
    """All valid ones."""
    found = []
    outputs: tuple[Output, ...] = ("bf16", "fp32", "nvfp4")
    operands: tuple[BlockScaledKind, ...] = ("nvfp4", "mxfp8")
    kinds = list(product(operands, (False, True), (False, True), (False, True), (1, 2, 4, 8)))
    pairs = [(False, 1, 1), *product((True,), (1, 2, 4), (1, 2, 4))]
    for tile, output, (operand, gated, grouped, stream_k, split), (pair, tokens, weights) in product(
        TOKEN_TILES, outputs, kinds, pairs
    ):
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
                    stream_k=stream_k,
                    operands=operand,
                )
            )
        except ValueError:
            continue
    return found


def name(value: KernelShape | Options) -> str:
    if isinstance(value, Options):
        return f"{value.mode} {value.starve or ''}".strip()
    kinds = "MXFP8 " * (value.operands == "mxfp8") + "stream-K " * value.stream_k
    kinds += "grouped " * value.grouped + "gated " * value.gated
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
        # Six tiles for four pairs: two are shared by two pairs each, and each pair has a whole one.
        features, clusters = (520, 4) if shape.stream_k else (200, 1)
        ProductCase(shape, tile + 1, features=features, k=k, seed=5).check(mode, clusters)
