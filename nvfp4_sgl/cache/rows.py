"""Row stores: caches addressed by slot, one row an entry, whatever the bytes behind.

SGLang allocates the buffers and hands out slots; a row store reads and writes one layer's rows in them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nvfp4_sgl.formats import index_entry, kv_entry


class RowStore(Protocol):
    """One layer's cache of rows."""

    @property
    def is_quantized(self) -> bool:
        """Whether a row that was written reads back rounded to an 8-bit format."""
        ...

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` (fp32 [n, dim]) at ``slots`` (int64 [n], distinct)."""
        ...

    def read(self, slots: Tensor) -> Tensor:
        """fp32 [..., dim] at ``slots`` (int64 [...], each a valid slot, repeats allowed)."""
        ...


class ExactRows:
    """Rows kept in the model dtype: buffer [pages, page_size * dim]."""

    is_quantized = False

    def __init__(self, buffer: Tensor, dim: int):
        self._rows = buffer.view(-1, dim)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self._rows[slots] = rows.to(self._rows.dtype)

    def read(self, slots: Tensor) -> Tensor:
        return self._rows.index_select(0, slots.reshape(-1)).float().view(*slots.shape, -1)


class PackedKvRows:
    """512-wide key/value rows in SGLang's 584-byte entries (specification §4.4): uint8 [pages, page_bytes].

    Rows are quantised from the fp32 values that are written.
    """

    is_quantized = True

    def __init__(self, pages: Tensor, page_size: int):
        self.pages, self.page_size = pages.view(torch.uint8), page_size

    def write(self, slots: Tensor, rows: Tensor) -> None:
        kv_entry.write_rows(self.pages, self.page_size, slots, rows)

    def read(self, slots: Tensor) -> Tensor:
        rows = kv_entry.read_rows(self.pages, self.page_size, slots.reshape(-1))
        return rows.view(*slots.shape, -1)


class PackedIndexRows:
    """128-wide indexer keys in SGLang's 132-byte entries (specification §4.5): uint8 [pages, page_bytes]."""

    is_quantized = True

    def __init__(self, pages: Tensor, page_size: int):
        self.pages, self.page_size = pages.view(torch.uint8), page_size

    def write(self, slots: Tensor, rows: Tensor) -> None:
        index_entry.write_rows(self.pages, self.page_size, slots, rows)

    def read(self, slots: Tensor) -> Tensor:
        rows = index_entry.read_rows(self.pages, self.page_size, slots.reshape(-1))
        return rows.view(*slots.shape, -1)
