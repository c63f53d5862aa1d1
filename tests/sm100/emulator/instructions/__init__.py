"""Instruction semantics, one module per family. Importing this package registers them all."""

from tests.sm100.emulator.instructions import (
    arithmetic,
    barriers,
    carry,
    clusters,
    compare,
    convert,
    copies,
    load_store,
    matrix_moves,
    move,
    ordering,
    tensor_core,
    tensor_maps,
    warp_mma,
    warp_wide,
)

__all__ = [
    "arithmetic",
    "barriers",
    "carry",
    "clusters",
    "compare",
    "convert",
    "copies",
    "load_store",
    "matrix_moves",
    "move",
    "ordering",
    "tensor_core",
    "tensor_maps",
    "warp_mma",
    "warp_wide",
]
