"""Fences, prefetches and other instructions that change no value here.

Warps act one instruction at a time on one memory, so fences are needed for no value; they count for the check that
accesses to shared memory are ordered (``actors``).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Mask, Warp


def _nothing(warp, mask):
    return None


@instruction("fence", "membar")
def build_fence(decoder: Decoder) -> Execute:
    """Memory fences. Scopes count as the CTA's or wider; of state spaces, that a proxy fence may leave out shared."""
    scope = decoder.one_of("cta", "cluster", "gpu", "sys", "gl", default="")
    if decoder.flag("mbarrier_init"):
        decoder.expect("release")
        return lambda warp, mask: warp.actor.fence_barrier_inits()
    if decoder.flag("proxy"):
        return _proxy_fence(decoder)
    semantics = decoder.one_of("acq_rel", "sc", "acquire", "release", default="")
    if not scope:
        raise UnsupportedError("a fence without a scope")
    if decoder.flag("sync_restrict::shared::cluster"):
        # It orders accesses to shared memory alone, and others' cells are no matter of a cluster's fence here.
        if (semantics, scope) != ("acquire", "cluster"):
            raise UnsupportedError(f"fence.{semantics}.sync_restrict::shared::cluster.{scope}")
    elif decoder.flag("sync_restrict::shared::cta"):
        raise UnsupportedError("fence.release.sync_restrict: one thread's accesses are not told apart by their CTA")
    acquires, releases = semantics != "release", semantics != "acquire"

    def execute(warp: Warp, mask: Mask) -> None:
        order = warp.cta.launch.global_order
        if order is not None and scope in ("gpu", "sys", "gl"):
            order.fence(warp)
        warp.actor.fence(scope != "cta", acquires, releases)

    return execute


def _proxy_fence(decoder: Decoder) -> Execute:
    kind = decoder.one_of("async", "alias", "tensormap::generic")
    place = decoder.one_of("global", "shared::cta", "shared::cluster", default="")
    if kind == "async" and place != "global":
        return lambda warp, mask: warp.actor.fence_proxy()
    decoder.one_of("acquire", "release", default="")
    return _nothing


@instruction("prefetch", "prefetchu")
def build_prefetch(decoder: Decoder) -> Execute:
    decoder.one_of("tensormap", "L1", "L2")
    decoder.one_of("param", "global", "const", default="")
    decoder.arity(1)
    return _nothing


@instruction("nanosleep")
def build_sleep(decoder: Decoder) -> Execute:
    decoder.expect("u32")
    decoder.arity(1)
    return _nothing


@instruction("trap")
def build_trap(decoder: Decoder) -> Execute:
    def execute(warp: Warp, mask: Mask) -> None:
        raise HazardError("trap")

    return execute


@instruction("createpolicy.fractional")
def build_policy(decoder: Decoder) -> Execute:
    """A cache policy: an opaque value that hints take."""
    for level in ("evict_last", "evict_first", "evict_normal", "evict_unchanged"):
        decoder.flag(f"L2::{level}")
    decoder.expect("b64")
    decoder.arity(1, 2)
    write = decoder.write(0)
    return lambda warp, mask: write(warp, np.zeros(LANES, np.uint64), mask)
