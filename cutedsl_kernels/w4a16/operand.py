"""The weight operand of the w4a16 GEMMs: tiles in the order in which tensor cores take them from registers.

value[r, k] = e2m1(code[r, k]) · block_scale[r, k // 16] · scale. ``sm90/layout.py`` describes a tile. Tiles are made
once, on the GPU, right after the weights arrive there; nothing else of them is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_dimensions, require_dtype, require_multiple, require_shape
from nvfp4_sgl.limits import TILED_K_MULTIPLE

from ..common.gates import interleave_gates
from ..sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS, first_tiles, pack_tiles
from ..sm90.shape import GATE_ROWS


@dataclass(frozen=True)
class TiledWeights:
    """The weight of a GEMM, or a stack of weights of a grouped one.

    Dense: [1, F, K], scale [1, F]. Grouped: [G, F, K], scale [G, F]. Experts: [E, F, K], scale [E]. Gated experts:
    [E, 2 I, K], scale [E, 2], gate before up; the rows are 8 gates, the 8 ups of the same features, the next 8 gates
    and so on.

    A layer's experts can be loaded a few at a time: ``allocate_experts`` or ``allocate_gated_experts``, then
    ``put_experts`` or ``put_gated_experts`` for all of them.

    Block scales must be finite and not negative. Callers that have checked them, or have them checked before any GEMM
    runs, pass ``checked``: then nothing waits for the device.

    Attributes:
        tiles: uint8 [matrices, ceil(features / 128), ceil(K / 128), 9216].
        scale: fp32, the global scales (alphas) as above.
        features: rows of each matrix.
        k: K.
    """

    tiles: Tensor
    scale: Tensor
    features: int
    k: int

    @classmethod
    def dense(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor, *, checked: bool = False) -> TiledWeights:
        """The weight [F, K] of a dense GEMM.

        Args:
            codes: uint8 [F, K/2], the even k in the low nibble, K a multiple of 64.
            block_scales: E4M3 [F, K/16].
            alpha: the global scale, fp32 0-d, [1] or, for a weight merged of several, [F].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or a block scale does not fit.
        """
        require_dimensions("codes", codes, 2, "[F, K/2]")
        require_dtype("alpha", alpha, torch.float32)
        if alpha.numel() not in (1, codes.shape[0]):
            raise OperandValueError(f"alpha: expected 1 or {codes.shape[0]} values, found shape {tuple(alpha.shape)}")
        of_rows = alpha.reshape(-1).expand(codes.shape[0])
        return cls._make(codes[None], block_scales[None], of_rows[None], checked)

    @classmethod
    def grouped(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor, *, checked: bool = False) -> TiledWeights:
        """The weights [G, F, K] of a block-diagonal GEMM, one for each group of the tokens' columns.

        Args:
            codes: uint8 [G, F, K/2], K a multiple of 64.
            block_scales: E4M3 [G, F, K/16].
            alpha: fp32 [G, F].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or a block scale does not fit.
        """
        require_dimensions("codes", codes, 3, "[G, F, K/2]")
        require_dtype("alpha", alpha, torch.float32)
        require_shape("alpha", alpha, codes.shape[:2], "[G, F]")
        return cls._make(codes, block_scales, alpha, checked)

    def first(self, features: int) -> TiledWeights:
        """The weight of the first ``features`` rows of a dense GEMM, in place; errors as of ``first_tiles``."""
        tiles = first_tiles(self.tiles, self.features, features)
        return replace(self, tiles=tiles, scale=self.scale[:, :features], features=features)

    @classmethod
    def allocate_experts(cls, experts: int, features: int, k: int, device: torch.device) -> TiledWeights:
        """Room for the down projections [E, F, K] of experts, contents undefined."""
        return cls._allocate(experts, features, k, (experts,), device)

    @classmethod
    def allocate_gated_experts(cls, experts: int, features: int, k: int, device: torch.device) -> TiledWeights:
        """Room for the gate and up projections [E, 2, I, K] of experts, contents undefined."""
        require_multiple("features", "I", features, GATE_ROWS, "gates and ups alternate by so many")
        return cls._allocate(experts, 2 * features, k, (experts, 2), device)

    def put_experts(
        self, first: int, codes: Tensor, block_scales: Tensor, alpha: Tensor, *, checked: bool = False
    ) -> None:
        """Copy the down projections of some experts into the stack.

        Args:
            first: index of the first of them.
            codes: uint8 [n, F, K/2]. block_scales: E4M3 [n, F, K/16]. Any device.
            alpha: fp32 [n].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or a block scale does not fit.
        """
        count = len(codes)
        require_shape("codes", codes, (count, self.features, self.k // 2), "[n, F, K/2]")
        self._put(first, codes, block_scales, alpha, checked)

    def put_gated_experts(
        self, first: int, codes: Tensor, block_scales: Tensor, alpha: Tensor, *, checked: bool = False
    ) -> None:
        """Copy the gate and up projections of some experts, gates first, into the stack.

        Args:
            first: index of the first of them.
            codes: uint8 [n, 2, I, K/2]. block_scales: E4M3 [n, 2, I, K/16]. Any device.
            alpha: fp32 [n, 2].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or a block scale does not fit.
        """
        halves = (len(codes), 2, self.features // 2)
        require_shape("codes", codes, (*halves, self.k // 2), "[n, 2, I, K/2]")
        require_shape("block_scales", block_scales, (*halves, self.k // 16), "[n, 2, I, K/16]")
        # As bytes: torch does not permute e4m3 everywhere.
        scales = interleave_gates(block_scales.view(torch.uint8), GATE_ROWS).view(torch.float8_e4m3fn)
        self._put(first, interleave_gates(codes, GATE_ROWS), scales, alpha, checked)

    def _put(self, first: int, codes: Tensor, block_scales: Tensor, alpha: Tensor, checked: bool) -> None:
        place = slice(first, first + len(codes))
        require_dtype("alpha", alpha, torch.float32)
        require_shape("alpha", alpha, (len(codes), *self.scale.shape[1:]), "those of the experts")
        require_shape("tiles", self.tiles[place], (len(codes), *self.tiles.shape[1:]), "room for the experts")
        device = self.tiles.device
        self.tiles[place].copy_(pack_tiles(codes.to(device), block_scales.to(device), checked=checked))
        self.scale[place].copy_(alpha)

    @classmethod
    def _make(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor, checked: bool) -> TiledWeights:
        tiles = pack_tiles(codes, block_scales, checked=checked)
        return cls(tiles, alpha.contiguous(), codes.shape[1], codes.shape[2] * 2)

    @classmethod
    def _allocate(
        cls, matrices: int, features: int, k: int, of_scale: tuple[int, ...], device: torch.device
    ) -> TiledWeights:
        require_multiple("k", "K", k, TILED_K_MULTIPLE, "whole halves of a tile")
        grid = (-(-features // TILE_ROWS), -(-k // TILE_K))
        tiles = torch.empty(matrices, *grid, TILE_BYTES, dtype=torch.uint8, device=device)
        return cls(tiles, torch.empty(of_scale, dtype=torch.float32, device=device), features, k)
