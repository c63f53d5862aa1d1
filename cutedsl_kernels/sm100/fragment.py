"""How a warp of the epilogue holds a chunk of an accumulator: 32 weight rows by 8, 16 or 32 tokens.

Two ``tcgen05.ld.16x256b`` read it, 16 rows each. Thread l then has, of each group of 8 tokens, the tokens 2 (l % 4)
and 2 (l % 4) + 1 of the rows l / 4 + 8 i, with i from 0 to 3. Two things follow:

* rounded to 16 bits, a thread's two tokens are a register of ``stmatrix.trans``, which writes a token's features next
  to each other;
* in a gated kernel, where a warp's first 16 rows are gates and its last 16 the ups of the same features, a thread has
  both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from .fixed import Fixed
from .shape import LANES, TEAM_THREADS, WARP_LANES

EPILOGUE_BARRIER = 1
"""Named barrier of the first team."""
LANE_STRIDE = 1 << 16
"""Between the addresses of neighbouring lanes of tensor memory."""


@dataclass(frozen=True)
class EpilogueWarp(Fixed):
    """One of the four warps of a team, each of which reads a quarter of tensor memory.

    Attributes:
        team: which team. quarter: 0 to 3 in it. lane: 0 to 31.
    """

    team: Any
    quarter: Any
    lane: Any

    def synchronise_team(self) -> None:
        """All threads of the team, over a named barrier of its own."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.team, number_of_threads=TEAM_THREADS)


def first_value(tokens: int, i: int, group: int) -> int:
    """Which of a thread's values is the first token's of a group of 8, of row l / 4 + 8 i; the second's is the next."""
    return i // 2 * (tokens // 2) + group * 4 + i % 2 * 2


def values_of(tokens: int, i: int) -> list[int]:
    """:func:`first_value` for all groups of 8 tokens."""
    return [first_value(tokens, i, group) for group in range(tokens // 8)]


def token_of(lane: Any, group: int) -> Any:
    """A lane's first token of a group of 8."""
    return lane % 4 * 2 + group * 8


def make_fragment(tokens: int) -> cute.Tensor:
    """This thread's registers."""
    return cute.make_rmem_tensor((tokens,), Float32)


def read_fragment(tensor_memory: Any, column: Any, warp: EpilogueWarp, fragment: cute.Tensor) -> None:
    """Begin to load the chunk that begins at a column; ``cute.arch.fence_view_async_tmem_load`` waits for it."""
    tokens = cute.size(fragment)
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(tokens // 8)), Float32)
    pointer = tensor_memory + cute.assume(Int32(column), divby=8)
    source = cute.make_tensor(pointer, cute.make_layout((LANES, tokens), stride=(LANE_STRIDE, 1)))
    copy = tcgen05.make_tmem_copy(atom, source)
    part = copy.get_slice(warp.quarter * WARP_LANES + warp.lane)
    target = part.partition_D(cute.make_identity_tensor((LANES, tokens)))
    cute.copy(copy, part.partition_S(source), cute.make_tensor(fragment.iterator, cute.make_layout(target.shape)))
