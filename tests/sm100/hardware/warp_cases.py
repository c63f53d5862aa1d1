"""Instructions of a whole warp: shuffles, votes, matches, reductions and elections, with all lanes and with some."""

from __future__ import annotations

from tests.sm100.hardware.case import Case
from tests.sm100.hardware.instruction_table import Snippet, table_case

# Operands that vary from lane to lane, so that each warp of the columns is a test of its own.
_SHUFFLES = [
    Snippet(
        f"and.b32 t, b, 31; shfl.sync.{mode}.b32 u|p, a, t, {(32 - width) << 8 | (0 if mode == 'up' else 31)}, -1; "
        "selp.b32 t, 0x10000, 0, p; xor.b32 d, t, u;",
        "i0 n",
        label=f"shfl.{mode} of {width} lanes",
    )
    for mode in ("idx", "up", "down", "bfly")
    for width in (32, 16, 4)
]
_SOME = "and.b32 t, b, 1; setp.eq.u32 p, t, 1; vote.sync.ballot.b32 u, p, -1; mov.b32 d, 77; @p"
"""Lanes with an odd second operand go on, with the mask of them in u; the others keep 77."""
_FEW = "and.b32 t, a, 3;"
"""A value that lanes share with others."""

WARP = [
    *_SHUFFLES,
    *[Snippet(f"setp.lt.s32 p, a, b; vote.sync.{mode}.pred q, p, -1; selp.b32 d, 1, 0, q;", f"i0 {other}",
              label=f"vote.{mode} {other}")
      for mode in ("all", "any", "uni") for other in ("i1", "n")],
    Snippet("setp.lt.u32 p, a, 0x7fffffff; vote.sync.ballot.b32 d, p, -1;", "i0", label="vote.ballot"),
    Snippet(f"{_FEW} match.any.sync.b32 d, t, -1;", "i0", label="match.any"),
    Snippet(f"{_FEW} match.all.sync.b32 u|p, t, -1; selp.b32 t, 1, 0, p; xor.b32 d, t, u;", "i0", label="match.all"),
    Snippet("match.any.sync.b64 d, a, -1;", "q0", label="match.any of 64 bits"),
    *[Snippet(f"redux.sync.{name} d, a, -1;", "i0", label=f"redux {name}")
      for name in ("add.s32", "add.u32", "min.s32", "min.u32", "max.s32", "max.u32", "and.b32", "or.b32", "xor.b32")],
    Snippet("elect.sync t|p, -1; selp.b32 u, 1, 0, p; shl.b32 u, u, 8; or.b32 d, t, u;", "i0", label="elect"),
    Snippet("activemask.b32 d;", "", label="activemask"),
    Snippet(f"{_SOME} redux.sync.add.s32 d, a, u;", "i0 i1", label="redux of some lanes"),
    Snippet(f"{_SOME} elect.sync d|q, u;", "i0 i1", label="elect of some lanes"),
    Snippet(f"{_SOME} match.any.sync.b32 d, t, u;", "i0 i1", label="match of some lanes"),
    Snippet(f"{_SOME} vote.sync.all.pred q, p, u; @p selp.b32 d, 1, 0, q;", "i0 i1", label="vote of some lanes"),
]  # fmt: skip


def cases() -> list[Case]:
    """All of the above."""
    return [table_case("warp", WARP)]
