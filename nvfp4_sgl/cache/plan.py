"""The plan of a batch: the slots that a forward pass reads and writes, computed once for all layers.

Tokens are packed request after request. Request ``b`` contributes positions ``starts[b] .. ends[b] - 1``; what
lies before ``starts[b]`` is already cached (an earlier chunk, earlier decode steps or a prefix-cache hit).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING, Rings, entry_slot, state_row
from nvfp4_sgl.config import LayerKind


@dataclass(frozen=True)
class CompressPlan:
    """Window closings of one ratio.

    Attributes:
        ratio: 4 or 128.
        phase: int64 [T], position modulo ratio of every token (selects its ``ape`` row).
        history_rows: int64 [M], state rows to read before anything is written.
        history_phase: int64 [M].
        write_tokens, write_rows: int64 [S], tokens whose raw rows go into the state, and where.
        window_rows: int64 [W, R], for each closing window its R rows as indices into the concatenation
            (T new tokens, M history rows, one absent row); R is 8 for ratio 4 (the previous window's four
            tokens first) and 128 for ratio 128.
        window_positions: int64 [W], position of the window's first token.
        window_slots: int64 [W], entry slot that the window is written to.
    """

    ratio: int
    phase: Tensor
    history_rows: Tensor
    history_phase: Tensor
    write_tokens: Tensor
    write_rows: Tensor
    window_rows: Tensor
    window_positions: Tensor
    window_slots: Tensor


@dataclass(frozen=True)
class BatchPlan:
    """The slots and lengths of a batch that attention needs.

    Attributes:
        positions: int64 [T].
        bounds: B + 1 row numbers; request b owns tokens ``bounds[b] .. bounds[b + 1] - 1``.
        swa_write_slots: int64 [T].
        swa_slots: int64 [T, window], the query's window, newest first, -1 padded; with a block's tokens wider by those.
        hca_slots: int64 [T, N128], visible ratio-128 entries in order, -1 padded.
        csa_entry_slots: int64 [B, N4], every ratio-4 entry of a request in order, -1 padded.
        csa_visible: int64 [T], how many ratio-4 entries a query sees: ``(position + 1) // 4``.
        compress: the window closings by ratio.
    """

    positions: Tensor
    bounds: list[int]
    swa_write_slots: Tensor
    swa_slots: Tensor
    hca_slots: Tensor
    csa_entry_slots: Tensor
    csa_visible: Tensor
    compress: dict[int, CompressPlan]


@dataclass(frozen=True)
class Batch:
    """A batch as the scheduler describes it; all tensors int64.

    Attributes:
        starts, ends: [B], cached length before and after this pass; ``ends > starts``.
        requests: [B], request slot (owner of the ratio-128 state ring).
        full_slots: [B, >= max(ends)], full slot of every position; columns past ``ends`` are ignored.
        full_to_swa: [full slots], SWA slot of a full slot.
    """

    starts: Tensor
    ends: Tensor
    requests: Tensor
    full_slots: Tensor
    full_to_swa: Tensor


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts [n]: owner and index within the owner, of each of ``sum(counts)`` items."""
    owner = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    return owner, torch.arange(owner.numel()) - (counts.cumsum(0) - counts)[owner]


def _masked(slots: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, slots, -1)


def plan_batch(
    batch: Batch, *, window: int, ratios: frozenset[int], is_block: bool = False, rings: Rings = STATE_RING
) -> BatchPlan:
    """Plan one forward pass.

    Args:
        window: sliding window in tokens, the query included.
        ratios: compression ratios that the model uses, a subset of {4, 128}.
        rings: rows of the compressors' state rings.
        is_block: each token sees the window in front of its request's new tokens, and all of these.
    """
    lengths = batch.ends - batch.starts
    owner, within = _ragged(lengths)
    positions = batch.starts[owner] + within
    bounds = [0, *lengths.cumsum(0).tolist()]

    if is_block:
        # Positions from the last new token back to the first of the window in front of them.
        seen = batch.ends[owner, None] - 1 - torch.arange(window + int(lengths.max()))
        back = torch.where(seen >= batch.starts[owner, None] - window, seen, -1)
    else:
        back = positions[:, None] - torch.arange(window)
    swa_slots = batch.full_to_swa[batch.full_slots[owner[:, None], back.clamp(min=0)]]
    entries4, entries128 = batch.ends // 4, batch.ends // 128
    first128 = torch.arange(int(entries128.max())) * 128
    hca_visible = first128[None, :] < (positions[:, None] + 1) // 128 * 128
    first4 = torch.arange(int(entries4.max())) * 4
    csa_exists = first4[None, :] < (entries4 * 4)[:, None]
    no_entries = torch.empty(positions.numel(), 0, dtype=torch.int64)
    return BatchPlan(
        positions=positions,
        bounds=bounds,
        swa_write_slots=batch.full_to_swa[batch.full_slots[owner, positions]],
        swa_slots=_masked(swa_slots, back >= 0),
        hca_slots=_masked(entry_slot(batch.full_slots[owner[:, None], first128], 128), hca_visible)
        if LayerKind.HCA.value in ratios
        else no_entries,
        csa_entry_slots=_masked(entry_slot(batch.full_slots[:, first4], 4), csa_exists),
        csa_visible=(positions + 1) // 4,
        compress={ratio: _plan_compress(batch, ratio, owner, positions, bounds, rings) for ratio in ratios},
    )


def _plan_compress(
    batch: Batch, ratio: int, owner: Tensor, positions: Tensor, bounds: list[int], rings: Rings
) -> CompressPlan:
    starts, ends = batch.starts, batch.ends
    kind = LayerKind(ratio)
    overlap = kind.overlap
    tokens = positions.numel()

    def rows_of(request: Tensor, position: Tensor) -> Tensor:
        swa = batch.full_to_swa[batch.full_slots[request, position]] if kind.keeps_state_by_page else None
        return state_row(ratio, request=batch.requests[request], position=position, swa_slot=swa, rings=rings)

    windows = ends // ratio - starts // ratio
    window_owner, window_within = _ragged(windows)
    first = (starts[window_owner] // ratio + window_within) * ratio

    # Cached tokens that a closing window needs: back to its own start, and for ratio 4 to the previous window's.
    oldest = (starts // ratio * ratio - overlap).clamp(min=0)
    history = torch.where(windows > 0, starts - oldest, 0)
    history_owner, history_within = _ragged(history)
    history_positions = oldest[history_owner] + history_within
    history_base = tokens + history.cumsum(0) - history

    row_positions = first[:, None] + torch.arange(-overlap, ratio)
    start, base = starts[window_owner, None], torch.tensor(bounds)[window_owner, None]
    cached = history_base[window_owner, None] + row_positions - oldest[window_owner, None]
    index = torch.where(row_positions >= start, base + row_positions - start, cached)
    absent = tokens + history_positions.numel()

    # A ring keeps its last rows only: per page for ratio 4, per request for ratio 128.
    horizon = ends[owner]
    if kind.keeps_state_by_page:
        horizon = torch.minimum((positions // PAGE_TOKENS + 1) * PAGE_TOKENS, horizon)
    kept = (positions >= horizon - rings[ratio]).nonzero().squeeze(1)
    return CompressPlan(
        ratio=ratio,
        phase=positions % ratio,
        history_rows=rows_of(history_owner, history_positions),
        history_phase=history_positions % ratio,
        write_tokens=kept,
        write_rows=rows_of(owner[kept], positions[kept]),
        window_rows=torch.where(row_positions < 0, absent, index),
        window_positions=first,
        window_slots=entry_slot(batch.full_slots[window_owner, first], ratio),
    )
