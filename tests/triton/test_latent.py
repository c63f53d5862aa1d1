"""The fused launch gives what its two parts give, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_sgl.ops.norm import rms_norm as reference_norm
from nvfp4_sgl.ops.rope import inverse_frequencies
from tests.triton.support.resources import resources
from triton_kernels.checks import KernelError
from triton_kernels.kv_entry import norm_rope_store_kv, page_bytes
from triton_kernels.latent import norm_latents
from triton_kernels.rope import rope_turns

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [128, 1024, 1536])
def test_both_parts(width: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(width)
    wide = torch.randn(9, width + 512 + 64, generator=generator) * 3
    wide[:, ::91] *= 300
    wide[4] = 0.0
    wide = wide.to(dtype).to(device)
    q_lora, kv, _ = wide.split([width, 512, 64], dim=1)
    q_norm, kv_norm = (torch.rand(n, generator=generator).add(0.5).bfloat16().to(device) for n in (width, 512))
    positions = torch.tensor([0, 1, 127, 128, 65535, 300001, 1048574, 1048575, 77], device=device)
    turns = rope_turns(positions, inverse_frequencies(64, 1e4).to(device), torch.empty(9, 64, device=device))
    slots = torch.tensor([3, 0, 511, 256, -1, 257, 100, 512, 7], dtype=torch.int32, device=device)
    found, expected = (torch.full((2, page_bytes(256)), 0xA5, dtype=torch.uint8, device=device) for _ in range(2))
    norm_rope_store_kv(kv, kv_norm, EPS, turns, slots, expected, 256)
    q_out = torch.full((9, width), torch.nan, dtype=torch.bfloat16, device=device)
    norm_latents(q_lora, q_norm, q_out, kv, kv_norm, EPS, turns, slots, found, 256)
    # The sum of squares is of another order in either launch: a code next to a tie may differ by one.
    different = (found.int() - expected.int())[found != expected]
    assert different.numel() <= 4 and bool((different.abs() == 1).all())
    exact = reference_norm(q_lora.cpu().float(), q_norm.cpu(), EPS)
    assert bool(((q_out.cpu().float() - exact).abs() <= exact.abs() * 2.0**-8).all())


def test_refusals(device: str):
    x = torch.zeros(2, 640, device=device)
    weight, turns, slots = x[0, :128], x[:, :64].contiguous(), torch.zeros(2, dtype=torch.int32, device=device)
    pages = torch.zeros(1, page_bytes(64), dtype=torch.uint8, device=device)
    good: list[Any] = [x[:, :128], weight, x[:, :128].clone(), x[:, 128:], x[0, :512], EPS, turns, slots, pages, 64]
    for index, bad, message in [
        (0, x[:1, :128], "q_lora: expected shape"),
        (1, x[0, :64], "weight: expected shape"),
        (3, x[:, :256], "kv: expected shape"),
        (6, x[:, :32].contiguous(), "rope_dim of turns"),
        (7, slots.float(), "slots: expected dtype"),
        (9, 256, "pages of 256 entries"),
    ]:
        arguments = [*good]
        arguments[index] = bad
        with pytest.raises(KernelError, match=message):
            norm_latents(*arguments)


def launches() -> None:
    x = torch.zeros(16, 2048)
    pages = torch.zeros(1, page_bytes(64), dtype=torch.uint8)
    slots, out = torch.zeros(16, dtype=torch.int32), torch.zeros(16, 1536, dtype=torch.bfloat16)
    weight = torch.zeros(1536, dtype=torch.bfloat16)
    norm_latents(x[:, :1536], weight, out, x[:, 1536:], weight[:512], EPS, torch.zeros(16, 64), slots, pages, 64)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 1
    found[0].require_no_spills()
