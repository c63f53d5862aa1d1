"""Compiles the kernel of a key. Everything here needs CuTeDSL, which takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass.cute as cute

from .common.entry import Entry
from .sm90 import epilogue as sm90_epilogue
from .sm90.gemm import W4A16Gemm
from .sm90.shape import KernelShape as HopperShape
from .sm100 import epilogue as sm100_epilogue
from .sm100.gemm import BlockScaledGemm

if TYPE_CHECKING:
    from .common.entry import Gemm
    from .compiled import KernelKey


def entry_of(key: KernelKey) -> Entry:
    """The function that ``cute.compile`` compiles for a key."""
    gemm: Gemm
    if isinstance(key.shape, HopperShape):
        gemm = W4A16Gemm(key.shape, sm90_epilogue.Epilogue(key.limit))
    else:
        gemm = BlockScaledGemm(key.shape, sm100_epilogue.Epilogue(key.limit, key.weighted, key.row_scale_constant))
    return Entry(gemm, key.programmatic_launch)


def compile_entry(entry: Entry, options: str) -> Any:
    """Compile ``entry`` by ``cute.compile``; needs no GPU."""
    return cute.compile(entry, *entry.example(), options=options)
