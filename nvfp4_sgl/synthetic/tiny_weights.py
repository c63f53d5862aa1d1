"""Random weights of tiny checkpoints: each a function of seed, name and shape only.

Independent of the order of drawing and of the storage format, so that checkpoints of one seed in different formats
hold the same weights before quantisation. Everything stored in 16 bits or fewer is first rounded to bf16.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.names import Role, TensorSpec

OUTLIER_SHARE, OUTLIER_GAIN = 1e-3, 8.0
"""One element in a thousand of every matrix is eight times larger: block scales must matter."""

GATE_UP_GAIN = 5.0
"""Gate and up come out with a standard deviation of about 5, so a few percent of them meet the clamp at 10."""

DOWN_GAIN = 1 / 12
"""Brings the SwiGLU output, about 15 rms with these gates, back to order 1."""

HEAD_GAIN = 4.5
"""Standard deviation of the logits: makes next-token distributions peaked."""


def draw(spec: TensorSpec, seed: int, *, experts: int) -> Tensor:
    """The tensor ``spec`` describes: bf16 for matrices and plain tensors, fp32 or int64 otherwise.

    Args:
        spec: which tensor.
        seed: the checkpoint's seed.
        experts: number of routed experts, for token→expert tables.
    """
    generator = torch.Generator().manual_seed(_tensor_seed(spec.name, seed))
    if spec.role is Role.TID2EID:
        order = torch.rand((spec.shape[0], experts), generator=generator).argsort(dim=-1, stable=True)
        return order[:, : spec.shape[1]].contiguous()
    x = torch.randn(spec.shape, generator=generator)
    if spec.role is Role.FP32:
        return fp32_values(spec.name, x, spec.shape[-1])
    if len(spec.shape) == 1:
        return (1.0 + 0.1 * x).bfloat16()
    if spec.name == "embed.weight":
        return x.bfloat16()
    outlier = torch.rand(spec.shape, generator=generator) < OUTLIER_SHARE
    x = torch.where(outlier, OUTLIER_GAIN * x, x) * spec.shape[-1] ** -0.5
    return (x * gain(spec.name)).bfloat16()


def _tensor_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def gain(name: str) -> float:
    """Factor of a matrix's elements over ``K ** -0.5``, by its stem or by the tensor's name."""
    stem = name.removesuffix(".weight")
    if stem.endswith((".w1", ".w3")):
        return GATE_UP_GAIN
    if stem.endswith(".w2"):
        return DOWN_GAIN
    return HEAD_GAIN if stem == "head" else 1.0


def fp32_values(name: str, x: Tensor, width: int) -> Tensor:
    """The fp32 parameter ``name``, with ``width`` columns, or a part of it, from numbers ``x`` of deviation 1."""
    if name.endswith("_fn"):
        return x * width**-0.5
    if name.endswith("_scale"):
        return 1.0 + 0.25 * x
    if name.endswith(("_base", ".ape")):
        return 0.5 * x
    if name.endswith(".gate.bias"):
        return 0.2 * x
    return x
