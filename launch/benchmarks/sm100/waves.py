"""Explains why a prefill's GEMM misses its goal: its last wave of tiles, and other ways to run that wave.

The kernel has stream-K (``sm100/stream_k.py``): the tiles of the last wave come first, and pairs share the K of each,
if there are two for a tile or more. The ways below, which run these tiles last, are not built. Each line assumes the
machine of ``cost.py`` and tiles of 256 by 256 for pairs of SMs:

* even: all pairs end at the same time, at no cost: what any split of the last wave can give at most;
* half tiles: the tiles of the last wave are cut in two along their tokens, if that many pairs are idle;
* K split: pairs share the K of a tile of the last wave, then write each other the sums they do not own through L2
  and add up the rest;
* 224 tokens: all tiles are 256 by 224. 8192 tokens then make 37 tiles, half as many as there are pairs. A tile begins
  within an atom of block scales, so it reads three atoms where two would do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sm100.cases import Case
from benchmarks.sm100.steps import goal_seconds
from nvfp4_sgl.cutedsl_kernels.sm100.cost import (
    B200,
    HANDOFF_SECONDS,
    epilogue_cycles,
    exposed_cycles,
    multiply_cycles,
    read_bytes,
)
from nvfp4_sgl.cutedsl_kernels.sm100.shape import SCALE_ATOM_BYTES, KernelShape

NARROWER = 224


@dataclass(frozen=True)
class LastWave:
    """A GEMM in tiles of 256 by 256: whole waves of them, and the rest; one that is no expert's."""

    case: Case

    @property
    def shape(self) -> KernelShape:
        return KernelShape(256, pair=True, output=self.case.problem.output)

    @property
    def pairs(self) -> int:
        """Pairs of SMs at work."""
        return B200.clusters.of(2)

    def tiles(self, tokens: int) -> int:
        """Number of tiles of 256 features by ``tokens`` tokens."""
        problem = self.case.problem
        return problem.groups * math.ceil(problem.features / 256) * math.ceil(problem.tokens / tokens)

    @property
    def whole(self) -> int:
        """Waves in which every pair has a tile."""
        return self.tiles(256) // self.pairs

    @property
    def rest(self) -> int:
        """Tiles of the last wave, if it is not whole."""
        return self.tiles(256) % self.pairs

    def _main_loop(self, shape: KernelShape, split: int = 1) -> float:
        stage = max(multiply_cycles(shape), read_bytes(shape) / B200.l2_bytes_per_cycle)
        return math.ceil(math.ceil(self.case.problem.k / shape.tile_k) / split) * stage

    def _excess(self, cycles: float) -> float:
        """µs beyond the goal, if waves and the last epilogue take so many cycles."""
        seconds = B200.launch_seconds - B200.overlap_seconds + (B200.fill_cycles + cycles) / B200.clock_hz
        return (seconds - goal_seconds(self.case.problem)) * 1e6

    @property
    def _tile(self) -> float:
        """Cycles from a tile to the next."""
        return self._main_loop(self.shape) + exposed_cycles(self.shape)

    def even(self) -> float:
        return self._excess(self.tiles(256) / self.pairs * self._tile + epilogue_cycles(self.shape))

    def half_tiles(self) -> float | None:
        half = replace(self.shape, token_tile=128)
        if not 0 < 2 * self.rest <= self.pairs:
            return None
        return self._excess(self.whole * self._tile + self._main_loop(half) + epilogue_cycles(half))

    def k_split(self) -> float | None:
        if not 0 < 2 * self.rest <= self.pairs:
            return None
        split = min(self.pairs // self.rest, math.ceil(self.case.problem.k / self.shape.tile_k))
        sums = (split - 1) / split * 128 * 256 * 4
        exchange = 2 * sums / B200.l2_bytes_per_cycle + HANDOFF_SECONDS * B200.clock_hz
        last = self._main_loop(self.shape, split) + exchange + epilogue_cycles(self.shape) / split
        return self._excess(self.whole * self._tile + last)

    def narrower(self) -> float:
        wide, atoms = self.shape, 3
        scales = atoms * SCALE_ATOM_BYTES * wide.stage_scale_atoms
        multiply = NARROWER / 256 * 256 * 256 * wide.tile_k / 2 / B200.multiply_adds_per_cycle
        multiply += (wide.weight_scale_bytes + scales) / B200.shared_bytes_per_cycle
        read = wide.weight_bytes + wide.weight_scale_bytes + wide.token_bytes * NARROWER / 256 + scales / 2
        stage = max(multiply, read / B200.l2_bytes_per_cycle)
        waves = math.ceil(self.tiles(NARROWER) / self.pairs)
        epilogue = epilogue_cycles(wide) * NARROWER / 256
        return self._excess(waves * math.ceil(self.case.problem.k / wide.tile_k) * stage + epilogue)


def wave_row(name: str, case: Case, excess: float) -> dict[str, Any]:
    """A GEMM's line of the report; all but the waves is µs beyond the goal."""
    wave = LastWave(case)

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    return {
        "model": case.model,
        "ranks": case.ranks,
        "product": name,
        "waves": round(wave.tiles(256) / wave.pairs, 2),
        "last wave": f"{wave.rest} of {wave.pairs}",
        "beyond goal us": shown(excess * 1e6),
        "even": shown(wave.even()),
        "half tiles": shown(wave.half_tiles()),
        "K split": shown(wave.k_split()),
        f"{NARROWER} tokens": shown(wave.narrower()),
    }
