"""The two latents of an attention layer: normalise q_lora; normalise, rotate, pack and store the keys.

Both are columns of the same GEMM's output, and neither depends on the other (specification §3.1, §4.4): a program
takes one of them for one token. Where the next GEMM reads q_lora as NVFP4 activations, the program that normalises a
row also quantises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.limits import MAX_NORM_WIDTH

from ..common.constants import constant
from ..common.integers import next_power_of_2
from ..common.rope import require_cos_sin, require_norm_weight
from ..common.rounding import round_for, round_to_bf16
from ..entries.kv_entry import DIM, ROPE_DIM, page_bytes, store_row
from ..entries.pool import last_slot
from ..hyper_connection.streams import normalized
from ..quantize.nvfp4 import halves
from ..quantize.rows import RowsArguments, check_rows, rows_arguments, store_quantized_row


class LatentArguments(NamedTuple):
    """:class:`Latents` as a kernel takes them; strides in elements, PAGE_SIZE and BLOCK constants.

    ``q_out`` is ``None``, or ``q_rows`` empty, where that output is not wanted.
    """

    q: Tensor
    q_norm: Tensor
    q_out: Tensor | None
    q_rows: RowsArguments | tuple[()]
    kv: Tensor
    kv_norm: Tensor
    cos_sin: Tensor
    slots: Tensor
    pages: Tensor
    eps: float
    width: int
    q_row: int
    q_out_row: int
    kv_row: int
    page_stride: int
    last_slot: int
    PAGE_SIZE: tl.constexpr
    BLOCK: tl.constexpr


@dataclass(frozen=True)
class Latents:
    """Latents of a pass of T tokens, and where their results go.

    Attributes:
        q_lora: bf16 or fp32 [T, n], the last dimension contiguous, n up to 16384.
        q_norm: bf16 or fp32 [n], contiguous.
        q_out: bf16 or fp32 [T, n], the last dimension contiguous: ``rms_norm(q_lora, q_norm)``, rounded once. May be
            ``None`` if ``q_rows`` is given.
        q_rows: [T, n], the same rounded to bf16 and quantised, equal bit for bit to ``quantize.quantize.quantize``; n a
            multiple of 64. May be ``None`` if ``q_out`` is given.
        kv: bf16 or fp32 [T, 512], the last dimension contiguous.
        kv_norm: bf16 or fp32 [512], contiguous.
        eps: added to both mean squares.
        cos_sin: fp32 [T, 64], contiguous, from ``common.rope.rope_cos_sin``.
        slots: int32 or int64 [T], contiguous; a key whose slot is outside the pool is not stored.
        pages, page_size: SGLang's pages of 584-byte entries, written in place, as in
            ``entries.kv_entry.norm_rope_store_kv``.
    """

    q_lora: Tensor
    q_norm: Tensor
    q_out: Tensor | None
    kv: Tensor
    kv_norm: Tensor
    eps: float
    cos_sin: Tensor
    slots: Tensor
    pages: Tensor
    page_size: int
    q_rows: Rows | None = None

    @property
    def tokens(self) -> int:
        """T, the tokens of the pass."""
        return self.kv.shape[0]

    def check(self) -> None:
        """Refuse what the kernels cannot read, by ``OperandTypeError`` or ``OperandValueError``; metadata only."""
        tokens, width = self.tokens, self.q_lora.shape[-1]
        if self.q_out is None and self.q_rows is None:
            raise OperandTypeError("latents: expected q_out, q_rows or both, found neither")
        for name, tensor, columns in (
            ("q_lora", self.q_lora, width),
            ("q_out", self.q_lora if self.q_out is None else self.q_out, width),
            ("kv", self.kv, DIM),
        ):
            checks.require_shape(f"latents: {name}", tensor, (tokens, columns), "[T, n] or [T, 512]")
            checks.require_dtype(f"latents: {name}", tensor, torch.bfloat16, torch.float32)
            checks.require_rows(f"latents: {name}", tensor)
        checks.require_range("latents: columns of q_lora", width, 1, MAX_NORM_WIDTH)
        require_norm_weight(self.q_norm, width)
        require_norm_weight(self.kv_norm, DIM)
        rope = require_cos_sin("latents: cos_sin", self.cos_sin, tokens, DIM)
        checks.require_one_of("latents: rope_dim of cos_sin", rope, (ROPE_DIM,))
        checks.require_shape("latents: slots", self.slots, (tokens,), "[T]")
        checks.require_dtype("latents: slots", self.slots, torch.int32, torch.int64)
        checks.require_contiguous("latents: slots", self.slots)
        checks.require_pages("latents: pages", self.pages, page_bytes(self.page_size), self.page_size)
        if self.q_rows is not None:
            check_rows("latents: q_rows", self.q_rows, (tokens,), width, self.q_lora)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        checks.require_same_device("q_lora", self.q_lora, **tensors)

    def arguments(self) -> LatentArguments:
        """Return the arguments of :func:`store_latent`."""
        width = self.q_lora.shape[1]
        return LatentArguments(
            q=self.q_lora,
            q_norm=self.q_norm,
            q_out=self.q_out,
            q_rows=() if self.q_rows is None else rows_arguments(self.q_rows),
            kv=self.kv,
            kv_norm=self.kv_norm,
            cos_sin=self.cos_sin,
            slots=self.slots,
            pages=self.pages,
            eps=self.eps,
            width=width,
            q_row=self.q_lora.stride(0),
            q_out_row=0 if self.q_out is None else self.q_out.stride(0),
            kv_row=self.kv.stride(0),
            page_stride=self.pages.stride(0),
            last_slot=last_slot(self.pages, self.page_size),
            PAGE_SIZE=constant(self.page_size),
            BLOCK=constant(next_power_of_2(width)),
        )


@triton.jit
def store_latent(row, which, of):
    """Store one latent of token ``row`` (int64): the key if ``which`` is 0, q_lora if 1.

    of: :class:`LatentArguments`.
    """
    if which == 0:
        slot = tl.load(of.slots + row).to(tl.int64)
        key_row, cos_sin_row = of.kv + row * of.kv_row, of.cos_sin + row * 64
        store_row(
            key_row, of.kv_norm, cos_sin_row, slot, of.pages, of.eps, of.page_stride, of.last_slot, True, of.PAGE_SIZE
        )
    else:
        BLOCK: tl.constexpr = of.BLOCK
        column = tl.arange(0, BLOCK)
        inside = column < of.width
        value = tl.load(of.q + row * of.q_row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.reshape(normalized(value, of.q_norm, of.eps, column, inside, of.width, True), (BLOCK,))
        if of.q_out is not None:
            tl.store(of.q_out + row * of.q_out_row + column, round_for(value, of.q_out), mask=inside)
        if len(of.q_rows) > 0:
            first, last = halves(round_to_bf16(value), BLOCK // 16)
            store_quantized_row(first, last, of.q_rows, row, 0, of.width // 16, BLOCK // 16)
