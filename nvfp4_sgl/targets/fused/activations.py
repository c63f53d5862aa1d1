"""Buffers of activations, in the forms that their consumers read."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.w4a4.operations import token_tile_for
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.model.contract import Activation, Form
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize


def new_rows(tokens: int, k: int, device: torch.device, *, groups: int | None = None) -> Rows:
    """Room for NVFP4 activations [tokens, k] or [tokens, groups, k], laid out for the GEMMs of that many tokens."""
    return Rows.allocate(tokens, k, token_tile_for(tokens), device, groups=groups)


def in_form(values: Tensor, form: Form) -> Activation:
    """``values``, bf16 [T, K] or [T, G, K], as an operand in ``form``; NVFP4 takes a launch of its own."""
    if Form.NVFP4 not in form:
        return Activation(values)
    groups = values.shape[1] if values.dim() == 3 else None
    rows = new_rows(values.shape[0], values.shape[-1], values.device, groups=groups)
    quantize(values, rows)
    return Activation(values if Form.VALUES in form else None, rows)
