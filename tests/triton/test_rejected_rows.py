"""Compressors of runs that draft: rows of rejected tokens harm nothing, in the longer rings (16 and 256 rows).

``World.run`` compares the whole state with the reference's after every pass, and ``tests/model/test_rejected_tokens``
the reference's with serial decoding. Here the kernels' are compared with the sequences themselves as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, DRAFTED_TOKENS, state_row
from tests.triton.support.compression import Side, World, bits

CASES = [(4, 512), (4, 128), (128, 512)]
STARTS = [*range(9, 13), *range(120, 137), 251, 254, 256]
"""Where drafting begins: every residue of 4, around the end of a window of 128 and of a page."""
WIDTHS = (8, 3, DRAFTED_TOKENS)
"""Tokens that each request adds, pass by pass."""


def draft(world: World, width: int, right: Mapping[int, int]) -> None:
    """A pass of ``width`` tokens of each request, of which the first ``right[request]`` are its sequence's."""
    kept, generator = world.rows.clone(), torch.Generator().manual_seed(width)
    for request, count in right.items():
        wrong = slice(world.lengths[request] + count, world.lengths[request] + width)
        world.rows[request, wrong] = torch.randn(world.rows[request, wrong].shape, generator=generator)
    starts = {request: world.lengths[request] for request in right}
    world.run(dict.fromkeys(right, width))
    world.rows = kept
    for request, count in right.items():
        world.lengths[request] = starts[request] + count


def open_rows(world: World, side: Side, index: int, request: int, length: int) -> tuple[Tensor, Tensor]:
    """What the next windows need of a sequence of ``length`` tokens: rows of the state, and the sequence's own."""
    ratio = side.compressor.ratio
    oldest = max(length // ratio * ratio - (4 if ratio == 4 else 0), 0)
    positions = torch.arange(oldest, length)
    swa = world.full_to_swa[world.slots[request, positions].long()]
    rows = state_row(ratio, request=torch.tensor(request), position=positions, swa_slot=swa, rings=world.rings)
    return side.state.cpu()[rows], torch.cat(world.columns(world.rows[request, positions], index), dim=1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_accepted_prefix_leaves_the_states_of_serial_decoding(case: tuple[int, int], device: str) -> None:
    """As many windows close in a pass as can; then others overwrite the rows of the rejected tokens."""
    drafted, serial = (
        World([case], device, requests=len(STARTS), rings=DRAFTED_STATE_RING, capacity=512) for _ in range(2)
    )
    begun = dict(enumerate(STARTS, 1))
    for world in (drafted, serial):
        world.suppose(begun)
    closed = set()
    for number, width in enumerate(WIDTHS):
        right = {request: 1 + (3 * request + 2 * number) % width for request in begun}
        if number + 1 == len(WIDTHS):
            right = dict.fromkeys(begun, width)
        starts = list(drafted.lengths)
        closed |= {(starts[r] + width) // case[0] - starts[r] // case[0] for r in begun}
        draft(drafted, width, right)
        for _ in range(width):
            one_more = {r: 1 for r in begun if serial.lengths[r] < drafted.lengths[r]}
            serial.suppose(one_more)
        assert serial.lengths == drafted.lengths
        for request, count in right.items():
            for length in range(starts[request] + 1, starts[request] + count + 1):
                found, expected = open_rows(drafted, drafted.sides[0], 0, request, length)
                assert torch.equal(bits(found), bits(expected)), (request, length)
    assert closed == ({0, 1, 2, 3} if case[0] == 4 else {0, 1})
    drafted.sides[0].expected_pages = serial.sides[0].expected_pages
    drafted.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_token_each_and_padding(case: tuple[int, int], device: str) -> None:
    """Steps without a draft in the same rings, beside padding."""
    world = World([case], device, requests=2, rings=DRAFTED_STATE_RING)
    world.suppose({1: 125, 2: 254})
    for _ in range(5):
        world.run({1: 1, 2: 1}, padding=2)
    world.check_entries()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts_in_long_rings(case: tuple[int, int], device: str) -> None:
    world = World([case], device, requests=2, rings=DRAFTED_STATE_RING)
    world.run({1: 300, 2: 5})
    world.run({2: 130, 1: 7})
    world.check_entries()
