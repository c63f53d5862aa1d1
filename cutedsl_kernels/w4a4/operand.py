"""The weight operand of the NVFP4 GEMMs: codes, swizzled block scales and global scales (alphas).

value[r, k] = e2m1(codes[r, k]) · block_scale[r, k // 16] · scale, with E2M1 codes two a byte, the even k in the low
nibble, and E4M3 block scales in the layout of ``nvfp4_sgl.formats.scale_layout``.

Constructors take plain block scales and swizzle them once, at load time. Activations are quantised directly into the
layout (``nvfp4_sgl.formats.rows``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_multiple,
    require_shape,
)
from nvfp4_sgl.formats.scale_layout import scale_bytes, swizzle_128x4
from nvfp4_sgl.limits import NVFP4_K_MULTIPLE

from ..common.gates import interleave_gates
from ..common.shape import BLOCK
from ..sm100.shape import GATE_ROWS


@dataclass(frozen=True)
class Weights:
    """The weight of a GEMM, or a stack of weights of a grouped one.

    Dense: codes [F, K/2], alpha [F]. Grouped: [G, F, K/2], alpha [G, F]. Experts: [E, F, K/2], alpha [E]. Gated
    experts: [E, 2 I, K/2], alpha [E, 2], gate before up; the rows are 16 gates, the 16 ups of the same features, the
    next 16 gates and so on (:func:`..common.gates.interleave_gates`).

    A layer's experts can be loaded one at a time: ``allocate_experts`` or ``allocate_gated_experts``, then
    ``put_expert`` or ``put_gated_expert`` for each. Beyond the stack itself, that takes memory only for one
    expert's block scales.

    Attributes:
        codes: uint8 [..., features, K/2], contiguous, two E2M1 codes a byte.
        block_scales: E4M3, flat, in the layout of ``nvfp4_sgl.formats.scale_layout``, one padded matrix after another.
        scale: fp32, the global scales (alphas) as above.
    """

    codes: Tensor
    block_scales: Tensor
    scale: Tensor

    @property
    def k(self) -> int:
        """K."""
        return self.codes.shape[-1] * 2

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., k]."""
        return (*self.codes.shape[:-1], self.k)

    @classmethod
    def dense(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> Weights:
        """The weight [F, K] of a dense GEMM.

        Args:
            codes: uint8 [F, K/2], contiguous, K a multiple of 64; not copied.
            block_scales: E4M3 [F, K/16].
            alpha: the global scale, fp32 0-d, [1] or, for a weight merged of several, [F].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or stride does not fit.
        """
        require_dimensions("codes", codes, 2, "[F, K/2]")
        return cls._make(codes, block_scales, _expanded_alpha("alpha", alpha, codes.shape[:1]))

    @classmethod
    def grouped(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> Weights:
        """The weights [G, F, K] of a block-diagonal GEMM, one for each group of the tokens' columns.

        Args:
            codes: uint8 [G, F, K/2], contiguous, K a multiple of 64; not copied.
            block_scales: E4M3 [G, F, K/16].
            alpha: fp32 [G] or [G, F].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or stride does not fit.
        """
        require_dimensions("codes", codes, 3, "[G, F, K/2]")
        if alpha.dim() == 1:
            require_shape("alpha", alpha, codes.shape[:1], "[G]")
            alpha = alpha[:, None]
        return cls._make(codes, block_scales, _expanded_alpha("alpha", alpha, codes.shape[:2]))

    @classmethod
    def experts(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> Weights:
        """The down projections [E, F, K] of experts.

        Args:
            codes: uint8 [E, F, K/2], contiguous, K a multiple of 64; not copied.
            block_scales: E4M3 [E, F, K/16].
            alpha: fp32 [E].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape or stride does not fit.
        """
        require_dimensions("codes", codes, 3, "[E, F, K/2]")
        require_shape("alpha", alpha, codes.shape[:1], "[E]")
        return cls._make(codes, block_scales, alpha.contiguous())

    @classmethod
    def gated_experts(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> Weights:
        """The gate and up projections [E, 2, I, K] of experts, the gate first; a copy on their device.

        Args:
            codes: uint8 [E, 2, I, K/2], I a multiple of 16, K a multiple of 64.
            block_scales: E4M3 [E, 2, I, K/16].
            alpha: fp32 [E, 2].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape does not fit.
        """
        require_dimensions("codes", codes, 4, "[E, 2, I, K/2]")
        experts, _, features, half_k = codes.shape
        require_shape("codes", codes, (experts, 2, features, half_k), "[E, 2, I, K/2]")
        require_shape("alpha", alpha, (experts, 2), "[E, 2]")
        require_shape("block_scales", block_scales, (*codes.shape[:-1], half_k * 2 // BLOCK), "[E, 2, I, K/16]")
        weights = cls.allocate_gated_experts(experts, features, half_k * 2, codes.device)
        for expert in range(experts):
            weights.put_gated_expert(expert, codes[expert], block_scales[expert], alpha[expert])
        return weights

    @classmethod
    def allocate_experts(cls, experts: int, features: int, k: int, device: torch.device) -> Weights:
        """Room for the down projections [E, F, K] of experts, contents undefined."""
        return cls._allocate((experts, features, k), (experts,), device)

    @classmethod
    def allocate_gated_experts(cls, experts: int, features: int, k: int, device: torch.device) -> Weights:
        """Room for the gate and up projections [E, 2, I, K] of experts, contents undefined."""
        require_multiple("features", "I", features, GATE_ROWS, "gates and ups alternate by so many")
        return cls._allocate((experts, 2 * features, k), (experts, 2), device)

    @classmethod
    def _allocate(cls, shape: tuple[int, int, int], of_alpha: tuple[int, ...], device: torch.device) -> Weights:
        experts, features, k = shape
        require_multiple("k", "K", k, NVFP4_K_MULTIPLE, "whole groups of four block scales")
        scales = torch.empty(experts * scale_bytes(features, k), dtype=torch.uint8, device=device)
        return cls(
            torch.empty(experts, features, k // 2, dtype=torch.uint8, device=device),
            scales.view(torch.float8_e4m3fn),
            torch.empty(of_alpha, dtype=torch.float32, device=device),
        )

    def put_expert(self, expert: int, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> None:
        """Copy one expert's down projection into the stack.

        Args:
            expert: its index.
            codes: uint8 [F, K/2], any device and strides.
            block_scales: E4M3 [F, K/16], any device and strides.
            alpha: fp32, one value.

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape does not fit.
        """
        _, features, half_k = self.codes.shape
        _require_expert(codes, block_scales, alpha, (features,), half_k * 2)
        self.codes[expert].copy_(codes)
        self._put_scales(expert, block_scales, alpha.reshape(()))

    def put_gated_expert(self, expert: int, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> None:
        """Copy one expert's gate and up projections, the gate first, into the stack.

        Args:
            expert: its index.
            codes: uint8 [2, I, K/2], any device and strides.
            block_scales: E4M3 [2, I, K/16], any device and strides.
            alpha: fp32 [2].

        Raises:
            OperandTypeError: a dtype is not one of those above.
            OperandValueError: a shape does not fit.
        """
        _, rows, half_k = self.codes.shape
        _require_expert(codes, block_scales, alpha, (2, rows // 2), half_k * 2)
        self.codes[expert].view(-1, 2, GATE_ROWS, half_k).copy_(codes.unflatten(1, (-1, GATE_ROWS)).transpose(0, 1))
        self._put_scales(expert, interleave_gates(block_scales, GATE_ROWS), alpha)

    def _put_scales(self, expert: int, block_scales: Tensor, alpha: Tensor) -> None:
        """Swizzle and copy one expert's ``block_scales`` [F, K/16], in the order of the codes' rows, and its alpha."""
        swizzled = swizzle_128x4(block_scales.to(self.codes.device)).flatten()
        self.block_scales.view(len(self.codes), -1)[expert].copy_(swizzled)
        self.scale[expert].copy_(alpha)

    @classmethod
    def _make(cls, codes: Tensor, block_scales: Tensor, alpha: Tensor) -> Weights:
        require_dtype("codes", codes, torch.uint8)
        require_dtype("block_scales", block_scales, torch.float8_e4m3fn)
        require_dtype("alpha", alpha, torch.float32)
        k = codes.shape[-1] * 2
        require_multiple("codes", "K", k, NVFP4_K_MULTIPLE, "whole groups of four block scales")
        require_shape("block_scales", block_scales, (*codes.shape[:-1], k // BLOCK), "[..., F, K/16]")
        require_contiguous("codes", codes)
        return cls(codes, swizzle_128x4(block_scales).flatten(), alpha)


def _require_expert(codes: Tensor, block_scales: Tensor, alpha: Tensor, rows: tuple[int, ...], k: int) -> None:
    """Check one expert's weights [*rows, k]."""
    require_dtype("codes", codes, torch.uint8)
    require_dtype("block_scales", block_scales, torch.float8_e4m3fn)
    require_dtype("alpha", alpha, torch.float32)
    prefix = "[2, I, " if len(rows) == 2 else "[F, "
    require_shape("codes", codes, (*rows, k // 2), f"{prefix}K/2]")
    require_shape("block_scales", block_scales, (*rows, k // BLOCK), f"{prefix}K/16]")
    if alpha.numel() != len(rows) or alpha.dim() > 1:
        raise OperandValueError(f"alpha: expected {len(rows)} values, found shape {tuple(alpha.shape)}")


def _expanded_alpha(name: str, alpha: Tensor, shape: torch.Size) -> Tensor:
    """``alpha`` expanded to ``shape``: one value for each feature."""
    try:
        return alpha.expand(shape).contiguous()
    except RuntimeError:
        raise OperandValueError(
            f"{name}: expected one value, or one for each of {tuple(shape)}, found shape {tuple(alpha.shape)}"
        ) from None
