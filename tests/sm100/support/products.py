"""Random NVFP4 products in the layouts that the SM100 kernels take, and their fp64 references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call, scale_rows
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.gemm import NvFp4Gemm
from nvfp4_sgl.numerics.scale_layout import swizzle_128x4
from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.support.numpy_nvfp4 import dequantize

_COMPILED: dict[Any, Compiled] = {}


def compile_call(call: Call, epilogue: Epilogue, architecture: str = "sm_100a") -> Compiled:
    """The kernel that a call needs, compiled once a process."""
    from cutlass.cute.runtime import make_fake_stream

    key = call.shape, epilogue, architecture
    if key not in _COMPILED:
        _COMPILED[key] = compile_for(
            architecture, NvFp4Gemm(call.shape, epilogue), *call.arguments(1), make_fake_stream()
        )
    return _COMPILED[key]


def run(
    call: Call, epilogue: Epilogue, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None
) -> Statistics:
    """Execute a call in the emulator on ``clusters`` persistent clusters."""
    import cuda.bindings.driver as cuda  # type: ignore[import-untyped]

    read, written = call.tensors()
    with emulated(options, reads=read, writes=written) as emulator:
        emulator(compiled or compile_call(call, epilogue), *call.arguments(clusters), cuda.CUstream(0))
    return emulator.statistics[0]


@dataclass(frozen=True)
class RandomOperand:
    """Random codes and block scales of ``groups`` matrices [rows, k]: packed [groups, rows, k/2] and plain scales."""

    packed: Tensor
    scales: Tensor

    @classmethod
    def make(cls, groups: int, rows: int, k: int, seed: int) -> RandomOperand:
        """Every code, and scales over E4M3's whole finite range, zero included; a twentieth of the blocks vanish."""
        random = np.random.default_rng(seed)
        packed = random.integers(0, 256, (groups, rows, k // 2), dtype=np.uint8)
        scales = random.integers(0, 127, (groups, rows, k // 16), dtype=np.uint8)
        scales[random.random(scales.shape) < 0.05] = 0
        return cls(torch.from_numpy(packed), torch.from_numpy(scales))

    def values(self, group: int) -> np.ndarray:
        """fp64 [rows, k]."""
        return dequantize(self.packed[group].numpy(), self.scales[group].numpy())

    def swizzled(self) -> Tensor:
        """Scales of each matrix, padded and swizzled, one after the other."""
        return swizzle_128x4(self.scales)


def swizzle_rows(scales: Tensor, token_tile: int) -> Tensor:
    """Block scales of token rows [rows, kb] as a kernel of that token tile takes them."""
    rows, kb = scales.shape
    if token_tile >= 128:
        return swizzle_128x4(scales)
    tiles = -(-rows // token_tile)
    spread = torch.zeros(tiles, 128, kb, dtype=torch.uint8)
    padded = torch.zeros(tiles * token_tile, kb, dtype=torch.uint8)
    padded[:rows] = scales.view(torch.uint8)
    spread[:, :token_tile] = padded.view(tiles, token_tile, kb)
    return swizzle_128x4(spread.view(-1, kb))


__all__ = ["RandomOperand", "compile_call", "run", "scale_rows", "swizzle_rows"]
