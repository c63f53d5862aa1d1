"""Random problems of sparse attention over paged keys, and their exact results in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import ExactRows, PackedRows, RowStore
from nvfp4_sgl.formats import kv_entry
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import Tiling

SCALE = 512**-0.5
BOUND = 2**-7 * (1 + 2**-5)
"""Bound of the error over Σ w_j |k_j|: weights and output are rounded to bf16 once each, 2^-8; the rest is fp32."""
WINDOW_PAGE, CSA_PAGE, HCA_PAGE = 256, 64, 2


def named(tiling: Tiling) -> str:
    """What tells the tilings here apart."""
    layout = "transposed" if tiling.transposed else "heads first"
    return f"{tiling.heads} heads, {tiling.keys} keys, {layout}"


def pool(rows: Tensor, slots: Tensor, count: int, page_size: int, *, packed: bool) -> tuple[Entries, RowStore]:
    """A pool of ``count`` entries with ``rows`` at ``slots``; every other byte is 0xFF, which reads as NaN."""
    pages = -(-count // page_size)
    store: RowStore
    if packed:
        buffer = torch.full((pages, kv_entry.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
        store = PackedRows(kv_entry.FORMAT, buffer, page_size)
    else:
        buffer = torch.full((pages, page_size * 512), float("nan"), dtype=torch.bfloat16)
        store = ExactRows(buffer, 512)
    store.write(slots, rows)
    return Entries(buffer, page_size), store


@dataclass
class Problem:
    """Arguments on the CPU, of the op (``entries``) and of the reference (``stores``)."""

    q: Tensor
    sink: Tensor
    entries: list[Entries]
    stores: list[RowStore]
    slots: list[Tensor]

    def run(self, device: str, **options: Any) -> Tensor:
        """The op's bf16 output, poisoned first."""
        out = torch.full_like(self.q, float("nan"), device=device)
        self.launch(device, out=out, **options)
        return out.cpu()

    def launch(self, device: str, **options: Any) -> None:
        window, *extra = [Entries(pages.to(device), size) for pages, size in self.entries]
        window_slots, *extra_slots = [slots.to(device) for slots in self.slots]
        q = self.q.to(device)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        pair = (extra[0], extra_slots[0]) if extra else (None, None)
        sparse_attention(q, window, window_slots, self.sink.to(device), SCALE, *pair, **options)

    def exact(self) -> tuple[Tensor, Tensor]:
        """fp64: the result, and Σ w_j |k_j|, by which its error is measured."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        size = torch.empty_like(out)
        for token in range(self.q.shape[0]):
            keys = torch.cat(
                [torch.zeros(0, 512, dtype=torch.float64)]
                + [
                    store.read(slots[token][slots[token] >= 0]).double()
                    for store, slots in zip(self.stores, self.slots, strict=True)
                    if (slots[token] >= 0).any()
                ]
            )
            logits = torch.cat((self.q[token].double() @ keys.T * SCALE, self.sink.double()[:, None]), dim=1)
            weights = logits.softmax(-1)[:, :-1]
            out[token], size[token] = weights @ keys, weights @ keys.abs()
        return out, size


def problem(
    heads: int,
    widths: list[int],
    *,
    tokens: int = 3,
    packed: bool = True,
    extra_page: int = CSA_PAGE,
    holes: float = 0.1,
    seed: int = 0,
    index: torch.dtype = torch.int32,
) -> Problem:
    """Random lists of entries that lie anywhere, some shared between queries, some missing."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator)
    q[:, ::3] *= 4  # some heads attend sharply
    entries, stores, lists = [], [], []
    for width, page_size in zip(widths, (WINDOW_PAGE, extra_page), strict=False):
        count = 2 * width + 5
        used = torch.randperm(count, generator=generator)[: max(width + width // 2, 1)]
        rows = torch.randn(used.numel(), 512, generator=generator)
        rows[:, ::29] *= 20  # outliers
        rows *= torch.exp2(torch.randint(-6, 3, (used.numel(), 8), generator=generator)).repeat_interleave(64, 1)
        part, store = pool(rows, used, count, page_size, packed=packed)
        choice = torch.stack([used[torch.randperm(used.numel(), generator=generator)[:width]] for _ in range(tokens)])
        missing = torch.rand(choice.shape, generator=generator) < holes
        entries.append(part)
        stores.append(store)
        lists.append(torch.where(missing, -1, choice).to(index))
    sink = torch.randn(heads, generator=generator) * 2
    return Problem(q.bfloat16(), sink, entries, stores, lists)


def check(case: Problem, device: str, **options: object) -> Tensor:
    out = case.run(device, **options)
    exact, size = case.exact()
    error = (out.double() - exact).abs()
    assert (error <= BOUND * size + 1e-37).all(), float((error / size.clamp(min=1e-30)).max())
    return out


def cos_sin_of(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(cos, sin) by pair, fp32 [T, 64]."""
    angles = positions.float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
