"""Named barriers (bar, barrier) and mbarrier objects."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.barriers import STATE_PENDING_BITS, MemoryBarrier
from tests.sm100.emulator.cluster import BARRIER_BYTES
from tests.sm100.emulator.decoder import Decoder, Execute, Reader, instruction
from tests.sm100.emulator.errors import HazardError, MemoryFaultError
from tests.sm100.emulator.handover import Message
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Blocked, Mask, Warp, active, leader


def uniform(values: np.ndarray, mask: Mask, what: str) -> int:
    """The one value that all executing lanes hold."""
    found = values[active(mask)]
    if (found != found[0]).any():
        raise HazardError(f"{what} differs between lanes")
    return int(found[0])


@instruction("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive", "bar.cta.sync", "barrier.cta.sync",
             "bar.cta.arrive", "barrier.cta.arrive")  # fmt: skip
def build_named_barrier(decoder: Decoder) -> Execute:
    """Whole warps only: lanes that have exited count as arrived."""
    arrive_only = "arrive" in decoder.instruction.opcode
    decoder.flag("aligned")
    decoder.arity(*((2,) if arrive_only else (1, 2)))
    number = decoder.read(0, "u32")
    threads = decoder.read(1, "u32") if len(decoder.operands) == 2 else None
    key = " ".join(decoder.instruction.opcode)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        executing = np.ones(LANES, bool) if mask is None else mask
        away = warp.present & ~executing
        if away.any():
            return Blocked(f"lanes {np.flatnonzero(away).tolist()} to come to the named barrier")
        which = uniform(number(warp), mask, "barrier number")
        barrier = warp.cta.named_barriers.get(which)
        if key in {name for _, name in warp.arrived} and (which, key) not in warp.arrived:
            raise HazardError("a warp waits at two named barriers")
        generation = warp.arrived.get((which, key))
        if generation is None:
            expected = -(-warp.cta.threads // LANES) * LANES
            if threads is not None:
                expected = uniform(threads(warp), mask, "thread count")
            generation = barrier.arrive(LANES, expected, warp.actor.release())
            warp.cta.launch.events += 1
            if arrive_only:
                return None
        if barrier.generation == generation:
            warp.arrived[which, key] = generation
            return Blocked(f"named barrier {which}: {barrier.arrived} of {barrier.expected} threads arrived")
        warp.arrived.pop((which, key), None)
        warp.actor.acquire(barrier.handover.released)
        warp.actor.synchronise_lanes(executing)
        return None

    return execute


def _space(decoder: Decoder) -> str:
    return decoder.one_of("shared", "shared::cta", "shared::cluster")


@instruction("mbarrier.init")
def build_init(decoder: Decoder) -> Execute:
    _space(decoder)
    decoder.expect("b64")
    decoder.arity(2)
    address, count = decoder.address(0), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            where = int(address(warp)[lane])
            cta, offset = warp.cta.cluster.locate(where)
            if offset % BARRIER_BYTES:
                raise MemoryFaultError(f"mbarrier at {where:#x}: expected a multiple of {BARRIER_BYTES}")
            cta.shared.write(offset, np.zeros(BARRIER_BYTES, np.uint8), warp.actor)
            barrier = MemoryBarrier.create(int(count(warp)[lane]), warp.actor.epoch())
            warp.cta.cluster.memory_barriers[cta.rank, offset] = barrier
            warp.cta.launch.events += 1

    return execute


@instruction("mbarrier.inval")
def build_inval(decoder: Decoder) -> Execute:
    _space(decoder)
    decoder.expect("b64")
    decoder.arity(1)
    address = decoder.address(0)

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            cta, offset = warp.cta.cluster.locate(int(address(warp)[lane]))
            if warp.cta.cluster.memory_barriers.pop((cta.rank, offset), None) is None:
                raise HazardError(f"mbarrier.inval at offset {offset}: no mbarrier")
            cta.shared.write(offset, np.zeros(BARRIER_BYTES, np.uint8), warp.actor)

    return execute


def _order_and_scope(decoder: Decoder) -> tuple[bool, str]:
    """Take order and scope: whether it is relaxed, and the scope, "" for none."""
    relaxed = decoder.one_of("release", "relaxed", "acquire", default="") == "relaxed"
    return relaxed, decoder.one_of("cta", "cluster", default="")


@instruction("mbarrier.arrive")
def build_arrive(decoder: Decoder) -> Execute:
    """arrive and arrive.expect_tx; the state returned is that before the arrival."""
    expect = decoder.flag("expect_tx")
    relaxed, scope = _order_and_scope(decoder)
    _space(decoder)
    decoder.expect("b64")
    has_state = not hasattr(decoder.operands[0], "base")
    first = int(has_state)
    decoder.arity(first + 2) if expect else decoder.arity(first + 1, first + 2)
    write = decoder.write(0) if has_state else None
    address = decoder.address(first)
    count: Reader | None = decoder.read(first + 1, "u32") if len(decoder.operands) > first + 1 else None

    def execute(warp: Warp, mask: Mask) -> None:
        addresses, counts = address(warp), count(warp) if count is not None else None
        states = np.zeros(LANES, np.uint64)
        messages: dict[bool, Message] = {}
        for lane in active(mask):
            barrier = warp.cta.cluster.memory_barrier(int(addresses[lane]), warp.actor)
            remote = warp.cta.cluster.locate(int(addresses[lane]))[0] is not warp.cta
            if remote not in messages:
                # The CTA's scope is taken at its word where it is written; ``release`` says what is where none is.
                narrow = scope == "cta" and remote
                messages[remote] = warp.actor.release(relaxed or narrow, reaching=scope == "cluster")
            warp.cta.launch.events += 1
            states[lane] = barrier.state
            if expect:
                assert counts is not None
                barrier.expect(int(counts[lane]))
                barrier.arrive(messages[remote])
            else:
                barrier.arrive(messages[remote], 1 if counts is None else int(counts[lane]))
        if write is not None:
            write(warp, states, mask)

    return execute


@instruction("mbarrier.expect_tx")
def build_expect(decoder: Decoder) -> Execute:
    _order_and_scope(decoder)  # it hands nothing on, whatever its order
    _space(decoder)
    decoder.expect("b64")
    decoder.arity(2)
    address, nbytes = decoder.address(0), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            warp.cta.cluster.memory_barrier(int(address(warp)[lane]), warp.actor).expect(int(nbytes(warp)[lane]))
            warp.cta.launch.events += 1

    return execute


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def build_wait(decoder: Decoder) -> Execute:
    by_parity = decoder.flag("parity")
    relaxed, scope = _order_and_scope(decoder)
    decoder.one_of("shared", "shared::cta")
    decoder.expect("b64")
    decoder.arity(3, 4)  # the fourth is a time limit: try_wait answers at once here
    write, address, phase = decoder.write(0), decoder.address(1), decoder.read(2, "u32" if by_parity else "u64")

    def execute(warp: Warp, mask: Mask) -> None:
        addresses, phases = address(warp), phase(warp)
        result = np.zeros(LANES, bool)
        known: dict[tuple[int, int], bool] = {}
        for lane in active(mask):
            key = int(addresses[lane]), int(phases[lane])
            if key not in known:
                _own(warp, key[0])
                barrier = warp.cta.cluster.memory_barrier(key[0], warp.actor)
                known[key] = barrier.is_complete(key[1]) if by_parity else barrier.has_left(key[1])
                if known[key]:
                    barrier.wait(warp.actor, relaxed, reaching=scope == "cluster")
                else:
                    which = f"parity {key[1] & 1}" if by_parity else f"phase {key[1] >> STATE_PENDING_BITS}"
                    warp.spinning = f"mbarrier at offset {key[0] & 0xFFFFFF} to end {which}: {barrier}"
            result[lane] = known[key]
        write(warp, result, mask)

    return execute


def _own(warp: Warp, address: int) -> None:
    cta, _ = warp.cta.cluster.locate(address)
    if cta is not warp.cta:
        raise MemoryFaultError(f"wait on an mbarrier of another CTA ({cta})")


@instruction("mbarrier.pending_count")
def build_pending(decoder: Decoder) -> Execute:
    """The arrivals that were pending in a state."""
    decoder.expect("b64")
    decoder.arity(2)
    state, write = decoder.read(1, "u64"), decoder.write(0)
    low = np.uint64((1 << STATE_PENDING_BITS) - 1)
    return lambda warp, mask: write(warp, (state(warp) & low).astype(np.uint32), mask)


@instruction("mbarrier.complete_tx")
def build_complete(decoder: Decoder) -> Execute:
    """Lowers the transaction count as an asynchronous copy does, without one; hands nothing on."""
    _order_and_scope(decoder)
    _space(decoder)
    decoder.expect("b64")
    decoder.arity(2)
    address, nbytes = decoder.address(0), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            barrier = warp.cta.cluster.memory_barrier(int(address(warp)[lane]), warp.actor)
            barrier.complete(int(nbytes(warp)[lane]), warp.actor.release(relaxed=True))
            warp.cta.launch.events += 1

    return execute


__all__ = ["leader", "uniform"]
