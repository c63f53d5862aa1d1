"""Cost of a kernel shape on a problem: bytes, tiles, waves, modelled time. Pure arithmetic, nothing measured.

The time of a launch is that of its waves or of HBM, plus what nothing hides: the launch, filling the pipeline, and the
last epilogue. A wave is a tile on each SM; a tile takes as long as its operands from L2, its MMAs, or its epilogue,
whichever is longest. Operands come from HBM at the rate of all of it if every SM loads, at the rate of an SM if few
do, and in between at a rate between (``cost``).

Calibration: ``Machine.launch_seconds`` and the way HBM is shared are fitted to public measurements of a kernel like
these, FlashInfer's ``mm_fp4`` (CuTeDSL) on a B200 (flashinfer-ai/flashinfer#2540), whose K is not split;
``tests/sm100/test_cost.py`` holds the points. One token: within 7 %. 16 tokens by 7168 or 9216 features, which keep
half of the SMs at work: modelled 10 to 13 % too fast. 64 tokens by few features: modelled 11 to 28 % too slow, as if
FlashInfer's kernel read tokens at no cost.
The constants of the epilogue come from the timed mode of the emulator in tests/, those of the machine from NVIDIA; the
rest is stated with its field.

Work before the wait for the kernel in front (weights, experts' counts) is not credited here, so that no kernel is
chosen by it. ``launch/bench_sm100`` credits it by constants measured on Hopper (launch/benchmarks/sm100/overlap.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..common.clusters import B200_CLUSTERS, Clusters
from ..common.shape import BLOCK, TEAM_WARPS, WARP_LANES, Output
from .shape import (
    ADDED_SLICES,
    LANES,
    MMA_ROW_BYTES,
    SCALE_ATOM_BLOCKS,
    SCALE_ATOM_BYTES,
    SCALE_ATOM_ROWS,
    STAGE_MMAS,
    BlockScaledKind,
    KernelShape,
)

OUTPUT_BYTES: dict[str, float] = {"bf16": 2.0, "fp32": 4.0, "nvfp4": 0.5 + 1 / BLOCK}
OPERAND_BYTES: dict[BlockScaledKind, float] = {"nvfp4": 0.5 + 1 / BLOCK, "mxfp8": 1 + 1 / (2 * BLOCK)}
"""Bytes of an element with its share of a block scale."""
OPERAND_RATES: dict[BlockScaledKind, float] = {"nvfp4": 1.0, "mxfp8": 0.5}
"""Multiply-adds over those of NVFP4: NVIDIA states half as many for FP8, dense."""

HANDOVER_CYCLES = 100.0
"""Cycles from an MMA's end until the next one may begin: a barrier to the epilogue's warps, which read a chunk out of
tensor memory, and a barrier back."""
SECOND_TEAM = 0.6
"""An epilogue's time with a second team of warps over the time without: they share the load/store unit."""
HANDOFF_SECONDS = 1.5e-6
"""Seconds from what an SM stores to its first byte loaded by another SM of the launch: a store, a fence, an atomic and
a poll through L2, then the load (assumed)."""
L2_LATENCY_CYCLES = 600.0
"""Cycles from a thread's load to its data from L2 (assumed: what the emulator's timed mode has)."""
EXPERT_COUNTS_CYCLES = 1060.0
"""Cycles until a grouped kernel knows its tiles: it reads and sums the experts' counts before its first load. From
the timed mode of the emulator."""


@dataclass(frozen=True)
class Machine:
    """A B200 at the clock at which 2^14 multiply-adds of NVFP4 a cycle and SM make the 9 PFLOP/s stated for it.

    Attributes:
        clusters: how many run at a time.
        memory_bytes_per_second: HBM, as far as kernels reach the 8 TB/s that are stated for it.
        l2_bytes_per_cycle: what an SM reads from L2 (assumed: 64 a cycle of the boost clock of 1.965 GHz; the
            slope of the public points agrees).
        receive_bytes_per_cycle: what an SM receives, multicasts of others included (assumed).
        shared_bytes_per_cycle: shared memory, which MMAs of narrow tiles wait for.
        launch_seconds: of a launch that overlaps with no other, beside all else here (fitted).
        overlap_seconds: of these what programmatic dependent launch hides behind the kernel before: the least of what
            was measured elsewhere, 0.5 to 0.7 µs a kernel (flashinfer-ai/flashinfer#2277).
        fill_cycles: a CTA's setup, and the first operands' way from memory (assumed; only its sum with the launch and
            the epilogue is fitted).
        latency_cycles: from a TMA load to its bytes (assumed).
        exchange_cycles: of a reduction over a cluster, beside its bytes (assumed).
    """

    clusters: Clusters = B200_CLUSTERS
    clock_hz: float = 1.85e9
    memory_bytes_per_second: float = 7.2e12
    multiply_adds_per_cycle: float = 16384.0
    l2_bytes_per_cycle: float = 68.0
    receive_bytes_per_cycle: float = 128.0
    shared_bytes_per_cycle: float = 128.0
    launch_seconds: float = 2.05e-6
    overlap_seconds: float = 0.5e-6
    fill_cycles: float = 2000.0
    latency_cycles: float = 1000.0
    exchange_cycles: float = 600.0

    @property
    def multiprocessors(self) -> int:
        """SMs."""
        return self.clusters.multiprocessors

    @property
    def flops(self) -> float:
        """Dense NVFP4 peak."""
        return 2 * self.multiply_adds_per_cycle * self.multiprocessors * self.clock_hz


B200 = Machine()


@dataclass(frozen=True)
class Problem:
    """``groups`` GEMMs of [tokens, k] by [features, k]; or experts that share ``tokens`` token-expert pairs.

    Attributes:
        gated: each group has a gate and an up matrix of ``features``.
        grouped: experts, of which each pair takes one, all equally likely.
        shared_tokens: so many of the pairs take the last of the experts for certain, and no other does.
    """

    features: int
    k: int
    tokens: int
    groups: int = 1
    gated: bool = False
    grouped: bool = False
    output: Output = "bf16"
    shared_tokens: int = 0
    kind: BlockScaledKind = "nvfp4"

    @property
    def matrices(self) -> float:
        """Weight matrices that are needed."""
        return self.active_groups * (2 if self.gated else 1)

    @property
    def active_groups(self) -> float:
        """Groups with tokens; of experts the mean number."""
        if not self.uneven:
            return self.groups
        return self._drawn_experts * _at_least(1, self._mean) + (1 if self.shared_tokens else 0)

    @property
    def uneven(self) -> bool:
        """Whether chance decides how many tokens a group has."""
        return self.grouped and self.groups > 1

    @property
    def _drawn_experts(self) -> int:
        """Experts that chance decides about."""
        return self.groups - (1 if self.shared_tokens else 0)

    @property
    def _mean(self) -> float:
        """Pairs of each of them."""
        return (self.tokens - self.shared_tokens) / self._drawn_experts

    @property
    def rows(self) -> int:
        """Rows of all GEMMs."""
        return self.tokens if self.grouped else self.tokens * self.groups

    def token_tiles(self, tile: int) -> float:
        """Tiles of that many tokens over all groups; of experts the mean number, partly filled tiles included."""
        if not self.uneven:
            return math.ceil(self.tokens / tile) * self.groups
        most = math.ceil((self._mean + 12 * math.sqrt(self._mean) + 12) / tile)
        drawn = sum(_at_least(1 + index * tile, self._mean) for index in range(most))
        return self._drawn_experts * drawn + math.ceil(self.shared_tokens / tile)

    @property
    def least_bytes(self) -> float:
        """Codes, block scales and outputs, each once, without padding."""
        operand = (self.matrices * self.features + self.rows) * self.k * OPERAND_BYTES[self.kind]
        return operand + self.rows * self.features * OUTPUT_BYTES[self.output]

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.features * self.k * (2 if self.gated else 1)

    def floor_seconds(self, machine: Machine = B200) -> float:
        """Lower bound of a kernel's time: HBM for the least bytes, or the tensor cores for all multiplications."""
        rate = machine.flops * OPERAND_RATES[self.kind]
        return max(self.least_bytes / machine.memory_bytes_per_second, self.flops / rate)


def _at_least(count: int, mean: float) -> float:
    """Probability of at least ``count`` events where ``mean`` are expected (Poisson); exact zero beyond its reach."""
    if count <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    deviation = math.sqrt(mean)
    if count < mean - 12 * deviation:
        return 1.0
    below = sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(count))
    return max(0.0, 1.0 - below)


@dataclass(frozen=True)
class Cost:
    """A shape on a problem.

    Attributes:
        tiles: of the output, each the work of a CTA, a pair or a split-K cluster; a mean for experts.
        waves: tiles after one another on the busiest SM; of experts, if several, a mean.
        tail_waste: share of SM time in the waves without a tile to work on, SMs that no cluster fits on included.
        loaded_bytes: what TMA brings into shared memory, all CTAs together.
        memory_bytes: HBM, each distinct byte once, padding that the layout demands included.
        stage_cycles: of a stage of the main loop: reading, receiving or multiplying it, or waiting for a place in the
            ring, whichever takes longest.
        multiply_cycles: of a stage in the tensor core alone.
        tile_cycles: between two tiles of an SM.
        body_seconds: of all tiles, by the busiest SM or by HBM.
        alone_seconds: the modelled time of a launch between idle ones, as benchmarks of a kernel measure it.
        seconds: the same where the launch overlaps with the one before.
    """

    tiles: float
    waves: float
    tail_waste: float
    loaded_bytes: float
    memory_bytes: float
    stage_cycles: float
    multiply_cycles: float
    tile_cycles: float
    body_seconds: float
    alone_seconds: float
    seconds: float


def epilogue_cycles(shape: KernelShape) -> float:
    """Cycles from a last tile's complete accumulator until its stores have been read from shared memory.

    Straight lines near what the emulator's timed mode has.
    """
    tokens = shape.token_tile * (1.0 if shape.teams == 1 else SECOND_TEAM)
    if shape.gated:
        return 190.0 + 22.0 * tokens if shape.output == "nvfp4" else 130.0 + 16.4 * tokens
    return 130.0 + (14.4 if shape.output == "fp32" else 8.9) * tokens


def exposed_cycles(shape: KernelShape) -> float:
    """Between the last MMA of a tile and the first of the next where the two share columns of tensor memory.

    The shared chunks are read, and only then worked on.
    """
    return HANDOVER_CYCLES if shape.overlap else 0.0


def multiply_cycles(shape: KernelShape, machine: Machine = B200) -> float:
    """The tensor core's time for a stage: MMAs, and block scales on their way to tensor memory.

    An MMA of a CTA takes 128 weight rows by the tokens, of which a pair's CTA multiplies all; its operands leave shared
    memory at 32 bytes a row, of which a pair's CTA holds half of the tokens.
    """
    mma_k = MMA_ROW_BYTES * shape.byte_elements
    products = LANES * shape.token_tile * mma_k / (machine.multiply_adds_per_cycle * OPERAND_RATES[shape.operands])
    own_tokens = shape.token_tile // (2 if shape.pair else 1)
    operands = (LANES + own_tokens) * MMA_ROW_BYTES / machine.shared_bytes_per_cycle
    scales = (shape.weight_scale_bytes + shape.token_scale_bytes) / machine.shared_bytes_per_cycle
    return STAGE_MMAS * max(products, operands) + scales


def read_bytes(shape: KernelShape) -> float:
    """Bytes that a CTA reads from L2 for a stage, on average: its share of multicasts."""
    weights = (shape.weight_bytes + shape.weight_scale_bytes) / shape.shared_weights
    tokens = shape.token_bytes + shape.token_scale_bytes / (2 if shape.pair else 1)
    return weights + tokens / shape.shared_tokens


def cost(shape: KernelShape, problem: Problem, machine: Machine = B200) -> Cost:
    """The cost of a shape that fits the problem (gated or not, grouped or not, output).

    HBM: an SM alone takes ``reading`` for a stage, all SMs together take what HBM's bandwidth gives each. The public
    points lie near a line between: an SM's time for a stage grows from 0.16 µs if 4 SMs read to 0.28 µs if 72 do. The
    line meets 7.2 TB/s at 148 SMs. So the time is HBM's for all bytes, plus the share of idle SMs times what an SM
    takes for what is not read again from L2.
    """
    k_tiles = math.ceil(problem.k / shape.tile_k)
    feature_tiles = math.ceil(problem.features / shape.tile_outputs)
    token_tiles = problem.token_tiles(shape.token_tile)
    tiles = feature_tiles * token_tiles
    # Pairs that share weights never span groups.
    token_blocks = problem.token_tiles(shape.token_tile * shape.shared_weights)
    blocks = math.ceil(feature_tiles / shape.shared_tokens) * token_blocks
    waves = _waves(blocks / machine.clusters.of(shape.cluster), problem.uneven)
    multiply = multiply_cycles(shape, machine)
    reading = read_bytes(shape) / machine.l2_bytes_per_cycle
    receiving = shape.stage_bytes / machine.receive_bytes_per_cycle
    waiting = (machine.latency_cycles + reading + multiply) / shape.stages
    stage = max(multiply, reading, receiving, waiting)
    stages = math.ceil(k_tiles / shape.split_k)
    main_loop = stages * stage
    epilogue = epilogue_cycles(shape)
    if shape.split_k > 1:
        # Partial sums are written and read.
        epilogue += machine.exchange_cycles + 2 * shape.partial_bytes / machine.l2_bytes_per_cycle
    between = max(main_loop + exposed_cycles(shape), epilogue)
    memory = _memory_bytes(shape, problem, token_tiles)
    ctas = 2 if shape.pair else shape.split_k
    busy = (waves - 1) * between + main_loop
    if shape.stream_k:
        shared = SharedTiles.of(int(tiles), machine.clusters.of(shape.cluster), k_tiles)
        waves, busy = shared.waves, _stream_k_cycles(shape, shared, stage, between, machine)
        if not shared.whole:
            epilogue = shared.finish_cycles(shape, machine)
    tail_waste = 1 - tiles * ctas / (waves * machine.multiprocessors)
    read = tiles * ctas * stages * read_bytes(shape)
    cold = tail_waste * waves * stages * reading * min(1.0, memory / read)
    from_memory = memory / machine.memory_bytes_per_second + cold / machine.clock_hz
    exposed = machine.fill_cycles + epilogue + (EXPERT_COUNTS_CYCLES if shape.grouped else 0.0)
    body = max(busy / machine.clock_hz, from_memory)
    alone = machine.launch_seconds + body + exposed / machine.clock_hz
    return Cost(
        tiles=tiles,
        waves=waves,
        tail_waste=tail_waste,
        loaded_bytes=tiles * ctas * stages * shape.stage_bytes,
        memory_bytes=memory,
        stage_cycles=stage,
        multiply_cycles=multiply,
        tile_cycles=between,
        body_seconds=body,
        alone_seconds=alone,
        seconds=alone - machine.overlap_seconds,
    )


def whole_waves(shape: KernelShape, problem: Problem, machine: Machine = B200) -> int:
    """Waves in which every pair has a tile, of a shape without multicasts."""
    tiles = math.ceil(problem.features / shape.tile_outputs) * problem.token_tiles(shape.token_tile)
    return int(tiles) // machine.clusters.of(shape.cluster)


@dataclass(frozen=True)
class SharedTiles:
    """The division of the tiles that fill no wave over pairs, as stream_k.py does it.

    Attributes:
        whole: waves of whole tiles.
        rest: shared tiles. sharers: pairs that share one.
        longest: stages of the longest slice. stages: of a tile.
    """

    whole: int
    rest: int
    sharers: int
    longest: int
    stages: int

    @classmethod
    def of(cls, tiles: int, pairs: int, stages: int) -> SharedTiles:
        whole, rest = divmod(tiles, pairs)
        if not rest:
            return cls(whole, 0, 1, 0, stages)
        longest = math.ceil(stages / (pairs // rest))
        return cls(whole, rest, math.ceil(stages / longest), longest, stages)

    @property
    def waves(self) -> float:
        """In the time of whole tiles' main loops."""
        return self.whole + self.longest / self.stages

    def _owned(self, units: int) -> int:
        """The largest number of a CTA's units whose sums it adds up; stream_k.py says what a unit is."""
        return math.ceil(units / self.sharers)

    def read_bytes(self, shape: KernelShape) -> int:
        """Sums that a CTA reads: the others' of what it owns, and its own of each team's first chunk."""
        own = self._owned(TEAM_WARPS * shape.teams) if self.sharers > 1 else 0
        return ((self.sharers - 1) * self._owned(TEAM_WARPS * shape.chunks) + own) * _unit_bytes(shape)

    def finish_cycles(self, shape: KernelShape, machine: Machine) -> float:
        """Cycles from the last MMA of a slice until its tile is stored.

        Sums of others' units are written and handed over, those of owned units read, and a share of the epilogue
        follows.
        """
        if self.sharers == 1:
            return epilogue_cycles(shape)
        units = TEAM_WARPS * shape.chunks
        written = (units - units // self.sharers) * _unit_bytes(shape)
        reads = math.ceil(self._owned(units) / (TEAM_WARPS * shape.teams)) * math.ceil(self.sharers / ADDED_SLICES)
        reading = max(self.read_bytes(shape) / machine.l2_bytes_per_cycle, (reads - 1) * L2_LATENCY_CYCLES)
        moved = written / machine.l2_bytes_per_cycle + HANDOFF_SECONDS * machine.clock_hz + reading
        return moved + epilogue_cycles(shape) * self._owned(units) / units


def _unit_bytes(shape: KernelShape) -> int:
    return WARP_LANES * shape.chunk * 4


def _stream_k_cycles(shape: KernelShape, shared: SharedTiles, stage: float, between: float, machine: Machine) -> float:
    """Main loops of a kernel whose pairs share tiles.

    During the first whole tile the shared ones are finished: the tensor core has its next tile when both are over, and
    the sums come from L2 beside the operands. Writing does not delay reading.
    """
    slices = shared.longest * stage
    if not shared.whole:
        return slices
    main_loop = shared.stages * stage
    if shared.rest:
        slices += exposed_cycles(shape)
    read = (shared.stages * read_bytes(shape) + shared.read_bytes(shape)) / machine.l2_bytes_per_cycle
    delay = max(read, shared.finish_cycles(shape, machine) if shared.rest else 0.0) - main_loop
    return slices + max(delay, 0.0) + (shared.whole - 1) * between + main_loop


def _waves(full: float, uneven: bool) -> float:
    """Waves of work that fills the SMs ``full`` times; of experts the last one is half full on average."""
    if full <= 1:
        return 1.0
    return full + 0.5 if uneven else float(math.ceil(full))


def _memory_bytes(shape: KernelShape, problem: Problem, token_tiles: float) -> float:
    """Each distinct byte that TMA touches, once: block scales come in whole atoms, of which narrow tiles have one."""
    scale_columns = math.ceil(problem.k / (SCALE_ATOM_BLOCKS * shape.block))
    weight_atoms = math.ceil(problem.features / SCALE_ATOM_ROWS) * scale_columns
    weights = problem.matrices * (problem.features * problem.k / shape.byte_elements + weight_atoms * SCALE_ATOM_BYTES)
    atoms = token_tiles * max(1, shape.token_tile // SCALE_ATOM_ROWS) * scale_columns
    tokens = problem.rows * problem.k / shape.byte_elements + atoms * SCALE_ATOM_BYTES
    return weights + tokens + problem.rows * problem.features * OUTPUT_BYTES[problem.output]
