"""The shape of one w4a16 GEMM kernel on Hopper and what it costs in shared memory; plain Python, no CuTeDSL.

Orientation: as on SM100 the weights are the MMA's A operand and the tokens its B operand, so that eight tokens waste
nothing. wgmma takes A from registers, where the weights are expanded to bf16; they never lie in memory in that form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layout import TILE_BYTES, TILE_K, TILE_ROWS

TOKEN_TILES = (8, 16, 32, 64, 128, 256)
"""N of wgmma."""
WARPGROUP_ROWS = 64
"""M of wgmma."""
WARP_ROWS = 16
WARP_LANES = 32
TEAMS = TILE_ROWS // WARPGROUP_ROWS
"""Warpgroups that multiply, each 64 of a tile's rows."""
CONSUMER_WARPS = 4 * TEAMS
CONSUMER_REGISTERS, LOADER_REGISTERS = 232, 40
"""Of a thread of the widest kernel, whose sums alone take 128; a multiple of 8 each."""
ALIGNMENT = 1024
"""Of the swizzled token buffers."""
RESERVED_SHARED_BYTES = 1024
"""What CUDA keeps of an SM's shared memory for itself, for each CTA."""
SHARED_CAPACITY = 228 * 1024 - RESERVED_SHARED_BYTES
"""Bytes a CTA may have on SM90: all of an SM's."""
NEIGHBOUR_SHARED_BYTES = 32 * 1024
"""Of a CTA of another kernel that must fit on an SM beside a kernel for few tokens, so that launches overlap."""
NEIGHBOUR_MAX_TOKEN_TILE = 64
MAX_STAGES = 12
MIN_STAGES = 3
SPLITS = (1, 2, 4, 8)
MAX_SPLIT_TILE = 64
"""Tokens of a kernel that splits K: with more there are tiles enough."""
SPLIT_CHUNK = 8
"""Tokens of a unit of work of the split-K reduction."""
MAX_CHUNK = 32
"""Tokens that the epilogue finishes at a time."""

Output = Literal["bf16", "fp32"]
ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class KernelShape:
    """What is fixed when a kernel is compiled.

    Attributes:
        token_tile: N of wgmma: tokens of a tile.
        split_k: CTAs of a cluster that share the K of one tile and reduce over distributed shared memory.
        output: what is written.

    Raises:
        ValueError: a combination that does not exist.
    """

    token_tile: int
    split_k: int = 1
    output: Output = "bf16"

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise ValueError(f"token_tile {self.token_tile}: expected one of {TOKEN_TILES}")
        if self.output not in ELEMENT_BYTES:
            raise ValueError(f"output {self.output!r}: expected one of {tuple(ELEMENT_BYTES)}")
        if self.split_k not in SPLITS:
            raise ValueError(f"split_k {self.split_k}: expected one of {SPLITS}")
        if self.split_k > 1 and self.token_tile > MAX_SPLIT_TILE:
            raise ValueError(f"split_k is for token tiles up to {MAX_SPLIT_TILE}, found {self.token_tile}")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.split_k

    @property
    def reallocates(self) -> bool:
        """Whether warps give registers to others, which whole warpgroups do. A launch then takes all registers of an
        SM, so that no other kernel's CTA fits beside it: for the widest kernel alone."""
        return self._is_widest

    @property
    def threads(self) -> int:
        """Of a CTA: the warpgroups that multiply, and a warp for loads (three idle ones where it must be a warpgroup).
        ptxas counts whole warpgroups, 168 registers a thread for either."""
        return (CONSUMER_WARPS + (4 if self.reallocates else 1)) * WARP_LANES

    # The epilogue: what sm100/store.py and sm100/split.py ask of a shape.

    @property
    def teams(self) -> int:
        """Teams of four warps."""
        return TEAMS

    @property
    def warp_outputs(self) -> int:
        """Output features of a warp."""
        return WARP_ROWS

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue finishes at a time."""
        if self.split_k > 1:
            return SPLIT_CHUNK
        return min(self.token_tile, MAX_CHUNK // 2 if self._is_widest else MAX_CHUNK)

    @property
    def _is_widest(self) -> bool:
        """Of whose stages three fit only if staging takes next to nothing."""
        return self.token_tile == TOKEN_TILES[-1]

    @property
    def chunks(self) -> int:
        return self.token_tile // self.chunk

    @property
    def chunk_values(self) -> int:
        """Of a thread: two rows of a quarter of the tokens."""
        return self.chunk // 2

    @property
    def store_tokens(self) -> int:
        """Tokens of a staging buffer."""
        if self.output == "fp32":
            return min(self.chunk, 8 if self._is_widest else 16)
        return self.chunk

    @property
    def warp_buffers(self) -> int:
        """Staging buffers of a warp: with two, a store overlaps the making of the next."""
        return 2 if self.split_k == 1 and self.token_tile > self.store_tokens and not self._is_widest else 1

    @property
    def warp_row_bytes(self) -> int:
        """Bytes of a token's features of one warp in a staging buffer."""
        return self.warp_outputs * ELEMENT_BYTES[self.output]

    @property
    def reducing_warps(self) -> int:
        """Of a CTA, in the split-K reduction."""
        return CONSUMER_WARPS

    @property
    def unit_values(self) -> int:
        """Of a thread, in a unit of the reduction: a warp's part of a chunk."""
        return SPLIT_CHUNK // 2

    @property
    def owned_units(self) -> int:
        """Units of the reduction that one CTA of a split-K cluster adds up, at most."""
        return -(-self.reducing_warps * self.chunks // self.split_k)

    # Shared memory, in bytes.

    @property
    def token_bytes(self) -> int:
        """bf16 tokens of a stage."""
        return self.token_tile * TILE_K * 2

    @property
    def stage_bytes(self) -> int:
        return TILE_BYTES + self.token_bytes

    @property
    def staging_bytes(self) -> int:
        """Staging buffers of all warps."""
        return CONSUMER_WARPS * self.warp_buffers * self.store_tokens * self.warp_row_bytes

    @property
    def partial_bytes(self) -> int:
        """Other CTAs' sums of the units that this CTA of a split-K cluster owns."""
        if self.split_k == 1:
            return 0
        return (self.split_k - 1) * self.owned_units * self.unit_values * WARP_LANES * 4

    @property
    def fixed_bytes(self) -> int:
        """All but the stages: staging, partial sums, barriers and alignment; a bound."""
        return self.staging_bytes + self.partial_bytes + 512 + 3 * ALIGNMENT

    @property
    def max_shared_bytes(self) -> int:
        """What a CTA may take of an SM's shared memory."""
        if self.token_tile > NEIGHBOUR_MAX_TOKEN_TILE:
            return SHARED_CAPACITY
        return SHARED_CAPACITY - RESERVED_SHARED_BYTES - NEIGHBOUR_SHARED_BYTES

    @property
    def stages(self) -> int:
        """What fits."""
        return min(MAX_STAGES, (self.max_shared_bytes - self.fixed_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; a bound."""
        return self.stages * self.stage_bytes + self.fixed_bytes
