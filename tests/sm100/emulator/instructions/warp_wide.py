"""Instructions of a whole warp: shfl, vote, match, elect, redux, bar.warp, activemask.

A ``.sync`` instruction waits until every lane of its member mask that has not exited executes it.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, Reader, instruction
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.formats import NAN
from tests.sm100.emulator.scalar_types import LANE_IDS, LANES
from tests.sm100.emulator.warp import Blocked, Mask, Warp, active, leader


def lanes_of(bits: int) -> np.ndarray:
    """bool[32] of a member mask."""
    return (bits >> LANE_IDS.astype(np.int64) & 1).astype(bool)


def missing(warp: Warp, mask: Mask, members: Reader) -> Blocked | None:
    """Blocked while lanes of the member mask have yet to come here."""
    if mask is None and warp.counters is None:
        return None
    executing = np.ones(LANES, bool) if mask is None else mask
    wanted = lanes_of(int(members(warp)[leader(mask)]))
    if (executing & ~wanted).any():
        raise HazardError(f"lanes {np.flatnonzero(executing & ~wanted).tolist()} are not in their own member mask")
    away = wanted & warp.present & ~executing
    if away.any():
        return Blocked(f"lanes {np.flatnonzero(away).tolist()} to execute the same instruction")
    return None


@instruction("shfl.sync")
def build_shfl(decoder: Decoder) -> Execute:
    decoder.expect("b32")
    mode = decoder.one_of("idx", "up", "down", "bfly")
    decoder.arity(5)
    first, second = decoder.pair(0)
    write = decoder.write(first)
    write_valid = decoder.write(second) if second is not None else None
    value, amount, limits, members = (decoder.read(i, "u32") for i in (1, 2, 3, 4))
    lane = LANE_IDS.astype(np.int64)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        b = amount(warp).astype(np.int64) & 31
        c = limits(warp).astype(np.int64)
        clamp, segment = c & 31, c >> 8 & 31
        last = (lane & segment) | (clamp & ~segment)
        source = {
            "idx": (lane & segment) | (b & ~segment),
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
        }[mode]
        valid = source >= last if mode == "up" else source <= last
        source = np.where(valid, source, lane) & 31
        executing = np.ones(LANES, bool) if mask is None else mask
        if not executing[source[executing]].all():
            raise HazardError("shfl reads a lane that does not execute it")
        write(warp, value(warp)[source], mask)
        if write_valid is not None:
            write_valid(warp, valid, mask)
        return None

    return execute


@instruction("vote.sync")
def build_vote(decoder: Decoder) -> Execute:
    mode = decoder.one_of("all", "any", "uni", "ballot")
    decoder.expect("b32" if mode == "ballot" else "pred")
    decoder.arity(3)
    write, predicate, members = decoder.write(0), decoder.read(1, "pred"), decoder.read(2, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        lanes = active(mask)
        votes = predicate(warp)[lanes]
        if mode == "ballot":
            result = np.full(LANES, sum(1 << int(lane) for lane in lanes[votes]), np.uint32)
        else:
            answer = {"all": votes.all(), "any": votes.any(), "uni": votes.all() or not votes.any()}[mode]
            result = np.full(LANES, bool(answer))
        write(warp, result, mask)
        return None

    return execute


@instruction("match.any.sync", "match.all.sync")
def build_match(decoder: Decoder) -> Execute:
    every = decoder.instruction.opcode[1] == "all"
    type_name = decoder.one_of("b32", "b64")
    decoder.arity(3)
    first, second = decoder.pair(0)
    write = decoder.write(first)
    write_same = decoder.write(second) if second is not None else None
    if write_same is not None and not every:
        raise UnsupportedError("a predicate of match.any")
    value, members = decoder.read(1, type_name), decoder.read(2, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        lanes, values = active(mask), value(warp)
        result = np.zeros(LANES, np.uint32)
        same = len(set(values[lanes].tolist())) == 1
        for lane in lanes:
            equal = lanes[values[lanes] == values[lane]]
            result[lane] = sum(1 << int(other) for other in equal) if same or not every else 0
        write(warp, result, mask)
        if write_same is not None:
            write_same(warp, np.full(LANES, same), mask)
        return None

    return execute


@instruction("elect.sync")
def build_elect(decoder: Decoder) -> Execute:
    """Elects the lowest lane of the member mask, which PTX leaves open but hardware does."""
    decoder.arity(2)
    first, second = decoder.pair(0)
    if second is None:
        raise UnsupportedError("elect.sync without a predicate")
    write, write_elected, members = decoder.write(first), decoder.write(second), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        elected = leader(mask)
        write(warp, np.full(LANES, elected, np.uint32), mask)
        write_elected(warp, np.equal(LANE_IDS, elected), mask)
        return None

    return execute


@instruction("redux.sync")
def build_redux(decoder: Decoder) -> Execute:
    name = decoder.one_of("add", "min", "max", "and", "or", "xor")
    if name in ("min", "max") and decoder.modifiers[-1] == "f32":
        return _float_redux(decoder, name)
    type_name = decoder.type()
    if type_name not in ("u32", "s32", "b32") or decoder.modifiers:
        raise UnsupportedError(f"redux.{name}.{type_name}")
    decoder.arity(3)
    write, value, members = decoder.write(0), decoder.read(1, type_name), decoder.read(2, "u32")
    reduce = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[name]  # fmt: skip

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        values = value(warp)[active(mask)]
        write(warp, np.full(LANES, reduce.reduce(values), values.dtype), mask)
        return None

    return execute


def _float_redux(decoder: Decoder, name: str) -> Execute:
    """The least or the greatest f32; of NaN the others, unless there is nothing else or ``.NaN`` asks for it."""
    absolute, nan = decoder.flag("abs"), decoder.flag("NaN")
    decoder.expect("f32")
    decoder.arity(3)
    write, value, members = decoder.write(0), decoder.read(1, "f32"), decoder.read(2, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        values = value(warp)[active(mask)]
        values = np.abs(values) if absolute else values
        numbers = values[~np.isnan(values)]
        if not numbers.size or (nan and numbers.size < values.size):
            result = NAN
        else:
            # Of zeros, -0 counts as less.
            order = np.lexsort((~np.signbit(numbers), numbers))
            result = numbers[order[0 if name == "min" else -1]]
        write(warp, np.full(LANES, result, np.float32), mask)
        return None

    return execute


@instruction("bar.warp.sync")
def build_warp_barrier(decoder: Decoder) -> Execute:
    decoder.arity(1)
    members = decoder.read(0, "u32")

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if blocked := missing(warp, mask, members):
            return blocked
        warp.actor.synchronise_lanes(np.ones(LANES, bool) if mask is None else mask)
        return None

    return execute


@instruction("activemask")
def build_activemask(decoder: Decoder) -> Execute:
    decoder.expect("b32")
    decoder.arity(1)
    write = decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, np.full(LANES, sum(1 << int(lane) for lane in active(mask)), np.uint32), mask)

    return execute
