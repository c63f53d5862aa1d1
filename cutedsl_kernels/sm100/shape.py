"""The shape of one block-scaled GEMM kernel and what it costs in shared and tensor memory; plain Python, no CuTeDSL.

Features lie on the 128 lanes of tensor memory and tokens in its columns; ``..common.shape`` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..common.shape import (
    ALIGNMENT,
    BLOCK,
    SPLIT_CHUNK,
    TEAM_THREADS,
    TEAM_WARPS,
    WARP_LANES,
    GemmShape,
    Output,
)

BlockScaledKind = Literal["nvfp4", "mxfp8"]
"""What is multiplied: E2M1 codes with an E4M3 scale for each 16 (tcgen05 kind mxf4nvf4), or E4M3 codes with a UE8M0
scale for each 32 (kind mxf8f6f4)."""
STAGE_ROW_BYTES = 128
"""Bytes of a row's codes in a pipeline stage: one row of the 128-byte swizzle."""
MMA_ROW_BYTES = 32
"""Bytes of a row's codes that one MMA instruction takes, of either kind."""
STAGE_MMAS = STAGE_ROW_BYTES // MMA_ROW_BYTES
"""MMA instructions of a stage."""
LANES = 128
"""Weight rows of a CTA's tile: the lanes of tensor memory."""
GATE_ROWS = 16
"""Gated weights alternate between this many rows of gates and as many of the ups of the same features, so that a warp
of the epilogue holds both; the features of one are a block of NVFP4 output."""
SCALE_ATOM_ROWS, SCALE_ATOM_BYTES, SCALE_ATOM_BLOCKS = 128, 512, 4
"""Block scales travel in atoms of 128 rows by 4 blocks."""
TENSOR_COLUMN_MULTIPLE = 16
"""Accumulators begin at multiples of this; the epilogue's reads assume 8."""
TENSOR_COLUMNS = 512
COPY_BYTES = 128
"""A tensor copy begins at a multiple of so many bytes of shared memory."""
MAX_CLUSTER = 8
"""CTAs of a cluster on any GPU (the portable size)."""
STREAM_K_TILE = 256
"""Tokens of a tile where CTA pairs share tiles."""
ADDED_SLICES = 2
"""Slices of a shared tile whose sums a warp loads at a time: more would not fit a thread's registers."""
MAX_STREAM_K_CLUSTERS = 256
"""Clusters of a launch that shares tiles, at most: more than any GPU runs."""
COUNTER_WORDS = 16 * MAX_STREAM_K_CLUSTERS
"""int32 words at the start of the workspace: a counter for each shared tile and each warp of a pair's epilogues."""
TRANSPOSE_PITCH = 20
"""fp32 words between two tokens' 16 features of a warp: 4 more than the features, so that 16-byte reads of eight
consecutive tokens touch all 32 banks, and so do writes of eight features of every other token of eight."""


@dataclass(frozen=True)
class KernelShape(GemmShape):
    """The properties that are fixed when a kernel is compiled.

    Attributes:
        token_tile, split_k, output, gated, grouped: as :class:`GemmShape` says.
        pair: two CTAs of a cluster work on 256 features as one tensor core (cta_group::2), each holding half of the
            tokens' codes.
        operands: their kind. Keys of compiled kernels spell the names of fields: a new name would compile all anew.
        shared_tokens: pairs of a cluster along the features, which receive the tokens by one multicast.
        shared_weights: pairs of a cluster along the tokens, which receive the weights by one multicast. A pair alone
            reads 72 bytes a cycle from L2 with 256 tokens, two by two pairs half of that.
        stream_k: the tiles that fill no wave are shared by several pairs, along K, and done first (stream_k.py). For
            plain GEMMs by single pairs with 256 tokens: their sums stay in tensor memory during the next main loop,
            which has the other accumulator buffer.
        counts_ahead: whether an experts' kernel reads offsets and counts, and loads its first weights, before the
            previous kernel has ended. That kernel must have waited for the one that wrote them.

    Raises:
        ValueError: a combination that does not exist.
    """

    pair: bool = False
    shared_tokens: int = 1
    shared_weights: int = 1
    operands: BlockScaledKind = "nvfp4"
    stream_k: bool = False
    counts_ahead: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair and self.token_tile < 128:
            raise ValueError(f"token_tile {self.token_tile} for a CTA pair: expected 128 or 256")
        if (self.shared_tokens, self.shared_weights) != (1, 1) and not self.pair:
            raise ValueError("shared_tokens and shared_weights are for CTA pairs")
        if self.shared_tokens not in (1, 2, 4) or self.shared_weights not in (1, 2, 4) or self.cluster > MAX_CLUSTER:
            raise ValueError(
                f"shared_tokens {self.shared_tokens}, shared_weights {self.shared_weights}: expected 1, 2 or 4, and"
                f" at most {MAX_CLUSTER} CTAs in a cluster"
            )
        is_plain_pair = self.pair and self.cluster == 2 and not self.gated and not self.grouped
        if self.stream_k and not (is_plain_pair and self.token_tile == STREAM_K_TILE):
            raise ValueError(f"stream_k is for plain GEMMs by single CTA pairs with token_tile {STREAM_K_TILE}")
        if self.counts_ahead and not self.grouped:
            raise ValueError(f"counts_ahead: expected a grouped kernel, found {self}")
        if self.output == "nvfp4" and not self.gated:
            raise ValueError("NVFP4 output needs the bound that the SwiGLU clamp gives: gated kernels only")
        if self.operands == "mxfp8" and (self.grouped or self.output == "nvfp4"):
            raise ValueError("MXFP8 operands are for plain and gated kernels with bf16 or fp32 output")
        loaded = self.token_scale_bytes // (2 * self.shared_tokens)
        if self.pair and loaded % COPY_BYTES:
            raise ValueError(
                f"token_tile {self.token_tile}, shared_tokens {self.shared_tokens}: each CTA would load {loaded} bytes"
                f" of the tokens' block scales; expected a multiple of {COPY_BYTES}"
            )

    @classmethod
    def outputs(cls) -> tuple[Output, ...]:
        return "bf16", "fp32", "nvfp4"

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 2 * self.shared_tokens * self.shared_weights if self.pair else self.split_k

    @property
    def waits_first(self) -> bool:
        """Whether every warp waits for the previous kernel before it reads anything."""
        return self.grouped and not self.counts_ahead

    @property
    def tile_features(self) -> int:
        """Weight rows of a tile: of a CTA or a pair."""
        return LANES * (2 if self.pair else 1)

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
    def teams(self) -> int:
        """Teams of four epilogue warps, which alternate in the chunks of a tile."""
        return 2 if self.chunks > 1 and self.split_k == 1 else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the teams, a warp for MMAs and one for loads."""
        return TEAM_THREADS * self.teams + 2 * WARP_LANES

    # Operands.

    @property
    def block(self) -> int:
        """Elements that share a block scale."""
        return BLOCK if self.operands == "nvfp4" else 2 * BLOCK

    @property
    def byte_elements(self) -> int:
        """Codes of a byte."""
        return 2 if self.operands == "nvfp4" else 1

    @property
    def tile_k(self) -> int:
        """Elements of K in a pipeline stage."""
        return STAGE_ROW_BYTES * self.byte_elements

    @property
    def stage_scale_atoms(self) -> int:
        """Atoms of block scales that 128 rows of a stage have: one for each MMA of NVFP4, one for all of MXFP8."""
        return self.tile_k // (SCALE_ATOM_BLOCKS * self.block)

    # Tensor memory, in columns.

    @property
    def accumulator_columns(self) -> int:
        """Columns of one tile's accumulator."""
        return self.token_tile

    @property
    def weight_scale_columns(self) -> int:
        """Columns of one stage's weight scales: 128 rows by 4 blocks take 4 columns."""
        return 4 * self.stage_scale_atoms

    @property
    def token_scale_columns(self) -> int:
        return max(self.token_tile // SCALE_ATOM_ROWS, 1) * 4 * self.stage_scale_atoms

    @property
    def overlap(self) -> int:
        """Columns that the two accumulator buffers share.

        Zero unless two buffers and the scales exceed tensor memory (token_tile 256). Then the epilogue
        drains the shared columns first and releases them early, so the next tile's main loop starts while the rest
        is still being drained.
        """
        scales = self.weight_scale_columns + self.token_scale_columns
        beyond = max(0, 2 * self.accumulator_columns + scales - TENSOR_COLUMNS)
        return -(-beyond // TENSOR_COLUMN_MULTIPLE) * TENSOR_COLUMN_MULTIPLE

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
        return LANES * STAGE_ROW_BYTES

    @property
    def token_bytes(self) -> int:
        """Codes of the tokens in a stage, per CTA."""
        return self.token_tile // (2 if self.pair else 1) * STAGE_ROW_BYTES

    @property
    def weight_scale_bytes(self) -> int:
        return SCALE_ATOM_BYTES * self.stage_scale_atoms

    @property
    def token_scale_bytes(self) -> int:
        """Block scales of all of the tile's tokens: each CTA of a pair needs them all."""
        return max(self.token_tile // SCALE_ATOM_ROWS, 1) * SCALE_ATOM_BYTES * self.stage_scale_atoms

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
    def transpose_bytes(self) -> int:
        """fp32 values between the order in which they are made and that in which they are quantised; NVFP4 only."""
        return TEAM_WARPS * self.teams * self.chunk * TRANSPOSE_PITCH * 4 if self.output == "nvfp4" else 0

    @property
    def unit_values(self) -> int:
        """fp32 values that a thread holds of a unit of the reduction: 32 rows by 8 tokens of a warp."""
        return SPLIT_CHUNK

    def workspace_bytes(self, clusters: int) -> int:
        """Global memory that a launch of ``clusters`` clusters needs beside its operands: counters, and a tile of fp32
        sums for each pair."""
        tile = self.tile_features * self.token_tile * 4
        return 4 * COUNTER_WORDS + clusters * tile if self.stream_k else 0

    @property
    def small_bytes(self) -> int:
        """Row factors, expert offsets, barriers (no more than 512 bytes) and alignment; a bound."""
        return self.teams * 2 * self.token_tile * 4 + self.expert_bytes + 512 + 2 * ALIGNMENT

    @property
    def fixed_bytes(self) -> int:
        """All but the stages; a bound."""
        return self.small_bytes + self.staging_bytes + self.transpose_bytes + self.partial_bytes
