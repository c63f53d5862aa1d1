"""The shape of one GEMM kernel on Hopper and what it costs in shared memory; plain Python, no CuTeDSL.

The weights are the MMA's A operand (``..common.shape`` says why). wgmma takes A from registers, where the weights are
expanded to bf16; they never lie in memory in that form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nvfp4_sgl.limits import PUSHING_RANKS

from ..common.shape import (
    ALIGNMENT,
    MAX_SPLIT_TILE,
    SPLIT_CHUNK,
    TEAM_WARPS,
    TOKEN_TILES,
    WARP_LANES,
    GemmShape,
    Output,
)
from .fp8_layout import FP8_TILE_BYTES
from .layout import TILE_BYTES, TILE_K, TILE_ROWS

WeightKind = Literal["nvfp4", "fp8"]
"""How weights are stored: E2M1 codes with a block scale for each 16 of K, or E4M3 codes with a power of two for each
64."""

WARPGROUP_ROWS = 64
"""M of wgmma."""
WARP_ROWS = 16
"""Rows of a warpgroup's M that one of its warps holds."""
GATE_ROWS = 8
"""Gated weights alternate between this many rows of gates and as many of the ups of the same features: a thread's rows
g and g + 8."""
TEAMS = TILE_ROWS // WARPGROUP_ROWS
"""Warpgroups that multiply, each 64 of a tile's rows."""
CONSUMER_WARPS = TEAM_WARPS * TEAMS
CONSUMER_REGISTERS, LOADER_REGISTERS = 232, 40
"""Registers of a thread of the widest kernel, whose sums alone take 128; a multiple of 8 each."""
TWO_CTAS_MAX_TILE = 64
"""The widest token tile whose kernels' registers and shared memory let two CTAs share an SM. Of kernels whose warps
multiply by themselves three do."""
WARP_MMA_MAX_TILE, EXPERT_WARP_MMA_MAX_TILE = 16, 8
"""The widest token tile that warps multiply by mma.sync (warp_sums.py), of dense kernels and of experts' ones. Experts
take tiles of 16 where the GPU is at its power limit, and wgmma reads tokens from shared memory for four warps at once:
with half-wide tiles 6 % less at 384 tokens (``launch/results/hopper_step_h200.md``)."""
GATHER_MAX_TILE = 16
"""The widest token tile whose rows are loaded one by one."""
LOAD_TOKENS = 32
"""Tokens of a load where a tile with few of them takes less."""
WIDTHS: Mapping[int, tuple[int, ...]] = {16: (8, 16), 128: (64, 96, 128), 256: (128, 192, 256)}
"""By token tile: how many tokens of an expert's tile may be multiplied. A tile takes the least width that holds its
tokens. Each width is a loop of its own in the code; with four of them ptxas serialises the wgmmas of the wider tile for
lack of registers."""
SM_REGISTERS = 65536
GEMM_TOKEN_TILES: Mapping[WeightKind, tuple[int, ...]] = {"nvfp4": TOKEN_TILES, "fp8": TOKEN_TILES[:-1]}
"""Token tiles of dense kernels: beside FP8 weights only two stages of the widest would fit."""
WEIGHT_TILE_BYTES: Mapping[WeightKind, int] = {"nvfp4": TILE_BYTES, "fp8": FP8_TILE_BYTES}
"""Bytes of a tile of weights."""
BARRIER_BYTES = 512
"""What mbarriers take at most, and the alignment of partial sums."""
MIN_STAGES = 3
MAX_CTAS = 3
"""Most CTAs that share an SM."""
HOPPER_SPLITS = (1, 2, 3, 4, 8)
"""CTAs that may share the K of a tile. An H200 runs 30 clusters of four at a time."""
COPIES = (0, *(ranks - 1 for ranks in PUSHING_RANKS))
"""Tensors beside ``out`` that a kernel may write its result to: those of the other ranks of 2, 4 or 8."""
MAX_CHUNK = 32
"""Tokens that the epilogue finishes at a time, at most."""


def max_split(token_tile: int) -> int:
    """Most CTAs that may share K: with more tokens there are tiles enough. The reduction's addresses take registers: at
    64 tokens with four CTAs only one CTA would fit on an SM."""
    if token_tile > MAX_SPLIT_TILE:
        return 1
    return 2 if token_tile == MAX_SPLIT_TILE else HOPPER_SPLITS[-1]


@dataclass(frozen=True)
class KernelShape(GemmShape):
    """Everything that is fixed when a kernel is compiled: fields of :class:`GemmShape`, and the storage of weights.

    Attributes:
        weights: their kind. FP8 ones are for dense kernels alone. Keys of compiled kernels spell the name.
        max_ctas: CTAs of a launch that may share an SM. A launch of fewer CTAs than places does not spread evenly over
            the SMs; with fewer places it must.
        gathers: whether tokens are taken from rows of an unsorted matrix, of experts' kernels for few tokens a tile.
        counts_ahead: whether an experts' kernel reads offsets and counts, and loads its first weights, before the
            previous kernel has ended. That kernel must have waited for the one that wrote them.
        copies: tensors beside ``out`` that get the same result, of dense kernels of NVFP4 weights with bf16 output.

    Raises:
        ValueError: a combination that does not exist.
    """

    weights: WeightKind = "nvfp4"
    max_ctas: int = MAX_CTAS
    gathers: bool = False
    counts_ahead: bool = False
    copies: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WEIGHT_TILE_BYTES:
            raise ValueError(f"weights: expected one of {tuple(WEIGHT_TILE_BYTES)}, found {self.weights!r}")
        if self.weights != "nvfp4" and (self.gated or self.grouped):
            raise ValueError(f"weights: expected 'nvfp4' for gated and grouped kernels, found {self.weights!r}")
        if self.token_tile not in GEMM_TOKEN_TILES[self.weights]:
            widest = GEMM_TOKEN_TILES[self.weights][-1]
            raise ValueError(f"token_tile is at most {widest} for {self.weights} weights, found {self.token_tile}")
        if self.gathers and not (self.grouped and self.token_tile <= GATHER_MAX_TILE):
            raise ValueError(
                f"gathers: expected a grouped kernel of token_tile at most {GATHER_MAX_TILE}, found {self}"
            )
        if self.counts_ahead and (self.gathers or not self.grouped):
            raise ValueError(f"counts_ahead: expected a grouped kernel of sorted rows, found {self}")
        if self.copies not in COPIES:
            raise ValueError(f"copies: expected one of {COPIES}, found {self.copies}")
        is_plain = (self.gated, self.grouped, self.output, self.weights) == (False, False, "bf16", "nvfp4")
        if self.copies and not is_plain:
            raise ValueError(f"copies: expected 0 but for dense NVFP4 kernels with bf16 output, found {self}")
        if self.split_k > max_split(self.token_tile):
            limit = max_split(self.token_tile)
            raise ValueError(f"split_k is at most {limit} for token_tile {self.token_tile}, found {self.split_k}")

    @classmethod
    def splits(cls) -> tuple[int, ...]:
        return HOPPER_SPLITS

    @classmethod
    def outputs(cls) -> tuple[Output, ...]:
        return "bf16", "fp32"

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.split_k

    @property
    def weights_ahead(self) -> bool:
        """Whether the loads of the first weights are issued before the first tokens."""
        return not self.grouped or self.gathers or self.counts_ahead

    @property
    def waits_first(self) -> bool:
        """Whether every warp waits for the previous kernel before it reads anything."""
        return self.grouped and not self.counts_ahead

    @property
    def multiplies_by_warp(self) -> bool:
        """Whether each warp multiplies by itself, with mma.sync, rather than a warpgroup with wgmma."""
        return self.token_tile <= (EXPERT_WARP_MMA_MAX_TILE if self.grouped else WARP_MMA_MAX_TILE)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of a tile that are multiplied: the least of these that holds those that there are."""
        whole = (self.token_tile,)
        return WIDTHS.get(self.token_tile, whole) if self.grouped and self.split_k == 1 else whole

    @property
    def trims(self) -> bool:
        """Whether a tile with few tokens is multiplied in part."""
        return len(self.widths) > 1

    @property
    def trims_loads(self) -> bool:
        """Whether a tile with few tokens is loaded in part, too."""
        return self.trims and self.token_tile > LOAD_TOKENS

    @property
    def keeps_offsets(self) -> bool:
        return not self._is_widest

    @property
    def load_tokens(self) -> int:
        """Tokens of a load."""
        return LOAD_TOKENS if self.trims_loads else self.token_tile

    @property
    def reallocates(self) -> bool:
        """Whether warpgroups reallocate registers (``setmaxregister``). A launch then takes all registers of an SM, so
        that no other kernel's CTA fits beside it: for the widest kernel alone."""
        return self._is_widest

    @property
    def threads(self) -> int:
        """Threads of a CTA: the warpgroups that multiply, and a warp for loads (three idle ones where it must be a
        warpgroup). ptxas counts whole warpgroups, 168 registers a thread for either."""
        return (CONSUMER_WARPS + (4 if self.reallocates else 1)) * WARP_LANES

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of a launch that an SM runs at a time."""
        return min(self.fitting_ctas, self.max_ctas)

    @property
    def fitting_ctas(self) -> int:
        """CTAs that fit on an SM at a time.

        One CTA expands weights more slowly than memory delivers them: 132 CTAs would reach 2.9 of 4.25 TB/s
        (``launch/results/hopper_gemm_h200.md``). FP8 weights take fewer instructions for more bytes, so that two
        suffice; three would leave each too few stages.
        """
        if self.weights == "fp8":
            # Partial sums of half of so many tokens leave two CTAs two stages each.
            is_full = self.split_k > 1 and self.token_tile == MAX_SPLIT_TILE
            return 2 if self.token_tile <= TWO_CTAS_MAX_TILE and not is_full else 1
        if self.multiplies_by_warp and self.split_k == 1:
            return 3
        if self.gated and self.grouped and (self.token_tile, self.split_k) == (32, 8):
            return 1  # for its 114 registers
        if self.copies == COPIES[-1] and (self.token_tile, self.split_k) in ((32, 8), (64, 2)):
            return 1  # for its 121 registers, of which the tensor maps' addresses take some
        return 2 if self.token_tile <= TWO_CTAS_MAX_TILE else 1

    @property
    def max_registers(self) -> int:
        """Registers of a thread with which that many CTAs fit on an SM; they are allocated eight at a time."""
        return SM_REGISTERS // (self.ctas_per_sm * self.threads) // 8 * 8

    @property
    def teams(self) -> int:
        """Teams of four warps."""
        return TEAMS

    @property
    def warp_outputs(self) -> int:
        """Output features of a warp."""
        return WARP_ROWS // self.rows_per_feature

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue finishes at a time."""
        if self.split_k > 1:
            return SPLIT_CHUNK
        return min(self.token_tile, MAX_CHUNK // 2 if self._is_widest else MAX_CHUNK)

    @property
    def _is_widest(self) -> bool:
        """Whether the token tile is the largest: three of its stages fit only if all else takes next to nothing."""
        return self.token_tile == TOKEN_TILES[-1]

    @property
    def chunk_values(self) -> int:
        """A thread's values of a chunk: two rows of a quarter of the tokens."""
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
        if self.weights == "fp8" and self.ctas_per_sm > 1:
            return 1  # for a third stage at 64 tokens
        return 2 if self.split_k == 1 and self.token_tile > self.store_tokens and not self._is_widest else 1

    @property
    def unit_values(self) -> int:
        """fp32 values that a thread holds of a unit of the reduction: 16 rows by 8 tokens of a warp."""
        return SPLIT_CHUNK // 2

    # Shared memory, in bytes.

    @property
    def token_bytes(self) -> int:
        """bf16 tokens of a stage."""
        return self.token_tile * TILE_K * 2

    @property
    def tile_bytes(self) -> int:
        """Weights of a stage."""
        return WEIGHT_TILE_BYTES[self.weights]

    @property
    def stage_bytes(self) -> int:
        return self.tile_bytes + self.token_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the stages: barriers, experts and partial sums, then staging, either aligned; a bound."""
        first = BARRIER_BYTES + self.expert_bytes + max(self.partial_bytes, 16)
        aligned = sum(-(-part // ALIGNMENT) * ALIGNMENT for part in (first, self.staging_bytes))
        # The whole is aligned, too.
        return aligned + (ALIGNMENT if self.tile_bytes % ALIGNMENT else 0)
