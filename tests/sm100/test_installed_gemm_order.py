"""Synchronisation left out of a GEMM that runs on hardware is found, without any delay and whatever the values."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Compiled, HazardError, Options
from tests.sm100.support.flashinfer_gemm import compiled_gemm, run_gemm

pytest.importorskip("flashinfer")

SHAPE = (200, 264, 320)
"""Six tiles for one CTA with two K tiles each: more than the pipeline's five stages and two accumulators."""
OPTIONS = Options(max_instructions=200_000)
FENCE = "fence.proxy.async.shared::cta;\n\t"
BARRIER = "bar.sync \t1, 128;\n"
WAIT_GROUP = "cp.async.bulk.wait_group.read \t4;\n"
PEEK = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 "
WAIT = "mbarrier.try_wait.parity.shared.b64 "

UNORDERED = "without being ordered after its"
MUTANTS: dict[str, tuple[list[tuple[str, str]], str]] = {
    "fence.proxy.async": ([(FENCE, "")], "read of shared memory .* without fence.proxy.async since its write"),
    "barrier before the store": ([(FENCE + BARRIER, FENCE)], f"read of shared memory .* {UNORDERED} write"),
    "barrier before the next chunk": (
        [(f"{WAIT_GROUP}$L__BB0_90:\n\t{BARRIER}", f"{WAIT_GROUP}$L__BB0_90:\n")],
        UNORDERED,
    ),
    "wait for the stores": ([(WAIT_GROUP, "\n")], f"write of shared memory .* {UNORDERED} read"),
    "wait for a full accumulator": ([(f"{WAIT}P1, [%r321], %r458, 10000000", "mov.pred P1, -1")], "never written"),
    "wait for an empty accumulator": ([(f"{WAIT}P1, [%r219], %r455, 10000000", "mov.pred P1, -1")], UNORDERED),
    "wait for full operands": (
        [
            (f"{PEEK}%p98, [%r218], %r453", "mov.pred %p98, -1"),
            (f"{WAIT}P1, [%r222], %r453, 10000000", "mov.pred P1, -1"),
            (f"{PEEK}%p98, [%r269], %r453", "mov.pred %p98, -1"),
        ],
        f"read of shared memory .* {UNORDERED} write",
    ),
    "wait for empty operands": (
        [
            (f"{PEEK}%p96, [%r123+40], %r446", "mov.pred %p96, -1"),
            (f"{WAIT}P1, [%r125], %r446, 10000000", "mov.pred P1, -1"),
            (f"{PEEK}%p96, [%r139+40], %r446", "mov.pred %p96, -1"),
        ],
        f"write of shared memory .* {UNORDERED}",
    ),
    "last wait for the stores": ([("cp.async.bulk.wait_group.read \t0;", "")], "release of shared memory .* its read"),
}
"""What is left out; the text to replace, with what; the report."""


def mutant(replacements: list[tuple[str, str]]) -> Compiled:
    compiled = compiled_gemm((128, 128), (1, 1))
    for old, new in replacements:
        compiled = compiled.patched(old, new)
    return compiled


@pytest.mark.parametrize("left_out", MUTANTS)
def test_what_is_left_out_is_found(left_out: str) -> None:
    replacements, report = MUTANTS[left_out]
    with pytest.raises(HazardError, match=report):
        run_gemm(mutant(replacements), SHAPE, OPTIONS)


def test_all_fences_of_barrier_initialisation() -> None:
    compiled = compiled_gemm((128, 128), (1, 1)).patched("fence.mbarrier_init.release.cluster;", "", 3)
    with pytest.raises(HazardError, match="used before its initialisation is known"):
        run_gemm(compiled, SHAPE, OPTIONS)


def test_strictness_asks_for_what_this_kernel_leaves_out() -> None:
    """It has neither tcgen05.wait::ld nor tcgen05.fence, and works; so they are demanded on request only."""
    with pytest.raises(HazardError, match="tensor memory .* without tcgen05.fence"):
        run_gemm(compiled_gemm((128, 128), (1, 1)), SHAPE, Options(strict_tensor_waits=True))


def test_a_cta_of_a_pair_must_not_end_before_its_peer_has_signalled() -> None:
    compiled = compiled_gemm((256, 128), (2, 1))
    for wait in ("[%r343], %r344, 10000000", "[%r521], 0, 10000000"):
        compiled = compiled.patched(f"{WAIT}P1, {wait}", "mov.pred P1, -1")
    with pytest.raises(HazardError, match="ended without waiting for an arrival of CTA"):
        run_gemm(compiled, SHAPE, OPTIONS)
