"""docs/hopper.md: the passes in which the experts' first GEMM gathers its tokens."""

from __future__ import annotations

import re

from nvfp4_sgl.cutedsl_kernels.plan import w4a16_gathers
from nvfp4_sgl.cutedsl_kernels.sm90.choose import expert_tile
from tests.packaging.checkout import ROOT
from tests.support.released import FLASH, PRO

PAGE = " ".join((ROOT / "docs" / "hopper.md").read_text(encoding="utf-8").split())


def last(most: int, fields: dict[str, int]) -> int:
    """The most tokens of a pass whose experts' tiles have at most ``most``; the shared expert is one more group."""
    visits, groups = fields["num_experts_per_tok"] + 1, fields["n_routed_experts"] + 1
    return next(tokens for tokens in range(1, 4096) if expert_tile(visits * (tokens + 1), groups) > most)


def test_the_passes_in_which_experts_gather_their_tokens() -> None:
    gathered = re.findall(r"in passes of at most (\d+) tokens for Flash and (\d+) for Pro", PAGE)
    eight = re.findall(
        r"tiles have 8 tokens in passes of at most (\d+) for Flash and (\d+) for Pro, and 16 above", PAGE
    )
    assert w4a16_gathers(16) and not w4a16_gathers(32)
    assert [tuple(map(int, pair)) for pair in gathered] == [(last(16, FLASH), last(16, PRO))]
    assert [tuple(map(int, pair)) for pair in eight] == [(last(8, FLASH), last(8, PRO))]
