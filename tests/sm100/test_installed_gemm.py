"""A dense NVFP4 GEMM that others wrote for SM100 hardware gives the right numbers in the emulator."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Compiled, DeadlockError, EmulatorError, HazardError, MemoryFaultError, Options
from tests.sm100.support.flashinfer_gemm import compiled_gemm, run_gemm

pytest.importorskip("flashinfer")

SHAPE = (200, 264, 320)
"""Ragged in M and N, one and a quarter K tiles, several output tiles for one CTA."""
LIMIT = 120_000
"""Several times the instructions of a correct run: a mutant in an endless loop ends soon."""
MODES = [
    Options(max_instructions=LIMIT),
    Options("random", 1, max_instructions=LIMIT),
    Options("starved", 2, "tma_load", max_instructions=LIMIT),
    Options("starved", 3, "tma_store", max_instructions=LIMIT),
    Options("starved", 4, "tensor", max_instructions=LIMIT),
]
FORMS = [((128, 128), (1, 1)), ((256, 128), (2, 1)), ((128, 192), (2, 2))]


def name(options: Options) -> str:
    return f"{options.mode} {options.starve or ''}".strip()


@pytest.mark.parametrize("form", FORMS, ids=["one CTA", "pair", "2x2 multicast"])
def test_output_equals_the_reference(form: tuple[tuple[int, int], tuple[int, int]]) -> None:
    equal, statistics = run_gemm(compiled_gemm(*form), SHAPE, MODES[0])
    assert equal
    m, n, k = SHAPE
    assert statistics.engine_bytes["tma_store"] == m * n * 2
    tile_m, tile_n = form[0]
    tiles = -(-m // tile_m) * -(-n // tile_n)
    work = statistics.engine_operations["multiply_adds"]
    # Tiles of a cluster beyond the edge of the output are computed, too, and so is K up to the next 256.
    assert work >= tiles * tile_m * tile_n * -(-k // 256) * 256
    assert work % (tile_m * tile_n * 64) == 0
    roles = statistics.by_role({"epilogue": range(4), "mma": [4], "tma": [5]})
    assert all("tcgen05.mma" not in opcode for role in ("epilogue", "tma") for opcode in roles[role])
    assert sum(number for opcode, number in roles["mma"].items() if "tcgen05.mma" in opcode) > 0


@pytest.mark.parametrize("options", MODES[1:], ids=name)
def test_output_does_not_depend_on_timing(options: Options) -> None:
    assert run_gemm(compiled_gemm(*FORMS[0]), SHAPE, options)[0]


CLUSTER_RUNS = [(FORMS[1], options) for options in MODES[1:]] + [(FORMS[2], MODES[1])]


@pytest.mark.parametrize(
    ("form", "options"),
    CLUSTER_RUNS,
    ids=[f"{form[1][0]}x{form[1][1]} {name(options)}" for form, options in CLUSTER_RUNS],
)
def test_clusters_do_not_depend_on_timing(form: tuple[tuple[int, int], tuple[int, int]], options: Options) -> None:
    assert run_gemm(compiled_gemm(*form), SHAPE, options)[0]


def compiled_mutant(old: str, new: str, count: int = 1) -> Compiled:
    return compiled_gemm(*FORMS[0]).patched(old, new, count)


MUTANTS = {
    "expects too many bytes": ("mov.b32 \t%r127, 36864;", "mov.b32 \t%r127, 36880;", 1, DeadlockError),
    "expects too few bytes": ("mov.b32 \t%r127, 36864;", "mov.b32 \t%r127, 36352;", 1, EmulatorError),
    "waits for a barrier with one warp too many": ("bar.sync \t2, 160;", "bar.sync \t2, 192;", 2, DeadlockError),
    "never releases tensor memory": ("tcgen05.dealloc.cta_group::1.sync.aligned.b32", "// ", 1, HazardError),
    "never commits the accumulator": ("[%r39+80];", "[%r39+80]; ret;", 1, EmulatorError),
    "loads past shared memory": ("[%r17+41984]", "[%r17+262144]", 1, MemoryFaultError),
    "loads to a misaligned place": ("[%r17+41984]", "[%r17+42000]", 1, MemoryFaultError),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("options", [MODES[0], MODES[1]], ids=["immediate", "random"])
def test_planted_bugs_are_reported(name: str, options: Options) -> None:
    old, new, count, error = MUTANTS[name]
    with pytest.raises(error):
        run_gemm(compiled_mutant(old, new, count), SHAPE, options)


WRONG = {
    "advances a descriptor wrongly": ("add.s32 \t%r48, %r45, 2;", "add.s32 \t%r48, %r45, 4;"),
    "takes scales of another block": (
        "[%r38], %rd41, %rd40, %r254, [%r29], [%r31]",
        "[%r38], %rd41, %rd40, %r254, [%r28], [%r31]",
    ),
    "leaves out the wait for the operands": ("%r222], %r453, 10000000;", "%r222], %r453, 10000000; mov.pred P1, -1;"),
    "leaves out the wait for the accumulator": (
        "[%r321], %r458, 10000000;",
        "[%r321], %r458, 10000000; mov.pred P1, -1;",
    ),
}


def is_right(name: str, options: Options) -> bool:
    old, new = WRONG[name]
    try:
        return run_gemm(compiled_mutant(old, new), SHAPE, options)[0]
    except EmulatorError:
        return False


@pytest.mark.parametrize("name", list(WRONG)[:2])
def test_planted_bugs_in_values_give_wrong_numbers(name: str) -> None:
    assert not is_right(name, MODES[0])


@pytest.mark.parametrize("name", list(WRONG)[2:])
def test_planted_races_are_caught_by_some_mode(name: str) -> None:
    assert not all(is_right(name, options) for options in MODES)


def test_a_deadlock_says_who_waits_for_what() -> None:
    old, new, count, _ = MUTANTS["expects too many bytes"]
    with pytest.raises(DeadlockError) as caught:
        run_gemm(compiled_mutant(old, new, count), SHAPE, MODES[0])
    message = str(caught.value)
    assert "16 B outstanding" in message
    assert "warp 4: mbarrier at offset" in message
    assert "mbarrier.try_wait" in message
