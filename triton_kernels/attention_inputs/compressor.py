"""Arguments of token compression: each window of 4 or 128 tokens becomes one cache entry (specification §4).

For every window that a token of the pass completes::

    a = softmax over the window's rows of (score + ape[position mod ratio]), per channel
    e = rope(rmsnorm(sum_rows a * kv), position of the window's first token)

Ratio 128 pools the window's own tokens. At ratio 4 windows overlap: a window pools half of the channels of the four
tokens before it and the other half of the channels of its own four. The raw rows of tokens whose window is still open,
and of those that the next window overlaps, stay in SGLang's state rings. Kernels derive from the
:class:`..plan.batch.Batch`, on the device, which windows to close and which rows to keep; one launch does both
(:mod:`.prepare`, with :mod:`.compress_csa` and :mod:`.compress_hca`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import MIN_CSA_WINDOW, ROPE_DIM

from ..common.constants import constant
from ..entries import index_entry, kv_entry
from ..entries.pool import last_row, last_slot
from ..plan.batch import Batch
from .windows import CompressionArguments, unit_limit


@dataclass(frozen=True)
class Compressor:
    """One compressor of one layer.

    Attributes:
        ratio: 4 or 128.
        ape: fp32 [ratio, w], contiguous; w = 2n for ratio 4, n for ratio 128.
        norm: bf16 or fp32 [n], contiguous; n = 512 for entries, 128 for the indexer's keys (ratio 4 only).
        norm_eps: added to the mean square.
    """

    ratio: int
    ape: Tensor
    norm: Tensor
    norm_eps: float

    @property
    def size(self) -> int:
        """Width n of an entry."""
        return self.norm.shape[0]

    @property
    def width(self) -> int:
        """Width w of a token's row of values or of scores."""
        return 2 * self.size if self.ratio == 4 else self.size


@dataclass(frozen=True)
class Compression:
    """The columns that a compressor reads and the pools that it writes in a pass.

    Attributes:
        compressor: its parameters.
        kv, score: fp32 or bf16 [T, w], raw, the last dimension contiguous: columns of a GEMM's output.
        state: fp32 or bf16 [rows, 2w], rows contiguous: ``kv | score`` of earlier tokens in SGLang's rings, updated in
            place; ``plan.batch`` says which row belongs to which token. Other rows are neither read nor written.
        pages: the pool of entries, updated in place. uint8 pages hold 584-byte entries (``kv_entry``) for n = 512, and
            132-byte entries (``index_entry``), rotated by the Hadamard matrix, for n = 128. Pages of bf16 or fp32
            [pages, page_size·n] hold the rows themselves.
        page_size: entries of a page.
        ring: rows of a ring of the state: 8 or 16 at ratio 4, 128 or 256 at ratio 128. In the longer ones a pass of up
            to 10 tokens of a request overwrites nothing that the next pass needs, even if some are rejected.
    """

    compressor: Compressor
    kv: Tensor
    score: Tensor
    state: Tensor
    pages: Tensor
    page_size: int
    ring: int

    def check(self, batch: Batch, frequencies: Tensor) -> None:
        """Refuse what the kernels cannot read, by ``OperandTypeError`` or ``OperandValueError``; metadata only."""
        compressor, floats = self.compressor, (torch.float32, torch.bfloat16)
        checks.require_one_of("compress: ratio", compressor.ratio, (4, 128))
        checks.require_dimensions("compress: norm", compressor.norm, 1, "[n]")
        checks.require_one_of("compress: n", compressor.size, (512, 128) if compressor.ratio == 4 else (512,))
        checks.require_one_of("compress: ring", self.ring, (8, 16) if compressor.ratio == 4 else (128, 256))
        checks.require_dtype("compress: norm", compressor.norm, *floats)
        checks.require_contiguous("compress: norm", compressor.norm)
        width = compressor.width
        checks.require_dtype("compress: ape", compressor.ape, torch.float32)
        checks.require_shape("compress: ape", compressor.ape, (compressor.ratio, width), "[ratio, w]")
        checks.require_contiguous("compress: ape", compressor.ape)
        for name, rows in (("kv", self.kv), ("score", self.score)):
            checks.require_dtype(f"compress: {name}", rows, *floats)
            checks.require_shape(f"compress: {name}", rows, (batch.tokens, width), "[T, w]")
            checks.require_rows(f"compress: {name}", rows)
        if compressor.ratio == 4:
            checks.require_range(
                "compress: window_slots' columns", batch.window_slots.shape[1], MIN_CSA_WINDOW, math.inf
            )
        checks.require_dtype("compress: state", self.state, *floats)
        checks.require_dimensions("compress: state", self.state, 2, "[rows, 2w]")
        checks.require_shape("compress: state", self.state, (self.state.shape[0], 2 * width), "[rows, 2w]")
        checks.require_rows("compress: state", self.state)
        self._check_pages()
        checks.require_shape("compress: frequencies", frequencies, (ROPE_DIM // 2,), "[rope_dim/2]")
        checks.require_dtype("compress: frequencies", frequencies, torch.float32)
        checks.require_contiguous("compress: frequencies", frequencies)
        checks.require_same_device(
            "kv",
            self.kv,
            score=self.score,
            state=self.state,
            pages=self.pages,
            ape=compressor.ape,
            norm=compressor.norm,
            frequencies=frequencies,
            batch_pages=batch.pages,
        )

    def _check_pages(self) -> None:
        size = self.compressor.size
        if self.pages.dtype == torch.uint8:
            entry = kv_entry if size == kv_entry.DIM else index_entry
            checks.require_pages("compress: pages", self.pages, entry.page_bytes(self.page_size), self.page_size)
            return
        checks.require_dtype("compress: pages", self.pages, torch.uint8, torch.bfloat16, torch.float32)
        expected = (self.pages.shape[0], self.page_size * size)
        checks.require_shape("compress: pages", self.pages, expected, "[pages, page_size * n]")
        checks.require_rows("compress: pages", self.pages)

    def arguments(self) -> CompressionArguments:
        """Return the arguments of the kernels."""
        return CompressionArguments(
            kv=self.kv,
            score=self.score,
            state=self.state,
            ape=self.compressor.ape,
            norm=self.compressor.norm,
            pages=self.pages,
            eps=self.compressor.norm_eps,
            kv_row=self.kv.stride(0),
            score_row=self.score.stride(0),
            state_row=self.state.stride(0),
            last_state_row=last_row(self.state),
            page_stride=self.pages.stride(0),
            last_slot=last_slot(self.pages, self.page_size),
            N=constant(self.compressor.norm.shape[0]),
            PAGE_SIZE=constant(self.page_size),
            RING=constant(self.ring),
        )


class Workspace(NamedTuple):
    """Workspace through which the programs that share a ratio-128 window pass their channels on.

    One workspace serves all layers of a CUDA stream, one after another.

    Attributes:
        pooled: fp32 [units, 512], the pooled channels of a unit's window.
        semaphores: int32 [units], the programs of a unit that are done; zero between launches.
    """

    pooled: Tensor
    semaphores: Tensor

    def check(self, units: int, kv: Tensor) -> None:
        """Refuse a workspace that is malformed or too small for ``units`` units; metadata only."""
        checks.require_dtype("compress: workspace.pooled", self.pooled, torch.float32)
        checks.require_dtype("compress: workspace.semaphores", self.semaphores, torch.int32)
        for name, tensor in self._asdict().items():
            checks.require_contiguous(f"compress: workspace.{name}", tensor)
        expected = (self.semaphores.shape[0], kv_entry.DIM)
        checks.require_shape("compress: workspace.pooled", self.pooled, expected, "[units, 512]")
        checks.require_same_device("kv", kv, pooled=self.pooled, semaphores=self.semaphores)
        if self.semaphores.shape[0] < units:
            raise OperandValueError(
                f"compress: workspace: expected at least {units} units, found {self.semaphores.shape[0]}"
            )


def new_workspace(tokens: int, requests: int, device: torch.device | str) -> Workspace:
    """Allocate a workspace for ratio-128 passes of up to ``tokens`` tokens and ``requests`` requests."""
    units = unit_limit(tokens, requests, 128)
    return Workspace(
        torch.empty(units, kv_entry.DIM, dtype=torch.float32, device=device),
        torch.zeros(units, dtype=torch.int32, device=device),
    )
