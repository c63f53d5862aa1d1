"""QuACK's bf16 GEMM for Hopper, written by others for hardware, in the emulator."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated


@dataclass(frozen=True)
class HopperGemm:
    """A persistent kernel of one cluster: a warp for TMA, two or more warpgroups that multiply.

    Attributes:
        tile: M and N of a tile.
        cluster: its shape; operands are multicast along it.
        pingpong: whether warpgroups take tiles in turn, rather than halves of one.
        registers: whether A goes through registers to the tensor core.
    """

    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int, int] = (1, 1, 1)
    pingpong: bool = False
    registers: bool = False

    def compiled(self) -> Compiled:
        return _compiled(self)

    def run(
        self, shape: tuple[int, int, int], options: Options, compiled: Compiled | None = None
    ) -> tuple[bool, Statistics]:
        """Multiply small random integers of (M, N, K), whose sums are exact; whether the output is equal."""
        import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

        a, b, out = matrices(*shape)
        with emulated(options, reads=[a, b], writes=[out]) as emulator:
            emulator(compiled or self.compiled(), *_arguments(a, b, out), cuda.CUstream(0))
        expected = (a.double() @ b.double().transpose(1, 2)).to(torch.bfloat16)
        return torch.equal(out, expected), emulator.statistics[0]


def matrices(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and a poisoned output."""
    random = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-4, 5, (1, rows, k), generator=random).to(torch.bfloat16) for rows in (m, n))
    return a, b, torch.full((1, m, n), float("nan"), dtype=torch.bfloat16)


def _arguments(*tensors: Tensor) -> tuple[Any, ...]:
    import cutlass
    from cutlass.cute.runtime import from_dlpack
    from quack.gemm_default_epi import GemmDefaultSm90
    from quack.tile_scheduler import TileSchedulerOptions

    given = [from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(2) for tensor in tensors]
    return *given, None, GemmDefaultSm90.EpilogueArguments(), TileSchedulerOptions(cutlass.Int32(1)), None


@functools.cache
def _compiled(gemm: HopperGemm) -> Compiled:
    import cutlass
    from cutlass.cute.runtime import make_fake_stream
    from quack.gemm_default_epi import GemmDefaultSm90

    kernel = GemmDefaultSm90(
        cutlass.Float32, cutlass.BFloat16, gemm.tile, gemm.cluster,
        pingpong=gemm.pingpong, mma_is_rs=gemm.registers, use_pdl=False,
    )  # fmt: skip
    return compile_for("sm_90a", kernel, *_arguments(*matrices(128, 128, 64)), make_fake_stream())
