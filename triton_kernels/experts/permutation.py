"""The permutation of tokens into rows grouped by expert (specification §6).

A *pair* is a token and one of its experts; pairs are numbered token by token. The experts' GEMMs take rows grouped by
expert, and each group begins at a multiple of the GEMMs' token tile. The row of a pair depends on the data, but the
number of rows does not (:func:`padded_rows`), so nothing waits for the device. Within a group rows are in the order of
tokens: equal input gives equal rows.

There are three ways, chosen by sizes alone:

* The program that routes a single token compares its pairs with each other.
* Up to :data:`SINGLE_PROGRAM_MAX_TOKENS` tokens and :data:`SINGLE_PROGRAM_MAX_PAIRS` pairs, one program sorts all
  pairs: the last of the routing programs to finish.
* Above either, each routing program counts the visits of its block of tokens to each group. Two more launches turn the
  counts into prefix sums and place the pairs.

Supports up to :data:`MAX_GROUPS` groups, token tiles up to 1024, and numbers of padded rows that fit int32. Pairs may
go without a row. The device functions here are called by the kernels of :mod:`.routing`.

Floor: 4 bytes a pair and 4 a padded row written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dtype,
    require_range,
    require_same_device,
    require_shape,
)

from ..common.constants import constant
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous

MAX_GROUPS = 1024
"""Most groups: one program holds a histogram of all of them."""
SINGLE_PROGRAM_MAX_TOKENS = 256
SINGLE_PROGRAM_MAX_PAIRS = 2048
"""The program that finishes routing last sorts all pairs, if neither their tokens nor the pairs are more than this."""
COUNTED_BLOCK_TOKENS = 16
"""Tokens that one program routes and counts, if there are more tokens or pairs than one program sorts."""
RANK_CHUNK = tl.constexpr(32)
"""Pairs that the pairs of a block are compared with at a time, to find their ranks."""
SCAN_BLOCK_GROUPS = 32
"""Groups of one program of the prefix sum: one memory line (128 bytes) of each block's counts."""


class RouteArguments(NamedTuple):
    """:class:`Routes` as a kernel takes it.

    Without ``rows``, the length of ``source_row``: Triton compiles a variant for each divisibility by 16 of a tuple's
    integers. BINS, the bins of a histogram over groups, is a compile-time constant.
    """

    experts: Tensor
    weights: Tensor
    source_row: Tensor
    destination: Tensor
    offsets: Tensor
    counts: Tensor
    starts: Tensor
    groups: int
    BINS: tl.constexpr


class Counted(NamedTuple):
    """The launches of :func:`place_counted`, for so many blocks: grids, and compile-time constants."""

    blocks: int
    scan_grid: tuple[int]
    scan: dict[str, Any]
    place_grid: tuple[int]
    place: dict[str, Any]


@dataclass(frozen=True)
class Routes:
    """The routing of T tokens: their experts and weights, and the rows of their copies.

    Attributes:
        experts: int32 [T, k], the group that each pair visits. A pair whose group is not one of G (−1, say) has no row.
        weights: fp32 [T, k], the routing weight of each pair.
        source_row: int32 [padded rows], the token that is copied to each row; −1 in the padding.
        destination: int32 [T, k], the row of each pair; −1 if it is not routed.
        offsets: int32 [G], the first row of each group, a multiple of the tile.
        counts: int32 [G], the rows of each group without padding.
        starts: int32 workspace for counts by block of tokens; empty if one program sorts all pairs.
        tile: the token tile of the experts' GEMMs.
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
        """Room for the routes of ``tokens`` tokens, contents undefined.

        Args:
            tokens: T.
            topk: groups that each token visits, the shared expert included if it is a group.
            groups: G, the shared expert included if it is a group.
            tile: the token tile of the experts' GEMMs; 1 for rows without padding.
            device: where to allocate.
        """

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
        """Bins of a histogram over the groups."""
        return _bins(self.groups)

    @property
    def is_sorted(self) -> bool:
        """Whether one program sorts all pairs."""
        return _counted_blocks(self.tokens, self.topk) == 0

    @once
    def check(self, op: str) -> None:
        """Refuse what the kernels cannot write; from metadata alone.

        Raises:
            OperandTypeError: a dtype is not that of the class's documentation.
            OperandValueError: a shape, stride or device does not fit, or there are too many groups, pairs or rows a
                tile.
        """
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
        """The same as the kernels take it."""
        return RouteArguments(
            experts=self.experts,
            weights=self.weights,
            source_row=self.source_row,
            destination=self.destination,
            offsets=self.offsets,
            counts=self.counts,
            starts=self.starts,
            groups=self.offsets.shape[0],
            BINS=constant(_bins(self.offsets.shape[0])),
        )

    @once
    def counted(self) -> Counted | None:
        """The launches that place pairs whose visits blocks of tokens have counted; None if one program sorts all."""
        blocks = _counted_blocks(self.tokens, self.topk)
        if blocks == 0:
            return None
        pairs = COUNTED_BLOCK_TOKENS * self.topk
        block = min(next_power_of_2(blocks), 256)
        scan = {"BINS": self.bins, "GROUPS": SCAN_BLOCK_GROUPS, "BLOCK_B": block, "num_warps": 8}
        length = max(next_power_of_2(pairs), 128)
        place = {"TOPK": self.topk, "BLOCK_PAIRS": pairs, "LENGTH": length, "TILE": self.tile, "num_warps": 4}
        return Counted(
            blocks, (self.bins // SCAN_BLOCK_GROUPS,), {**scan, **OVERLAPPED}, (blocks,), {**place, **OVERLAPPED}
        )


def padded_rows(pairs: int, groups: int, tile: int) -> int:
    """The number of rows that suffices for any distribution of ``pairs`` over ``groups``.

    Each group's rows are rounded up to whole tiles. In the worst case as many groups as can have any pair are one row
    into their last tile.
    """
    return (pairs + min(groups, pairs) * (tile - 1)) // tile * tile


def _bins(groups: int) -> int:
    """Bins of a histogram over ``groups``: a power of two, at least one a lane of a warp."""
    return max(next_power_of_2(groups), 32)


def _counted_blocks(tokens: int, topk: int) -> int:
    """Blocks of COUNTED_BLOCK_TOKENS tokens whose visits are counted; 0 if one program sorts all pairs."""
    if tokens <= SINGLE_PROGRAM_MAX_TOKENS and tokens * topk <= SINGLE_PROGRAM_MAX_PAIRS:
        return 0
    return cdiv(tokens, COUNTED_BLOCK_TOKENS)


@triton.jit
def fill_padding(out, rows, BLOCK: tl.constexpr):
    """Mark this program's share of all ``rows`` as padding (−1), BLOCK at a time; routed pairs overwrite it later."""
    share = tl.cdiv(rows, tl.num_programs(0))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, rows)
    for start in range(first, last, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(out.source_row + row, tl.full((BLOCK,), -1, tl.int32), mask=row < last)


@triton.jit
def _offsets(counts, TILE: tl.constexpr):
    """The first row of each group: the exclusive prefix sum of the counts rounded up to whole tiles."""
    padded = (counts + (TILE - 1)) // TILE * TILE
    return tl.cumsum(padded, axis=0) - padded


@triton.jit
def _load_experts(out, first, last, LENGTH: tl.constexpr):
    """Load the groups of the pairs ``first`` to ``last - 1``: int32 [LENGTH], 0 if there is none, and whether there is.

    The loads bypass L1, because other programs may have stored the groups.
    """
    pair = first + tl.arange(0, LENGTH)
    expert = tl.load(out.experts + pair, mask=pair < last, other=-1, cache_modifier=".cg")
    routed = (expert >= 0) & (expert < out.groups)
    return tl.where(routed, expert, 0), routed


@triton.jit
def permute_sorted(out, pairs, TOPK: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """Sort all pairs by group and store their rows over padding, in one program.

    pairs: at most LENGTH, a power of two. The program must not have more threads than LENGTH: several would hold one
    pair, and the histogram would count it more than once.
    """
    BINS: tl.constexpr = out.BINS
    expert, routed = _load_experts(out, 0, pairs, LENGTH)
    pair = tl.arange(0, LENGTH)
    ordered = tl.sort(tl.where(routed, expert, BINS) * LENGTH + pair)
    group = tl.arange(0, BINS)
    visits = tl.histogram(expert, BINS, mask=routed)
    begin = _offsets(visits, TILE)
    tl.store(out.counts + group, visits, mask=group < out.groups)
    tl.store(out.offsets + group, begin, mask=group < out.groups)
    pair, expert = ordered % LENGTH, ordered // LENGTH
    routed = expert < BINS
    row = tl.arange(0, LENGTH)
    if TILE > 1:
        # Padding of earlier groups moves all rows of a group by this much.
        added = begin - _offsets(visits, 1)
        row += tl.gather(added, tl.where(routed, expert, 0), axis=0)
    tl.store(out.destination + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(out.source_row + row, pair // TOPK, mask=routed)


@triton.jit
def permute_one(out, TOPK: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr):
    """Store the rows of one token's pairs over padding.

    Each thread compares all pairs with its own groups: no sort, no histogram, no prefix sum, for which warps would wait
    for each other. BLOCK_K: a power of two, at least TOPK.
    """
    # Past L1, because other threads have just stored them.
    experts = ()  # type: tuple[tl.tensor, ...]
    for k in tl.static_range(TOPK):
        experts += (tl.load(out.experts + k, cache_modifier=".cg"),)
    place = tl.arange(0, BLOCK_K)
    expert = tl.load(out.experts + place, mask=place < TOPK, other=-1, cache_modifier=".cg")
    routed = (expert >= 0) & (expert < out.groups)
    group = tl.arange(0, out.BINS)
    counts, begin = tl.zeros((out.BINS,), tl.int32), tl.zeros((out.BINS,), tl.int32)
    row = tl.zeros((BLOCK_K,), tl.int32)
    for k in tl.static_range(TOPK):
        # All rows of a group, with their padding, belong to the first of its pairs.
        visits, before = 0, 0
        for other in tl.static_range(TOPK):
            visits += (experts[other] == experts[k]).to(tl.int32)
            if other < k:
                before += (experts[other] == experts[k]).to(tl.int32)
        is_first = (before == 0) & (experts[k] >= 0)
        rows = tl.where(is_first, (visits + (TILE - 1)) // TILE * TILE, 0)
        counts += (group == experts[k]).to(tl.int32)
        begin += tl.where(group > experts[k], rows, 0)
        row += tl.where(expert > experts[k], rows, 0) + ((expert == experts[k]) & (place > k)).to(tl.int32)
    tl.store(out.counts + group, counts, mask=group < out.groups)
    tl.store(out.offsets + group, begin, mask=group < out.groups)
    tl.store(out.destination + place, tl.where(routed, row, -1), mask=place < TOPK)
    tl.store(out.source_row + row, tl.zeros((BLOCK_K,), tl.int32), mask=routed)


@triton.jit
def count_visits(out, pairs, BLOCK_PAIRS: tl.constexpr, LENGTH: tl.constexpr):
    """Store how often the BLOCK_PAIRS pairs of this program visit each group.

    BLOCK_PAIRS is at most LENGTH, and the program has at most LENGTH threads, as in :func:`permute_sorted`.
    """
    BINS: tl.constexpr = out.BINS
    first = tl.program_id(0) * BLOCK_PAIRS
    expert, routed = _load_experts(out, first, tl.minimum(first + BLOCK_PAIRS, pairs), LENGTH)
    visits = tl.histogram(expert, BINS, mask=routed)
    tl.store(out.starts + tl.program_id(0) * BINS + tl.arange(0, BINS), visits)


@triton.jit(do_not_specialize=["blocks"])
def _scan(starts, counts, blocks, groups, BINS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Replace the counts of each block by their exclusive prefix sum over blocks, and store the total of each group.

    Afterwards ``starts[block, group]`` is the rank, among all pairs of the group, of the block's first one. A program
    takes GROUPS groups and BLOCK_B blocks at a time.
    """
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
    """The rank of each pair of a block among the block's pairs of the same group, int32 [LENGTH]."""
    pair = tl.arange(0, LENGTH)
    rank = tl.zeros((LENGTH,), tl.int32)
    for start in range(0, LENGTH, RANK_CHUNK):
        other_pair = start + tl.arange(0, RANK_CHUNK)
        other = tl.load(out.experts + first + other_pair, mask=first + other_pair < last, other=-1)
        same = (expert[:, None] == other[None, :]) & (other_pair[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit(do_not_specialize=["pairs"])
def _place(out, pairs, TOPK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, LENGTH: tl.constexpr, TILE: tl.constexpr):
    """Store the rows of the pairs of one block, from the group's offset, the block's start and the rank within it."""
    after_previous()
    BINS: tl.constexpr = out.BINS
    block = tl.program_id(0)
    group = tl.arange(0, BINS)
    begin = _offsets(tl.load(out.counts + group, mask=group < out.groups, other=0), TILE)
    if block == 0:
        tl.store(out.offsets + group, begin, mask=group < out.groups)
    first = block * BLOCK_PAIRS
    last = tl.minimum(first + BLOCK_PAIRS, pairs)
    expert, routed = _load_experts(out, first, last, LENGTH)
    row = tl.gather(begin, expert, axis=0) + tl.load(out.starts + block * BINS + expert)
    row += _rank(expert, out, first, last, LENGTH)
    pair = first + tl.arange(0, LENGTH)
    tl.store(out.destination + pair, tl.where(routed, row, -1), mask=pair < last)
    tl.store(out.source_row + row, pair // TOPK, mask=routed)


def place_counted(out: Routes, arguments: RouteArguments, counted: Counted) -> None:
    """Launch the prefix sum and the placement of pairs whose blocks :func:`count_visits` has counted, over padding.

    Args:
        out: routes whose ``experts`` and ``starts`` are written and whose ``source_row`` is all padding;
            ``source_row``, ``destination``, ``offsets`` and ``counts`` are written.
        arguments, counted: of these routes.
    """
    _scan[counted.scan_grid](out.starts, out.counts, counted.blocks, arguments.groups, **counted.scan)
    _place[counted.place_grid](arguments, out.experts.numel(), **counted.place)
