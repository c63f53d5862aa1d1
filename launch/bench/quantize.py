"""Quantisation to NVFP4, alone and fused, at the shapes of Flash and Pro.

Peers: the reference recipe in torch, and what SGLang does in the same places for products in FP8: groups of 128 values
(E4M3 codes and fp32 scales, so nearly twice our bytes written). Its kernels but RMSNorm are compiled by nvcc at their
first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench_peers import foreign, installed
from torch import Tensor

from nvfp4_sgl.formats.nvfp4 import quantize_rows, swiglu_row_scale
from nvfp4_sgl.triton_kernels.quantize.nvfp4 import block_scale_bytes
from nvfp4_sgl.triton_kernels.quantize.quantize import (
    inverse_rope_quantize,
    quantize,
    quantize_scattered,
    rms_norm_quantize,
    swiglu_quantize,
)

from . import Case

GROUP = 128
QUANTIZE_FP8 = foreign("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8")
TOKENS = (1, 8, 64, 256, 8192)
EPS, LIMIT = 1e-6, 10.0
EXPERTS_PER_TOKEN = 6


def cases() -> Iterator[Case]:
    for model, hidden, query_rank, inner, heads, groups in (
        ("flash", 4096, 1024, 2048, 64, 8),
        ("pro", 7168, 1536, 3072, 128, 16),
    ):
        for tokens in TOKENS:
            for width in (query_rank, hidden, groups * 1024):
                yield _plain(f"quantize/{model}/{tokens}x{width}", tokens, width)
            yield _gathered(f"quantize gathered/{model}/{tokens}x{hidden}", tokens, hidden)
            yield _scattered(f"quantize scattered/{model}/{tokens}x{hidden}", tokens, hidden)
            yield _norm(f"rms_norm_quantize/{model}/{tokens}x{hidden}", tokens, hidden)
            yield _swiglu(f"swiglu_quantize/{model}/{tokens}x{inner}", tokens, inner)
            yield _inverse_rope(f"inverse_rope_quantize/{model}/{tokens}x{heads}x512", tokens, heads, groups)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _outputs(rows: int, k: int, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    leading = (rows,) if groups == 1 else (rows, groups)
    codes = torch.empty(*leading, k // 2, device="cuda", dtype=torch.uint8)
    scales = torch.zeros(block_scale_bytes(rows, k * groups), device="cuda", dtype=torch.uint8)
    return codes, scales, torch.empty(leading, device="cuda")


def _written(rows: int, k: int) -> int:
    """Bytes of codes, block scales and row scales."""
    return rows * (k // 2 + k // 16 + 4)


def _plain(name: str, rows: int, k: int) -> Case:
    x, outputs = _random(rows, k), _outputs(rows, k)
    peers: dict[str, Callable[[], object]] = {"torch": partial(quantize_rows, x)}
    if installed("sglang"):
        peers["sglang fp8 per-token-group (nvcc)"] = partial(_fp8, x)
    return Case(name, partial(quantize, x, *outputs), x.nbytes + _written(rows, k), peers=peers)


def _gathered(name: str, tokens: int, k: int) -> Case:
    """Each token once for each of its experts, experts' rows padded to tiles: a row of padding for each real one."""
    x, rows = _random(tokens, k), 2 * EXPERTS_PER_TOKEN * tokens
    source = torch.arange(rows, device="cuda", dtype=torch.int32) // (2 * EXPERTS_PER_TOKEN)
    source[1::2] = -1
    run = partial(quantize, x, *_outputs(rows, k), source_row=source)
    return Case(name, run, x.nbytes + source.nbytes + _written(rows // 2, k))


def _scattered(name: str, tokens: int, k: int) -> Case:
    """The same, each token quantised once; to rows as far from each other as experts' are."""
    x, rows = _random(tokens, k), 2 * EXPERTS_PER_TOKEN * tokens
    destination = 2 * torch.arange(tokens * EXPERTS_PER_TOKEN, device="cuda", dtype=torch.int32)
    destination = destination.view(EXPERTS_PER_TOKEN, tokens).t().contiguous()
    run = partial(quantize_scattered, x, destination, *_outputs(rows, k))
    return Case(name, run, x.nbytes + destination.nbytes + _written(rows // 2, k))


def _norm(name: str, rows: int, k: int) -> Case:
    x, normed = _random(rows, k), _random(rows, k)
    weight = _random(k)
    run = partial(rms_norm_quantize, x, weight, EPS, *_outputs(rows, k), normed=normed)
    peers: dict[str, Callable[[], object]] = {}
    if installed("sglang", "sgl_kernel"):
        norm = foreign("sgl_kernel", "rmsnorm")
        peers["sgl_kernel norm, sglang fp8 per-token-group (nvcc)"] = lambda: _fp8(norm(x, weight, EPS))
    return Case(name, run, x.nbytes + normed.nbytes + _written(rows, k), peers=peers)


def _swiglu(name: str, rows: int, k: int) -> Case:
    gate_up = _random(rows, 2 * k)
    codes, scales, _ = _outputs(rows, k)
    run = partial(swiglu_quantize, gate_up, LIMIT, codes, scales, swiglu_row_scale(LIMIT))
    peers: dict[str, Callable[[], object]] = {}
    if installed("sglang"):
        peers["sglang fp8 silu_and_mul_contig_post_quant (nvcc)"] = partial(
            foreign("sglang.kernels.ops.activation.silu_and_mul_clamp", "silu_and_mul_contig_post_quant"),
            gate_up,
            torch.empty(rows, k, device="cuda", dtype=torch.float8_e4m3fn),
            torch.empty(rows, k // GROUP, device="cuda"),
            GROUP,
            swiglu_limit=LIMIT,
        )
    return Case(name, run, gate_up.nbytes + _written(rows, k), peers=peers)


def _inverse_rope(name: str, rows: int, heads: int, groups: int) -> Case:
    x, turns, k = _random(rows, heads, 512), torch.randn(rows, 64, device="cuda"), heads * 512 // groups
    run = partial(inverse_rope_quantize, x, turns, *_outputs(rows, k, groups))
    peers: dict[str, Callable[[], object]] = {}
    if installed("sglang"):
        rotated, positions = x.clone(), torch.zeros(rows, device="cuda", dtype=torch.int64)
        table = torch.ones(1, 32, device="cuda", dtype=torch.complex64)
        rotate = foreign("sglang.kernels.ops.attention.dsv4.norm_rope", "fused_rope_inplace")

        def rotate_quantize() -> None:
            rotate(rotated[..., -64:], None, table, positions, True)
            _fp8(rotated.view(rows * groups, k))

        peers["sglang rope, fp8 per-token-group (nvcc)"] = rotate_quantize
    return Case(name, run, x.nbytes + turns.nbytes + groups * _written(rows, k), peers=peers)


def _fp8(x: Tensor) -> object:
    """As SGLang's products on Hopper want it: scales column by column, padded for their bulk loads."""
    return QUANTIZE_FP8(x, GROUP, column_major_scales=True, scale_tma_aligned=True)
