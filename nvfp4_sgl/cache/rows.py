"""Row stores: caches addressed by slot, one row an entry, whatever the bytes behind.

SGLang allocates the buffers and hands out slots; a row store reads and writes one layer's rows in them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nvfp4_sgl.formats.pages import RowFormat


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


class PackedRows:
    """Rows in SGLang's 8-bit entries (specification §4.4, §4.5): uint8 [pages, page_bytes].

    Rows are quantised from the fp32 values that are written.
    """

    is_quantized = True

    def __init__(self, format: RowFormat, pages: Tensor, page_size: int):
        self.format, self.pages, self.page_size = format, pages.view(torch.uint8), page_size

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.format.write_rows(self.pages, self.page_size, slots, rows)

    def read(self, slots: Tensor) -> Tensor:
        rows = self.format.read_rows(self.pages, self.page_size, slots.reshape(-1))
        return rows.view(*slots.shape, -1)


def row_store(buffer: Tensor, page_size: int, dim: int, format: RowFormat) -> RowStore:
    """The rows of one layer in ``buffer``.

    Args:
        buffer: fp32 or bf16 [pages, page_size * dim] for exact rows, or uint8 [pages, bytes] in ``format``.
        page_size: rows of a page. dim: values of an exact row. format: of packed rows.
    """
    if buffer.dtype in (torch.float32, torch.bfloat16):
        return ExactRows(buffer, dim)
    return PackedRows(format, buffer, page_size)
