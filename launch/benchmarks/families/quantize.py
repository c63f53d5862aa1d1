"""Quantisation to NVFP4 in launches of its own, at the shapes of Flash and Pro.

Peers: the reference recipe in torch, and what SGLang does in the same places for GEMMs in FP8: groups of 128 values
(E4M3 codes and fp32 scales, so nearly twice our bytes written). Its kernels are compiled by nvcc at their first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import foreign, installed
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize
from nvfp4_sgl.triton_kernels.quantize.scatter import quantize_scattered

from . import Case

GROUP = 128
QUANTIZE_FP8 = foreign("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8")
TOKENS = (1, 8, 64, 256, 8192)
EXPERTS_PER_TOKEN = 6


def cases() -> Iterator[Case]:
    for model, hidden, query_rank, groups in (("flash", 4096, 1024, 8), ("pro", 7168, 1536, 16)):
        for tokens in TOKENS:
            for width in (query_rank, hidden, groups * 1024):
                yield _plain(f"quantize/{model}/{tokens}x{width}", tokens, width)
            yield _scattered(f"quantize scattered/{model}/{tokens}x{hidden}", tokens, hidden)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _outputs(rows: int, k: int) -> Rows:
    out = Rows.allocate(rows, k, 128, "cuda")
    out.block_scales.view(torch.uint8).zero_()
    return out


def _written(rows: int, k: int) -> int:
    """Bytes of codes, block scales and row scales."""
    return rows * (k // 2 + k // 16 + 4)


def _plain(name: str, rows: int, k: int) -> Case:
    x, out = _random(rows, k), _outputs(rows, k)
    peers: dict[str, Callable[[], object]] = {"torch": partial(quantize_rows, x)}
    if installed("sglang"):
        peers["sglang fp8 per-token-group (nvcc)"] = partial(_fp8, x)
    return Case(name, partial(quantize, x, out), x.nbytes + _written(rows, k), peers=peers)


def _scattered(name: str, tokens: int, k: int) -> Case:
    """Each token to its experts' rows, which are padded to tiles: a row of padding for each real one."""
    x, rows = _random(tokens, k), 2 * EXPERTS_PER_TOKEN * tokens
    destination = 2 * torch.arange(tokens * EXPERTS_PER_TOKEN, device="cuda", dtype=torch.int32)
    destination = destination.view(EXPERTS_PER_TOKEN, tokens).t().contiguous()
    run = partial(quantize_scattered, x, destination, _outputs(rows, k))
    return Case(name, run, x.nbytes + destination.nbytes + _written(rows // 2, k))


def _fp8(x: Tensor) -> object:
    """Quantise as SGLang's GEMMs on Hopper expect: scales column by column, padded for their bulk loads."""
    return QUANTIZE_FP8(x, GROUP, column_major_scales=True, scale_tma_aligned=True)
