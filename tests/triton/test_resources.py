"""What is required of every compiled kernel finds what it is for, and nothing else."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from nvfp4_sgl.triton_kernels.common.overlap import OVERLAPPED, after_previous
from tests.triton.support.resources import lost_negations, resources


@triton.jit
def _three(numbers):
    after_previous()
    first, second, third = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    tl.store(numbers, tl.maximum(tl.maximum(first, -second), third))


def launches() -> None:
    _three[(1,)](torch.zeros(3, dtype=torch.int32), **OVERLAPPED)


def test_kernels_that_lose_one_are_refused():
    with pytest.raises(RuntimeError, match="ptxas may lose the negations"):
        resources(__name__)


def ptx(*statements: str) -> str:
    return "\n".join(f"\t{statement};" for statement in statements)


@pytest.mark.parametrize("extremum", ["max.s32", "min.s32"])
@pytest.mark.parametrize(
    "negation",
    [
        ("neg.s32 \t%r4, %r2",),
        ("sub.s32 \t%r4, 0, %r2",),
        ("mul.lo.s32 \t%r4, %r2, -1",),
        ("neg.s32 \t%r3, %r2", "mov.b32 \t%r4, %r3"),
        ("@%p1 neg.s32 \t%r4, %r2",),
        ("abs.s32 \t%r4, %r2",),
    ],
)
def test_negations_that_may_be_lost(negation: tuple[str, ...], extremum: str):
    for operands in ("%r1, %r4", "%r4, %r1"):
        found = ptx(*negation, f"{extremum} \t%r5, {operands}", f"{extremum} \t%r6, %r7, %r5")
        assert lost_negations(found) == ["%r4"]


def test_maximum_with_its_own_negation():
    """An absolute value in other words; 16 bits are no different."""
    for size, register in (("s32", "%r"), ("s16", "%rs")):
        x, negated, absolute, other, to = (f"{register}{index}" for index in range(5))
        first = ptx(f"neg.{size} \t{negated}, {x}", f"max.{size} \t{absolute}, {x}, {negated}")
        assert lost_negations(first) == []
        assert lost_negations(first + "\n" + ptx(f"max.{size} \t{to}, {absolute}, {other}")) == [negated]


@pytest.mark.parametrize(
    "statements",
    [
        ("not.b32 \t%r4, %r2", "max.s32 \t%r5, %r1, %r4", "max.s32 \t%r6, %r5, %r3"),
        ("sub.s32 \t%r4, %r7, %r2", "max.s32 \t%r5, %r1, %r4", "max.s32 \t%r6, %r5, %r3"),
        ("neg.s32 \t%r4, %r2", "max.s32 \t%r5, %r1, %r4"),
        ("neg.s32 \t%r4, %r2", "max.s32 \t%r5, %r1, %r4", "min.s32 \t%r6, %r5, %r3"),
        ("neg.f32 \t%f4, %f2", "max.f32 \t%f5, %f1, %f4", "max.f32 \t%f6, %f5, %f3"),
        ("neg.s32 \t%r4, %r2", "max.u32 \t%r5, %r1, %r4", "max.u32 \t%r6, %r5, %r3"),
    ],
    ids=["not", "difference", "of two", "maximum in a minimum", "floats", "unsigned"],
)
def test_what_is_kept(statements: tuple[str, ...]):
    assert lost_negations(ptx(*statements)) == []
