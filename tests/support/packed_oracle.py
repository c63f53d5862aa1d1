"""transformers' DeepSeek-V4 with every cached row rounded as SGLang's 8-bit entries round it.

The rounding is NumPy of its own (tables of values, nearest with ties to even), applied where transformers hands
keys to its attention function and queries and keys to its indexer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from tests.support.numpy_nvfp4 import E4M3, nearest


def _e4m3(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * E4M3[nearest(np.abs(values), E4M3)]


def round_kv_rows(rows: Tensor) -> Tensor:
    """fp32 [..., 512]: 448 dims in blocks of 64, each scaled by a power of two, as E4M3; the last 64 as bf16."""
    flat = rows.detach().reshape(-1, 512).numpy().astype(np.float32)
    nope = flat[:, :448].reshape(-1, 7, 64)
    amax = np.maximum(np.abs(nope).max(-1, keepdims=True), np.float32(1e-4))
    scale = 2.0 ** np.ceil(np.log2(amax.astype(np.float64) / 448))
    rounded = (_e4m3(nope / scale) * scale).reshape(-1, 448).astype(np.float32)
    tail = torch.from_numpy(flat[:, 448:].copy()).bfloat16().float()
    return torch.cat((torch.from_numpy(rounded), tail), dim=1).view(rows.shape)


def _hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def round_index_rows(rows: Tensor) -> Tensor:
    """fp32 [..., 128]: rotated by the orthonormal Hadamard matrix, E4M3 with one fp32 scale a row."""
    flat = rows.detach().reshape(-1, 128).numpy().astype(np.float64) @ _hadamard(128)
    scale = np.maximum(np.abs(flat).max(-1, keepdims=True), 1e-4) / 448
    return torch.from_numpy((_e4m3(flat / scale) * scale).astype(np.float32)).view(rows.shape)


def _packed_attention(module, query, key, value, attention_mask, **kwargs):
    key = round_kv_rows(key)
    return hf.eager_attention_forward(module, query, key, key, attention_mask, **kwargs)


def pack_rows(model: nn.Module) -> nn.Module:
    """Make ``model`` (a transformers DeepSeek-V4, stateless use) round its cached rows; returns it."""
    AttentionInterface.register("packed_eager", _packed_attention)
    AttentionMaskInterface.register("packed_eager", eager_mask)
    model.config._attn_implementation = "packed_eager"

    def rotate_and_round(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, keys, *rest = args
        return round_index_rows(q), round_index_rows(keys), *rest

    for module in model.modules():
        if isinstance(module, hf.DeepseekV4IndexerScorer):
            module.register_forward_pre_hook(rotate_and_round)
    return model
