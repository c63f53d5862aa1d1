"""What a kernel shape costs on a problem: bytes, tiles, waves, and a modelled time. Pure arithmetic, nothing measured.

The time of a launch is that of its waves or of HBM, whichever is longer, plus what nothing hides: filling the
pipeline, and the last epilogue. A wave is a tile on each SM; a tile takes as long as its operands from L2, its
products, or its epilogue, whichever is longest. The constants of the epilogue come from the timed mode of the
emulator in tests/, those of the machine from NVIDIA; the rest is stated with its field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .shape import BLOCK, LANES, MMA_K, SCALE_ATOM_BYTES, SCALE_ATOM_ROWS, TILE_K, KernelShape, Output

OUTPUT_BYTES: dict[str, float] = {"bf16": 2.0, "fp32": 4.0, "nvfp4": 0.5 + 1 / BLOCK}


HANDOVER_CYCLES = 130.0
"""From the end of an MMA over a barrier to warps, a chunk out of tensor memory, and back over a barrier to an MMA."""
SECOND_TEAM = 0.65
"""An epilogue's time with a second team of warps over the time without: they share the load/store unit."""


@dataclass(frozen=True)
class Machine:
    """A B200 at the clock at which 2^14 multiply-adds a cycle and SM make the 9 PFLOP/s stated for it.

    Attributes:
        l2_bytes_per_cycle: what an SM reads from L2 (assumed).
        receive_bytes_per_cycle: what an SM receives, multicasts of others included (assumed).
        shared_bytes_per_cycle: shared memory, which MMAs of narrow tiles wait for.
        fill_cycles: launch, and the first operands' way from memory (assumed).
        exchange_cycles: of a reduction over a cluster, beside its bytes (assumed).
    """

    multiprocessors: int = 148
    clock_hz: float = 1.85e9
    memory_bytes_per_second: float = 8e12
    multiply_adds_per_cycle: float = 16384.0
    l2_bytes_per_cycle: float = 64.0
    receive_bytes_per_cycle: float = 128.0
    shared_bytes_per_cycle: float = 128.0
    fill_cycles: float = 2000.0
    exchange_cycles: float = 600.0

    @property
    def flops(self) -> float:
        """Dense NVFP4 peak."""
        return 2 * self.multiply_adds_per_cycle * self.multiprocessors * self.clock_hz


B200 = Machine()


@dataclass(frozen=True)
class Problem:
    """``groups`` products of [tokens, k] by [features, k]; or experts that share ``tokens`` token-expert pairs.

    Attributes:
        gated: each group has a gate and an up matrix of ``features``.
        grouped: experts, of which each pair takes one, all equally likely.
    """

    features: int
    k: int
    tokens: int
    groups: int = 1
    gated: bool = False
    grouped: bool = False
    output: Output = "bf16"

    @property
    def matrices(self) -> float:
        """Weight matrices that are needed."""
        return self.active_groups * (2 if self.gated else 1)

    @property
    def active_groups(self) -> float:
        """Groups with tokens; of experts the mean number."""
        return self.groups * _at_least(1, self.tokens / self.groups) if self._uneven else self.groups

    @property
    def _uneven(self) -> bool:
        """Whether chance decides how many tokens a group has."""
        return self.grouped and self.groups > 1

    @property
    def rows(self) -> int:
        """Rows of all products."""
        return self.tokens if self.grouped else self.tokens * self.groups

    def token_tiles(self, tile: int) -> float:
        """Tiles of that many tokens over all groups; of experts the mean number, partly filled tiles included."""
        if not self._uneven:
            return math.ceil(self.tokens / tile) * self.groups
        mean = self.tokens / self.groups
        most = math.ceil((mean + 12 * math.sqrt(mean) + 12) / tile)
        return self.groups * sum(_at_least(1 + index * tile, mean) for index in range(most))

    @property
    def least_bytes(self) -> float:
        """Codes, block scales and outputs, each once, without padding."""
        operand = (self.matrices * self.features + self.rows) * self.k * (0.5 + 1 / BLOCK)
        return operand + self.rows * self.features * OUTPUT_BYTES[self.output]

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.features * self.k * (2 if self.gated else 1)

    def floor_seconds(self, machine: Machine = B200) -> float:
        """No kernel is faster: HBM for the least bytes, or the tensor cores for the products."""
        return max(self.least_bytes / machine.memory_bytes_per_second, self.flops / machine.flops)


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
        waves: tiles after one another on the busiest SM.
        tail_waste: share of SM time in the waves without a tile to work on.
        loaded_bytes: what TMA brings into shared memory, all CTAs together.
        memory_bytes: HBM, each distinct byte once, padding that the layout demands included.
        stage_cycles: of a stage of the main loop: reading, receiving or multiplying it, whichever takes longest.
        multiply_cycles: of a stage in the tensor core alone.
        tile_cycles: between two tiles of an SM.
        seconds: the modelled time.
    """

    tiles: float
    waves: int
    tail_waste: float
    loaded_bytes: float
    memory_bytes: float
    stage_cycles: float
    multiply_cycles: float
    tile_cycles: float
    seconds: float


def epilogue_cycles(shape: KernelShape) -> float:
    """From an accumulator that is complete to its last store issued."""
    tokens = shape.token_tile * (1.0 if shape.teams == 1 else SECOND_TEAM)
    if shape.gated:
        return 1000.0 + (56.0 if shape.output == "nvfp4" else 44.0) * tokens
    return 400.0 + 16.0 * tokens


def exposed_cycles(shape: KernelShape) -> float:
    """Between the last MMA of a tile and the first of the next where the two share columns of tensor memory.

    The shared chunks are read, and only then worked on.
    """
    return HANDOVER_CYCLES if shape.overlap else 0.0


def multiply_cycles(shape: KernelShape, machine: Machine = B200) -> float:
    """The tensor core's time for a stage: MMAs, and block scales on their way to tensor memory.

    An MMA of a CTA takes 128 weight rows by the tokens, of which a pair's CTA multiplies all; its operands
    leave shared memory at 32 bytes a row, of which a pair's CTA holds half of the tokens.
    """
    products = LANES * shape.token_tile * MMA_K / machine.multiply_adds_per_cycle
    own_tokens = shape.token_tile // (2 if shape.pair else 1)
    operands = (LANES + own_tokens) * MMA_K / 2 / machine.shared_bytes_per_cycle
    scales = (shape.weight_scale_bytes + shape.token_scale_bytes) / machine.shared_bytes_per_cycle
    return (TILE_K // MMA_K) * max(products, operands) + scales


def read_bytes(shape: KernelShape) -> float:
    """What a CTA reads from L2 for a stage, on average: its share of what multicasts bring to several."""
    weights = (shape.weight_bytes + shape.weight_scale_bytes) / shape.shared_weights
    tokens = shape.token_bytes + shape.token_scale_bytes / (2 if shape.pair else 1)
    return weights + tokens / shape.shared_tokens


def cost(shape: KernelShape, problem: Problem, machine: Machine = B200) -> Cost:
    """The cost of a shape that fits the problem (gated or not, grouped or not, output)."""
    k_tiles = math.ceil(problem.k / TILE_K)
    feature_tiles = math.ceil(problem.features / shape.tile_outputs)
    token_tiles = problem.token_tiles(shape.token_tile)
    tiles = feature_tiles * token_tiles
    clusters = machine.multiprocessors // shape.cluster
    # Pairs that share weights never span groups.
    token_blocks = problem.token_tiles(shape.token_tile * shape.shared_weights)
    blocks = math.ceil(feature_tiles / shape.shared_tokens) * token_blocks
    waves = max(1, math.ceil(blocks / clusters))
    multiply = multiply_cycles(shape, machine)
    reading = read_bytes(shape) / machine.l2_bytes_per_cycle
    stage = max(multiply, reading, shape.stage_bytes / machine.receive_bytes_per_cycle)
    main_loop = math.ceil(k_tiles / shape.split_k) * stage
    epilogue = epilogue_cycles(shape)
    if shape.split_k > 1:
        sent = shape.partial_bytes
        epilogue += machine.exchange_cycles + 2 * sent / machine.l2_bytes_per_cycle
        tile_cycles = main_loop + epilogue + machine.fill_cycles / 2  # not persistent: nothing overlaps
    else:
        tile_cycles = max(main_loop + exposed_cycles(shape), epilogue)
    memory = _memory_bytes(shape, problem, token_tiles)
    ctas = 2 if shape.pair else shape.split_k
    busy = (waves - 1) * tile_cycles + main_loop
    hidden = max(busy / machine.clock_hz, memory / machine.memory_bytes_per_second)
    return Cost(
        tiles=tiles,
        waves=waves,
        tail_waste=1 - tiles * ctas / (waves * machine.multiprocessors),
        loaded_bytes=tiles * ctas * math.ceil(k_tiles / shape.split_k) * shape.stage_bytes,
        memory_bytes=memory,
        stage_cycles=stage,
        multiply_cycles=multiply,
        tile_cycles=tile_cycles,
        seconds=hidden + (machine.fill_cycles + epilogue) / machine.clock_hz,
    )


def _memory_bytes(shape: KernelShape, problem: Problem, token_tiles: float) -> float:
    """Each distinct byte that TMA touches, once: block scales come in whole atoms, of which narrow tiles have one."""
    scale_columns = math.ceil(problem.k / (4 * BLOCK))
    weight_atoms = math.ceil(problem.features / SCALE_ATOM_ROWS) * scale_columns
    weights = problem.matrices * (problem.features * problem.k / 2 + weight_atoms * SCALE_ATOM_BYTES)
    atoms = token_tiles * max(1, shape.token_tile // SCALE_ATOM_ROWS) * scale_columns
    tokens = problem.rows * problem.k / 2 + atoms * SCALE_ATOM_BYTES
    return weights + tokens + problem.rows * problem.features * OUTPUT_BYTES[problem.output]
