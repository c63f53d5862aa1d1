"""Asynchronous copies: TMA tensor copies, bulk copies, cp.async of a thread, and their groups.

A load into shared memory is one step (bytes arrive, then the mbarrier's transaction count falls). A store is two:
the source is read (``wait_group.read`` waits for this), then global memory is written.
"""

from __future__ import annotations

import re

import numpy as np

from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.cluster import Cluster, Cta
from tests.sm100.emulator.decoder import Decoder, Execute, Reader, instruction
from tests.sm100.emulator.errors import HazardError, MemoryFaultError, UnsupportedError
from tests.sm100.emulator.handover import Message
from tests.sm100.emulator.instructions.reductions import OPERATIONS, Update, reduction
from tests.sm100.emulator.instructions.tensor_maps import read_map
from tests.sm100.emulator.memory import OFFSET_MASK, PARAMETER_WINDOW, RANK_SHIFT, SHARED_BASE, SHARED_WINDOW
from tests.sm100.emulator.ordering_clock import Clock
from tests.sm100.emulator.ptx import TensorAddress
from tests.sm100.emulator.swizzle import swizzle
from tests.sm100.emulator.tensor_map import TensorMap
from tests.sm100.emulator.warp import Blocked, BulkGroup, Mask, Warp, active

TMA_ALIGNMENT = 128
COPY_REDUCTIONS = tuple(name for name in OPERATIONS if name != "exch")


def _groups(warp: Warp, lane: int, bulk: bool) -> tuple[BulkGroup, list[BulkGroup]]:
    table = warp.bulk_groups if bulk else warp.copy_groups
    return table.setdefault(lane, (BulkGroup(), []))


def tensor_operands(decoder: Decoder, index: int) -> tuple[Reader, list[Reader]]:
    found = decoder.operands[index]
    if not isinstance(found, TensorAddress):
        raise UnsupportedError(f"operand {found} as a tensor address")
    rank = int(decoder.one_of("1d", "2d", "3d", "4d", "5d")[0])
    if rank != len(found.coordinates):
        raise UnsupportedError(f"{len(found.coordinates)} coordinates in a {rank}d copy")
    return decoder.read(found.base, "u64"), [decoder.read(item, "s32") for item in found.coordinates]


def begin_with_map(warp: Warp, address: int) -> TensorMap:
    """The map for a copy that begins: in the parameter block or in global memory."""
    if SHARED_WINDOW <= address < PARAMETER_WINDOW:
        raise MemoryFaultError(f"tensor map at {address:#x}: copies take no map from shared memory")
    found = TensorMap.decode(read_map(warp, "", address))
    warp.cta.launch.map_order.begin(warp.cta.index, address)
    return found


def _check_aligned(offset: int) -> None:
    if offset % TMA_ALIGNMENT:
        raise MemoryFaultError(f"tensor copy at shared offset {offset}: expected a multiple of {TMA_ALIGNMENT}")


def _offsets(box: TensorMap, offset: int) -> np.ndarray:
    # Swizzles act on addresses; offsets count from SHARED_BASE's alignment, so they agree with hardware's.
    assert SHARED_BASE % 1024 == 0
    return swizzle(offset + np.arange(box.box_bytes), box.swizzle)


@instruction("cp.async.bulk.tensor")
def build_tensor_copy(decoder: Decoder) -> Execute:
    decoder.one_of("tile", default="")
    if decoder.flag("bulk_group"):
        return _tensor_store(decoder)
    return _tensor_load(decoder)


def _barrier_addresses(cluster: Cluster, targets: list[Cta], barrier: int, multicast: bool, pair: bool) -> list[int]:
    """The mbarrier that each target's bytes are reported to.

    Multicast: the same offset in each target; with cta_group::2 in the CTA of the target's pair that has the parity
    of the barrier given, so that the pair's leader may collect both.
    """
    if not multicast:
        return [barrier]
    owner, offset = cluster.locate(barrier)
    ranks = [(cta.rank & ~1 | owner.rank & 1) if pair else cta.rank for cta in targets]
    return [cluster.ctas[rank].shared_address(offset) for rank in ranks]


def _time_load(warp: Warp, nbytes: int, reports: list[int], writers: list[Actor]) -> None:
    """Give the operations of a load the time of its end."""
    cluster = warp.cta.cluster
    assert cluster.timing is not None
    places = [(cta.rank, offset) for cta, offset in map(cluster.locate, reports)]
    phases = [(place, cluster.memory_barriers[place].completed) for place in places]
    end = cluster.timing.load(warp.cta.rank, warp.actor.clock.time, nbytes, len(writers), phases)
    for writer in writers:
        writer.clock.time = end


def _time_store(warp: Warp, nbytes: int, reader: Actor) -> None:
    """Give a store the time at which its source has been read."""
    timing = warp.cta.cluster.timing
    if timing is not None:
        reader.clock.time = timing.store(warp.cta.rank, warp.actor.clock.time, nbytes)


def _tensor_load(decoder: Decoder) -> Execute:
    parts = decoder.modifiers
    # The source and destination spaces may be spelled alike, so they are taken by place.
    places = [p for p in parts if p in ("shared::cta", "shared::cluster", "global")]
    if len(places) != 2 or places[1] != "global":
        raise UnsupportedError(f"tensor copy {places}")
    decoder.expect(*places)
    decoder.expect("mbarrier::complete_tx::bytes")
    multicast = decoder.flag("multicast::cluster")
    pair = decoder.one_of("cta_group::1", "cta_group::2", default="") == "cta_group::2"
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 + multicast + hint)
    destination, barrier = decoder.address(0), decoder.address(2)
    map_address, coordinates = tensor_operands(decoder, 1)
    receivers = decoder.read(3, "u16") if multicast else None

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            where = int(map_address(warp)[lane])
            box = begin_with_map(warp, where)
            corner = tuple(int(read(warp)[lane]) for read in coordinates)
            cluster = warp.cta.cluster
            owner, offset = cluster.locate(int(destination(warp)[lane]))
            _check_aligned(offset)
            targets = [owner]
            if receivers is not None:
                bits = int(receivers(warp)[lane])
                if bits >> len(cluster.ctas) or not bits:
                    raise HazardError(f"multicast to CTAs {bits:#x} of {len(cluster.ctas)}")
                targets = [cta for cta in cluster.ctas if bits >> cta.rank & 1]
            reports = _barrier_addresses(cluster, targets, int(barrier(warp)[lane]), multicast, pair)
            for report in reports:
                cluster.memory_barrier(report, warp.actor, asynchronous=True)
            rows = list(box.rows(corner))
            writers = [warp.actor.issue(int(lane)) for _ in targets]
            if cluster.timing is not None:
                _time_load(warp, sum(row.size for row in rows), reports, writers)

            def arrive(warp=warp, where=where, box=box, rows=rows, cluster=cluster, targets=targets, reports=reports,
                       offset=offset, writers=writers):  # fmt: skip
                warp.cta.launch.map_order.end(where)
                data = np.zeros(box.box_bytes, np.uint8)  # outside the tensor: zeros
                for row in rows:
                    source = warp.cta.launch.memory.view(row.address, row.size, write=False)
                    data[row.box_offset : row.box_offset + row.size] = source
                statistics = warp.cta.launch.statistics
                statistics.engine_bytes["tma_load"] += sum(row.size for row in rows)
                for cta, report, writer in zip(targets, reports, writers, strict=True):
                    cta.shared.scatter(_offsets(box, offset), data, writer)
                    statistics.engine_bytes["tma_load_shared"] += box.box_bytes
                    message = Message.to_all(warp.cta.rank, writer.clock)
                    cluster.memory_barrier(report, writer).complete(box.box_bytes, message)

            warp.cta.launch.statistics.engine_operations["tma_load"] += 1
            warp.cta.cluster.engines.issue("tma_load", None, [arrive])

    return execute


@instruction("cp.reduce.async.bulk.tensor")
def build_tensor_reduction(decoder: Decoder) -> Execute:
    """As a store, but what is there is combined with what comes."""
    decoder.one_of("tile", default="")
    decoder.expect("bulk_group")
    return _tensor_store(decoder, decoder.one_of(*COPY_REDUCTIONS))


def _tensor_store(decoder: Decoder, operation: str = "") -> Execute:
    decoder.expect("global", "shared::cta")
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 if hint else 2)
    map_address, coordinates = tensor_operands(decoder, 0)
    source = decoder.address(1)

    def execute(warp: Warp, mask: Mask) -> None:
        issued: dict[tuple[int, ...], list[int]] = {}
        for lane in active(mask):
            values = tuple(int(read(warp)[lane]) for read in (map_address, source, *coordinates))
            # Storing the same bytes again changes nothing: one store serves all lanes that ask for the same.
            number = int(lane) if operation else 0
            issued.setdefault((number, *values), []).append(int(lane))
        for (_, where, origin, *corner), lanes in issued.items():
            _store_box(warp, where, origin, tuple(corner), lanes, operation)

    return execute


def _store_box(warp: Warp, where: int, origin: int, corner: tuple[int, ...], lanes: list[int], operation: str) -> None:
    """Issue a store of lanes, or a reduction if an operation is given."""
    box = begin_with_map(warp, where)
    combine = reduction(operation, box.element, flushes=False) if operation else None
    cta, offset = warp.cta.cluster.locate(origin)
    _check_aligned(offset)
    rows = list(box.rows(corner, store=True))
    reader = warp.actor.issue(lanes[0])
    _time_store(warp, sum(row.size for row in rows), reader)
    groups = [_groups(warp, lane, bulk=True)[0] for lane in lanes]
    for group in groups:
        group.add(reader.clock)
    held: list[np.ndarray] = []

    def read() -> None:
        warp.cta.launch.map_order.end(where)
        # Only what lies inside the tensor is read: the rest of the box need not have been written.
        places = _offsets(box, offset)
        held.extend(cta.shared.gather(places[row.box_offset : row.box_offset + row.size], reader) for row in rows)
        for group in groups:
            group.unread -= 1

    def write() -> None:
        for row, data in zip(rows, held, strict=True):
            target = warp.cta.launch.memory.view(row.address, row.size, write=True)
            target[:] = data if combine is None else combine(target.copy(), np.ascontiguousarray(data))
            warp.cta.launch.statistics.engine_bytes["tma_store"] += row.size
        for group in groups:
            group.unfinished -= 1

    warp.cta.launch.statistics.engine_operations["tma_store"] += 1
    warp.cta.cluster.engines.issue("tma_store", None, [read, write])


def _commit(decoder: Decoder, bulk: bool) -> Execute:
    decoder.arity(0)

    def execute(warp: Warp, mask: Mask) -> None:
        table = warp.bulk_groups if bulk else warp.copy_groups
        for lane in active(mask):
            group, committed = _groups(warp, int(lane), bulk)
            table[int(lane)] = BulkGroup(), [*committed, group]

    return execute


def _wait(decoder: Decoder, bulk: bool, keep: int, reading: bool) -> Execute:
    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        learnt: dict[int, Clock] = {}  # lanes often share a copy
        done: list[tuple[list[BulkGroup], int]] = []
        for lane in active(mask):
            committed = _groups(warp, int(lane), bulk)[1]
            older = committed[: len(committed) - keep] if keep < len(committed) else []
            left = sum(group.unread if reading else group.unfinished for group in older)
            if left:
                return Blocked(f"{left} copies of lane {lane} to {'read their source' if reading else 'finish'}")
            learnt |= {id(known): known for group in older for known in group.known}
            if not any(group.unfinished for group in older):
                done.append((committed, len(older)))
        for committed, count in done:
            del committed[:count]
        for known in learnt.values():
            warp.actor.learn(known)
        return None

    return execute


@instruction("cp.async.bulk.commit_group")
def build_bulk_commit(decoder: Decoder) -> Execute:
    return _commit(decoder, bulk=True)


@instruction("cp.async.bulk.wait_group")
def build_bulk_wait(decoder: Decoder) -> Execute:
    decoder.arity(1)
    return _wait(decoder, bulk=True, keep=decoder.literal(0), reading=decoder.flag("read"))


@instruction("cp.async.commit_group")
def build_commit(decoder: Decoder) -> Execute:
    return _commit(decoder, bulk=False)


@instruction("cp.async.wait_group")
def build_wait(decoder: Decoder) -> Execute:
    decoder.arity(1)
    return _wait(decoder, bulk=False, keep=decoder.literal(0), reading=False)


@instruction("cp.async.wait_all")
def build_wait_all(decoder: Decoder) -> Execute:
    """Commit, then wait for everything."""
    commit, wait = _commit(decoder, bulk=False), _wait(decoder, bulk=False, keep=0, reading=False)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if any(_groups(warp, int(lane), bulk=False)[0].known for lane in active(mask)):
            commit(warp, mask)
        return wait(warp, mask)

    return execute


@instruction("cp.async.ca", "cp.async.cg")
def build_element_copy(decoder: Decoder) -> Execute:
    """4, 8 or 16 bytes per lane; bytes beyond the optional source size are zero."""
    decoder.one_of("shared", "shared::cta")
    decoder.expect("global")
    hint = decoder.flag("L2::cache_hint")
    for name in [part for part in decoder.modifiers if re.match(r"L2::(64|128|256)B$", part)]:
        decoder.flag(name)
    decoder.arity(*((4, 5) if hint else (3, 4)))
    size = decoder.literal(2)
    if size not in ((16,) if decoder.instruction.opcode[2] == "cg" else (4, 8, 16)):
        raise UnsupportedError(f"cp.async of {size} B")
    destination, source = decoder.address(0), decoder.address(1)
    valid = decoder.read(3, "u32") if len(decoder.operands) - hint == 4 else None

    def execute(warp: Warp, mask: Mask) -> None:
        lanes = active(mask)
        writer = warp.actor.issue(generic=True)
        warp.copies.join(writer.clock)
        targets, addresses = destination(warp)[lanes], source(warp)[lanes]
        counts = np.full(len(lanes), size) if valid is None else valid(warp)[lanes].astype(np.int64)
        wrong = (targets | addresses) & np.uint64(size - 1)
        if np.count_nonzero(wrong):
            first = int(np.argmax(wrong != 0))
            raise MemoryFaultError(
                f"cp.async of {size} B from {int(addresses[first]):#x} to {int(targets[first]):#x}: misaligned"
            )
        if np.count_nonzero(counts > size):
            raise HazardError(f"cp.async of {int(counts.max())} B where at most {size} fit")
        groups = [_groups(warp, lane, bulk=False)[0] for lane in lanes.tolist()]
        for group in groups:
            group.add(writer.clock)
        warp.loose_copies.update(lanes.tolist())

        if warp.cta.launch.global_order is not None:
            for nbytes in np.unique(counts[counts > 0]).tolist():
                warp.cta.launch.global_order.load(warp, addresses[counts == nbytes], nbytes)

        def copy() -> None:
            launch, cluster = warp.cta.launch, warp.cta.cluster
            data = np.zeros((len(targets), size), np.uint8)
            for nbytes in np.unique(counts[counts > 0]).tolist():
                data[counts == nbytes, :nbytes] = launch.memory.gather(addresses[counts == nbytes], nbytes)
            ranks = targets >> np.uint64(RANK_SHIFT)
            for rank in np.unique(ranks):
                there = ranks == rank
                cta, _ = cluster.locate(int(targets[there][0]))
                offsets = (targets[there] & np.uint64(OFFSET_MASK)).astype(np.int64)[:, None] + np.arange(size)
                cta.shared.scatter(offsets, data[there], writer)
            launch.statistics.engine_bytes["cp_async"] += int(counts.sum())
            for group in groups:
                group.unread -= 1
                group.unfinished -= 1

        warp.cta.launch.statistics.engine_operations["cp_async"] += len(lanes)
        warp.cta.cluster.engines.issue("cp_async", (id(warp), "copies"), [copy])

    return execute


@instruction("cp.async.mbarrier.arrive")
def build_copy_arrive(decoder: Decoder) -> Execute:
    """An arrival for each lane once its earlier cp.async copies are done; without noinc it is one more to come."""
    more = not decoder.flag("noinc")
    decoder.one_of("shared", "shared::cta")
    decoder.expect("b64")
    decoder.arity(1)
    address = decoder.address(0)

    def execute(warp: Warp, mask: Mask) -> None:
        targets = [int(address(warp)[lane]) for lane in active(mask)]
        known = Message.to_all(warp.cta.rank, warp.copies.copy())
        for lane in active(mask).tolist():
            warp.loose_copies.pop(lane, None)
        for target in targets if more else ():
            warp.cta.cluster.memory_barrier(target, warp.actor).raise_pending()

        def arrive(cluster=warp.cta.cluster, targets=targets, known=known):
            for target in targets:
                cluster.memory_barrier(target, warp.actor).arrive(known)

        # Same queue as the copies, so that it comes after them.
        warp.cta.cluster.engines.issue("cp_async", (id(warp), "copies"), [arrive])

    return execute


@instruction("cp.async.bulk")
def build_bulk_copy(decoder: Decoder) -> Execute:
    """Contiguous bytes from global or shared to shared memory (mbarrier), or from there to global (bulk group)."""
    store = decoder.flag("bulk_group")
    if not store:
        decoder.expect("mbarrier::complete_tx::bytes")
    places = [p for p in decoder.modifiers if p in ("shared::cta", "shared::cluster", "global")]
    between = places == ["shared::cluster", "shared::cta"] and not store
    if (places != ["global", "shared::cta"]) if store else (len(places) != 2 or places[1] != "global") and not between:
        raise UnsupportedError(f"bulk copy {places}")
    decoder.expect(*places)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity((3 if store else 4) + hint)
    destination, source, size = decoder.address(0), decoder.address(1), decoder.read(2, "u32")
    barrier = None if store else decoder.address(3)

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            target, origin, nbytes = (int(read(warp)[lane]) for read in (destination, source, size))
            _check_bulk(target, origin, nbytes)
            if barrier is None:
                _bulk_store(warp, int(lane), target, origin, nbytes, None)
                continue
            launch, cluster = warp.cta.launch, warp.cta.cluster
            launch.statistics.engine_operations["tma_load"] += 1
            launch.statistics.engine_bytes["tma_load"] += nbytes
            report = int(barrier(warp)[lane])
            actor = warp.actor.issue(int(lane))
            if cluster.timing is not None:
                _time_load(warp, nbytes, [report], [actor])

            def arrive(launch=launch, cluster=cluster, launch_rank=warp.cta.rank, target=target, origin=origin,
                       nbytes=nbytes, report=report, actor=actor):  # fmt: skip
                if between:
                    cta, offset = cluster.locate(origin)
                    data = cta.shared.read(offset, nbytes, actor)
                else:
                    data = launch.memory.view(origin, nbytes, write=False)
                cta, offset = cluster.locate(target)
                cta.shared.write(offset, data, actor)
                message = Message.to_all(launch_rank, actor.clock)
                cluster.memory_barrier(report, actor).complete(nbytes, message)

            cluster.engines.issue("tma_load", None, [arrive])

    return execute


@instruction("cp.reduce.async.bulk")
def build_bulk_reduction(decoder: Decoder) -> Execute:
    """Contiguous bytes of shared memory combined with those in global memory (bulk group)."""
    places = [p for p in decoder.modifiers if p in ("shared::cta", "shared::cluster", "global")]
    if places != ["global", "shared::cta"]:
        raise UnsupportedError(f"bulk reduction {places}")
    decoder.expect(*places, "bulk_group")
    type_name = decoder.one_of("f16", "bf16", default="") or decoder.type()
    operation = decoder.one_of(*COPY_REDUCTIONS)
    if operation == "add" and type_name in ("f16", "bf16"):
        decoder.expect("noftz")
    combine = reduction(operation, type_name, flushes=False)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 + hint)
    destination, source, size = decoder.address(0), decoder.address(1), decoder.read(2, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            target, origin, nbytes = (int(read(warp)[lane]) for read in (destination, source, size))
            _check_bulk(target, origin, nbytes)
            _bulk_store(warp, int(lane), target, origin, nbytes, combine)

    return execute


def _check_bulk(target: int, origin: int, nbytes: int) -> None:
    if target % 16 or origin % 16 or nbytes % 16:
        raise MemoryFaultError(f"bulk copy of {nbytes} B from {origin:#x} to {target:#x}: expected multiples of 16")


def _bulk_store(warp: Warp, lane: int, target: int, origin: int, nbytes: int, combine: Update | None) -> None:
    """Issue a store of contiguous bytes, or a reduction."""
    launch, cluster = warp.cta.launch, warp.cta.cluster
    launch.statistics.engine_operations["tma_store"] += 1
    launch.statistics.engine_bytes["tma_store"] += nbytes
    cta, offset = cluster.locate(origin)
    group = _groups(warp, lane, bulk=True)[0]
    actor = warp.actor.issue(lane)
    _time_store(warp, nbytes, actor)
    group.add(actor.clock)
    held: list[np.ndarray] = []

    def read() -> None:
        held.append(cta.shared.read(offset, nbytes, actor).copy())
        group.unread -= 1

    def write() -> None:
        there = launch.memory.view(target, nbytes, write=True)
        there[:] = held[0] if combine is None else combine(there.copy(), held[0])
        group.unfinished -= 1

    cluster.engines.issue("tma_store", None, [read, write])
