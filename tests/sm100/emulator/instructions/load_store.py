"""ld, st, atom, red on the parameter block, global and shared memory.

Lanes are served in lane order. Each access must be aligned to its size. Atomics and accesses with a memory order are
strong: they may race with one another, and order other accesses as release and acquire say. Global memory is not
checked for races.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.cluster import Cta
from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError
from tests.sm100.emulator.instructions.half_arithmetic import HALVES
from tests.sm100.emulator.instructions.reductions import OPERATIONS, element_size, reduction
from tests.sm100.emulator.memory import LOCAL_WINDOW, OFFSET_MASK, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW
from tests.sm100.emulator.scalar_types import LANES, dtype_of
from tests.sm100.emulator.tensor_map_order import Agent
from tests.sm100.emulator.warp import Mask, Warp, active

SPACES = ("param", "global", "shared", "shared::cta", "shared::cluster", "local", "const")
ORDERS = ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile")
SCOPES = ("cta", "cluster", "gpu", "sys")
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
LOCAL_OFFSETS = np.uint64(LOCAL_WINDOW - 1)


def agent(warp: Warp) -> Agent:
    """The name of a warp in a launch."""
    return warp.cta.index, warp.index


def _shared_cells(warp: Warp, space: str, addresses: np.ndarray, size: int) -> tuple[Cta, np.ndarray] | None:
    """The CTA and the offsets [n, size] that accesses touch if all are to one shared memory, else None."""
    if space == "" and ((addresses >= SHARED_WINDOW) & (addresses < PARAMETER_WINDOW)).all():
        space, addresses = "shared", addresses - np.uint64(SHARED_WINDOW)
    ranks = addresses >> np.uint64(RANK_SHIFT)
    if not space.startswith("shared") or (ranks != ranks[0]).any():
        return None
    cta, _ = warp.cta.cluster.locate(int(addresses[0]))
    offsets = (addresses & np.uint64(OFFSET_MASK)).astype(np.int64)
    return cta, offsets[:, None] + np.arange(size)


def _is_global(space: str, addresses: np.ndarray) -> bool:
    return space in ("", "global") and int(addresses.max()) < SHARED_WINDOW


def _in_local(space: str, addresses: np.ndarray) -> bool:
    """Whether accesses are to local memory; generic ones to it come alone."""
    return space == "local" or (space == "" and bool((addresses >= LOCAL_WINDOW).all()))


def _check_aligned(addresses: np.ndarray, size: int, what: str) -> None:
    wrong = addresses % np.uint64(size) != 0
    if wrong.any():
        raise MemoryFaultError(f"{what} of {size} B at {int(addresses[np.argmax(wrong)]):#x}: misaligned")


def load_lanes(warp: Warp, space: str, addresses: np.ndarray, size: int, strong: bool = False) -> np.ndarray:
    """u8 [n, size] at u64 addresses of a space ("" is generic); ``strong`` accesses may race with one another."""
    _check_aligned(addresses, size, "load")
    shared = _shared_cells(warp, space, addresses, size)
    if shared is not None:
        cta, offsets = shared
        return cta.shared.gather(offsets, warp.actor, strong)
    if _is_global(space, addresses):
        return warp.cta.launch.memory.gather(addresses, size)
    if len(addresses) > 1:
        return np.concatenate([load_lanes(warp, space, one[None], size, strong) for one in addresses])
    address = int(addresses[0])
    if PARAMETER_WINDOW <= address < LOCAL_WINDOW and space in ("", "param"):
        return warp.cta.launch.parameters.view(address, size)[None]
    raise MemoryFaultError(f"{space or 'generic'} address {address:#x}")


def store_lanes(warp: Warp, space: str, addresses: np.ndarray, data: np.ndarray, strong: bool = False) -> None:
    """Store u8 [n, size], in order, at u64 addresses of a space ("" is generic)."""
    _check_aligned(addresses, data.shape[1], "store")
    shared = _shared_cells(warp, space, addresses, data.shape[1])
    if shared is not None:
        cta, offsets = shared
        cta.shared.scatter(offsets, data, warp.actor, strong)
        return
    if _is_global(space, addresses):
        if warp.cta.launch.has_tensor_maps:
            for address in addresses.tolist():
                warp.cta.launch.map_order.write(address, data.shape[1], agent(warp))
        warp.cta.launch.memory.scatter(addresses, data)
        return
    if len(addresses) > 1:
        for address, row in zip(addresses, data, strict=True):
            store_lanes(warp, space, address[None], row[None], strong)
        return
    raise MemoryFaultError(f"store to {space or 'generic'} address {int(addresses[0]):#x}")


def load(warp: Warp, space: str, address: int, size: int, strong: bool = False) -> np.ndarray:
    """Bytes at one address."""
    return load_lanes(warp, space, np.array([address], np.uint64), size, strong)[0]


def store(warp: Warp, space: str, address: int, data: np.ndarray, strong: bool = False) -> None:
    """Store u8 ``data`` at one address."""
    store_lanes(warp, space, np.array([address], np.uint64), data[None], strong)


def _space(decoder: Decoder) -> str:
    space = decoder.one_of(*SPACES, default="")
    if space == "const":
        raise UnsupportedError("constant memory")
    return space


def _qualifiers(decoder: Decoder) -> str:
    """Take scope, cache and prefetch hints, which change nothing here; return the memory order, "weak" for none."""
    order = decoder.one_of(*ORDERS, default="weak")
    decoder.one_of(*SCOPES, default="")
    decoder.one_of(*CACHE, default="")
    for level in ("L1", "L2"):
        for policy in ("evict_last", "evict_first", "no_allocate", "evict_normal", "evict_unchanged"):
            decoder.flag(f"{level}::{policy}")
    for size in ("64B", "128B", "256B"):
        decoder.flag(f"L2::{size}")
    return order


def _words(space: str, addresses: np.ndarray) -> list[int]:
    """A number for each word however it is addressed."""
    window = SHARED_WINDOW if space.startswith("shared") else 0
    return [int(address) + window for address in addresses]


def _release(warp: Warp, space: str, addresses: np.ndarray, order: str) -> None:
    """Hand on what strong stores or atomics release."""
    known = warp.actor.release(relaxed=order not in ("release", "acq_rel"))
    for word in _words(space, addresses):
        warp.cta.cluster.hand_on(word, known)


def _acquire(warp: Warp, space: str, addresses: np.ndarray, order: str) -> None:
    """Learn what strong loads or atomics acquire."""
    for word in _words(space, addresses):
        known = warp.cta.cluster.handed_on(word)
        if known is not None:
            warp.actor.acquire(known, relaxed=order not in ("acquire", "acq_rel"))


def _poll(warp: Warp) -> None:
    """The warp looked at memory that others may yet change: let them run."""
    warp.spinning = "another value in memory, polling"
    warp.cta.cluster.polled = True


def _width(decoder: Decoder) -> int:
    return int(decoder.one_of("v2", "v4", "v8", default="v1")[1:])


@instruction("ld")
def build_ld(decoder: Decoder) -> Execute:
    type_name = decoder.type()
    space, count = _space(decoder), _width(decoder)
    order = _qualifiers(decoder)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 if hint else 2)
    items = decoder.vector(0)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} destinations for a vector of {count}")
    address = decoder.address(1)
    dtype = dtype_of(type_name)
    writes = [decoder.write_wide(item, type_name) for item in items]
    size = count * dtype.itemsize

    def execute(warp: Warp, mask: Mask) -> None:
        lanes = active(mask)
        addresses = address(warp)[lanes]
        data = np.zeros((LANES, size), np.uint8)
        if space == "param":
            data[:] = load(warp, space, int(addresses[0]), size)
        elif _in_local(space, addresses):
            _check_aligned(addresses, size, "load")
            data[lanes] = warp.local.read(lanes, addresses & LOCAL_OFFSETS, size)
        elif order == "weak":
            data[lanes] = load_lanes(warp, space, addresses, size)
        else:
            data[lanes] = load_lanes(warp, space, addresses, size, strong=True)
            _acquire(warp, space, addresses, order)
            _poll(warp)
        values = data.view(dtype)
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute


@instruction("st")
def build_st(decoder: Decoder) -> Execute:
    type_name = decoder.type()
    space, count = _space(decoder), _width(decoder)
    order = _qualifiers(decoder)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 if hint else 2)
    items = decoder.vector(1)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} sources for a vector of {count}")
    address = decoder.address(0)
    bits = f"b{8 * dtype_of(type_name).itemsize}"
    reads = [decoder.read(item, bits, wider=True) for item in items]

    def execute(warp: Warp, mask: Mask) -> None:
        lanes = active(mask)
        addresses = address(warp)[lanes]
        data = matrix([read(warp) for read in reads]).view(np.uint8)[lanes]
        if _in_local(space, addresses):
            _check_aligned(addresses, data.shape[1], "store")
            warp.local.write(lanes, addresses & LOCAL_OFFSETS, data)
            return
        store_lanes(warp, space, addresses, data, strong=order != "weak")
        if order != "weak":
            _release(warp, space, addresses, order)

    return execute


@instruction("atom", "red")
def build_atomic(decoder: Decoder) -> Execute:
    """atom and red, lanes in lane order (the hardware's order is unspecified); relaxed by default."""
    returns = decoder.instruction.opcode[0] == "atom"
    type_name = decoder.one_of(*HALVES, default="") or decoder.type()
    if type_name in HALVES:
        decoder.flag("noftz")
    space, count = _space(decoder), _width(decoder)
    if space in ("local", "param"):
        raise UnsupportedError(f"atomics on {space} memory")
    order = _qualifiers(decoder)
    name = decoder.one_of(*OPERATIONS, "cas")
    compare = name == "cas"
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(2 + returns + compare + hint)
    size = element_size(type_name)
    bits = f"b{8 * size}"
    address = decoder.address(int(returns))
    operands = [decoder.read(item, bits) for item in decoder.vector(1 + returns)]
    replacement = decoder.read(2 + returns, bits) if compare else None
    writes = [decoder.write(item) for item in decoder.vector(0)] if returns else []
    if len(operands) != count or len(writes) not in (0, count) or (compare and count > 1):
        raise UnsupportedError(f"{len(operands)} elements for a vector of {count}")
    updates = {} if compare else {place: reduction(name, type_name, place) for place in (False, True)}

    def execute(warp: Warp, mask: Mask) -> None:
        addresses = address(warp)
        if returns:
            _acquire(warp, space, addresses[active(mask)], order)
        operand = matrix([read(warp) for read in operands]).view(np.uint8)
        replacing = None if replacement is None else np.ascontiguousarray(replacement(warp)[:, None]).view(np.uint8)
        old = np.zeros((LANES, size * count), np.uint8)
        changed = False
        for lane in active(mask):
            where = int(addresses[lane])
            old[lane] = load(warp, space, where, size * count, strong=True)
            if replacing is not None:
                new = replacing[lane] if np.array_equal(old[lane], operand[lane]) else old[lane]
            else:
                in_global = not space.startswith("shared") and where < SHARED_WINDOW
                new = updates[in_global](old[lane].copy(), operand[lane])
            store(warp, space, where, new, strong=True)
            changed |= not np.array_equal(new, old[lane])
        _release(warp, space, addresses[active(mask)], order)
        if changed:
            warp.cta.launch.events += 1
        elif returns:
            _poll(warp)
        values = old.view(f"u{size}")
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute
