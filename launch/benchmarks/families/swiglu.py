"""SwiGLU and scattered rows in bf16, for the experts of Flash and Pro: six of them and the shared one, for each token.

Peers: SGLang's CUDA kernel (compiled by nvcc at its first call), torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu

from . import Case

TOKENS = (1, 8, 64, 256, 8192)
EXPERTS, LIMIT = 7, 10.0
WIDTHS = {"flash": (4096, 2048), "pro": (7168, 3072)}


def cases() -> Iterator[Case]:
    for model, (hidden, inner) in WIDTHS.items():
        for tokens in TOKENS:
            rows = EXPERTS * tokens
            yield _swiglu(f"swiglu/{model}/{tokens}x{EXPERTS}x{inner}", rows, inner)
            yield _scatter(f"scatter_rows/{model}/{tokens}x{EXPERTS}x{hidden}", tokens, rows, hidden)


def _swiglu(name: str, rows: int, width: int) -> Case:
    gate_up = torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
    out = gate_up.new_empty(rows, width)
    peers = {}
    if installed("sglang"):
        own = torch.empty_like(out)
        clamped = foreign("sglang.kernels.ops.activation.silu_and_mul_clamp", "silu_and_mul_clamp")
        peers["sglang silu_and_mul_clamp (nvcc)"] = compared(partial(clamped, gate_up, own, LIMIT), out, own)
    return Case(name, partial(swiglu, gate_up, LIMIT, out), gate_up.nbytes + out.nbytes, peers=peers)


def _scatter(name: str, tokens: int, rows: int, width: int) -> Case:
    """Each token's rows among those of its experts, anywhere. torch gathers them."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    destination = torch.randperm(rows, device="cuda", dtype=torch.int32).view(tokens, EXPERTS)
    source = destination.flatten().argsort() // EXPERTS
    out, own = x.new_empty(rows, width), x.new_empty(rows, width)
    return Case(
        name,
        partial(scatter_rows, x, destination, out),
        x.nbytes + destination.nbytes + out.nbytes,
        peers={"torch.index_select": compared(partial(torch.index_select, x, 0, source, out=own), out, own)},
    )
