"""Sequences that a compressor's kernels and the reference compress side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING, Rings
from nvfp4_sgl.cache.plan import Batch as ReferenceBatch
from nvfp4_sgl.cache.plan import plan_batch
from nvfp4_sgl.cache.rows import ExactRows, PackedRows, RowStore
from nvfp4_sgl.formats import index_entry, kv_entry
from nvfp4_sgl.ops.compressor import compress_windows
from nvfp4_sgl.ops.indexer import write_index_keys
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Compression, Compressor, new_workspace
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import prepare_attention
from nvfp4_sgl.triton_kernels.plan.batch import Batch
from tests.triton.support.passes import moved, resolved

EPS = 1e-6
FREQUENCIES = inverse_frequencies(64, 160000.0)
POISON = 0xA5


def bits(x: Tensor) -> Tensor:
    """So that NaN equals NaN."""
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def state_rows(ratio: int, pages: int, requests: int, rings: Rings) -> int:
    return (pages if ratio == 4 else requests + 1) * rings[ratio]


class Side:
    """A compressor's parameters and its buffers, once for the kernel and once for the reference.

    Everything that is not yet written is NaN, or 0xA5 in packed pages.
    """

    def __init__(
        self, ratio: int, n: int, pages: int, requests: int, *, packed: bool, state_dtype: torch.dtype, rings: Rings
    ):
        generator = torch.Generator().manual_seed(ratio + n)
        width = 2 * n if ratio == 4 else n
        self.compressor = Compressor(
            ratio,
            torch.randn(ratio, width, generator=generator),
            (torch.rand(n, generator=generator) + 0.5).to(torch.bfloat16),
            EPS,
        )
        self.page_size, self.packed, self.n, self.ring = PAGE_TOKENS // ratio, packed, n, rings[ratio]
        state = torch.full((state_rows(ratio, pages, requests, rings), 2 * width), torch.nan, dtype=state_dtype)
        self.state, self.expected_state = state, state.clone()
        if packed:
            entry = kv_entry if n == 512 else index_entry
            buffer = torch.full((pages, entry.page_bytes(self.page_size)), POISON, dtype=torch.uint8)
        else:
            buffer = torch.full((pages, self.page_size * n), torch.nan, dtype=torch.bfloat16)
        self.pages, self.expected_pages = buffer, buffer.clone()

    def store(self) -> RowStore:
        if not self.packed:
            return ExactRows(self.expected_pages, self.n)
        entry = kv_entry if self.n == 512 else index_entry
        return PackedRows(entry.FORMAT, self.expected_pages, self.page_size)

    def call(self, kv: Tensor, score: Tensor, device: str) -> Compression:
        self.state, self.pages = self.state.to(device), self.pages.to(device)
        compressor = replace(self.compressor, ape=self.compressor.ape.to(device), norm=self.compressor.norm.to(device))
        rows = kv.to(device), score.to(device)
        return Compression(compressor, *rows, self.state, self.pages, self.page_size, self.ring)


class World:
    """Sequences of random rows over pages dealt at random; passes of them through the kernel and the reference.

    Page 0 of every pool and request 0 belong to padding, as in SGLang.
    """

    def __init__(
        self,
        cases: Sequence[tuple[int, int]],
        device: str,
        *,
        requests: int = 1,
        capacity: int = 512,
        packed: bool = True,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        rings: Rings = STATE_RING,
    ):
        generator = torch.Generator().manual_seed(1)
        per_request = capacity // PAGE_TOKENS
        count = requests * per_request

        def deal() -> Tensor:
            order = torch.randperm(count, generator=generator) + 1
            return (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()

        self.device, self.rings = device, rings
        self.slots = torch.zeros(requests + 1, capacity, dtype=torch.int32)
        self.slots[1:] = deal().view(requests, capacity).int()
        self.full_to_swa = torch.cat((torch.arange(PAGE_TOKENS), deal()))
        self.lengths = [0] * (requests + 1)
        self.pages = count + 1
        kept = {"packed": packed, "state_dtype": state_dtype, "rings": rings}
        self.sides = [Side(*case, self.pages, requests, **kept) for case in cases]  # type: ignore[arg-type]
        # Each side's rows are columns of one product, next to other columns.
        widths = [2 * side.compressor.width for side in self.sides]
        self.rows = torch.randn(requests + 1, capacity, sum(widths) + 64, generator=generator) * 2
        self.rows = self.rows.to(dtype)
        self.starts_at = [sum(widths[:i]) + 32 for i in range(len(widths))]
        self.frequencies = FREQUENCIES.to(device)
        self.workspace = new_workspace(capacity * requests, requests + 8, device)

    def columns(self, wide: Tensor, side: int) -> tuple[Tensor, Tensor]:
        width, at = self.sides[side].compressor.width, self.starts_at[side]
        return wide[:, at : at + width], wide[:, at + width : at + 2 * width]

    def batch(self, requests: list[int], starts: list[int], counts: list[int]) -> Batch:
        lengths = torch.tensor(counts)
        owners = torch.repeat_interleave(torch.arange(len(counts)), lengths)
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        positions = torch.tensor(starts)[owners] + torch.arange(len(owners)) - bounds[owners]
        tables = torch.tensor(requests), self.slots, self.full_to_swa
        return moved(resolved(positions, owners, torch.tensor(starts), bounds, *tables), self.device)

    def suppose(self, counts: dict[int, int]) -> None:
        """A pass of the reference's that counts as the kernel's, too."""
        self._reference(counts)
        for side in self.sides:
            side.state, side.pages = side.expected_state.clone(), side.expected_pages.clone()

    def run(self, counts: dict[int, int], *, padding: int = 0, pair: bool = False) -> None:
        """A pass that adds ``counts[request]`` tokens, none for 0, and checks the states after it."""
        batch, wide = self.prepare(counts, padding)
        self.launch(self.calls(wide), batch, pair=pair)
        self.check_states(padding=padding > 0)

    def prepare(self, counts: dict[int, int], padding: int = 0) -> tuple[Batch, Tensor]:
        """A pass's arguments, after the reference's side of it."""
        requests = list(counts)
        starts = [self.lengths[request] for request in requests]
        wide = self._reference(counts)
        batch = self.batch(requests + [0] * padding, starts + [0] * padding, [*counts.values(), *[1] * padding])
        wide = torch.cat((wide, torch.full((padding, wide.shape[1]), 7.0, dtype=wide.dtype)))
        return batch, wide.to(self.device)

    def calls(self, wide: Tensor) -> list[Compression]:
        return [side.call(*self.columns(wide, i), self.device) for i, side in enumerate(self.sides)]

    def launch(self, calls: list[Compression], batch: Batch, *, pair: bool = False) -> None:
        for some in [calls[:2], *([call] for call in calls[2:])] if pair else [[call] for call in calls]:
            prepare_attention(None, some, batch, self.frequencies, workspace=self.workspace)

    def check_states(self, *, padding: bool = False) -> None:
        """The first ring is the padding's."""
        for side in self.sides:
            unused = side.ring if padding else 0
            assert torch.equal(bits(side.state.cpu()[unused:]), bits(side.expected_state[unused:]))

    def _reference(self, counts: dict[int, int]) -> Tensor:
        """The pass on the reference's side; the rows of its tokens."""
        added = [request for request, count in counts.items() if count]
        if not added:
            return self.rows[0, :0]
        starts = [self.lengths[request] for request in added]
        for request in added:
            self.lengths[request] += counts[request]
        ends = [self.lengths[request] for request in added]
        wide = torch.cat([self.rows[r, a:b] for r, a, b in zip(added, starts, ends, strict=True)])
        chosen = torch.tensor(added)
        batch = ReferenceBatch(
            torch.tensor(starts), torch.tensor(ends), chosen, self.slots[chosen].long(), self.full_to_swa
        )
        ratios = frozenset(s.compressor.ratio for s in self.sides)
        plan = plan_batch(batch, window=128, ratios=ratios, rings=self.rings)
        for i, side in enumerate(self.sides):
            kv, score = self.columns(wide.float(), i)
            closing = plan.compress[side.compressor.ratio]
            entries = compress_windows(
                *(kv, score, side.expected_state, closing),
                ape=side.compressor.ape,
                norm=side.compressor.norm,
                norm_eps=EPS,
                frequencies=FREQUENCIES,
            )
            if side.n == 128:
                write_index_keys(side.store(), closing.window_slots, entries)
            else:
                side.store().write(closing.window_slots, entries)
        return wide

    def check_entries(self) -> None:
        for side in self.sides:
            check_entries(side.pages.cpu(), side.expected_pages, side)


def check_entries(found: Tensor, expected: Tensor, side: Side) -> None:
    """Within one unit of the format, rarely; nothing written but what the reference writes."""
    if not side.packed:
        check_bf16(found, expected)
        return
    layout = (kv_entry if side.n == 512 else index_entry).FORMAT
    data, scales = (part.flatten(0, 1) for part in layout.regions(found, side.page_size))
    expected_data, expected_scales = (part.flatten(0, 1) for part in layout.regions(expected, side.page_size))
    written = (expected_data != POISON).any(dim=1)
    assert bool((data[~written] == POISON).all()) and bool((scales[~written] == POISON).all())
    data, scales, expected_data, expected_scales = (
        part[written] for part in (data, scales, expected_data, expected_scales)
    )
    distance = (steps(data) - steps(expected_data)).abs()
    if side.n == 128:
        found_scales, scales = (s.contiguous().view(torch.float32) for s in (scales, expected_scales))
        torch.testing.assert_close(found_scales, scales, rtol=2**-18, atol=0.0)
    else:
        check_bf16(*(d[:, 448:].contiguous().view(torch.bfloat16) for d in (data, expected_data)))
        exponents = (scales.int() - expected_scales.int()).abs()
        assert bool((exponents <= 1).all()) and is_rare(exponents != 0)
        distance = distance[:, :448].unflatten(1, (7, 64))[exponents[:, :7] == 0]
    assert bool((distance <= 1).all()) and is_rare(distance != 0)


def steps(codes: Tensor) -> Tensor:
    """E4M3 codes, uint8, as integers in the order of their values; both zeros are 0."""
    return torch.where(codes < 128, codes.int(), 128 - codes.int())


def is_rare(different: Tensor) -> bool:
    return int(different.sum()) <= 1 + different.numel() // 1000


def check_bf16(found: Tensor, expected: Tensor) -> None:
    """One unit of bf16, rarely; where a rotation cancels, what fp32 loses there."""
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-18, equal_nan=True)
    assert is_rare(bits(found) != bits(expected))
