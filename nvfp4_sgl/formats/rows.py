"""Activations in NVFP4 and MXFP8, as the kernels that make them hand them to the GEMMs that read them.

value[t, k] = e2m1(codes[t, k]) * block_scale[t, k // 16] * scale[t], with two E2M1 codes a byte, the even k in the low
nibble. The recipe is :func:`nvfp4_sgl.formats.nvfp4.quantize_rows`; the order of block scales is that of
:mod:`nvfp4_sgl.formats.scale_layout` for one token tile. MXFP8 (:class:`MxFp8Rows`) has the same layout for its scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.scale_layout import TOKEN_TILES, scale_bytes


@dataclass(frozen=True)
class Rows:
    """NVFP4 activations [T, K], or [T, G, K] for a grouped GEMM.

    Attributes:
        codes: uint8 [T, K/2] or [T, G, K/2], the last dimension contiguous.
        block_scales: float8_e4m3fn, flat, ``scale_bytes(T, G * K, token_tile)`` long; groups side by side, one matrix.
        scale: fp32 row scales, [T] or [T, G]; or [1], one constant for all rows.
        token_tile: of the GEMM that reads the block scales.
    """

    codes: Tensor
    block_scales: Tensor
    scale: Tensor
    token_tile: int

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise OperandValueError(f"token_tile: expected one of {TOKEN_TILES}, found {self.token_tile}")

    @classmethod
    def allocate(
        cls, tokens: int, k: int, token_tile: int, device: torch.device | str, *, groups: int | None = None
    ) -> Rows:
        """Room for [tokens, k], or [tokens, groups, k]; contents undefined."""
        leading = (tokens,) if groups is None else (tokens, groups)
        scales = torch.empty(scale_bytes(tokens, k * (groups or 1), token_tile), dtype=torch.uint8, device=device)
        return cls(
            torch.empty(*leading, k // 2, dtype=torch.uint8, device=device),
            scales.view(torch.float8_e4m3fn),
            torch.empty(leading, dtype=torch.float32, device=device),
            token_tile,
        )

    def first(self, tokens: int) -> Rows:
        """The part for the first ``tokens`` tokens, in place."""
        groups = self.codes.shape[1] if self.codes.dim() == 3 else 1
        scales = self.block_scales[: scale_bytes(tokens, self.k * groups, self.token_tile)]
        return Rows(self.codes[:tokens], scales, self.scale[:tokens], self.token_tile)

    @property
    def k(self) -> int:
        return self.codes.shape[-1] * 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, [T, K] or [T, G, K]."""
        return (*self.codes.shape[:-1], self.k)

    @property
    def offsets_and_counts(self) -> tuple[Tensor | None, Tensor | None]:
        """First rows and numbers of rows of experts; ``None`` where all rows are one group."""
        return None, None


@dataclass(frozen=True)
class ExpertRows(Rows):
    """Activations sorted by expert: expert e owns ``counts[e]`` rows from ``offsets[e]`` on.

    Every offset is a multiple of ``token_tile``, and the buffer holds each expert's last tile whole: rows between an
    expert's last and the end of its tile are computed too, and their results have no meaning. Offsets are data on the
    device: a wrong one is not noticed.

    Attributes:
        offsets, counts: int32 [E].
    """

    offsets: Tensor
    counts: Tensor

    @classmethod
    def of_experts(
        cls,
        count: int,
        k: int,
        token_tile: int,
        offsets: Tensor,
        counts: Tensor,
        *,
        scale: Tensor | None = None,
    ) -> ExpertRows:
        """Room for ``count`` rows [count, k], padding included; ``scale``: fp32 [1], the constant of all rows."""
        rows = Rows.allocate(count, k, token_tile, offsets.device)
        return cls(rows.codes, rows.block_scales, rows.scale if scale is None else scale, token_tile, offsets, counts)

    @property
    def offsets_and_counts(self) -> tuple[Tensor | None, Tensor | None]:
        return self.offsets, self.counts


@dataclass(frozen=True)
class MxFp8Rows:
    """MXFP8 activations [T, K], or [T, G, K] for a grouped GEMM: value = e4m3(codes) * 2^(block_scale - 127).

    The recipe is :func:`nvfp4_sgl.formats.mxfp8.quantize_rows`. There are no row scales.

    Attributes:
        codes: float8_e4m3fn [T, K] or [T, G, K], the last dimension contiguous.
        block_scales: uint8, flat; whole atoms of each group side by side, one matrix. Scales that pad a row's last atom
            are numbers: a GEMM multiplies zeros with them.
        token_tile: of the GEMM that reads the block scales.
    """

    codes: Tensor
    block_scales: Tensor
    token_tile: int

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise OperandValueError(f"token_tile: expected one of {TOKEN_TILES}, found {self.token_tile}")

    @classmethod
    def allocate(
        cls, tokens: int, k: int, token_tile: int, device: torch.device | str, *, groups: int | None = None
    ) -> MxFp8Rows:
        """Room for [tokens, k], or [tokens, groups, k]; contents undefined."""
        leading = (tokens,) if groups is None else (tokens, groups)
        scales = scale_bytes(tokens, k, token_tile, mxfp8.BLOCK, groups or 1)
        return cls(
            torch.empty(*leading, k, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(scales, dtype=torch.uint8, device=device),
            token_tile,
        )
