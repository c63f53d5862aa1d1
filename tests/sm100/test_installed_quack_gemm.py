"""QuACK's bf16 GEMM for SM100, written by others for hardware, gives exact numbers in the emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.sm100.emulator import Options, compile_for, emulated


def small_integers(rows: int, columns: int, seed: int) -> Tensor:
    """bf16 [1, rows, columns] whose products are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (1, rows, columns), generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(("tile", "cluster", "clc"), [
    ((128, 128), (1, 1, 1), False), ((128, 64), (1, 1, 1), False), ((128, 64), (1, 1, 1), True),
    ((128, 64), (2, 1, 1), True),
])  # fmt: skip
@pytest.mark.parametrize("options", [Options(), Options("random", 1)], ids=lambda options: options.mode)
def test_output_is_exact(tile: tuple[int, int], cluster: tuple[int, int, int], clc: bool, options: Options) -> None:
    """Ragged edges in every dimension; several tiles on one persistent CTA, or taken by cluster launch control."""
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]
    import cutlass
    from cutlass.cute.runtime import from_dlpack, make_fake_stream
    from quack.gemm_default_epi import GemmDefaultSm100
    from quack.tile_scheduler import TileSchedulerOptions

    m, n, k = 200, 136, 96
    a, b = small_integers(m, k, 1), small_integers(n, k, 2)
    out = torch.full((1, m, n), float("nan"), dtype=torch.bfloat16)
    kernel = GemmDefaultSm100(cutlass.Float32, cutlass.BFloat16, tile, cluster, use_clc_persistence=clc, use_pdl=False)
    tensors = [from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(2) for tensor in (a, b, out)]
    arguments = (
        *tensors, None, GemmDefaultSm100.EpilogueArguments(), TileSchedulerOptions(cutlass.Int32(1)), None
    )  # fmt: skip
    compiled = compile_for("sm_100a", kernel, *arguments, make_fake_stream())
    with emulated(options, reads=[a, b], writes=[out]) as emulator:
        emulator(compiled, *arguments, cuda.CUstream(0))
    assert bool(emulator.statistics[0].engine_operations["launch_control"]) == clc
    assert torch.equal(out, (a.double() @ b.double().transpose(1, 2)).to(torch.bfloat16))
