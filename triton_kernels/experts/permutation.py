"""In which rows the copies of tokens stand, grouped by expert (DEEPSEEK_V4.md §6).

A *pair* is a token and one of its experts; pairs are numbered token by token. The products of experts take rows
grouped by expert, each group beginning at a multiple of their token tile. Where a pair's row is depends on the data,
how many rows there are does not (:func:`padded_rows`), so that nothing waits for the device. Within an expert rows are
in the order of tokens: equal input gives equal rows.

Few pairs are sorted by one program, the last to come of those that route. Of many, blocks of tokens are counted by the
programs that route them; two more launches add the counts up and place the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
)

from ..common.overlap import OVERLAPPED, after_previous

MAX_GROUPS = 1024
FEW_TOKENS = 256
FEW_PAIRS = 2048
"""Up to here, both of them, the program that routes last sorts all pairs."""
MANY_BLOCK = 16
"""Tokens of a program that routes and counts, where there are more."""
CHUNK = tl.constexpr(32)
"""Pairs that a block of pairs is compared with at a time."""
BLOCK_GROUPS = 32
"""Groups of one program of the scan: a line of memory of each block of pairs."""


class RouteArguments(NamedTuple):
    """:class:`Routes` as a kernel takes it; rows: of ``source_row``; BINS, of histograms, and TILE constants."""

    experts: Tensor
    weights: Tensor
    source_row: Tensor
    destination: Tensor
    offsets: Tensor
    counts: Tensor
    starts: Tensor
    rows: int
    groups: int
    BINS: tl.constexpr
    TILE: tl.constexpr


@dataclass(frozen=True)
class Routes:
    """Which experts the tokens visit, how much each counts, and which row is whose.

    Attributes:
        experts: int32 [T, k], the group that each pair visits; a pair whose group is not one of G (−1, say) has no row.
        weights: fp32 [T, k].
        source_row: int32 [padded rows], the token whose copy stands in a row; −1 in the padding.
        destination: int32 [T, k], the row of a pair; −1 if it is not routed.
        offsets: int32 [G], multiples of the tile: where a group's rows begin.
        counts: int32 [G], how many there are without padding.
        starts: int32 workspace.
        tile: the token tile of the products.
    """

    experts: Tensor
    weights: Tensor
    source_row: Tensor
    destination: Tensor
    offsets: Tensor
    counts: Tensor
    starts: Tensor
    tile: int

    @classmethod
    def allocate(cls, tokens: int, topk: int, groups: int, tile: int, device: torch.device | str) -> Routes:
        """For ``tokens`` tokens with ``topk`` of ``groups`` each, the shared one counted in both if it is a group."""

        def new(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        return cls(
            new(tokens, topk),
            torch.empty(tokens, topk, dtype=torch.float32, device=device),
            new(padded_rows(tokens * topk, groups, tile)),
            new(tokens, topk),
            new(groups),
            new(groups),
            new(_counted_blocks(tokens, topk) * _bins(groups)),
            tile,
        )

    @property
    def tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def topk(self) -> int:
        return self.experts.shape[1]

    @property
    def groups(self) -> int:
        return self.offsets.shape[0]

    @property
    def bins(self) -> int:
        """Of the histograms."""
        return _bins(self.groups)

    @property
    def is_sorted(self) -> bool:
        """Whether one program sorts all pairs."""
        return _counted_blocks(self.tokens, self.topk) == 0

    def check(self, op: str) -> None:
        """Refuse what the kernels cannot write; metadata only."""
        pairs = self.experts.numel()
        require_range(f"{op}: number of groups", self.groups, 1, MAX_GROUPS)
        require_range(f"{op}: tile", self.tile, 1, 1024)
        require_range(f"{op}: pairs", pairs, 0, 2**31 - 1 - MAX_GROUPS * self.tile)
        expected = {
            "weights": ((self.tokens, self.topk), "[tokens, topk]"),
            "source_row": ((padded_rows(pairs, self.groups, self.tile),), "[padded_rows(...)]"),
            "destination": ((self.tokens, self.topk), "[tokens, topk]"),
            "counts": ((self.groups,), "[groups]"),
            "starts": ((_counted_blocks(self.tokens, self.topk) * self.bins,), "[blocks of tokens * bins of groups]"),
        }
        for name, (shape, meaning) in expected.items():
            require_shape(f"{op}: {name}", getattr(self, name), shape, meaning)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            require_dtype(f"{op}: {name}", tensor, torch.float32 if name == "weights" else torch.int32)
            require_contiguous(f"{op}: {name}", tensor)
            require_same_device("experts", self.experts, **{f"{op}: {name}": tensor})

    def arguments(self) -> RouteArguments:
        return RouteArguments(
            experts=self.experts,
            weights=self.weights,
            source_row=self.source_row,
            destination=self.destination,
            offsets=self.offsets,
            counts=self.counts,
            starts=self.starts,
            rows=self.source_row.shape[0],
            groups=self.groups,
            BINS=tl.constexpr(self.bins),
            TILE=tl.constexpr(self.tile),
        )


def padded_rows(pairs: int, groups: int, tile: int) -> int:
    """Rows that are enough however ``pairs`` fall to ``groups``, each group's rounded up to whole tiles.

    The worst case: as many groups as can have any are one row into their last tile.
    """
    return (pairs + min(groups, pairs) * (tile - 1)) // tile * tile


def _bins(groups: int) -> int:
    """A power of two, and a warp's at least."""
    return max(triton.next_power_of_2(groups), 32)


def _counted_blocks(tokens: int, topk: int) -> int:
    """Of MANY_BLOCK tokens, where pairs are not sorted at once."""
    if tokens <= FEW_TOKENS and tokens * topk <= FEW_PAIRS:
        return 0
    return triton.cdiv(tokens, MANY_BLOCK)


@triton.jit
def fill_padding(out):
    """The program's share of all rows is nobody's, until pairs are put over it."""
    BLOCK: tl.constexpr = 1024
    share = tl.cdiv(out.rows, tl.num_programs(0))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, out.rows)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(out.source_row + row, tl.full((BLOCK,), -1, tl.int32), mask=row < last)


@triton.jit
def _offsets(counts, TILE: tl.constexpr):
    """Where each group's rows begin."""
    padded = (counts + (TILE - 1)) // TILE * TILE
    return tl.cumsum(padded, axis=0) - padded


@triton.jit
def _load_experts(out, first, last, LENGTH: tl.constexpr):
    """Of pairs from ``first`` to ``last``, [LENGTH] each: the group, 0 if there is none, and whether there is one.

    Past the L1 cache: other programs may have stored them.
    """
    pair = first + tl.arange(0, LENGTH)
    expert = tl.load(out.experts + pair, mask=pair < last, other=-1, cache_modifier=".cg")
    routed = (expert >= 0) & (expert < out.groups)
    return tl.where(routed, expert, 0), routed


@triton.jit
def permute_sorted(out, pairs, TOPK: tl.constexpr, LENGTH: tl.constexpr):
    """Permute all pairs, LENGTH (a power of two) or fewer, over padding.

    No more threads than LENGTH, or several would hold one pair and count it again.
    """
    BINS: tl.constexpr = out.BINS
    expert, routed = _load_experts(out, 0, pairs, LENGTH)
    pair = tl.arange(0, LENGTH)
    ordered = tl.sort(tl.where(routed, expert, BINS) * LENGTH + pair)
    group = tl.arange(0, BINS)
    visits = tl.histogram(expert, BINS, mask=routed)
    begin = _offsets(visits, out.TILE)
    tl.store(out.counts + group, visits, mask=group < out.groups)
    tl.store(out.offsets + group, begin, mask=group < out.groups)
    pair, expert = ordered % LENGTH, ordered // LENGTH
    routed = expert < BINS
    row = tl.arange(0, LENGTH)
    if out.TILE > 1:
        # What the padding of the groups before adds to all rows of a group.
        added = begin - _offsets(visits, 1)
        row += tl.gather(added, tl.where(routed, expert, 0), axis=0)
    tl.store(out.destination + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(out.source_row + row, pair // TOPK, mask=routed)


@triton.jit
def count_visits(out, pairs, EACH: tl.constexpr, LENGTH: tl.constexpr):
    """Each group's visits by the EACH pairs of this program, LENGTH or fewer, which has no more threads."""
    BINS: tl.constexpr = out.BINS
    first = tl.program_id(0) * EACH
    expert, routed = _load_experts(out, first, tl.minimum(first + EACH, pairs), LENGTH)
    visits = tl.histogram(expert, BINS, mask=routed)
    tl.store(out.starts + tl.program_id(0) * BINS + tl.arange(0, BINS), visits)


@triton.jit
def _scan(starts, counts, blocks, groups, BINS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Counts of blocks to where among their group's pairs they start; some groups a program."""
    after_previous()
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    total = tl.zeros((GROUPS,), tl.int32)
    for first in range(0, blocks, BLOCK_B):
        block = first + tl.arange(0, BLOCK_B)
        at = starts + block[:, None] * BINS + group[None, :]
        mask = (block < blocks)[:, None]
        visits = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(visits, axis=0) - visits + total[None, :], mask=mask)
        total += tl.sum(visits, axis=0)
    tl.store(counts + group, total, mask=group < groups)


@triton.jit
def _rank(expert, out, first, last, LENGTH: tl.constexpr):
    """How many pairs before each one of a block have its group, [LENGTH]."""
    pair = tl.arange(0, LENGTH)
    rank = tl.zeros((LENGTH,), tl.int32)
    for start in range(0, LENGTH, CHUNK):
        other_pair = start + tl.arange(0, CHUNK)
        other = tl.load(out.experts + first + other_pair, mask=first + other_pair < last, other=-1)
        same = (expert[:, None] == other[None, :]) & (other_pair[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit
def _place(out, pairs, TOPK: tl.constexpr, EACH: tl.constexpr, LENGTH: tl.constexpr):
    after_previous()
    BINS: tl.constexpr = out.BINS
    block = tl.program_id(0)
    group = tl.arange(0, BINS)
    begin = _offsets(tl.load(out.counts + group, mask=group < out.groups, other=0), out.TILE)
    if block == 0:
        tl.store(out.offsets + group, begin, mask=group < out.groups)
    first = block * EACH
    last = tl.minimum(first + EACH, pairs)
    expert, routed = _load_experts(out, first, last, LENGTH)
    row = tl.gather(begin, expert, axis=0) + tl.load(out.starts + block * BINS + expert)
    row += _rank(expert, out, first, last, LENGTH)
    pair = first + tl.arange(0, LENGTH)
    tl.store(out.destination + pair, tl.where(routed, row, -1), mask=pair < last)
    tl.store(out.source_row + row, pair // TOPK, mask=routed)


def place_counted(out: Routes) -> None:
    """Permute pairs whose blocks are counted, over padding."""
    blocks = _counted_blocks(out.tokens, out.topk)
    _scan[(out.bins // BLOCK_GROUPS,)](
        out.starts,
        out.counts,
        blocks,
        out.groups,
        BINS=out.bins,
        GROUPS=BLOCK_GROUPS,
        BLOCK_B=min(triton.next_power_of_2(blocks), 256),
        num_warps=8,
        **OVERLAPPED,
    )
    _place[(blocks,)](
        out.arguments(),
        out.experts.numel(),
        TOPK=out.topk,
        EACH=MANY_BLOCK * out.topk,
        LENGTH=max(triton.next_power_of_2(MANY_BLOCK * out.topk), 128),
        num_warps=4,
        **OVERLAPPED,
    )
