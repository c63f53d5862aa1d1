"""tcgen05: allocation, copies of scale factors, mma, commit, loads and stores of tensor memory, ordering.

mma, cp and commit go to the tensor engine and take effect in issue order for each CTA (or pair).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.cluster import Cta
from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.instructions.barriers import uniform
from tests.sm100.emulator.instructions.load_store import store
from tests.sm100.emulator.mma import InstructionDescriptor, MatrixDescriptor, check_shape, multiply
from tests.sm100.emulator.ptx import Memory, Vector
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Blocked, Mask, Warp, active


def _group(decoder: Decoder) -> int:
    """1 or 2: the number of CTAs that act together."""
    return int(decoder.one_of("cta_group::1", "cta_group::2")[-1])


def _members(cta: Cta, group: int) -> list[Cta]:
    """The CTA, or its pair with the even one first."""
    if group == 1:
        return [cta]
    first = cta.rank & ~1
    if first + 1 >= len(cta.cluster.ctas):
        raise HazardError("cta_group::2 in a cluster without the peer CTA")
    return cta.cluster.ctas[first : first + 2]


def _issue(warp: Warp, group: int, action, operation: str) -> None:
    leader = _members(warp.cta, group)[0]
    warp.cta.launch.statistics.engine_operations[operation] += 1
    warp.cta.launch.engines.issue("tensor", (id(warp.cta.cluster), leader.rank), [action])


def _whole_warp(mask, what: str) -> None:
    if mask is not None:
        raise HazardError(f"{what} by {np.flatnonzero(mask).size} lanes: it is for whole warps")


@instruction("tcgen05.alloc")
def build_alloc(decoder: Decoder) -> Execute:
    _group(decoder)
    decoder.expect("sync", "aligned", "b32")
    decoder.one_of("shared", "shared::cta")
    decoder.arity(2)
    address, count = decoder.address(0), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        _whole_warp(mask, "tcgen05.alloc")
        columns = uniform(count(warp), mask, "column count")
        start = warp.cta.tensor_memory.allocate(columns)
        if start is None:
            return Blocked(f"{columns} free tensor-memory columns")
        store(warp, "shared", int(address(warp)[0]), np.array([start], np.uint32).view(np.uint8))
        warp.cta.launch.events += 1
        return None

    return execute


@instruction("tcgen05.dealloc")
def build_dealloc(decoder: Decoder) -> Execute:
    _group(decoder)
    decoder.expect("sync", "aligned", "b32")
    decoder.arity(2)
    address, count = decoder.read(0, "u32"), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        _whole_warp(mask, "tcgen05.dealloc")
        warp.cta.tensor_memory.release(int(address(warp)[0]), uniform(count(warp), mask, "column count"))
        warp.cta.launch.events += 1

    return execute


@instruction("tcgen05.relinquish_alloc_permit")
def build_relinquish(decoder: Decoder) -> Execute:
    _group(decoder)
    decoder.expect("sync", "aligned")
    decoder.arity(0)

    def execute(warp: Warp, mask: Mask) -> None:
        warp.cta.tensor_memory.permit = False

    return execute


@instruction("tcgen05.cp")
def build_copy(decoder: Decoder) -> Execute:
    """32x128b.warpx4: 32 rows of 16 bytes from shared memory into four columns, for each of four lane groups."""
    group = _group(decoder)
    decoder.expect("32x128b", "warpx4")
    decoder.arity(2)
    address, descriptor = decoder.read_address_register(0), decoder.read(1, "u64")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            target = int(address(warp)[lane])
            if target >> 16:
                raise UnsupportedError(f"tcgen05.cp to lane {target >> 16}")
            source = MatrixDescriptor.decode(int(descriptor(warp)[lane]))
            columns = slice(target, target + 4)
            members = _members(warp.cta, group)
            for cta in members:
                cta.tensor_memory.announce(columns, 1)

            def copy(members=members, source=source, columns=columns):
                for cta in members:
                    cta.tensor_memory.announce(columns, -1)
                    rows = np.ascontiguousarray(cta.shared.gather(source.offsets(32, 16))).view(np.uint32)
                    cta.tensor_memory.write(slice(0, 128), columns, np.tile(rows, (4, 1)))
                    warp.cta.launch.statistics.engine_bytes["tensor_copy"] += rows.nbytes

            _issue(warp, group, copy, "tensor_copy")

    return execute


@instruction("tcgen05.mma")
def build_mma(decoder: Decoder) -> Execute:
    group = _group(decoder)
    kind = decoder.one_of("kind::mxf4nvf4", "kind::f16").removeprefix("kind::")
    scaled = kind == "mxf4nvf4"
    if scaled:
        decoder.expect("block_scale")
        decoder.one_of("block16", "scale_vec::4X")
    # How long the hardware may keep operand A in its collector: no effect on results.
    for hint in ("fill", "use", "lastuse", "discard"):
        decoder.flag(f"collector::a::{hint}")
    if isinstance(decoder.operands[1], Memory):
        raise UnsupportedError("operand A in tensor memory")
    if not scaled and len(decoder.operands) == 6 and isinstance(decoder.operands[4], Vector):
        lane_masks = [decoder.read(item, "u32") for item in decoder.vector(4)]
        del decoder.operands[4]
    else:
        lane_masks = []
    decoder.arity(7 if scaled else 5)
    accumulator = decoder.read_address_register(0)
    a, b, shape = decoder.read(1, "u64"), decoder.read(2, "u64"), decoder.read(3, "u32")
    scale_a = decoder.read_address_register(4) if scaled else None
    scale_b = decoder.read_address_register(5) if scaled else None
    enable = decoder.read(6 if scaled else 4, "pred")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            if any(lane_mask(warp)[lane] for lane_mask in lane_masks):
                raise UnsupportedError("disabled output lanes")
            target = int(accumulator(warp)[lane])
            if target >> 16:
                raise UnsupportedError(f"accumulator in lane {target >> 16}")
            descriptor = InstructionDescriptor.decode(int(shape(warp)[lane]), kind)
            check_shape(descriptor, group)
            scales = (int(scale_a(warp)[lane]), int(scale_b(warp)[lane])) if scale_a and scale_b else None
            operands = MatrixDescriptor.decode(int(a(warp)[lane])), MatrixDescriptor.decode(int(b(warp)[lane]))
            accumulate = bool(enable(warp)[lane])
            members = _members(warp.cta, group)
            columns = slice(target, target + descriptor.n)
            for cta in members:
                cta.tensor_memory.announce(columns, 1)

            def run(members=members, target=target, operands=operands, descriptor=descriptor, scales=scales,
                    accumulate=accumulate, columns=columns):  # fmt: skip
                for cta in members:
                    cta.tensor_memory.announce(columns, -1)
                done = multiply(members, target, operands[0], operands[1], descriptor, scales, accumulate)
                warp.cta.launch.statistics.engine_operations["multiply_adds"] += done

            _issue(warp, group, run, "mma")

    return execute


@instruction("tcgen05.commit")
def build_commit(decoder: Decoder) -> Execute:
    """An arrival on an mbarrier once all earlier operations of this CTA (pair) are done."""
    group = _group(decoder)
    decoder.expect("mbarrier::arrive::one", "b64")
    decoder.one_of("shared::cluster", "shared::cta", default="")
    multicast = decoder.flag("multicast::cluster")
    decoder.arity(2 if multicast else 1)
    address = decoder.address(0)
    destinations = decoder.read(1, "u16") if multicast else None

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            where = int(address(warp)[lane])
            cluster = warp.cta.cluster
            cta, offset = cluster.locate(where)
            ranks = [cta.rank]
            if destinations is not None:
                bits = int(destinations(warp)[lane])
                ranks = [rank for rank in range(16) if bits >> rank & 1]
                if ranks and ranks[-1] >= len(cluster.ctas):
                    raise HazardError(f"commit to ranks {ranks} of {len(cluster.ctas)} CTAs")
            targets = [cluster.ctas[rank].shared_address(offset) for rank in ranks]

            def arrive(cluster=cluster, targets=targets):
                for target in targets:
                    cluster.memory_barrier(target).arrive()

            _issue(warp, group, arrive, "commit")

    return execute


@instruction("tcgen05.ld", "tcgen05.st")
def build_transfer(decoder: Decoder) -> Execute:
    """Shape 32x32b: lane l of the warp has lane l of its quarter of tensor memory, register j column j."""
    loads = decoder.instruction.opcode[1] == "ld"
    decoder.expect("sync", "aligned", "32x32b", "b32")
    count = int(decoder.one_of(*(f"x{1 << n}" for n in range(8)))[1:])
    decoder.arity(2)
    address = decoder.read_address_register(1 if loads else 0)
    items = decoder.vector(0 if loads else 1)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} registers for x{count}")
    writes = [decoder.write(item) for item in items] if loads else []
    reads = [] if loads else [decoder.read(item, "b32") for item in items]
    name = f"tcgen05.{'ld' if loads else 'st'}"

    def execute(warp: Warp, mask: Mask) -> None:
        _whole_warp(mask, name)
        where = uniform(address(warp), mask, "tensor-memory address")
        lane, column = where >> 16, where & 0xFFFF
        if lane != warp.index % 4 * LANES:
            raise HazardError(
                f"{name} at lane {lane} by warp {warp.index}: it may reach lanes from {warp.index % 4 * LANES}"
            )
        memory, lanes, columns = warp.cta.tensor_memory, slice(lane, lane + LANES), slice(column, column + count)
        memory.check_settled(columns, name)
        warp.cta.launch.statistics.engine_bytes[name] += 4 * LANES * count
        if loads:
            values = memory.read(lanes, columns)
            for index, write in enumerate(writes):
                write(warp, np.ascontiguousarray(values[:, index]), None)
        else:
            memory.write(lanes, columns, np.stack([read(warp) for read in reads], axis=1))

    return execute


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def build_wait(decoder: Decoder) -> Execute:
    """Loads and stores of tensor memory are complete at once here."""
    decoder.expect("sync", "aligned")
    decoder.arity(0)
    return lambda warp, mask: None


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def build_fence(decoder: Decoder) -> Execute:
    """Order is kept by construction; a missing fence is not found yet."""
    decoder.arity(0)
    return lambda warp, mask: None
