"""Paged row storage shared by the key-cache formats: a page is P data rows, then P scale rows, then padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_dtype


@dataclass(frozen=True)
class PageLayout:
    """A page: ``page_size`` rows of ``data_bytes``, then as many of ``scale_bytes``, rounded up to ``align`` bytes."""

    data_bytes: int
    scale_bytes: int
    align: int = 1

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` rows."""
        if page_size <= 0:
            raise OperandValueError(f"page_size: expected a positive number of rows, found {page_size}")
        raw = page_size * (self.data_bytes + self.scale_bytes)
        return -(-raw // self.align) * self.align

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

    def write(self, pages: Tensor, page_size: int, slots: Tensor, data: Tensor, scales: Tensor) -> None:
        """Store entry i (``data[i]``, ``scales[i]``, uint8) at ``slots[i]``; other bytes are left alone.

        Which entry wins at a slot that is named twice is undefined.
        """
        data_region, scale_region = self.regions(pages, page_size)
        page, offset = self._locate(pages, page_size, slots)
        data_region[page, offset] = data
        scale_region[page, offset] = scales

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
