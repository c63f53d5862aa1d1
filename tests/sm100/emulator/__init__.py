"""A functional emulator of PTX as CuTeDSL and Triton emit it for sm_100a and sm_90a, one warp instruction at a time.

It executes kernels through CuTeDSL's own compiled host code, on a machine without a GPU or a driver; Triton's launches
come by ``tests.sm100.support.triton_launch``::

    compiled = compile_for("sm_100a", function, *fake_arguments)
    with emulated(Options(mode="random", seed=1), reads=[a, b], writes=[c]) as emulator:
        emulator(compiled, *arguments)
    emulator.statistics[0].by_opcode()

Rule: an instruction, a modifier, an operand form, a descriptor field, a launch attribute or a device attribute that
is not modelled raises ``UnsupportedError``, for instructions before anything runs.

Modelled
    * scalar code: integer (with carries) and logic; f32, f32x2, f64, f16 and bf16 arithmetic, one or two to a register,
      and f32 with operands of half precision; copysign; comparisons; cvt (integers, f32, f64, f16, bf16, pairs of E4M3,
      E5M2, E2M1, UE8M0 and the fixed-point S2F6); moves, packing; ld/st/atom/red of one to eight elements, ld and st of
      up to 128 bits; ldmatrix, stmatrix; local memory; tables that the module holds;
    * warps: divergence with independent progress of diverged lanes, also by brx.idx; shfl, vote, match, elect, redux
      (f32, too); mma.sync m16n8k16 of fp16 and bf16 with fp32 accumulation;
    * barriers: named barriers, mbarriers with arrival and transaction counts and states, the cluster barrier;
    * copies: cp.async, bulk copies, tiled TMA loads and stores (rank 1 to 5, packed fp4 included, swizzles of
      0, 32, 64, 128 bytes, ragged edges, multicast), reductions by either, bulk groups, prefetches into L2; tensor maps
      changed on the device, with the order that their proxy asks for (``tensor_map_order``);
    * tcgen05: alloc, dealloc; cp of every shape; mma of kinds f16 (fp16 and bf16), tf32 (K-major, in shared memory),
      f8f6f4, mxf8f6f4, mxf4 and mxf4nvf4 with fp32 accumulation, 128 or 64 rows per CTA, for one CTA or a pair;
      operands of 8 and 16 bits also MN-major or, without scales, A in tensor memory; commit, also multicast; ld and st
      of every shape, also packed;
    * wgmma (sm_90a): m64nNk16 of fp16 and bf16, m64nNk32 of E4M3 and E5M2, with fp32 accumulators; A in registers or
      in shared memory, operands of 16 bits in shared memory K-major or MN-major, every swizzle, base offsets; fence,
      commit and wait for groups. A warpgroup's operation begins with the last of its warps and ends for all at once
      (``warpgroup``). Registers in flight must be left alone until a wait covers them, and a fence must stand between a
      warp's own accesses and the operation's, whatever the timing (``warpgroup_registers``); setmaxnreg;
    * clusters: any shape; shared memory of other CTAs by mapa; cluster launch control, also multicast, with requests
      that fail for no reason in the shuffled modes; those that wait for one another in global memory (the next ones
      begin as soon as one polls, up to ``Options.resident``) in either order (``Options.backwards``);
    * asynchrony: engines act at once, after seeded random delays, or one is starved (``Options``);
    * order of accesses to shared and tensor memory, whatever the timing: two that conflict must be ordered by barriers,
      mbarriers, commits, waits for groups of copies or for stores of tensor memory, or release and acquire; a generic
      write that an asynchronous operation reads or overwrites needs a proxy fence on the way (``ordering_clock``,
      ``actors``, ``access_history``). With ``Options.strict_tensor_waits`` also ``tcgen05.wait::ld``,
      ``tcgen05.fence``, and a proxy fence between cp.async and tcgen05. A CTA must not touch another
      one's shared memory before it knows that this one has begun, nor end before it knows that copies, tensor cores and
      other CTAs have done with its memory and (``Options.strict_exit``) mbarriers; a thread waits for its own cp.async
      before it exits, those handed to an mbarrier included (``Options.strict_copies``). Triton's kernels break two of
      these rules by design, which can be left out (``Options``): warps that hold copies of an element store it to one
      place in any order, and no fence stands between the initialisation of an mbarrier and a commit to it;
    * scopes: between CTAs of a cluster a release and an acquire count if they or a fence have its scope
      (``handover``); a fence that acquires alone, also one restricted to shared memory, or releases alone counts for
      that side. An arrival on and a wait for an mbarrier without a scope order all but writes to the other CTA's
      memory, since kernels proven on hardware rely on it (not with ``Options.strict_scopes``). Atomics and other
      strong accesses, to global memory, too, need scopes that include one another's CTAs (``global_scopes``);
    * lanes: those of a warp must synchronise before one hands on or touches what others accessed (``lane_order``; of
      reads, unless ``Options.strict_reads`` is off, since a kernel proven on hardware does not);
    * stores to global memory: a cluster may load or overwrite those of another only if releases and acquires order them
      (``global_order``);
    * programmatic dependent launch, on request: ``Options(overlap=True)`` lets launches run side by side and reports
      conflicting accesses to global memory (``stream``);
    * time, on request: ``Options(timing=TimingModel())`` and ``statistics[0].timelines`` (``timing`` says how, and what
      it leaves out);
    * errors: accesses outside the declared buffers or of unallocated tensor memory, misalignment, writes to inputs,
      reads of shared or tensor memory never written, over-arrived barriers, mbarriers that run ahead of a waiter, too
      much shared or tensor memory, tcgen05.ld of an accumulator still being written (in the delayed modes), tensor
      memory not released, copies under way at exit, and deadlocks with a report of who waits for what.

Not modelled, refused
    Roundings other than to nearest even; stochastic rounding; constant memory; calls; wgmma and mma.sync of other types
    and shapes; sparsity; fp16 accumulation; time of wgmma; A in tensor memory with scales, 64 rows or less
    than 8 bits; tcgen05.ld with a reduction; unpacking cp; im2col and gather of TMA, and its tensors of padded elements
    of 4 or 6 bits, as GEMMs of E2M1 by E4M3 load them (how a map numbers those types is not published); cvt to S2F6
    with a scale, or of NaN (PTX leaves both open); fences restricted to releases; grid-wide barriers;
    tcgen05.cp and mma of different threads ordered by fences without a commit (reported as a hazard).

Not modelled, not noticed
    Races on global memory within a launch other than loads and stores after another cluster's store
    (``global_order``): among the warps of a CTA, of TMA and bulk copies, stores after loads. Among the lanes of a warp:
    reads of one cell but for the last lane's, where another overwrites it, and what one waited for and another uses.
    Register budgets, but for what setmaxnreg itself says. Approximate functions (ex2, rcp, …) are given correctly
    rounded, and an MMA's sum is taken in fp64, so last bits may differ from hardware.
    Lanes that issue the same bulk store together count as one store.

Compared with hardware
    What SM100 shares with sm_90a, and wgmma, give the bytes that an H200 gave (``tests/sm100/hardware``); approximate
    functions and rounded sums of wgmma are within the ulp stated there. Nothing of tcgen05, of TMA for CTA pairs and of
    FP4 was compared.
"""

from tests.sm100.emulator.engines import ENGINES, Options
from tests.sm100.emulator.errors import (
    DeadlockError,
    EmulatorError,
    HazardError,
    MemoryFaultError,
    UnsupportedError,
)
from tests.sm100.emulator.host import Compiled, Emulator, compile_for, emulated
from tests.sm100.emulator.statistics import Statistics
from tests.sm100.emulator.timing import Timeline
from tests.sm100.emulator.timing_model import TimingModel

__all__ = [
    "ENGINES",
    "Compiled",
    "DeadlockError",
    "Emulator",
    "EmulatorError",
    "HazardError",
    "MemoryFaultError",
    "Options",
    "Statistics",
    "Timeline",
    "TimingModel",
    "UnsupportedError",
    "compile_for",
    "emulated",
]
