"""Cluster-wide instructions: mapa, getctarank, barrier.cluster; and dependent launch, register budgets."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.memory import OFFSET_MASK, RANK_SHIFT, SHARED_WINDOW
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Blocked, Mask, Warp

NO_RANK = 0xFF
"""The rank of an address that is in no CTA: larger than any cluster's."""


@instruction("mapa")
def build_mapa(decoder: Decoder) -> Execute:
    """The address of the same offset in another CTA of the cluster.

    A rank that the cluster does not have gives an address that no access may use: kernels compute it for lanes that
    do not go on to use it.
    """
    space = decoder.one_of("shared::cluster", default="")
    type_name = decoder.one_of("u32", "u64")
    decoder.arity(3)
    address, rank, write = decoder.read(1, type_name), decoder.read(2, "u32"), decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        ranks, addresses = rank(warp), address(warp)
        ranks = np.minimum(ranks, NO_RANK)
        kind = addresses.dtype.type
        base = kind(0) if space else kind(SHARED_WINDOW)
        write(warp, ((addresses - base) & kind(OFFSET_MASK) | ranks.astype(kind) << kind(RANK_SHIFT)) + base, mask)

    if not space and type_name == "u32":
        raise UnsupportedError("mapa.u32 on generic addresses")
    return execute


@instruction("getctarank")
def build_rank(decoder: Decoder) -> Execute:
    decoder.expect("shared::cluster", "u32")
    decoder.arity(2)
    address, write = decoder.read(1, "u32"), decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, address(warp) >> np.uint32(RANK_SHIFT), mask)

    return execute


@instruction("barrier.cluster")
def build_cluster_barrier(decoder: Decoder) -> Execute:
    wait = decoder.one_of("arrive", "wait") == "wait"
    relaxed = decoder.one_of("relaxed", "release", "acquire", default="") == "relaxed"
    decoder.flag("aligned")
    decoder.arity(0)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        executing = np.ones(LANES, bool) if mask is None else mask
        away = warp.present & ~executing
        if away.any():
            return Blocked(f"lanes {np.flatnonzero(away).tolist()} to come to the cluster barrier")
        barrier = warp.cta.cluster.barrier
        if not wait:
            if warp.cluster_generation is not None:
                raise HazardError("barrier.cluster.arrive twice without a wait")
            warp.cluster_generation = barrier.arrive(warp.actor.release(relaxed))
            warp.cta.launch.events += 1
            return None
        if warp.cluster_generation is None:
            raise HazardError("barrier.cluster.wait without an arrive")
        if barrier.generation == warp.cluster_generation:
            return Blocked(f"cluster barrier: {barrier.arrived} of {barrier.warps} warps arrived")
        warp.cluster_generation = None
        warp.actor.acquire(barrier.handover.released, relaxed)
        warp.actor.synchronise_lanes(executing)
        return None

    return execute


@instruction("griddepcontrol")
def build_dependent_launch(decoder: Decoder) -> Execute:
    waits = decoder.one_of("wait", "launch_dependents") == "wait"
    decoder.arity(0)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        if waits:
            blocked = warp.cta.launch.wait_for_launch_before()
            warp.waited_for_launch = blocked is None
            return blocked
        if not warp.cta.triggered:
            warp.cta.triggered_after_wait = warp.waited_for_launch
        warp.cta.triggered = True
        warp.cta.launch.events += 1
        warp.spinning = "its next turn, so that a dependent launch may begin"
        return None

    return execute
