"""What every Hopper kernel's machine code must show."""

from __future__ import annotations

from typing import Any

from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import entry_of
from tests.sm100.support.sass import Binary, compile_binary


def checked_binary(shape: KernelShape) -> Binary:
    """Compile for sm_90a; check the loop's instructions, of one for each width, and that as many CTAs share an SM as is
    promised."""
    entry = entry_of(shape)
    binary = compile_binary("sm_90a", entry, *entry.example())
    loops = len(shape.widths)
    if shape.multiplies_by_warp:
        groups = sum(width // 8 for width in shape.widths)
        assert binary.count("HMMA") == 8 * groups, "a stage of 128 of K"
        assert binary.count("LDSM") == 4 * groups, "two steps each"
        assert binary.count("HGMMA") == 0
    else:
        assert binary.count("HGMMA") == 8 * loops, "a stage of 128 of K"
        assert binary.count("WARPGROUP.ARRIVE") == 2 * loops, "ptxas has serialised the wgmmas of a group"
    assert binary.count("HMUL2.BF16") == 32 * loops, "64 weights a thread, two at a time"
    assert binary.count("STL") == binary.count("LDL") == binary.stack == binary.local == 0, "registers are spilled"
    assert binary.registers <= shape.max_registers
    # The stages are chosen by a bound on all else: no less than what the kernel takes, and not much more.
    gemm: Any = entry.gemm
    taken = gemm.storage.size_in_bytes()
    assert taken <= shape.shared_bytes <= taken + 4 * 1024
    return binary
