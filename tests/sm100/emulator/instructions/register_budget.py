"""setmaxnreg: registers handed from warps that need few to warps that need many."""

from __future__ import annotations

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError
from tests.sm100.emulator.warp import Blocked, Mask, Warp

FEWEST, MOST, STEP = 24, 256, 8
LANE_REGISTERS = 65536 // 32
"""Registers of a CTA for one lane of each of its warps."""


@instruction("setmaxnreg")
def build_register_budget(decoder: Decoder) -> Execute:
    """Registers are unlimited here; counts are checked.

    What a warp has before its first setmaxnreg is ptxas's choice, and counts as the least. For sm_90a all warps of a
    warpgroup must execute the same one; kernels for SM100 that run on hardware let single warps differ.
    """
    more = decoder.one_of("inc", "dec") == "inc"
    decoder.expect("sync", "aligned", "u32")
    decoder.arity(1)
    count = decoder.literal(0)
    if not FEWEST <= count <= MOST or count % STEP:
        raise HazardError(f"setmaxnreg {count}")
    together = decoder.kernel.target == "sm_90a"

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        budget = warp.cta.register_counts
        held = budget.get(warp.index)
        if held is not None and (count < held if more else count > held):
            raise HazardError(f"setmaxnreg.{'inc' if more else 'dec'} to {count} from {held}")
        others = sum(budget.get(one.index, FEWEST) for one in warp.cta.warps if one is not warp)
        if more and others + count > LANE_REGISTERS:
            return Blocked(f"{others + count - LANE_REGISTERS} registers of a lane that other warps must give back")
        if together:
            warp.cta.warpgroup(warp.index).follow(warp)
        budget[warp.index] = count
        warp.cta.launch.events += 1
        return None

    return execute
