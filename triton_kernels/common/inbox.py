"""Sums over tensor-parallel ranks without a launch of their own: senders store parts, the next kernel adds them.

A rank's *sender* is the kernel that makes its part of a sum, such as :func:`..experts.finalize.finalize`. It stores the
part into an inbox in every rank's memory, its own included; CUDA maps the memory of other GPUs. A *receiver* is a later
kernel of each rank, an mHC site. It waits in :func:`receive` until its own inbox holds all parts, adds them, and leaves
the inbox empty (:func:`clear`). So a part crosses between two GPUs once, in one direction, while the receiver is being
placed, and receivers poll their own memory alone.

**No flags, no fences.** A value says itself that it is there: where none has come an inbox holds :data:`EMPTY`, the NaN
0xFFFF. Senders need not look at their values, because the hardware's conversion of fp32 to bf16 makes 0x7FFF of every
NaN; nothing but values that were converted so may be sent. Each value stands for itself, so the order in which they
come does not matter. None is torn: two aligned bytes are written at once, by wide stores and TMA's, too. A receiver
first looks at vectors of values, by loads that the compiler may issue early and keep in L1. There they find a part that
came, or EMPTY: the program that read a part emptied it from the same multiprocessor, so no L1 holds an older part. What
is missing is polled with ``ld.volatile``, which goes to memory each time.

**When a slot is free.** There are :data:`SLOTS`, which successive sums use by turns. Rank q sends for sum n + 2 to the
slot of sum n, in rank r's memory, after q's receiver of sum n + 1 has ended. That received r's part of sum n + 1, and
r's sender of it began after r's receiver of sum n had ended, which left the slot empty: kernels of a rank run one after
the other, each when the stores of those before it are in memory (:mod:`.overlap`). So q's values come to an empty slot,
on every r, and no value is ever stored over another, if a sender stores each value once: a second time might be when
r's receiver has emptied the place. One slot would not do: q would send for sum n + 1 after its own receiver of sum n,
when r's may still wait.

An all-reduce may take the place of a sum: no rank leaves it before all have come to it, and their receivers have ended.
So after one either slot is free. In short, between two uses of a slot there must be a use of the other or an
all-reduce. All ranks make the same sums, of equally many tokens, in the same slots, in the same order. The first comes
after a barrier of all ranks behind :func:`empty_inbox`.

**Waiting cannot block the device.** A receiver waits for senders alone. Its own rank's is an earlier kernel, which has
ended. Another rank's waits for nothing but earlier kernels of its rank, of which receivers wait for senders of earlier
sums: by induction over the sums all receivers end. Nor do programs of a receiver take the places that a sender needs:
they are placed when all programs of the kernel before have begun. If a rank dies the others wait for ever, as in an
all-reduce.

Sums are fp32, in the order of ranks, rounded once to bf16: every rank finds the same bits, for two ranks those of an
all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_one_of,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import PUSHING_RANKS

from .rounding import INTERPRETED, round_to_bf16, widen

EMPTY = tl.constexpr(-1)
"""The bits of a bf16 NaN, 0xFFFF, as int16: no value has come yet."""
SLOTS = 2
SOME_ADDRESS = 1 << 40
"""Stands for the address of a tensor without memory: kernels are compiled for 64 bits."""


@dataclass(frozen=True)
class Inbox:
    """A slot of this rank's inbox, which stands for the sum of the parts that come.

    Attributes:
        parts: int16 [ranks, capacity, d], contiguous: the bits of each rank's part [T, d], in this rank's memory. Rows
            from T on stay empty.
    """

    parts: Tensor

    def check(self, name: str, tokens: int, d: int, like: Tensor) -> None:
        """:class:`OperandError` unless it takes parts [tokens, d], on the device of ``like``."""
        require_dtype(name, self.parts, torch.int16)
        require_dimensions(name, self.parts, 3, "[ranks, capacity, d]")
        ranks, capacity, _ = self.parts.shape
        require_one_of(f"{name}: ranks", ranks, PUSHING_RANKS)
        if capacity < tokens:
            raise OperandValueError(f"{name}: expected a capacity of at least {tokens} tokens, found {capacity}")
        require_shape(name, self.parts, (ranks, capacity, d), "[ranks, capacity, d]")
        require_contiguous(name, self.parts)
        require_same_device("streams", like, **{name: self.parts})

    def arguments(self) -> tuple[Tensor, int]:
        """``inbox`` of :func:`receive`."""
        return self.parts, self.parts.stride(0)


def empty_inbox(ranks: int, tokens: int, d: int, device: torch.device | str) -> Tensor:
    """An int16 [SLOTS, ranks, tokens, d] that holds nothing yet: what a rank shares with the others."""
    return torch.full((SLOTS, ranks, tokens, d), EMPTY.value, dtype=torch.int16, device=device)


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Addresses of tensors in other GPUs' memory, for :func:`pointer` in a kernel: Triton refuses such tensors."""
    return tuple([SOME_ADDRESS if tensor.is_meta else tensor.data_ptr() for tensor in tensors])


@triton.jit
def pointer(address, like):
    """A pointer of the type of ``like`` to an address, a multiple of 16."""
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.constexpr_function
def _sum_in_ptx(ranks: int, values: int) -> str:
    """PTX that waits for ``values`` values of each rank's part, and adds the parts.

    Operands, so many of each: fp32 sums; addresses in the first rank's part; bytes from one rank's part to the next's;
    then for each rank what a first look has found, int32 that hold the bits of bf16. All that was missing is loaded
    again at once, and a warp goes on when it has its values: it waits for no other warp.
    """
    place, stride, found = values, 2 * values, 3 * values
    every = [(rank, value) for rank in range(ranks) for value in range(values)]
    text = [".reg .pred empty, any;", ".reg .b16 zero;", ".reg .b64 at;", ".reg .f32 part;", "mov.b16 zero, 0;"]
    for rank, value in every:
        text += [f".reg .b16 x{rank}_{value};", f"cvt.u16.u32 x{rank}_{value}, ${found + rank * values + value};"]
    text += ["LOOK:", "setp.ne.s16 any, zero, 0;"]
    for rank, value in every:
        text += [
            f"setp.eq.s16 empty, x{rank}_{value}, {EMPTY.value};",
            f"mad.lo.s64 at, ${stride + value}, {rank}, ${place + value};",
            f"@empty ld.volatile.global.b16 x{rank}_{value}, [at];",
            "or.pred any, any, empty;",
        ]
    text += ["vote.sync.any.pred any, any, -1;", "@any bra LOOK;"]
    for rank, value in every:
        if rank == 0:
            text += [f"mov.b32 ${value}, {{zero, x0_{value}}};"]
        else:
            text += [f"mov.b32 part, {{zero, x{rank}_{value}}};", f"add.rn.f32 ${value}, ${value}, part;"]
    return "\n\t".join(["{", *text, "}"])


@triton.constexpr_function
def _constraints(ranks: int, values: int) -> str:
    return ",".join(["=&f"] * values + ["l"] * (2 * values) + ["r"] * (ranks * values))


@triton.jit
def receive(inbox, at, mask, RANKS: tl.constexpr):
    """Wait for a tile of all ranks' parts and return their sum, rounded to bf16, in fp32.

    There is no control flow that the compiler sees, so it pipelines the other loads of a loop around this.

    Args:
        inbox: :meth:`Inbox.arguments`.
        at: int64 [T, D], offsets in a part, of a tile that no other program receives.
        mask: where values are awaited; elsewhere the sum is zero.
        RANKS: as the inbox has.
    """
    parts, stride = inbox
    if INTERPRETED:
        total = tl.zeros(at.shape, tl.float32)
        for rank in tl.static_range(RANKS):
            place = parts + rank * stride.to(tl.int64) + at
            part = tl.load(place, mask=mask, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32)) > 0:
                part = tl.load(place, mask=mask, other=0, volatile=True)
            part = widen(part.to(tl.bfloat16, bitcast=True))
            total = part if rank == 0 else total + part
    else:
        THREADS: tl.constexpr = tl.extra.cuda.num_threads()
        # As many of a thread's values at once as registers hold.
        VALUES: tl.constexpr = min(at.shape[0] * at.shape[1] // THREADS, 32 // RANKS)
        tl.static_assert(VALUES > 0, "each thread has a value of its own")
        # The first look is at a vector of values at a time, and mostly the last one. The asm looks at single values.
        operands = [parts + at, stride.to(tl.int64) * 2]
        for rank in tl.static_range(RANKS):
            found = tl.load(parts + rank * stride.to(tl.int64) + at, mask=mask, other=0, volatile=True)
            operands += [found.to(tl.int32)]
        total = tl.inline_asm_elementwise(
            _sum_in_ptx(RANKS, VALUES),
            _constraints(RANKS, VALUES),
            operands,
            dtype=tl.float32,
            # It is not. But what has effects the compiler does twice, once in a layout that nobody uses. Moving this is
            # harmless: no time is too early for it, and what is stored before the program's barrier needs the sum.
            is_pure=True,
            pack=VALUES,
        )
    return round_to_bf16(total)


@triton.jit
def clear(inbox, at, mask, RANKS: tl.constexpr):
    """Empty a tile, behind a barrier after :func:`receive`: all threads have what they waited for."""
    parts, stride = inbox
    for rank in tl.static_range(RANKS):
        place = parts + rank * stride.to(tl.int64) + at
        tl.store(place, tl.full(at.shape, EMPTY, tl.int16), mask=mask)
