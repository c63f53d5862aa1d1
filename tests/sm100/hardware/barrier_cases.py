"""An mbarrier's states: what arrivals return, what waits answer before and after a phase ends."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware.case import Case, untouched

_READ = "selp.b32 {$w%d}, 1, 0, p;"
_STEPS = [
    # (what runs, how its answer is read); the barrier counts three arrivals.
    ("mbarrier.arrive.shared.b64 s0, [{$r0}];", "mbarrier.pending_count.b64 {$w%d}, s0;"),
    ("mbarrier.test_wait.shared.b64 p, [{$r0}], s0;", _READ),
    ("mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 0;", _READ),
    ("mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 1;", _READ),
    ("mbarrier.arrive.shared.b64 s1, [{$r0}], 2;", "mbarrier.pending_count.b64 {$w%d}, s1;"),
    ("mbarrier.test_wait.shared.b64 p, [{$r0}], s0;", _READ),
    ("mbarrier.try_wait.shared.b64 p, [{$r0}], s1;", _READ),
    ("mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 0;", _READ),
    ("mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 1;", _READ),
    ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{$r0}], 48; mbarrier.arrive.shared.b64 s2, [{$r0}], 3;",
     "mbarrier.pending_count.b64 {$w%d}, s2;"),
    ("mbarrier.test_wait.shared.b64 p, [{$r0}], s2;", _READ),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{$r0}], 16;"
     " mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 1;", _READ),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{$r0}], 32;"
     " mbarrier.test_wait.parity.shared.b64 p, [{$r0}], 1;", _READ),
    ("mbarrier.arrive.expect_tx.shared.b64 s3, [{$r0}], 16;", "mbarrier.pending_count.b64 {$w%d}, s3;"),
]  # fmt: skip
LABELS = [f"{number}: {step.split(';')[0].split(' ')[0]}" for number, (step, _) in enumerate(_STEPS)]


class BarrierStates:
    """One thread takes all the steps."""

    @cute.jit
    def __call__(self, answers: Any) -> None:
        self.kernel(answers).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, answers: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        barrier = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 3)
            body = " ".join([f"{step} {read % number}" for number, (step, read) in enumerate(_STEPS)])
            found = inline_ptx(
                "{ .reg .pred p; .reg .b64 s0, s1, s2, s3; " + body + " }",
                write_only_types=[cutlass.Uint32] * len(_STEPS),
                read_only_args=[barrier.toint()],
            )
            for number in cutlass.range_constexpr(len(_STEPS)):
                answers[number, 0] = answers.element_type(found[number])


def cases() -> list[Case]:
    """The one case of all steps."""
    answers = untouched((len(_STEPS), 1), torch.int32)
    return [Case("mbarrier states", BarrierStates(), {}, {"answers": answers}, {"answers": LABELS})]
