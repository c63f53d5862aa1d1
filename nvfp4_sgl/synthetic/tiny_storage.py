"""A matrix of a tiny checkpoint in each storage: names, dtypes and shapes as exporters write them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_sgl.formats import fp8_block, mxfp4, nvfp4
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, round_to_e4m3

UNTIED_UP_FACTOR = 1.37
"""Where gate and up keep scales of their own, up's is also this much larger than its maximum needs."""

INPUT_SCALE = 8.0 / nvfp4.FULL_SCALE
"""A calibration constant as an exporter would write it, for activations up to 8. Nothing here reads it."""

Stored = Iterator[tuple[str, Tensor]]


def modelopt_nvfp4(stem: str, w: Tensor, sibling: Tensor | None) -> Stored:
    """As ModelOpt writes it; ``sibling`` is the matrix that shares its global scale."""
    stored = _quantized(stem, w, sibling)
    yield f"{stem}.weight", stored.packed
    yield f"{stem}.weight_scale", stored.block_scale
    yield f"{stem}.weight_scale_2", stored.global_scale
    yield f"{stem}.input_scale", torch.tensor(INPUT_SCALE, dtype=torch.float32)


def compressed_nvfp4(stem: str, w: Tensor, sibling: Tensor | None) -> Stored:
    """As compressed-tensors writes it: global scales inverse, [1]."""
    stored = _quantized(stem, w, sibling)
    yield f"{stem}.weight_packed", stored.packed
    yield f"{stem}.weight_scale", stored.block_scale
    yield f"{stem}.weight_global_scale", stored.global_scale.reciprocal().reshape(1)
    yield f"{stem}.input_global_scale", torch.tensor([1 / INPUT_SCALE], dtype=torch.float32)


def fp8(stem: str, w: Tensor, scale_suffix: str) -> Stored:
    """128 × 128 blocks with UE8M0 scales."""
    stored = fp8_block.quantize_weight(w)
    yield f"{stem}.weight", stored.weight
    yield f"{stem}.{scale_suffix}", stored.scale.view(torch.float8_e8m0fnu)


def fp8_float(stem: str, w: Tensor, scale_suffix: str, dtype: torch.dtype) -> Stored:
    """128 × 128 blocks with scales in ``dtype``, the block's maximum / 448 rounded up to what ``dtype`` holds."""
    (n, k), block = w.shape, fp8_block.BLOCK
    blocks = functional.pad(w.float(), (0, -k % block, 0, -n % block)).unflatten(-1, (-1, block))
    blocks = blocks.unflatten(0, (-1, block))  # [N/128, 128, K/128, 128]
    # 2^-8 is a rounding step of bf16: no block's maximum exceeds 448 times its scale.
    scale = (blocks.abs().amax(dim=(1, 3)).clamp_min(fp8_block.AMAX_FLOOR) * (1 + 2**-8) / E4M3_MAX).to(dtype)
    values = round_to_e4m3(blocks / scale.float()[:, None, :, None]).flatten(0, 1).flatten(1)
    yield f"{stem}.weight", values[:n, :k].contiguous()
    yield f"{stem}.{scale_suffix}", scale


def mxfp4_packed(stem: str, w: Tensor, scale_suffix: str) -> Stored:
    """As DeepSeek writes it: codes as int8."""
    stored = mxfp4.quantize(w)
    yield f"{stem}.weight", stored.packed.view(torch.int8)
    yield f"{stem}.{scale_suffix}", stored.scale.view(torch.float8_e8m0fnu)


def _quantized(stem: str, w: Tensor, sibling: Tensor | None) -> nvfp4.NvFp4Tensor:
    amax = w.float().abs().amax()
    if sibling is not None:
        amax = torch.maximum(amax, sibling.float().abs().amax())
    elif stem.endswith(".w3"):
        amax = amax * UNTIED_UP_FACTOR
    return nvfp4.quantize_weight(w, amax / nvfp4.FULL_SCALE)
