"""Asynchronous engines: when the effect of an issued operation takes place.

Each operation belongs to a queue and is a list of steps (a TMA store: read shared memory, then write global).
Operations of one queue take effect in order; queues are independent of one another. Three modes:

* immediate: all steps at issue;
* random: after a while, seeded; any queue may overtake any other;
* starved: like random, but one engine acts only when nothing else can go on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.sm100.emulator.timing_model import TimingModel

Mode = Literal["immediate", "random", "starved"]
ENGINES = ("tma_load", "tma_store", "tensor", "cp_async", "st_async", "warpgroup")
"""tensor: tcgen05.mma, cp, commit (one queue per CTA or CTA pair); cp_async: non-bulk copies of a thread;
st_async: stores to a cluster's shared memory that report to an mbarrier; warpgroup: wgmma (one queue per warpgroup)."""


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        mode: when engines act.
        seed: of the random and starved modes, for engines and for the order of warps.
        starve: the engine held back in starved mode.
        strict_tensor_waits: demand, beyond what hardware is known to need, what the PTX ISA says of tensor memory:
            ``tcgen05.wait::ld`` before a cell that was loaded may be overwritten (a use of the loaded registers does
            not count), and ``tcgen05.fence`` before and after a synchronisation that orders tcgen05 operations of
            different threads (release and acquire do not count). NVIDIA's own GEMMs in CuTeDSL leave both out. Also
            ``fence.proxy.async`` between cp.async, which writes through the generic proxy, and a tcgen05 operation
            that reads its data: NVIDIA's GEMMs that gather rows so leave it out.
        backwards: begin clusters last first.
        equal_writes: let warps write the same to one place of shared memory in any order. Triton's do so where several
            hold copies of an element.
        init_fence: demand ``fence.mbarrier_init`` or ``fence.proxy.async`` between the initialisation of an mbarrier
            and its use by an asynchronous operation, as the PTX ISA does. Triton's kernels of one CTA leave it out and
            only synchronise.
        strict_moves: demand ``wgmma.fence`` after a move to a register that wgmma uses, too, as the PTX ISA does.
            NVIDIA's GEMM for Hopper in CuTeDSL has moves between fence and wgmma, which ptxas places as it must.
        strict_scopes: demand the cluster's scope, on both sides, of synchronisation that orders what a warp has read
            before another CTA's write to it, as the PTX ISA does of all that CTAs order. Kernels proven on hardware
            leave it out there.
        strict_reads: demand that lanes synchronise before one of them hands on that others have read shared memory, as
            the PTX ISA does. QuACK's GEMM for Hopper with A in registers leaves it out.
        strict_exit: demand that a CTA has waited for every arrival on its mbarriers before it ends. Kernels proven on
            hardware leave some out: NVIDIA's FMHA of CUTLASS 7107b05 does not wait for the last commits of its MMAs.
            Accesses to a CTA's shared memory, and copies, must be known to be over in any case.
        strict_copies: demand that a thread has waited for its own cp.async copies before it exits. Else those that it
            has handed to an mbarrier (``cp.async.mbarrier.arrive``) may be under way: whoever waits for it knows that
            they are done. A CTA must know it in any case before it ends.
        overlap: let a launch with the programmatic attribute run beside the ones before it; see ``stream``.
        max_instructions: warp instructions of a launch before it counts as endless.
        resident: clusters that have a place at once: how many more are begun while those before poll global memory.
        timing: what to model time by; None leaves it out.
    """

    mode: Mode = "immediate"
    seed: int = 0
    starve: str | None = None
    max_instructions: int = 5_000_000
    resident: int = 148
    init_fence: bool = True
    backwards: bool = False
    equal_writes: bool = False
    strict_tensor_waits: bool = False
    strict_moves: bool = False
    strict_scopes: bool = False
    strict_reads: bool = True
    strict_exit: bool = True
    strict_copies: bool = True
    overlap: bool = False
    timing: TimingModel | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("immediate", "random", "starved"):
            raise ValueError(f"mode {self.mode!r}: expected immediate, random or starved")
        if (self.mode == "starved") != (self.starve is not None):
            raise ValueError("starve names an engine in starved mode, and only there")
        if self.starve is not None and self.starve not in ENGINES:
            raise ValueError(f"starve {self.starve!r}: expected one of {ENGINES}")


@dataclass
class Engines:
    """The queues of one cluster."""

    options: Options
    random: random.Random
    queues: dict[tuple[str, Hashable], deque[Callable[[], None]]] = field(default_factory=dict)
    performed: int = 0
    """Steps done so far: progress, for the deadlock check."""
    _unique: int = 0

    def issue(self, engine: str, queue: Hashable | None, steps: Sequence[Callable[[], None]]) -> None:
        """Hand over an operation; ``queue`` None means that nothing orders it (a queue of its own)."""
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r}")
        if self.options.mode == "immediate":
            for step in steps:
                step()
                self.performed += 1
            return
        if queue is None:
            self._unique += 1
            queue = self._unique
        self.queues.setdefault((engine, queue), deque()).extend(steps)

    def _act(self, key: tuple[str, Hashable]) -> None:
        steps = self.queues[key]
        steps.popleft()()
        self.performed += 1
        if not steps:
            del self.queues[key]

    def pump(self) -> None:
        """Let some engines act."""
        for key in list(self.queues):
            while key in self.queues and key[0] != self.options.starve and self.random.random() < 0.3:
                self._act(key)

    def force(self) -> bool:
        """Make one pending operation act, the starved engine's last; False if nothing is pending."""
        if not self.queues:
            return False
        keys = [key for key in self.queues if key[0] != self.options.starve] or list(self.queues)
        self._act(self.random.choice(keys))
        return True

    def drain(self) -> None:
        """Make everything act: the end of a kernel."""
        while self.force():
            pass
