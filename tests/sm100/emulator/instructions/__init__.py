"""Instruction semantics, one module per family. Importing this package registers them all."""

from tests.sm100.emulator.instructions import (
    arithmetic,
    barriers,
    clusters,
    compare,
    convert,
    copies,
    launch_control,
    load_store,
    matrix_moves,
    mixed_arithmetic,
    move,
    ordering,
    prefetches,
    tensor_core,
    tensor_maps,
    warp_wide,
)

__all__ = [
    "arithmetic",
    "barriers",
    "clusters",
    "compare",
    "convert",
    "copies",
    "launch_control",
    "load_store",
    "matrix_moves",
    "mixed_arithmetic",
    "move",
    "ordering",
    "prefetches",
    "tensor_core",
    "tensor_maps",
    "warp_wide",
]
