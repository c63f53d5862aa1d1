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
from tests.sm100.emulator.mma import check_shape, multiply
from tests.sm100.emulator.mma_descriptors import KINDS, InstructionDescriptor, MatrixDescriptor
from tests.sm100.emulator.ptx import Memory, Vector
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.tensor_layouts import (
    COPY_SHAPES,
    MULTICASTS,
    TRANSFER_SHAPES,
    Accumulator,
    copy_lanes,
    transfer_cells,
)
from tests.sm100.emulator.tensor_memory import BOTH_HALVES, HALF_LANES, POISON
from tests.sm100.emulator.warp import Blocked, Mask, Warp, active

LOW = np.uint32(0xFFFF)


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
    warp.cta.cluster.engines.issue("tensor", (id(warp.cta.cluster), leader.rank), [action])


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
        warp.cta.tensor_memory.release(int(address(warp)[0]), uniform(count(warp), mask, "column count"), warp.actor)
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
    """Rows from shared memory into columns of tensor memory, some shapes into several groups of lanes."""
    group = _group(decoder)
    shape = decoder.one_of(*COPY_SHAPES)
    multicast = decoder.one_of(*MULTICASTS[shape]) if shape in MULTICASTS else ""
    rows, row_bytes = COPY_SHAPES[shape]
    lanes = copy_lanes(shape, multicast)
    decoder.arity(2)
    address, descriptor = decoder.read_address_register(0), decoder.read(1, "u64")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            target = int(address(warp)[lane])
            first, column = target >> 16, target & 0xFFFF
            if first and (shape != "4x256b" or first >= LANES):
                raise UnsupportedError(f"tcgen05.cp.{shape} to lane {first}")
            source = MatrixDescriptor.decode(int(descriptor(warp)[lane]))
            columns = slice(column, column + row_bytes // 4)
            members = _members(warp.cta, group)
            for cta in members:
                cta.tensor_memory.announce(BOTH_HALVES, columns, 1)
            actor = warp.actor.issue_tensor(int(lane))
            timing = warp.cta.cluster.timing
            if timing is not None:
                state = timing.warp(warp.cta.rank, warp.index)
                timing.copy(members[0].rank, state, warp.actor.clock.time, rows * row_bytes)

            def copy(members=members, source=source, columns=columns, first=first, actor=actor):
                for cta in members:
                    cta.tensor_memory.announce(BOTH_HALVES, columns, -1)
                    raw = cta.shared.gather(source.offsets(rows, row_bytes), actor)
                    cells = np.ascontiguousarray(raw).view(np.uint32)
                    where = np.arange(columns.start, columns.stop)[None, None]
                    cta.tensor_memory.write(first + lanes[:, :, None], where, cells[:, None], actor)
                    warp.cta.launch.statistics.engine_bytes["tensor_copy"] += cells.nbytes

            _issue(warp, group, copy, "tensor_copy")

    return execute


def _block(decoder: Decoder, kind: str) -> int:
    """The block size that the instruction names, by itself or by the scales of a row; 0 for none."""
    blocks = KINDS[kind].scales
    names = {name: block for block in blocks for name in (f"block{block}", f"scale_vec::{KINDS[kind].depth // block}X")}
    default = "" if KINDS[kind].block else None
    return names.get(decoder.one_of(*names, default=default), 0)


@instruction("tcgen05.mma")
def build_mma(decoder: Decoder) -> Execute:
    group = _group(decoder)
    kind = decoder.one_of(*(f"kind::{name}" for name in KINDS)).removeprefix("kind::")
    scaled, block = bool(KINDS[kind].scales), 0
    if scaled:
        decoder.expect("block_scale")
        block = _block(decoder, kind)
    # How long the hardware may keep operand A in its collector: no effect on results.
    for hint in ("fill", "use", "lastuse", "discard"):
        decoder.flag(f"collector::a::{hint}")
    a_in_tensor_memory = isinstance(decoder.operands[1], Memory)
    if a_in_tensor_memory and scaled:
        raise UnsupportedError("operand A in tensor memory with scales")
    if not scaled and len(decoder.operands) == 6 and isinstance(decoder.operands[4], Vector):
        lane_masks = [decoder.read(item, "u32") for item in decoder.vector(4)]
        del decoder.operands[4]
    else:
        lane_masks = []
    decoder.arity(7 if scaled else 5)
    accumulator = decoder.read_address_register(0)
    a = decoder.read_address_register(1) if a_in_tensor_memory else decoder.read(1, "u64")
    b, shape = decoder.read(2, "u64"), decoder.read(3, "u32")
    scale_a = decoder.read_address_register(4) if scaled else None
    scale_b = decoder.read_address_register(5) if scaled else None
    enable = decoder.read(6 if scaled else 4, "pred")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            if any(lane_mask(warp)[lane] for lane_mask in lane_masks):
                raise UnsupportedError("disabled output lanes")
            target = int(accumulator(warp)[lane])
            descriptor = InstructionDescriptor.decode(int(shape(warp)[lane]), kind, block)
            check_shape(descriptor, group)
            scales = (int(scale_a(warp)[lane]), int(scale_b(warp)[lane])) if scale_a and scale_b else None
            left, right = int(a(warp)[lane]), MatrixDescriptor.decode(int(b(warp)[lane]))
            operands = left if a_in_tensor_memory else MatrixDescriptor.decode(left), right
            accumulate = bool(enable(warp)[lane])
            members = _members(warp.cta, group)
            cells = Accumulator.at(target, descriptor.m, descriptor.n, group)
            for cta in members:
                cta.tensor_memory.announce(cells.halves, cells.span, 1)
            actor = warp.actor.issue_tensor(int(lane))
            timing = warp.cta.cluster.timing
            if timing is not None:
                state = timing.warp(warp.cta.rank, warp.index)
                time = warp.actor.clock.time
                timing.multiply(members[0].rank, state, time, descriptor.m, descriptor.n, group, descriptor.depth)

            def run(members=members, target=target, operands=operands, descriptor=descriptor, scales=scales,
                    accumulate=accumulate, cells=cells, actor=actor):  # fmt: skip
                for cta in members:
                    cta.tensor_memory.announce(cells.halves, cells.span, -1)
                done = multiply(members, target, operands[0], operands[1], descriptor, scales, accumulate, actor)
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

            for target in targets:
                cluster.memory_barrier(target, warp.actor, asynchronous=True)
            known = warp.actor.commit_tensor(int(lane))
            if cluster.timing is not None:
                places = [(target.rank, offset) for target, offset in map(cluster.locate, targets)]
                leader = _members(warp.cta, group)[0].rank
                known.near.time = cluster.timing.commit(leader, warp.actor.clock.time, places)

            def arrive(cluster=cluster, targets=targets, known=known):
                for target in targets:
                    cluster.memory_barrier(target, warp.actor).arrive(known)

            _issue(warp, group, arrive, "commit")

    return execute


@instruction("tcgen05.ld", "tcgen05.st")
def build_transfer(decoder: Decoder) -> Execute:
    """Between a warp's registers and its quarter of tensor memory."""
    loads = decoder.instruction.opcode[1] == "ld"
    name = f"tcgen05.{'ld' if loads else 'st'}"
    decoder.expect("sync", "aligned", "b32")
    shape_name = decoder.one_of(*TRANSFER_SHAPES)
    shape = TRANSFER_SHAPES[shape_name]
    count = int(decoder.one_of(*(f"x{1 << n}" for n in range(8)))[1:])
    packed = decoder.flag("pack::16b" if loads else "unpack::16b")
    halves = shape_name == "16x32bx2"
    decoder.arity(3 if halves else 2)
    split = decoder.literal(2 if loads else 1) if halves else 0
    address = decoder.read_address_register(1 if loads else 0)
    items = decoder.vector(0 if loads else 2 if halves else 1)
    if len(items) != count * shape.registers or count > shape.largest:
        raise UnsupportedError(f"{len(items)} registers for {shape_name}.x{count}")
    writes = [decoder.write(item) for item in items] if loads else []
    reads = [] if loads else [decoder.read(item, "b32") for item in items]
    lanes, columns = transfer_cells(shape_name, count, 2 if packed else 1, split)

    def execute(warp: Warp, mask: Mask) -> None:
        _whole_warp(mask, name)
        where = uniform(address(warp), mask, "tensor-memory address")
        lane, column = where >> 16, where & 0xFFFF
        allowed = range(warp.index % 4 * LANES, warp.index % 4 * LANES + LANES, shape.lanes)
        if lane not in allowed:
            raise HazardError(f"{name} at lane {lane} by warp {warp.index}: it may reach lanes from {allowed.start}")
        memory, rows, places = warp.cta.tensor_memory, lane + lanes, column + columns
        first = lane % LANES // HALF_LANES
        span = slice(column, column + int(columns.max()) + packed + 1)
        memory.check_settled(slice(first, first + shape.lanes // HALF_LANES), span, name)
        warp.cta.launch.statistics.engine_bytes[name] += 4 * LANES * len(items)
        actor = warp.actor.transfer("ld" if loads else "st")
        if loads:
            values = memory.read(rows, places, actor)
            if packed:
                values = values & LOW | memory.read(rows, places + 1, actor) << np.uint32(16)
            for index, write in enumerate(writes):
                write(warp, np.ascontiguousarray(values[:, index]), None)
            return
        values = np.stack([read(warp) for read in reads], axis=1)
        if packed:
            # What the high halves become is not stated: a NaN for whoever reads them.
            memory.write(rows, places + 1, values >> np.uint32(16) | np.uint32(POISON & ~0xFFFF), actor)
            values = values & LOW | np.uint32(POISON & ~0xFFFF)
        memory.write(rows, places, values, actor)

    return execute


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def build_wait(decoder: Decoder) -> Execute:
    """Values move at once here; what is kept track of is what the program may count on."""
    kind = decoder.instruction.opcode[1].removeprefix("wait::")
    decoder.expect("sync", "aligned")
    decoder.arity(0)
    return lambda warp, mask: warp.actor.wait_transfers(kind)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def build_fence(decoder: Decoder) -> Execute:
    """Orders tcgen05 operations across a synchronisation of threads."""
    before = decoder.instruction.opcode[1] == "fence::before_thread_sync"
    decoder.arity(0)
    return lambda warp, mask: warp.actor.fence_tensor(before)
