"""What the timed mode of the emulator takes for granted about a B200: every figure, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass

CLOCK_HZ = 1.85e9
MULTIPROCESSORS = 148
MEMORY_BYTES_PER_SECOND = 8e12


@dataclass(frozen=True)
class TimingModel:
    """Rates and latencies of one SM, in cycles of 1.85 GHz.

    Stated by NVIDIA, or following from what it states: 9 PFLOP/s of dense FP4, 4.5 of FP8 and 2.25 of bf16 over 148
    SMs (the clock at which that makes 2^14 multiply-adds a cycle is the one taken here), 8 TB/s of HBM, 128 B a cycle
    of shared memory, and the lanes a cycle of each kind of instruction (CUDA C++ Programming Guide, arithmetic
    throughput).
    That an MMA waits for its operands in shared memory where they take longer than the products, as they do for N
    below 128 and one CTA, has been measured on B200 (SemiAnalysis, "Dissecting Nvidia Blackwell", 2026).

    Assumed, since nothing reliable was found; vary them before believing a result that hinges on them: what an SM
    reads from L2 (64 B a cycle) and can receive, all latencies, tensor memory's bandwidth, and that a tcgen05.cp keeps
    the tensor core from multiplying while it reads shared memory.

    Attributes:
        load_bytes_per_cycle: what TMA loads of one SM read from L2, for however many SMs.
        receive_bytes_per_cycle: what TMA loads write into one SM, its own and those multicast to it.
        load_latency: from the turn of a TMA load to its first byte.
        store_bytes_per_cycle: of TMA stores, reading shared memory.
        fp4_per_cycle, fp8_per_cycle, half_per_cycle: multiply-adds of the tensor core.
        shared_bytes_per_cycle: shared memory, for the tensor core's operands and scales and for warps.
        tensor_latency: from the end of a tensor-core operation to the arrival that tcgen05.commit makes.
        tensor_memory_bytes_per_cycle, tensor_memory_latency: of a warp's tcgen05.ld.
        global_latency, shared_latency: of ld.
        wait_latency: of a try_wait that finds its phase complete.
        barrier_latency, cluster_latency: of a named barrier and of the cluster barrier once all have arrived.
        warps_sharing: warps that use shared memory and the load/store unit at a time (those of an epilogue).
        function_cycles: between two ex2, rcp, … of a warp (16 lanes a cycle and SM).
        conversion_cycles: between two floating-point conversions of a warp (64 lanes a cycle and SM).
    """

    load_bytes_per_cycle: float = 64.0
    receive_bytes_per_cycle: float = 128.0
    load_latency: float = 800.0
    store_bytes_per_cycle: float = 64.0
    fp4_per_cycle: float = 16384.0
    fp8_per_cycle: float = 8192.0
    half_per_cycle: float = 4096.0
    shared_bytes_per_cycle: float = 128.0
    tensor_latency: float = 30.0
    tensor_memory_bytes_per_cycle: float = 128.0
    tensor_memory_latency: float = 30.0
    global_latency: float = 600.0
    shared_latency: float = 30.0
    wait_latency: float = 20.0
    barrier_latency: float = 20.0
    cluster_latency: float = 200.0
    warps_sharing: float = 4.0
    function_cycles: float = 8.0
    conversion_cycles: float = 2.0

    @classmethod
    def from_memory(cls) -> TimingModel:
        """Operands that no cache holds, with all SMs loading: each gets its share of HBM's bandwidth."""
        return cls(load_bytes_per_cycle=MEMORY_BYTES_PER_SECOND / MULTIPROCESSORS / CLOCK_HZ, load_latency=1000.0)
