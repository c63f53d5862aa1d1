"""The shape that all GEMM kernels have in common, and its cost in shared memory; plain Python, no CuTeDSL.

Orientation. A GEMM computes ``out[t, f] = sum_k tokens[t, k] * weights[f, k]``. The weights are the MMA's A operand,
the tokens its B operand: a tile has 128 features by 8 to 256 tokens. A decode step with eight tokens then wastes
nothing (N = 8), a prefill uses N = 256, and both are the same kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from nvfp4_sgl.formats.blocks import NVFP4
from nvfp4_sgl.limits import MAX_GEMM_EXPERTS

BLOCK = NVFP4.columns
"""Elements of NVFP4 that share a block scale."""
TOKEN_TILES = (8, 16, 32, 64, 128, 256)
"""N of the MMA."""
WARP_LANES = 32
TEAM_WARPS = 4
"""Warps of a team of the epilogue: those that read all of SM100's tensor memory, or a warpgroup of SM90."""
TEAM_THREADS = TEAM_WARPS * WARP_LANES
RESERVED_SHARED_BYTES = 1024
"""What CUDA keeps of an SM's shared memory for itself, for each CTA."""
SM_SHARED_BYTES = 228 * 1024
"""Shared memory of an SM of SM90 and SM100."""
SHARED_CAPACITY = SM_SHARED_BYTES - RESERVED_SHARED_BYTES
"""Bytes a CTA may have: all of an SM's."""
NEIGHBOUR_SHARED_BYTES = 32 * 1024
"""Shared memory that a kernel for few tokens leaves free on its SM. A CTA of another kernel fits beside it, so that a
launch of either can begin while the one before it is ending. Where several CTAs share an SM, the first to end makes
that room."""
NEIGHBOUR_MAX_TOKEN_TILE = 64
"""Up to here kernels leave room for a neighbour. Those for more tokens run too long for that to matter."""
ALIGNMENT = 1024
"""Alignment of the swizzled buffers in shared memory, in bytes."""
MAX_STAGES = 12
"""Enough to cover any latency; barriers stay few."""
SPLITS = (1, 2, 4, 8)
"""CTAs that may share the K of a tile: clusters of the portable sizes."""
MAX_SPLIT_TILE = 64
"""Tokens of a tile of a kernel that splits K: with more there are tiles enough."""
SPLIT_CHUNK = 8
"""Tokens of a unit of work of the split-K reduction."""
EXPERT_TABLE_WORDS = 33 + MAX_GEMM_EXPERTS // 32 * 33
"""What a grouped kernel keeps of its experts in shared memory (schedule.py): rows of blocks before each."""
OFFSET_WORDS = MAX_GEMM_EXPERTS // 32 * 33
"""What most keep beside that: each expert's offset."""

Output = Literal["bf16", "fp32", "nvfp4"]
"""What the epilogue writes. "nvfp4" is codes and swizzled block scales with a constant global scale."""
ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
"""Bytes of an output element that is staged in shared memory; NVFP4 goes straight to global memory."""


@dataclass(frozen=True)
class GemmShape(ABC):
    """The properties that are fixed when a kernel is compiled, on every architecture.

    Attributes:
        token_tile: N of the MMA: tokens of a tile.
        split_k: CTAs of a cluster that share the K of one tile and reduce over distributed shared memory.
        output: what is written.
        gated: weight rows alternate between gates and ups (the architecture's ``GATE_ROWS`` of each); SwiGLU joins them
            to half as many features.
        grouped: experts with device-side offsets instead of a batch of equal GEMMs.

    Raises:
        ValueError: a combination that does not exist.
    """

    token_tile: int
    split_k: int = 1
    output: Output = "bf16"
    gated: bool = False
    grouped: bool = False

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise ValueError(f"token_tile {self.token_tile}: expected one of {TOKEN_TILES}")
        if self.output not in self.outputs():
            raise ValueError(f"output {self.output!r}: expected one of {self.outputs()}")
        if self.split_k not in self.splits():
            raise ValueError(f"split_k {self.split_k}: expected one of {self.splits()}")
        if self.split_k > 1 and self.token_tile > MAX_SPLIT_TILE:
            raise ValueError(f"split_k is for token_tile up to {MAX_SPLIT_TILE}, found {self.token_tile}")

    @classmethod
    def splits(cls) -> tuple[int, ...]:
        """CTAs that may share the K of a tile."""
        return SPLITS

    @classmethod
    @abstractmethod
    def outputs(cls) -> tuple[Output, ...]:
        """The outputs that kernels of this architecture can write."""

    @property
    @abstractmethod
    def cluster(self) -> int:
        """CTAs of a cluster."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a CTA."""

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM runs at a time."""
        return 1

    @property
    def rows_per_feature(self) -> int:
        """Weight rows that make an output feature: a gate and an up, or one."""
        return 2 if self.gated else 1

    # The epilogue, and the split-K reduction.

    @property
    @abstractmethod
    def teams(self) -> int:
        """Teams of four warps that take part in the epilogue."""

    @property
    @abstractmethod
    def warp_outputs(self) -> int:
        """Output features of a warp of the epilogue."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Tokens that the epilogue finishes at a time."""

    @property
    @abstractmethod
    def store_tokens(self) -> int:
        """Tokens of a staging buffer."""

    @property
    @abstractmethod
    def warp_buffers(self) -> int:
        """Staging buffers of a warp: with two, a store overlaps the making of the next."""

    @property
    @abstractmethod
    def unit_values(self) -> int:
        """fp32 values that a thread holds of a unit of the reduction: a warp's part of a chunk."""

    @property
    def chunks(self) -> int:
        return self.token_tile // self.chunk

    @property
    def warp_row_bytes(self) -> int:
        """Bytes of a token's features of one warp in a staging buffer; they are swizzled by that much."""
        return self.warp_outputs * ELEMENT_BYTES[self.output]

    @property
    def reducing_warps(self) -> int:
        """Warps of a CTA that take part in the split-K reduction: all of the epilogue."""
        return TEAM_WARPS * self.teams

    @property
    def owned_units(self) -> int:
        """Units of the reduction that one CTA of a split-K cluster adds up, at most."""
        return -(-self.reducing_warps * self.chunks // self.split_k)

    # Shared memory, in bytes.

    @property
    @abstractmethod
    def stage_bytes(self) -> int:
        """Operands of a pipeline stage."""

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Bytes of all but the stages; an upper bound."""

    @property
    def keeps_offsets(self) -> bool:
        """Whether the table of experts has their offsets; else one is read again for each tile."""
        return True

    @property
    def expert_words(self) -> int:
        """The table of experts of a grouped kernel."""
        if not self.grouped:
            return 0
        return EXPERT_TABLE_WORDS + (OFFSET_WORDS if self.keeps_offsets else 0)

    @property
    def expert_bytes(self) -> int:
        return 4 * self.expert_words

    @property
    def staging_bytes(self) -> int:
        """Staging buffers of all warps of the epilogue."""
        if self.output == "nvfp4":
            return 0
        return TEAM_WARPS * self.teams * self.warp_buffers * self.store_tokens * self.warp_row_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of other CTAs' sums of the units that this CTA of a split-K cluster owns."""
        if self.split_k == 1:
            return 0
        return (self.split_k - 1) * self.owned_units * self.unit_values * WARP_LANES * 4

    @property
    def max_shared_bytes(self) -> int:
        """Most bytes of shared memory that a CTA may take."""
        if self.ctas_per_sm > 1:
            return SM_SHARED_BYTES // self.ctas_per_sm - RESERVED_SHARED_BYTES
        if self.token_tile > NEIGHBOUR_MAX_TOKEN_TILE:
            return SHARED_CAPACITY
        return SHARED_CAPACITY - RESERVED_SHARED_BYTES - NEIGHBOUR_SHARED_BYTES

    @property
    def stages(self) -> int:
        """Pipeline stages that fit."""
        return min(MAX_STAGES, (self.max_shared_bytes - self.fixed_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA; an upper bound."""
        return self.stages * self.stage_bytes + self.fixed_bytes
