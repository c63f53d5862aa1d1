"""Facts of a kernel without a GPU: its code, the instructions of a stage, modelled times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey, entry_of
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options, Statistics, TimingModel
from tests.sm100.support.products import ExpertCase, ProductCase, run
from tests.sm100.support.sass import compile_binary


@dataclass(frozen=True)
class KernelFacts:
    """A compiled kernel.

    Attributes:
        registers, spilled: per thread; spilled is in bytes.
        shared_bytes: of a CTA: stages and all else, rounded up to what is reserved.
        mmas, copies: tcgen05.mma and tcgen05.cp of a stage, each issued for a CTA or a pair. [emulated]
        mma_warp, load_warp: other PTX instructions that a stage takes of these warps. [emulated]
        busy: share of the main loop in which the tensor core multiplies or copies scales; operands come from L2, those
            of token tiles up to 64 from HBM. [modelled]
        in_flight: TMA stages of a CTA or pair on their way, on average. [modelled]
        handover: cycles between a tile's last MMA and the next tile's first. [modelled]
        drain: cycles of a tile's epilogue. [modelled]
    """

    registers: int
    spilled: int
    shared_bytes: int
    mmas: float
    copies: float
    mma_warp: float
    load_warp: float
    busy: float
    in_flight: float
    handover: float
    drain: float


def kernel_facts(key: KernelKey) -> KernelFacts:
    """Compile a kernel, and run two tiles of it in the emulator with two different K."""
    k = 2048 if key.shape.split_k == 1 else 4096
    entry = entry_of(key)
    binary = compile_binary(key.architecture, entry, *entry.example())
    short, long = _emulate(key, k // 2), _emulate(key, k)
    shape, times = shape_of(key), long.timelines[0]
    # A stage is issued once for each CTA, or pair, of a cluster.
    issued = k // 2 // shape.tile_k * _tiles(key)
    # Behind the teams of the epilogue.
    multiplying, loading = (_count(long, warp) - _count(short, warp) for warp in (4 * shape.teams, 4 * shape.teams + 1))
    mmas, copies = (_tensor(multiplying, name) / issued for name in ("tcgen05.mma", "tcgen05.cp"))
    return KernelFacts(
        registers=binary.registers,
        spilled=binary.stack + binary.local,
        shared_bytes=shape.shared_bytes,
        mmas=mmas,
        copies=copies,
        mma_warp=multiplying.total() / issued - mmas - copies,
        load_warp=loading.total() / issued / (2 if shape.pair else 1),
        busy=times.busy,
        in_flight=times.stages_in_flight,
        handover=times.idle.get("accumulators", 0.0),
        drain=times.drains[-1],
    )


def shape_of(key: KernelKey) -> KernelShape:
    """The shape of an SM100 kernel."""
    assert isinstance(key.shape, KernelShape), key
    return key.shape


def _tiles(key: KernelKey) -> int:
    """Tiles of an emulated run: two for every CTA or pair of a cluster; a split-K cluster has one."""
    shape = shape_of(key)
    return 2 * shape.shared_tokens * shape.shared_weights if shape.split_k == 1 else 1


def _emulate(key: KernelKey, k: int) -> Statistics:
    shape = shape_of(key)
    blocks = 2 if shape.split_k == 1 else 1
    features = shape.tile_outputs * shape.shared_tokens * blocks
    tokens = shape.token_tile * shape.shared_weights
    model = TimingModel() if shape.token_tile >= 128 else TimingModel.from_memory()
    # In shuffled turns, so that no warp is always first at what the warps of an epilogue share.
    options = Options("random", 1, timing=replace(model, warps_sharing=4.0 * shape.teams))
    if shape.gated or shape.grouped:
        case = ExpertCase(shape, (tokens,), features, k)
        return run(case.build()[0], case.epilogue(shape.output), options)
    return run(*ProductCase(shape, tokens, features, k).build(), options)


def _count(statistics: Statistics, warp: int) -> Counter[str]:
    return Counter({opcode: count for (index, opcode), count in statistics.instructions.items() if index == warp})


def _tensor(counts: Counter[str], prefix: str) -> int:
    return sum(count for opcode, count in counts.items() if opcode.startswith(prefix))
