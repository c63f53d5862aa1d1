"""NVIDIA's fused attention for SM100 (CuTeDSL), as FlashInfer installs it, in the emulator."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.cutlass_examples import example

TYPES = {"Float16": torch.float16, "Float8E4M3FN": torch.float8_e4m3fn}


def _pointers(dtype: str, output: str, addresses: list[int]) -> list[Any]:
    """Pointers to queries, keys, values and the output."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    kinds = [getattr(cutlass, name) for name in (dtype, dtype, dtype, output)]
    return [
        make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16)
        for kind, address in zip(kinds, addresses, strict=True)
    ]


@functools.cache
def compiled_attention(dtype: str, output: str, width: int) -> Compiled:
    """The kernel without a mask, for heads of ``width``."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    module = example("fmha")
    kernel = module.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (128, 128, width), False, module.fmha_utils.MaskEnum.RESIDUAL_MASK
    )
    sizes = tuple(cutlass.Int32(1) for _ in range(7))
    scales = (cutlass.Float32(1.0),) * 3
    pointers = _pointers(dtype, output, [0] * 4)
    arguments = (*pointers, sizes, None, None, None, *scales, None, None, make_fake_stream())
    return compile_for("sm_100a", kernel, *arguments)


def run_attention(
    dtype: str, output: str, queries: int, keys: int, width: int, options: Options
) -> tuple[Tensor, Tensor, Statistics]:
    """One head on random rows: what the kernel gives and what is right, both fp64 [queries, width]."""
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

    random = torch.Generator().manual_seed(1)
    q, k, v = ((torch.randn(1, rows, 1, width, generator=random)).to(TYPES[dtype]) for rows in (queries, keys, keys))
    out = torch.full((1, queries, 1, width), float("nan")).to(TYPES[output])
    scale = 1 / math.sqrt(width)
    with emulated(options, reads=[q, k, v], writes=[out]) as emulator:
        sizes = 1, queries, queries, keys, 1, 1, width
        pointers = _pointers(dtype, output, [tensor.data_ptr() for tensor in (q, k, v, out)])
        emulator(
            compiled_attention(dtype, output, width), *pointers, sizes, None, None, None,
            scale * math.log2(math.e), scale, 1.0, None, None, cuda.CUstream(0),
        )  # fmt: skip
    left, right, values = (tensor[0, :, 0].double() for tensor in (q, k, v))
    expected = torch.softmax(left @ right.T * scale, dim=1) @ values
    return out[0, :, 0].double(), expected, emulator.statistics[0]
