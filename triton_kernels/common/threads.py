"""A Triton program written for single threads: what is a scalar to the compiler differs between the threads.

:func:`thread` says which thread it is; what is computed from it, or loaded from where it says, is the thread's own.
Triton's stores and reductions take scalars for equal in all threads; the functions here take their place, and give
shared memory. In the interpreter each scalar that differs is a block with one value a thread; then ``while`` and ``if``
take only what is equal in all threads, and :func:`any_left` is the exception.
"""

# ruff: noqa: RUF005 -- tuples of values grow by + in a Triton kernel

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rounding import INTERPRETED

SHARED_WORDS = tl.constexpr(6144)
"""Words of 32 bits of the shared memory that :func:`new_shared` gives."""
_NEW_SHARED = tl.constexpr(
    f"{{ .shared .align 16 .b8 words_of_threads[{4 * SHARED_WORDS.value}]; mov.u32 $0, words_of_threads; }}"
)
_SCAN = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.b32 $0, $1; "
    + " ".join(f"shfl.sync.up.b32 t|p, $0, {step}, 0, -1; @p add.s32 $0, $0, t;" for step in (1, 2, 4, 8, 16))
    + " }"
)


def _reach(numbers: int) -> str:
    """PTX that sets a bit for each of so many fp32 numbers that reach a bound, the last operand."""
    tests = (f"setp.ge.f32 p, ${1 + n}, ${1 + numbers}; @p or.b32 $0, $0, {1 << n};" for n in range(numbers))
    return "{ .reg .pred p; mov.b32 $0, 0; " + " ".join(tests) + " }"


_REACH_4, _REACH_8 = tl.constexpr(_reach(4)), tl.constexpr(_reach(8))
_REACH_16, _REACH_32 = tl.constexpr(_reach(16)), tl.constexpr(_reach(32))
_REACH_OPERANDS_4, _REACH_OPERANDS_8 = tl.constexpr("=&r" + ",f" * 5), tl.constexpr("=&r" + ",f" * 9)
_REACH_OPERANDS_16, _REACH_OPERANDS_32 = tl.constexpr("=&r" + ",f" * 17), tl.constexpr("=&r" + ",f" * 33)

_words = torch.empty(SHARED_WORDS.value, dtype=torch.int32)
_WORDS = tl.constexpr(_words.data_ptr() if INTERPRETED.value else 0)
"""Address of what is shared memory in the interpreter."""


@triton.jit
def _instruction(PTX: tl.constexpr, value, PURE: tl.constexpr):
    """Run PTX that makes an int32, $0, of another, $1. PURE: equal runs may be merged, and unused ones left out."""
    return tl.inline_asm_elementwise(PTX, "=r,r", [value], dtype=tl.int32, is_pure=PURE, pack=1)


@triton.jit
def _at_word(PTX: tl.constexpr, shared, at, value, mask):
    """Run PTX at word ``at`` of shared memory and return $0. $1: the word's address. $2: the value. $3: the mask."""
    return tl.inline_asm_elementwise(
        PTX, "=&r,r,r,b", [shared + 4 * at, value, mask], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def thread(THREADS: tl.constexpr):
    """Return the number, int32, of the thread in its program."""
    if INTERPRETED:
        return tl.arange(0, THREADS)
    else:
        return _instruction("mov.u32 $0, %tid.x;", tl.full((), 0, tl.int32), True)


@triton.jit
def new_shared():
    """Return shared memory of SHARED_WORDS words, of any value; once a kernel."""
    if INTERPRETED:
        words = tl.full((), _WORDS, tl.int64).to(tl.pointer_type(tl.int32))
        for place in tl.static_range(SHARED_WORDS // 1024):
            tl.store(words + place * 1024 + tl.arange(0, 1024), 0x5A5A5A5A)
        return words
    else:
        return _instruction(_NEW_SHARED, tl.full((), 0, tl.int32), False)


@triton.jit
def barrier():
    """Wait for all threads; they see each other's stores to shared memory."""
    if not INTERPRETED:
        _instruction("bar.sync 0;", tl.full((), 0, tl.int32), False)


@triton.jit
def any_left(condition):
    """Say whether a thread's loop goes on; in the interpreter, whether any thread's does."""
    if INTERPRETED:
        return tl.max(condition.to(tl.int32), axis=0) > 0
    else:
        return condition


@triton.jit
def rounds_of(rounds, condition):
    """Return how often a thread's loop runs, if only threads with the condition need it: in the interpreter, all do."""
    if INTERPRETED:
        return rounds
    else:
        return tl.where(condition, rounds, 0)


@triton.jit
def shared_load(shared, at):
    """Load the int32 at word ``at``."""
    if INTERPRETED:
        return tl.load(shared + at)
    else:
        return _instruction("ld.shared.b32 $0, [$1];", shared + 4 * at, False)


@triton.jit
def shared_load_pair(shared, at):
    """Load the two int32 from the even word ``at`` on."""
    if INTERPRETED:
        return tl.load(shared + at), tl.load(shared + at + 1)
    else:
        return tl.inline_asm_elementwise(
            "ld.shared.v2.b32 {$0, $1}, [$2];",
            "=r,=r,r",
            [shared + 4 * at],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def shared_store(shared, at, value, mask):
    """Store the int32 at word ``at`` where the mask says so."""
    if INTERPRETED:
        tl.store(shared + (0 * value + at), value, mask=mask)
    else:
        _at_word("{ @$3 st.shared.b32 [$1], $2; }", shared, at, value, mask)


@triton.jit
def shared_store_pair(shared, at, first, second, mask):
    """Store two int32 from the even word ``at`` on, where the mask says so."""
    if INTERPRETED:
        tl.store(shared + (0 * first + at), first, mask=mask)
        tl.store(shared + (0 * second + 1 + at), second, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ @$4 st.shared.v2.b32 [$1], {$2, $3}; }",
            "=r,r,r,r,b",
            [shared + 4 * at, first, second, mask],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def shared_add(shared, at, value, mask):
    """Add the int32 to word ``at`` where the mask says so; atomic."""
    if INTERPRETED:
        tl.atomic_add(shared + (0 * value + at), value, mask=mask)
    else:
        _at_word("{ @$3 red.shared.add.u32 [$1], $2; }", shared, at, value, mask)


@triton.jit
def shared_or(shared, at, value, mask):
    """Set bits of word ``at`` where the mask says so; atomic."""
    if INTERPRETED:
        tl.atomic_or(shared + (0 * value + at), value, mask=mask)
    else:
        _at_word("{ @$3 red.shared.or.b32 [$1], $2; }", shared, at, value, mask)


@triton.jit
def shared_take(shared, at, value, mask):
    """Add the int32 to word ``at`` where the mask says so; atomic. Returns what was there."""
    if INTERPRETED:
        return tl.atomic_add(shared + (0 * value + at), value, mask=mask)
    else:
        return _at_word("{ mov.b32 $0, 0; @$3 atom.shared.add.u32 $0, [$1], $2; }", shared, at, value, mask)


@triton.jit
def global_store(pointer, value, mask):
    """Store the int32 where the mask says so."""
    if INTERPRETED:
        tl.store(pointer, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ @$3 st.global.b32 [$1], $2; }",
            "=r,l,r,b",
            [pointer.to(tl.int64), value, mask],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_four(pointer, mask, ALIGNED: tl.constexpr):
    """Load four fp32; NaN where the mask does not say so. ALIGNED: the pointer is a multiple of 16 bytes."""
    if INTERPRETED:
        first = tl.load(pointer, mask=mask, other=float("nan"))
        second = tl.load(pointer + 1, mask=mask, other=float("nan"))
        third = tl.load(pointer + 2, mask=mask, other=float("nan"))
        return first, second, third, tl.load(pointer + 3, mask=mask, other=float("nan"))
    elif ALIGNED:
        return tl.inline_asm_elementwise(
            "{ mov.b32 $0, 0x7fffffff; mov.b32 $1, $0; mov.b32 $2, $0; "
            "mov.b32 $3, $0; @$5 ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
            "=&f,=&f,=&f,=&f,l,b",
            [pointer.to(tl.int64), mask],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ mov.b32 $0, 0x7fffffff; mov.b32 $1, $0; mov.b32 $2, $0; "
            "mov.b32 $3, $0; @$5 ld.global.f32 $0, [$4]; @$5 ld.global.f32 $1, [$4+4]; @$5 ld.global.f32 $2, [$4+8]; "
            "@$5 ld.global.f32 $3, [$4+12]; }",
            "=&f,=&f,=&f,=&f,l,b",
            [pointer.to(tl.int64), mask],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def reaching(numbers, bound, NUMBERS: tl.constexpr):
    """Return int32 with bit i set where the i-th of NUMBERS fp32, 4 to 32, is at least the bound."""
    if INTERPRETED:
        bits = tl.where(numbers[0] >= bound, 1, 0)
        for place in tl.static_range(1, NUMBERS):
            bits |= tl.where(numbers[place] >= bound, 1, 0) << place
        return bits
    elif NUMBERS == 4:
        return tl.inline_asm_elementwise(
            _REACH_4, _REACH_OPERANDS_4, numbers + (bound,), dtype=tl.int32, is_pure=True, pack=1
        )
    elif NUMBERS == 8:
        return tl.inline_asm_elementwise(
            _REACH_8, _REACH_OPERANDS_8, numbers + (bound,), dtype=tl.int32, is_pure=True, pack=1
        )
    elif NUMBERS == 16:
        return tl.inline_asm_elementwise(
            _REACH_16, _REACH_OPERANDS_16, numbers + (bound,), dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _REACH_32, _REACH_OPERANDS_32, numbers + (bound,), dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def ones(bits):
    """Count the bits that are set."""
    if INTERPRETED:
        bits = bits.to(tl.uint32, bitcast=True)
        bits -= (bits >> 1) & 0x55555555
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F
        return ((bits * 0x01010101) >> 24).to(tl.int32)
    else:
        return _instruction("popc.b32 $0, $1;", bits, True)


@triton.jit
def lowest(bits):
    """Return the number of the lowest bit that is set; of no bit anything from 0 to 32."""
    if INTERPRETED:
        return ones((bits & -bits) - 1)
    else:
        return _instruction("{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", bits, True)


@triton.jit
def width(value):
    """Return how many bits a uint32 takes: 0 for 0."""
    if INTERPRETED:
        for step in tl.static_range(5):
            value |= value >> (1 << step)
        return ones(value.to(tl.int32, bitcast=True))
    else:
        return 32 - _instruction("clz.b32 $0, $1;", value.to(tl.int32, bitcast=True), True)


@triton.jit
def _warp_sum(value):
    return _instruction("redux.sync.add.s32 $0, $1, -1;", value, False)


@triton.jit
def _warp_min(value):
    return _instruction("redux.sync.min.s32 $0, $1, -1;", value, False)


@triton.jit
def _warp_max(value):
    return _instruction("redux.sync.max.s32 $0, $1, -1;", value, False)


@triton.jit
def counts_before(value, shared, at, THREADS: tl.constexpr):
    """Sum int32 values over earlier threads, and over all: (the thread's own, the same in all threads).

    at: of up to 32 words; a barrier must precede the next use of them.
    """
    if INTERPRETED:
        return tl.cumsum(value, axis=0) - value, tl.sum(value, axis=0)
    else:
        me = thread(THREADS)
        lane, warp = me & 31, me >> 5
        until = tl.inline_asm_elementwise(_SCAN, "=&r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
        shared_store(shared, at + warp, until, lane == 31)
        barrier()
        of_warp = shared_load(shared, at + (lane & (THREADS // 32 - 1)))
        earlier = _warp_sum(tl.where(lane < warp, of_warp, 0))
        return earlier + until - value, _warp_sum(tl.where(lane < THREADS // 32, of_warp, 0))


@triton.jit
def extremes(least, most, shared, at, THREADS: tl.constexpr):
    """Return (minimum of ``least``, maximum of ``most``), int32, over all threads.

    at: of up to 64 words from an even one on; a barrier must precede the next use of them.
    """
    if INTERPRETED:
        return tl.min(least, axis=0), tl.max(most, axis=0)
    else:
        me = thread(THREADS)
        lane, warp = me & 31, me >> 5
        shared_store_pair(shared, at + 2 * warp, _warp_min(least), _warp_max(most), lane == 0)
        barrier()
        least, most = shared_load_pair(shared, at + 2 * (lane & (THREADS // 32 - 1)))
        return _warp_min(least), _warp_max(most)
