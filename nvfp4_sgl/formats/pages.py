"""Rows of the key caches in 8-bit formats, and pages of them: P rows of data, then P of scales, then padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_dtype, require_shape


@dataclass(frozen=True)
class RowFormat:
    """A row of a cache: the one record of its bytes, for caches, kernels and forecasts.

    Attributes:
        dim: values of a row.
        data_bytes, scale_bytes: of a row.
        pack: fp32 or bf16 [n, dim] to data uint8 [n, data_bytes] and scales, of ``scale_bytes`` a row.
        unpack: the inverse, to fp32 [n, dim]; takes data, and scales as uint8 [n, scale_bytes].
        align: pages are multiples of so many bytes.
    """

    dim: int
    data_bytes: int
    scale_bytes: int
    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    unpack: Callable[[Tensor, Tensor], Tensor]
    align: int = 1

    @property
    def entry_bytes(self) -> int:
        """Bytes of a row."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` rows."""
        if page_size <= 0:
            raise OperandValueError(f"page_size: expected a positive number of rows, found {page_size}")
        return -(-page_size * self.entry_bytes // self.align) * self.align

    def regions(self, pages: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """Views into ``pages`` (uint8 [n_pages, page_bytes]).

        Returns data [n_pages, P, data_bytes] and scales [n_pages, P, scale_bytes].
        """
        require_dtype("pages", pages, torch.uint8)
        expected = self.page_bytes(page_size)
        if pages.dim() != 2 or pages.shape[1] != expected:
            raise OperandValueError(
                f"pages: expected shape [n_pages, {expected}] for page_size {page_size}, found {tuple(pages.shape)}"
            )
        split = page_size * self.data_bytes
        data = pages[:, :split].unflatten(1, (page_size, self.data_bytes))
        scales = pages[:, split : split + page_size * self.scale_bytes].unflatten(1, (page_size, self.scale_bytes))
        return data, scales

    def write_rows(self, pages: Tensor, page_size: int, slots: Tensor, rows: Tensor) -> None:
        """Pack ``rows`` (fp32 or bf16 [n, dim]) into ``pages`` (uint8 [n_pages, page_bytes], in place).

        slots: int32 or int64 [n], slot = page · P + row; outside the pages: :class:`OperandValueError`. Slots should be
        distinct: which row wins at a repeated slot is undefined. Padding and other slots are left alone.
        """
        require_shape("slots", slots, (rows.shape[0],))
        data, scales = self.pack(rows)
        data_region, scale_region = self.regions(pages, page_size)
        page, offset = self._locate(pages, page_size, slots)
        data_region[page, offset] = data
        scale_region[page, offset] = scales.view(torch.uint8).view(len(data), self.scale_bytes)

    def read_rows(self, pages: Tensor, page_size: int, slots: Tensor) -> Tensor:
        """fp32 [n, dim]: the entries at ``slots`` (int32 or int64 [n], may repeat) of ``pages``, dequantised."""
        return self.unpack(*self.read(pages, page_size, slots))

    def read(self, pages: Tensor, page_size: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies (data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]) of the entries at ``slots``."""
        data_region, scale_region = self.regions(pages, page_size)
        page, offset = self._locate(pages, page_size, slots)
        return data_region[page, offset], scale_region[page, offset]

    @staticmethod
    def _locate(pages: Tensor, page_size: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        require_dtype("slots", slots, torch.int64, torch.int32)
        if slots.dim() != 1:
            raise OperandValueError(f"slots: expected shape [n], found {tuple(slots.shape)}")
        # Indexing would wrap a negative slot round to the last page without a word.
        total = pages.shape[0] * page_size
        if slots.numel():
            low, high = int(slots.min()), int(slots.max())
            if low < 0 or high >= total:
                raise OperandValueError(
                    f"slots: expected values in [0, {total}) ({pages.shape[0]} pages of {page_size}), found"
                    f" {low}..{high}; mask padding before the call"
                )
        slots = slots.long()
        return slots // page_size, slots % page_size
