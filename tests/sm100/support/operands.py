"""Random operands of the operations, with their exact values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.rows import ExpertRows, Rows
from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from tests.sm100.support.products import Bounded, RandomOperand, product

E4M3 = torch.float8_e4m3fn


def fp64(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def scales(*shape: int, seed: int = 0) -> Tensor:
    """Global or row scales that bring products of full-range block scales near one."""
    return torch.exp2(torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 4 - 11)


@dataclass(frozen=True)
class RandomRows:
    """Rows [T, K], or [T, G, K] with ``groups``."""

    rows: Rows
    operand: RandomOperand

    @classmethod
    def make(cls, count: int, k: int, token_tile: int, groups: int | None = None, seed: int = 1) -> RandomRows:
        operand = RandomOperand.make(groups or 1, count, k, seed)
        if groups is None:
            codes, plain, scale = operand.packed[0], operand.scales[0], scales(count, seed=seed)
        else:
            codes, plain = operand.packed.transpose(0, 1).contiguous(), torch.cat(list(operand.scales), dim=1)
            scale = scales(count, groups, seed=seed)
        return cls(Rows(codes, swizzle_128x4(plain.view(E4M3), token_tile), scale, token_tile), operand)

    def values(self, group: int = 0) -> np.ndarray:
        """fp64 [T, K] without row scales."""
        return self.operand.values(group)

    def for_experts(self, counts: tuple[int, ...]) -> ExpertRows:
        """The rows as those of experts, each padded to whole token tiles; there must be enough of them."""
        rows = self.rows
        needed = [-(-count // rows.token_tile) * rows.token_tile for count in counts]
        assert sum(needed) == len(rows.codes)
        offsets = torch.tensor([0, *needed[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ExpertRows(
            rows.codes, rows.block_scales, rows.scale, rows.token_tile, offsets, torch.tensor(counts, dtype=torch.int32)
        )


def random_weights(*shape: int, seed: int = 2) -> tuple[Tensor, Tensor, RandomOperand]:
    """Codes, plain block scales and values of weights [..., F, K]."""
    *leading, features, k = shape
    operand = RandomOperand.make(int(np.prod(leading)), features, k, seed)
    codes = operand.packed.view(*leading, features, k // 2)
    return codes, operand.scales.view(*leading, features, k // 16).view(E4M3), operand


def expected_product(tokens: np.ndarray, weights: np.ndarray, row_scale: Tensor, alpha: Tensor | float) -> Bounded:
    """``(tokens @ weights.T * row_scale) * alpha``."""
    factors = alpha if isinstance(alpha, float) else fp64(alpha)
    return product(tokens, weights).scaled(fp64(row_scale)[:, None]).scaled(np.asarray(factors))


def assert_allowed(found: Tensor, expected: Bounded) -> None:
    wrong = ~expected.allows(found)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}"
    if found.dtype == torch.bfloat16 and found.numel():
        assert expected.decided(found.dtype) > 0.95, "operands leave too many outputs undecided"


__all__ = ["E4M3", "RandomRows", "Weights", "assert_allowed", "expected_product", "fp64", "random_weights", "scales"]
