"""The SM100 kernels as compiled for sm_100a and sm_103a: tensor-core instructions, registers, spills, memory.

Known by compiling alone; nothing here runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from nvfp4_sgl.cutedsl_kernels.common.entry import Entry
from nvfp4_sgl.cutedsl_kernels.common.shape import SHARED_CAPACITY, TOKEN_TILES, Output
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.gemm import BlockScaledGemm
from nvfp4_sgl.cutedsl_kernels.sm100.shape import ADDED_SLICES, STAGE_MMAS, TENSOR_COLUMNS, KernelShape
from tests.sm100.support.products import LIMIT
from tests.sm100.support.sass import Binary, compile_binary

REGISTER_BUDGET = 164
"""Registers a thread; ptxas spills beyond 168. Shared tiles with fp32 output take the most (162), two slices under way
at a time; of other kernels the gated re-quantising epilogue does (143)."""

SHAPES = [
    KernelShape(8),
    KernelShape(64, split_k=4),
    KernelShape(128, output="fp32"),
    KernelShape(256, pair=True, shared_tokens=2, shared_weights=2),
    KernelShape(256, pair=True, stream_k=True),
    KernelShape(256, pair=True, stream_k=True, output="fp32"),
    KernelShape(8, gated=True, grouped=True, output="nvfp4"),
    KernelShape(16, gated=True, grouped=True, split_k=4, output="nvfp4"),
    KernelShape(64, grouped=True),
    KernelShape(8, grouped=True, split_k=8),
    KernelShape(8, gated=True, grouped=True, split_k=8, output="nvfp4", counts_ahead=True),
    KernelShape(8, grouped=True, counts_ahead=True),
    KernelShape(8, operands="mxfp8"),
    KernelShape(64, split_k=4, operands="mxfp8"),
    KernelShape(256, output="fp32", operands="mxfp8"),
    KernelShape(128, pair=True, gated=True, operands="mxfp8"),
    KernelShape(128, pair=True, gated=True, grouped=True, output="nvfp4"),
]


def name(shape: KernelShape) -> str:
    kinds = "grouped " * shape.grouped + "ahead " * shape.counts_ahead + "gated " * shape.gated + "pair " * shape.pair
    kinds += "MXFP8 " * (shape.operands == "mxfp8") + "stream-K " * shape.stream_k
    return f"{kinds}{shape.token_tile} {shape.output}" + f" split {shape.split_k}" * (shape.split_k > 1)


def epilogue_of(shape: KernelShape) -> Epilogue:
    limit, constant = (LIMIT if shape.gated else None), (1.0 if shape.output == "nvfp4" else None)
    return Epilogue(limit, weighted=shape.grouped and not shape.gated, row_scale_constant=constant)


@functools.cache
def compiled(shape: KernelShape, architecture: str) -> tuple[Binary, int]:
    """What is executed, and the bytes of shared memory that the kernel's storage takes."""
    gemm = BlockScaledGemm(shape, epilogue_of(shape))
    entry = Entry(gemm)
    return compile_binary(architecture, entry, *entry.example()), gemm.storage.size_in_bytes()


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_sass_for_sm_100a(shape: KernelShape) -> None:
    binary, _ = compiled(shape, "sm_100a")
    kind, scales = ("UTCOMMA", ".4X") if shape.operands == "nvfp4" else ("UTCQMMA", "")
    mma = f"{kind}.2CTA{scales}" if shape.pair else f"{kind}{scales}"
    assert binary.opcodes[mma] == binary.count(kind) == STAGE_MMAS, "block-scaled MMAs of one stage"
    atoms = shape.stage_scale_atoms * (1 + max(shape.token_tile // 128, 1))
    assert binary.count("UTCCP") == atoms, "block scales to tensor memory, an instruction for each 128 rows by 4 blocks"
    assert binary.count("UTMALDG") > 0
    stores = 0 if shape.output == "nvfp4" else shape.chunk // shape.store_tokens
    epilogues = 2 if shape.stream_k else 1
    assert binary.count("UTMASTG") == epilogues * stores, "of shared and of whole tiles"
    assert binary.count("STSM") == (epilogues * shape.chunk // 8 if shape.output == "bf16" else 0)
    reads = 2 if shape.split_k > 1 and shape.chunks > 1 else 2 + ADDED_SLICES if shape.stream_k else 1
    assert binary.count("LDTM") == 2 * reads, "16 lanes at a time"
    assert binary.count("STL") == binary.count("LDL") == binary.stack == binary.local == 0, "registers are spilled"
    assert binary.registers <= REGISTER_BUDGET


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]], ids=name)
def test_sass_for_sm_103a(shape: KernelShape) -> None:
    binary, _ = compiled(shape, "sm_103a")
    assert binary.count("UTCOMMA") == STAGE_MMAS
    assert binary.count("STL") == binary.count("LDL") == binary.stack == binary.local == 0


def every_shape() -> list[KernelShape]:
    shapes = []
    outputs: tuple[Output, ...] = ("bf16", "fp32", "nvfp4")
    for tile in TOKEN_TILES:
        for pair in (False, True):
            for gated in (False, True):
                for split in (1, 2, 4, 8):
                    for output in outputs:
                        try:
                            shapes.append(KernelShape(tile, split, output, pair=pair, gated=gated, grouped=gated))
                        except ValueError:
                            continue
                        if output != "nvfp4":
                            shapes.append(replace(shapes[-1], grouped=False, operands="mxfp8"))
    return shapes


@pytest.mark.parametrize("shape", every_shape(), ids=name)
def test_memory_budgets(shape: KernelShape) -> None:
    """Shared memory as the kernel lays it out fits and leaves stages; tensor memory holds what it must."""
    assert shape.stages >= (4 if shape.token_tile <= 64 else 3)
    assert shape.shared_bytes <= shape.max_shared_bytes <= SHARED_CAPACITY
    end = shape.scales_column + shape.weight_scale_columns + shape.token_scale_columns
    assert end <= shape.tensor_columns <= TENSOR_COLUMNS
    assert shape.second_accumulator + shape.accumulator_columns <= shape.scales_column
    assert shape.second_accumulator % 8 == 0, "what the epilogue's reads of tensor memory assume"
    assert shape.overlap <= shape.teams * shape.chunk, "the teams' first chunks are read before the next tile begins"


@pytest.mark.parametrize("shape", [*SHAPES, KernelShape(256, output="fp32")], ids=name)
def test_shared_memory_is_what_the_shape_says(shape: KernelShape) -> None:
    """The stages are chosen by a bound on all else: no less than what the kernel takes, and not much more."""
    _, taken = compiled(shape, "sm_100a")
    assert taken <= shape.shared_bytes <= taken + 3 * 1024


def test_kernels_for_few_tokens_leave_room_for_a_neighbour() -> None:
    """32 KiB on an SM of 228, of which each CTA takes 1 beside its own."""
    few = [shape for shape in every_shape() if shape.token_tile <= 64]
    assert len(few) > 40
    for shape in few:
        assert 228 - (shape.shared_bytes / 1024 + 1) >= 32 + 1, shape


def test_impossible_shapes_are_refused() -> None:
    for arguments in (
        {"token_tile": 24},
        {"token_tile": 64, "pair": True},
        {"token_tile": 8, "split_k": 3},
        {"token_tile": 128, "split_k": 2},
        {"token_tile": 128, "split_k": 2, "gated": True, "grouped": True},
        {"token_tile": 8, "output": "nvfp4"},
        {"token_tile": 8, "output": "fp16"},
        {"token_tile": 128, "shared_tokens": 2},
        {"token_tile": 128, "pair": True, "shared_tokens": 4, "shared_weights": 2},
        {"token_tile": 8, "grouped": True, "operands": "mxfp8"},
        {"token_tile": 8, "gated": True, "output": "nvfp4", "operands": "mxfp8"},
        {"token_tile": 128, "pair": True, "shared_tokens": 4, "operands": "mxfp8"},
        {"token_tile": 256, "stream_k": True},
        {"token_tile": 128, "pair": True, "stream_k": True},
        {"token_tile": 256, "pair": True, "shared_tokens": 2, "stream_k": True},
        {"token_tile": 256, "pair": True, "gated": True, "stream_k": True},
        {"token_tile": 256, "pair": True, "grouped": True, "stream_k": True},
    ):
        with pytest.raises(ValueError, match=r"expected|is for|are for|needs"):
            KernelShape(**arguments)
