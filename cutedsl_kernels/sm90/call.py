"""The tensors of one launch on Hopper; operators have checked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..common.arguments import COPIES, Arguments
from ..common.call import GemmCall
from .layout import TILE_K, TILE_ROWS
from .shape import KernelShape


@dataclass(frozen=True, kw_only=True)
class Call(GemmCall):
    """The tensors and sizes of one launch.

    Attributes:
        weights: uint8 [groups, ceil(features / 128), ceil(k / 128), tile bytes], as ``layout.pack_tiles`` or
            ``fp8_layout.pack_fp8_tiles`` makes them. Rows of gated kernels: ``shape.GATE_ROWS`` gates, as many ups, and
            so on.
        tokens: bf16 [rows, k] or [rows, groups, k], the last dimension contiguous. A grouped kernel has [rows, k].
        out: bf16 or fp32 [rows, outputs] or [rows, groups, outputs]. Outputs are features, or half of them, a multiple
            of 8, if gated. A grouped kernel also writes the rows after an expert's last one in its last token tile.
        alpha: fp32, the weights' global scales: [groups, features], [groups] for experts, or [groups, 2] for gates and
            ups; the last two contiguous.
        sources: int32 [rows] of a kernel that gathers, else None: the row of ``tokens``, [T, k] with T up to ``rows``,
            that each row of ``out`` is computed from; negative for a row without a token.
        copies: tensors of the shape, strides and dtype of ``out`` that get the same result, as many as the shape says.

    Raises:
        ValueError: there are more or fewer copies; or as :class:`GemmCall` says.
    """

    shape: KernelShape
    sources: Tensor | None = None
    copies: Sequence[Tensor] = ()

    stage_k = TILE_K

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.copies) != self.shape.copies:
            raise ValueError(f"copies: expected {self.shape.copies}, found {len(self.copies)}")

    @property
    def features(self) -> int:
        return self.out.shape[-1] * self.shape.rows_per_feature

    @property
    def rows(self) -> int:
        return self.tokens.shape[0] if self.sources is None else self.sources.shape[0]

    @property
    def k(self) -> int:
        return self.tokens.shape[-1]

    @property
    def blocks(self) -> int:
        tiles = -(-self.features // TILE_ROWS) * -(-self.rows // self.shape.token_tile)
        return tiles if self.shape.grouped else tiles * self.groups

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        read = [self.weights, self.tokens, self.alpha, self.offsets, self.counts, self.sources]
        return [tensor for tensor in read if tensor is not None], [self.out, *self.copies]

    def copied(self) -> dict[str, Tensor]:
        return super().copied() | {f"copies[{i}]": copy for i, copy in enumerate(self.copies)}

    def arguments(self, clusters: int) -> Arguments:
        found = super().arguments(clusters)
        if not self.copies:
            return found
        return found._replace(**{name: copy.data_ptr() for name, copy in zip(COPIES, self.copies, strict=False)})
