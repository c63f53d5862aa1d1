"""Sums over K by mma.sync, for few tokens: every warp multiplies its 16 rows by itself.

A warpgroup must wait for a group of wgmmas before it may overwrite the registers that they read. mma.sync shortens a
decode step by 1.2 to 1.8 % (``launch/results/hopper_step_h200.md``). Its m16n8k16 takes the same fragments of 16 rows
(layout.py), so the expansion is the same; tokens are loaded as fragments, too, and what follows is ordinary register
arithmetic that the scheduler overlaps. Half a stage's weights are loaded while those of the half before are multiplied,
and a stage is released once it is in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp
from ..common.ring import Ring
from .layout import TILE_K
from .shape import KernelShape
from .stage import expanded, load_stage_half, release
from .weights import HALF_WORDS

SWIZZLED_BYTES = 128
"""A row of staged tokens: 64 of K, whose units of 16 bytes are swizzled by the token's number."""
STEPS = TILE_K // 16
"""Steps of 16 of K in a stage. One ldmatrix loads a pair of them."""


@dataclass(frozen=True)
class WarpSums(Fixed):
    """One warp's sums.

    Attributes:
        weights: shared pointer to the stages' tiles. tokens: shared address of the stages' tokens.
    """

    shape: KernelShape
    ring: Ring
    weights: Any
    tokens: Any
    warp: EpilogueWarp

    @property
    def chains(self) -> int:
        """Sums that a value is divided into, so that one multiplication need not wait for the one before."""
        return 2 if self.shape.token_tile == 8 else 1

    @cute.jit
    def add_up(
        self, values: cute.Tensor, position: Any, k_begin: Int32, k_end: Int32, width: cutlass.Constexpr[int]
    ):  # fmt: skip
        """Set ``values`` to the sums over a tile's stages; returns the ring's position behind them.

        Args:
            width: all tokens of the tile.
        """
        shape = self.shape
        sums = [cute.make_rmem_tensor((shape.token_tile // 2,), Float32) for _ in range(self.chains)]
        for chain in cutlass.range_constexpr(self.chains):
            sums[chain].fill(0.0)
        places = self._places()
        # Half a stage's weights are loaded while those of the half before are multiplied, across stages, too.
        halves = [cute.make_rmem_tensor((HALF_WORDS[shape.weights],), Uint32) for _ in range(2)]
        self.ring.wait_full(position)
        for half in cutlass.range_constexpr(2):
            self._load_half(position.index, half, halves[half])
        for k_tile in cutlass.range(k_begin, k_end, unroll=1):
            tokens = self._load_tokens(places, position.index * shape.token_bytes)
            release(self.ring, position.index)
            position.advance()
            self._multiply(halves[0], tokens, 0, sums)
            is_last = k_tile + 1 == k_end
            if not is_last:
                self.ring.wait_full(position)
                self._load_half(position.index, 0, halves[0])
            self._multiply(halves[1], tokens, 1, sums)
            if not is_last:
                self._load_half(position.index, 1, halves[1])
        for i in cutlass.range_constexpr(shape.token_tile // 2):
            values[i] = sums[0][i] + sums[1][i] if self.chains > 1 else sums[0][i]
        return position

    def _load_half(self, index: Any, half: int, words: cute.Tensor) -> None:
        """Load this lane's part of half a stage of weights."""
        staged = self.weights + index * self.shape.tile_bytes
        for i, word in enumerate(load_stage_half(self.shape, staged, self.warp, half)):
            words[i] = word

    def _places(self) -> tuple[Any, Any]:
        """Addresses of this lane's row of a matrix in the first stage, for even pairs of steps and odd ones.

        Lane 8 i + t gives the address of token t of matrix i.
        """
        token = self.warp.lane % 8
        unit = (self.warp.lane // 8) ^ token
        row = self.tokens + token * SWIZZLED_BYTES
        return row + unit * 16, row + (unit ^ 4) * 16

    def _load_tokens(self, places: tuple[Any, Any], stage: Any) -> list[list[Any]]:
        """For each step of a stage the B fragments of its groups of 8 tokens, two registers each."""
        steps: list[list[Any]] = [[] for _ in range(STEPS)]
        for pair in range(STEPS // 2):
            half = pair // 2 * self.shape.token_tile
            for group in range(self.shape.token_tile // 8):
                found = _load_matrices(places[pair % 2] + stage + (half + group * 8) * SWIZZLED_BYTES)
                steps[2 * pair].append(found[:2])
                steps[2 * pair + 1].append(found[2:])
        return steps

    def _multiply(self, words: cute.Tensor, tokens: list[list[Any]], half: int, sums: list[cute.Tensor]) -> None:
        """Multiply half a stage and add it to the sums."""
        registers = expanded(self.shape, [words[i] for i in range(HALF_WORDS[self.shape.weights])])
        for step in range(STEPS // 2):
            k = half * (STEPS // 2) + step
            for group, fragment in enumerate(tokens[k]):
                _multiply_add(sums[k % self.chains], 4 * group, registers[4 * step : 4 * step + 4], fragment)


def _load_matrices(place: Any) -> tuple[Any, ...]:
    """The B fragments of two steps: of each step two registers."""
    found: tuple[Any, ...] = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Uint32(place)],
    )
    return found


def _multiply_add(sums: Any, first: int, a: Any, b: Any) -> None:
    """Multiply a step and add it to four sums from ``first`` on."""
    found = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { {$w0}, {$w1}, {$w2}, {$w3} },"
        " { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r7}, {$r8}, {$r9} };",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *(sums[first + i] for i in range(4))],
    )
    for i in range(4):
        sums[first + i] = found[i]
