"""ld, st, atom, red on the parameter block, global and shared memory.

Lanes are served in lane order. Each access must be aligned to its size. Atomics and accesses with a memory order are
strong: they may race with one another, and order other accesses as release and acquire say. Global memory is not
checked for races.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.actors import Strength
from tests.sm100.emulator.cluster import Cta
from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError
from tests.sm100.emulator.global_scopes import StrongAccess
from tests.sm100.emulator.handover import Mailbox, Message
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
    if not space.startswith("shared"):
        return None
    ranks = addresses >> np.uint64(RANK_SHIFT)
    if np.count_nonzero(ranks != ranks[0]):
        return None
    cta, _ = warp.cta.cluster.locate(int(addresses[0]))
    offsets = (addresses & np.uint64(OFFSET_MASK)).astype(np.int64)
    return cta, offsets[:, None] + np.arange(size)


def _is_global(space: str, addresses: np.ndarray) -> bool:
    return space in ("", "global") and max(addresses.tolist()) < SHARED_WINDOW


def _in_local(space: str, addresses: np.ndarray) -> bool:
    """Whether accesses are to local memory; generic ones to it come alone."""
    return space == "local" or (space == "" and bool((addresses >= LOCAL_WINDOW).all()))


def _check_aligned(addresses: np.ndarray, size: int, what: str) -> None:
    beyond = np.uint64(size - 1)
    wrong = addresses % np.uint64(size) if size & size - 1 else addresses & beyond
    if np.count_nonzero(wrong):
        raise MemoryFaultError(f"{what} of {size} B at {int(addresses[np.argmax(wrong != 0)]):#x}: misaligned")


def load_lanes(
    warp: Warp, space: str, addresses: np.ndarray, size: int, lanes: np.ndarray | None = None,
    strength: Strength = "weak",
) -> np.ndarray:  # fmt: skip
    """u8 [n, size] at u64 addresses of a space ("" is generic).

    Args:
        lanes: which lane makes each access, for their order among one another (``lane_order``); None for no matter.
        strength: strong accesses may race with one another.
    """
    _check_aligned(addresses, size, "load")
    shared = _shared_cells(warp, space, addresses, size)
    if shared is not None:
        cta, offsets = shared
        return cta.shared.gather(offsets, warp.actor, strength, lanes)
    if _is_global(space, addresses):
        launch = warp.cta.launch
        if launch.global_order is not None and strength == "weak":
            launch.global_order.load(warp, addresses, size)
        return launch.memory.gather(addresses, size)
    if len(addresses) > 1:
        tags = [None] * len(addresses) if lanes is None else lanes[:, None]
        pairs = zip(addresses, tags, strict=True)
        return np.concatenate([load_lanes(warp, space, one[None], size, tag, strength) for one, tag in pairs])
    address = int(addresses[0])
    if PARAMETER_WINDOW <= address < LOCAL_WINDOW and space in ("", "param"):
        return warp.cta.launch.parameters.view(address, size)[None]
    raise MemoryFaultError(f"{space or 'generic'} address {address:#x}")


def store_lanes(
    warp: Warp, space: str, addresses: np.ndarray, data: np.ndarray, lanes: np.ndarray | None = None,
    strength: Strength = "weak",
) -> None:  # fmt: skip
    """Store u8 [n, size], in order, at u64 addresses of a space; arguments as for loads."""
    _check_aligned(addresses, data.shape[1], "store")
    shared = _shared_cells(warp, space, addresses, data.shape[1])
    if shared is not None:
        cta, offsets = shared
        cta.shared.scatter(offsets, data, warp.actor, strength, lanes)
        return
    if _is_global(space, addresses):
        launch = warp.cta.launch
        if launch.has_tensor_maps:
            for address in addresses.tolist():
                launch.map_order.write(address, data.shape[1], agent(warp))
        if launch.global_order is not None and strength == "weak":
            launch.global_order.store(warp, addresses, data, launch.memory.gather(addresses, data.shape[1]))
        launch.memory.scatter(addresses, data)
        return
    if len(addresses) > 1:
        tags = [None] * len(addresses) if lanes is None else lanes[:, None]
        for address, row, tag in zip(addresses, data, tags, strict=True):
            store_lanes(warp, space, address[None], row[None], tag, strength)
        return
    raise MemoryFaultError(f"store to {space or 'generic'} address {int(addresses[0]):#x}")


def load(warp: Warp, space: str, address: int, size: int, strength: Strength = "weak") -> np.ndarray:
    """Bytes at one address."""
    return load_lanes(warp, space, np.array([address], np.uint64), size, None, strength)[0]


def store(warp: Warp, space: str, address: int, data: np.ndarray, strength: Strength = "weak") -> None:
    """Store u8 ``data`` at one address."""
    store_lanes(warp, space, np.array([address], np.uint64), data[None], None, strength)


def _space(decoder: Decoder) -> str:
    space = decoder.one_of(*SPACES, default="")
    if space == "const":
        raise UnsupportedError("constant memory")
    return space


@dataclass(frozen=True)
class Semantics:
    """Memory order and scope of an access.

    Attributes:
        order: "weak" for none; a volatile one is relaxed.
        scope: that of the GPU where none is said, which only atomics may leave out.
    """

    order: str
    scope: str

    def touch(self, warp: Warp, space: str, addresses: np.ndarray, writes: bool) -> None:
        """Record strong accesses to global memory."""
        access = StrongAccess(warp.cta, self.scope, writes)
        for word in _words(space, addresses):
            if word < SHARED_WINDOW:
                warp.cta.launch.scopes.access(word, access)

    @property
    def strength(self) -> Strength:
        if self.order == "weak":
            return "weak"
        return "cta" if self.scope == "cta" else "reaching"

    def _crosses(self, warp: Warp, word: int) -> bool:
        """Whether other clusters may learn from it."""
        return warp.cta.launch.global_order is not None and word < SHARED_WINDOW and self.scope in ("gpu", "sys")

    def release(self, warp: Warp, space: str, addresses: np.ndarray) -> None:
        """Hand on what strong stores or atomics release."""
        message = warp.actor.release(relaxed=self.order not in ("release", "acq_rel"))
        if self.scope == "cta":
            message = message.within()
        for word in _words(space, addresses):
            warp.cta.cluster.flags.setdefault(word, Mailbox()).put(message)
            if self._crosses(warp, word):
                warp.cta.launch.global_order.release(warp, word, self.order not in ("release", "acq_rel"))

    def acquire(self, warp: Warp, space: str, addresses: np.ndarray) -> None:
        """Learn what strong loads or atomics acquire."""
        for word in _words(space, addresses):
            if self._crosses(warp, word):
                warp.cta.launch.global_order.acquire(warp, word, self.order not in ("acquire", "acq_rel"))
            found = warp.cta.cluster.flags.get(word)
            if found is not None:
                reached = Mailbox(found.near) if self.scope == "cta" else found
                warp.actor.acquire(reached, relaxed=self.order not in ("acquire", "acq_rel"))


def _semantics(decoder: Decoder, default: str = "weak") -> Semantics:
    """Take order, scope, cache and prefetch hints, of which the last two change nothing here."""
    order = decoder.one_of(*ORDERS, default=default)
    scope = decoder.one_of(*SCOPES, default="sys" if order == "volatile" else "gpu")
    decoder.one_of(*CACHE, default="")
    for level in ("L1", "L2"):
        for policy in ("evict_last", "evict_first", "no_allocate", "evict_normal", "evict_unchanged"):
            decoder.flag(f"{level}::{policy}")
    for size in ("64B", "128B", "256B"):
        decoder.flag(f"L2::{size}")
    return Semantics(order, scope)


def _words(space: str, addresses: np.ndarray) -> list[int]:
    """A number for each word however it is addressed."""
    window = SHARED_WINDOW if space.startswith("shared") else 0
    return [int(address) + window for address in addresses]


def _poll(warp: Warp) -> None:
    """The warp looked at memory that others may yet change: let them run."""
    warp.spinning = "another value in memory, polling"
    warp.cta.cluster.polled = True


def _width(decoder: Decoder) -> int:
    return int(decoder.one_of("v2", "v4", "v8", default="v1")[1:])


@instruction("ld")
def build_ld(decoder: Decoder) -> Execute:
    type_name = decoder.type(moved=True)
    space, count = _space(decoder), _width(decoder)
    semantics = _semantics(decoder)
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
        addresses = address(warp) if mask is None else address(warp)[lanes]
        if space == "param":
            found = np.broadcast_to(load(warp, space, int(addresses[0]), size), (len(lanes), size))
        elif _in_local(space, addresses):
            _check_aligned(addresses, size, "load")
            found = warp.local.read(lanes, addresses & LOCAL_OFFSETS, size)
        else:
            found = load_lanes(warp, space, addresses, size, lanes, semantics.strength)
            if semantics.order != "weak":
                semantics.touch(warp, space, addresses, writes=False)
                semantics.acquire(warp, space, addresses)
                _poll(warp)
        if mask is not None:
            data = np.zeros((LANES, size), np.uint8)
            data[lanes] = found
            found = data
        values = np.ascontiguousarray(found).view(dtype)
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute


@instruction("st")
def build_st(decoder: Decoder) -> Execute:
    type_name = decoder.type(moved=True)
    space, count = _space(decoder), _width(decoder)
    semantics = _semantics(decoder)
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
        addresses, data = address(warp), matrix([read(warp) for read in reads]).view(np.uint8)
        if mask is not None:
            addresses, data = addresses[lanes], data[lanes]
        if _in_local(space, addresses):
            _check_aligned(addresses, data.shape[1], "store")
            warp.local.write(lanes, addresses & LOCAL_OFFSETS, data)
            return
        store_lanes(warp, space, addresses, data, lanes, semantics.strength)
        if semantics.order != "weak":
            semantics.touch(warp, space, addresses, writes=True)
            semantics.release(warp, space, addresses)

    return execute


@instruction("st.async")
def build_async_store(decoder: Decoder) -> Execute:
    """To shared memory of the cluster; an mbarrier beside the destination counts the bytes.

    By the generic proxy, in no order among one another. What arrives is released to who waits for the mbarrier.
    """
    decoder.flag("weak")
    decoder.expect("shared::cluster", "mbarrier::complete_tx::bytes")
    count = _width(decoder)
    type_name = decoder.type(moved=True)
    decoder.arity(3)
    items = decoder.vector(1)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} sources for a vector of {count}")
    destination, barrier = decoder.address(0), decoder.address(2)
    size = dtype_of(type_name).itemsize
    if size not in (4, 8):
        raise UnsupportedError(f"st.async of {size} B")
    reads = [decoder.read(item, f"b{8 * size}", wider=True) for item in items]

    def execute(warp: Warp, mask: Mask) -> None:
        lanes, cluster = active(mask), warp.cta.cluster
        data = matrix([read(warp) for read in reads]).view(np.uint8)[lanes]
        addresses, reports = destination(warp)[lanes], barrier(warp)[lanes]
        _check_aligned(addresses, data.shape[1], "st.async")
        places = [cluster.locate(address) for address in addresses.tolist()]
        for (cta, _), report in zip(places, reports.tolist(), strict=True):
            if cluster.locate(report)[0] is not cta:
                raise MemoryFaultError(f"st.async into {cta} with an mbarrier of another CTA")
            cluster.memory_barrier(report, warp.actor, asynchronous=True)
        writer = warp.actor.issue(generic=True)

        def arrive() -> None:
            message = Message.to_all(warp.cta.rank, writer.clock)
            for (cta, offset), report, row in zip(places, reports.tolist(), data, strict=True):
                cta.shared.write(offset, row, writer)
                cluster.memory_barrier(report, writer).complete(row.size, message)

        cluster.engines.issue("st_async", None, [arrive])

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
    semantics = _semantics(decoder, default="relaxed")
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
        semantics.touch(warp, space, addresses[active(mask)], writes=True)
        if returns:
            semantics.acquire(warp, space, addresses[active(mask)])
        operand = matrix([read(warp) for read in operands]).view(np.uint8)
        replacing = None if replacement is None else np.ascontiguousarray(replacement(warp)[:, None]).view(np.uint8)
        old = np.zeros((LANES, size * count), np.uint8)
        changed = False
        for lane in active(mask):
            where = int(addresses[lane])
            old[lane] = load(warp, space, where, size * count, semantics.strength)
            if replacing is not None:
                new = replacing[lane] if np.array_equal(old[lane], operand[lane]) else old[lane]
            else:
                in_global = not space.startswith("shared") and where < SHARED_WINDOW
                new = updates[in_global](old[lane].copy(), operand[lane])
            store(warp, space, where, new, semantics.strength)
            changed |= not np.array_equal(new, old[lane])
        semantics.release(warp, space, addresses[active(mask)])
        if changed:
            warp.cta.launch.events += 1
        elif returns:
            _poll(warp)
        values = old.view(f"u{size}")
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute
