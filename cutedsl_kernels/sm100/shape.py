"""The shape of one NVFP4 GEMM kernel and what it costs in shared and tensor memory; plain Python, no CuTeDSL.

Orientation. A product is ``out[t, f] = sum_k tokens[t, k] * weights[f, k]``. The weights are the MMA's A operand, the
tokens its B operand: features lie on the 128 lanes of tensor memory and tokens in its columns. A decode step with
eight tokens then wastes nothing (N = 8), a prefill uses N = 256, and both are the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 16
"""Elements that share a block scale."""
TILE_K = 256
"""Elements of K in a pipeline stage: 128 bytes of FP4, one row of the 128-byte swizzle."""
MMA_K = 64
"""Elements of K of one MMA instruction of kind mxf4nvf4."""
LANES = 128
"""Weight rows of a CTA's tile: the lanes of tensor memory."""
WARP_LANES = 32
"""Lanes of tensor memory that a warp of the epilogue reads."""
TEAM_THREADS = 128
"""Of a team of the epilogue: four warps, which read all of tensor memory."""
GATE_ROWS = 16
"""Gated weights alternate between this many rows of gates and as many of the ups of the same features, so that a warp
of the epilogue holds both; the features of one are a block of NVFP4 output."""
TOKEN_TILES = (8, 16, 32, 64, 128, 256)
SCALE_ATOM_ROWS, SCALE_ATOM_BYTES = 128, 512
"""Block scales travel in atoms of 128 rows by 4 blocks."""
TENSOR_COLUMNS = 512
RESERVED_SHARED_BYTES = 1024
"""What CUDA keeps of an SM's shared memory for itself, for each CTA."""
SHARED_CAPACITY = 228 * 1024 - RESERVED_SHARED_BYTES
"""Bytes a CTA may have on SM100: all of an SM's."""
NEIGHBOUR_SHARED_BYTES = 32 * 1024
"""Of a CTA of another kernel that must fit on an SM beside a CTA of a kernel for few tokens: with that much left, a
launch of either can begin while the one before it is ending."""
NEIGHBOUR_MAX_TOKEN_TILE = 64
"""Up to here kernels leave room for a neighbour. Those for more tokens run too long for that to matter."""
ALIGNMENT = 1024
"""Of the swizzled operand buffers."""
MAX_STAGES = 12
"""More than covers any latency; barriers stay few."""
MAX_CLUSTER = 8
"""CTAs of a cluster on any GPU (the portable size)."""
SPLIT_CHUNK = 8
"""Tokens of a unit of work of the split-K reduction."""


Output = Literal["bf16", "fp32", "nvfp4"]
"""What the epilogue writes. "nvfp4" is codes and swizzled block scales with a constant global scale."""
ELEMENT_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
"""Of an output that is staged in shared memory; NVFP4 goes straight to global memory."""
OUTPUTS: tuple[Output, ...] = ("bf16", "fp32", "nvfp4")


@dataclass(frozen=True)
class KernelShape:
    """What is fixed when a kernel is compiled.

    Attributes:
        token_tile: N of the MMA: tokens of a tile.
        pair: two CTAs of a cluster work on 256 features as one tensor core (cta_group::2), each holding half of the
            tokens' codes.
        gated: the weights' rows are gates and ups in turn, ``GATE_ROWS`` of each, joined by SwiGLU: half as many
            features come out.
        grouped: experts with device-side offsets instead of a batch of equal products.
        split_k: CTAs of a cluster that share the K of one tile and reduce over distributed shared memory.
        output: what is written.
        shared_tokens: pairs of a cluster along the features, which receive the tokens by one multicast.
        shared_weights: pairs of a cluster along the tokens, which receive the weights by one multicast. A pair alone
            reads 72 bytes a cycle from L2 with 256 tokens, two by two pairs half of that.

    Raises:
        ValueError: a combination that does not exist.
    """

    token_tile: int
    pair: bool = False
    gated: bool = False
    grouped: bool = False
    split_k: int = 1
    output: Output = "bf16"
    shared_tokens: int = 1
    shared_weights: int = 1

    def __post_init__(self) -> None:
        if self.token_tile not in TOKEN_TILES:
            raise ValueError(f"token_tile {self.token_tile}: expected one of {TOKEN_TILES}")
        if self.pair and self.token_tile < 128:
            raise ValueError(f"token_tile {self.token_tile} for a CTA pair: expected 128 or 256")
        if self.output not in OUTPUTS:
            raise ValueError(f"output {self.output!r}: expected one of {OUTPUTS}")
        if self.split_k not in (1, 2, 4, 8):
            raise ValueError(f"split_k {self.split_k}: expected 1, 2, 4 or 8")
        if self.split_k > 1 and (self.pair or self.token_tile > 64):
            raise ValueError("split_k is for single-CTA kernels with token_tile up to 64")
        if (self.shared_tokens, self.shared_weights) != (1, 1) and not self.pair:
            raise ValueError("shared_tokens and shared_weights are for CTA pairs")
        if self.shared_tokens not in (1, 2, 4) or self.shared_weights not in (1, 2, 4) or self.cluster > MAX_CLUSTER:
            raise ValueError(
                f"shared_tokens {self.shared_tokens}, shared_weights {self.shared_weights}: expected 1, 2 or 4, and"
                f" at most {MAX_CLUSTER} CTAs in a cluster"
            )
        if self.output == "nvfp4" and not self.gated:
            raise ValueError("NVFP4 output needs the bound that the SwiGLU clamp gives: gated kernels only")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 * self.shared_tokens * self.shared_weights if self.pair else self.split_k

    @property
    def tile_features(self) -> int:
        """Weight rows of a tile: of a CTA or a pair."""
        return LANES * (2 if self.pair else 1)

    @property
    def rows_per_feature(self) -> int:
        """Weight rows that make an output feature: a gate and an up, or one."""
        return 2 if self.gated else 1

    @property
    def tile_outputs(self) -> int:
        """Output features of a tile: of a CTA or a pair."""
        return self.tile_features // self.rows_per_feature

    @property
    def warp_outputs(self) -> int:
        """Output features of a warp of the epilogue."""
        return WARP_LANES // self.rows_per_feature

    @property
    def chunk(self) -> int:
        """Tokens that the epilogue takes from tensor memory at a time."""
        return SPLIT_CHUNK if self.split_k > 1 else min(self.token_tile, 32)

    @property
    def chunks(self) -> int:
        return self.token_tile // self.chunk

    @property
    def teams(self) -> int:
        """Teams of four epilogue warps, which take the chunks of a tile in turn."""
        return 2 if self.chunks > 1 and self.split_k == 1 else 1

    @property
    def threads(self) -> int:
        """Of a CTA: the teams, a warp for MMAs and one for loads."""
        return 128 * self.teams + 64

    # Tensor memory, in columns.

    @property
    def accumulator_columns(self) -> int:
        """Of one tile."""
        return self.token_tile

    @property
    def weight_scale_columns(self) -> int:
        """Of one stage: 128 rows by 4 blocks take 4 columns."""
        return 4 * (TILE_K // MMA_K)

    @property
    def token_scale_columns(self) -> int:
        return max(self.token_tile // SCALE_ATOM_ROWS, 1) * 4 * (TILE_K // MMA_K)

    @property
    def overlap(self) -> int:
        """Columns that the two accumulator buffers share.

        Zero unless two buffers and the scales exceed tensor memory (token_tile 256). Then the epilogue
        drains the shared columns first and releases them early, so the next tile's main loop starts while the rest
        is still being drained.
        """
        scales = self.weight_scale_columns + self.token_scale_columns
        return max(0, 2 * self.accumulator_columns + scales - TENSOR_COLUMNS)

    @property
    def second_accumulator(self) -> int:
        """First column of the second accumulator buffer."""
        return self.accumulator_columns - self.overlap

    @property
    def scales_column(self) -> int:
        """First column of the block scales."""
        return 2 * self.accumulator_columns - self.overlap

    @property
    def tensor_columns(self) -> int:
        """Columns to allocate: a power of two of at least 32, no more than needed."""
        needed = self.scales_column + self.weight_scale_columns + self.token_scale_columns
        return max(32, 1 << (needed - 1).bit_length())

    # Shared memory, in bytes.

    @property
    def weight_bytes(self) -> int:
        """Codes of the weights in a stage, per CTA."""
        return LANES * TILE_K // 2

    @property
    def token_bytes(self) -> int:
        """Codes of the tokens in a stage, per CTA."""
        return self.token_tile // (2 if self.pair else 1) * TILE_K // 2

    @property
    def weight_scale_bytes(self) -> int:
        return SCALE_ATOM_BYTES * (TILE_K // MMA_K)

    @property
    def token_scale_bytes(self) -> int:
        """Block scales of all of the tile's tokens: each CTA of a pair needs them all."""
        return max(self.token_tile // SCALE_ATOM_ROWS, 1) * SCALE_ATOM_BYTES * (TILE_K // MMA_K)

    @property
    def stage_bytes(self) -> int:
        return self.weight_bytes + self.token_bytes + self.weight_scale_bytes + self.token_scale_bytes

    @property
    def store_tokens(self) -> int:
        """Tokens of a staging buffer: those of a chunk; of fp32 half of them, so that there is room for two buffers."""
        return min(self.chunk, 16) if self.output == "fp32" else self.chunk

    @property
    def warp_buffers(self) -> int:
        """Output staging buffers of a warp: with two, a store overlaps the making of the next."""
        more = self.chunks * self.chunk > self.teams * self.store_tokens
        return 2 if self.split_k == 1 and self.output != "nvfp4" and more else 1

    @property
    def warp_row_bytes(self) -> int:
        """Bytes of a token's features of one warp in a staging buffer; they are swizzled by that much."""
        return self.warp_outputs * ELEMENT_BYTES[self.output]

    @property
    def staging_bytes(self) -> int:
        """Staging buffers of all warps of the epilogue."""
        if self.output == "nvfp4":
            return 0
        return 4 * self.teams * self.warp_buffers * self.store_tokens * self.warp_row_bytes

    @property
    def transpose_bytes(self) -> int:
        """fp32 values between the order in which they are made and that in which they are quantised; NVFP4 only."""
        return 4 * self.teams * self.chunk * TRANSPOSE_PITCH * 4 if self.output == "nvfp4" else 0

    @property
    def partial_bytes(self) -> int:
        """Other CTAs' sums of the units that this CTA of a split-K cluster owns."""
        if self.split_k == 1:
            return 0
        return (self.split_k - 1) * self.owned_units * SPLIT_CHUNK * WARP_LANES * 4

    @property
    def reducing_warps(self) -> int:
        """Of a CTA, in the split-K reduction."""
        return 4

    @property
    def unit_values(self) -> int:
        """Of a thread, in a unit of the reduction: a warp's part of a chunk."""
        return SPLIT_CHUNK

    @property
    def owned_units(self) -> int:
        """Units of the reduction that one CTA of a split-K cluster adds up, at most."""
        return -(-self.reducing_warps * self.chunks // self.split_k)

    @property
    def small_bytes(self) -> int:
        """Row factors, expert offsets, barriers (no more than 512 bytes) and alignment; a bound."""
        experts = EXPERT_TABLE_WORDS * 4 if self.grouped else 0
        return self.teams * 2 * self.token_tile * 4 + experts + 512 + 2 * ALIGNMENT

    @property
    def stages(self) -> int:
        """TMA stages: what fits."""
        return min(MAX_STAGES, (self.max_shared_bytes - self.fixed_bytes) // self.stage_bytes)

    @property
    def max_shared_bytes(self) -> int:
        """What a CTA may take of an SM's shared memory."""
        if self.token_tile > NEIGHBOUR_MAX_TOKEN_TILE:
            return SHARED_CAPACITY
        return SHARED_CAPACITY - RESERVED_SHARED_BYTES - NEIGHBOUR_SHARED_BYTES

    @property
    def fixed_bytes(self) -> int:
        """All but the stages; a bound."""
        return self.small_bytes + self.staging_bytes + self.transpose_bytes + self.partial_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; a bound."""
        return self.stages * self.stage_bytes + self.fixed_bytes


MAX_EXPERTS = 512
EXPERT_TABLE_WORDS = 33 + 2 * MAX_EXPERTS // 32 * 33
"""What a grouped kernel keeps of its experts in shared memory (schedule.py)."""
TRANSPOSE_PITCH = 20
"""fp32 words between two tokens' 16 features of a warp: 4 more than the features, so that 16-byte reads of eight
consecutive tokens touch all 32 banks, and so do writes of eight features of every other token of eight."""
