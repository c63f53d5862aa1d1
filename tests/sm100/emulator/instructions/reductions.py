"""What an atomic operation or a reducing copy leaves in memory.

Source: PTX ISA, ``atom``, ``red``, ``cp.reduce.async.bulk``. Atomic sums of f32 in global memory flush subnormals;
those of reducing copies do not (seen on sm_90).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.instructions.arithmetic import flush
from tests.sm100.emulator.instructions.half_arithmetic import HALVES, half_operation
from tests.sm100.emulator.scalar_types import dtype_of

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]
ANY: dict[str, Update] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "exch": lambda old, new: new,
}
BITWISE: dict[str, Update] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COUNTING: dict[str, Update] = {
    "inc": lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype),
}
OPERATIONS = (*ANY, *BITWISE, *COUNTING)
_INTEGERS = ("u32", "s32", "u64", "s64")
_BITS = ("b32", "b64", *_INTEGERS)
TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "exch": ("b32", "b64"),
    **dict.fromkeys(("min", "max"), (*_INTEGERS, "f16", "bf16")),
    **dict.fromkeys(BITWISE, _BITS),
    **dict.fromkeys(COUNTING, ("u32",)),
}
"""Element types of each operation, packed ones included."""


def element_size(type_name: str) -> int:
    """Bytes of an element."""
    if type_name in HALVES:
        return 4 if type_name.endswith("x2") else 2
    return dtype_of(type_name).itemsize


def reduction(name: str, type_name: str, flushes: bool) -> Update:
    """From u8 contents and u8 operands, any whole number of elements, to u8 new contents.

    ``flushes`` says whether a sum of f32 flushes subnormal operands and results.

    Raises:
        UnsupportedError: the operation does not exist for the type.
    """
    if type_name.removesuffix("x2") not in TYPES[name]:
        raise UnsupportedError(f"{name} of .{type_name}")
    if type_name in HALVES:
        half = half_operation(name, type_name.removesuffix("x2"))
        return lambda old, new: half(old.view(np.uint16), new.view(np.uint16)).view(np.uint8)
    dtype = dtype_of(type_name)
    update = {**ANY, **BITWISE, **COUNTING}[name]

    def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        left, right = old.view(dtype), new.view(dtype)
        if (name, type_name) != ("add", "f32"):
            return update(left, right).view(np.uint8)
        total = flush(flush(left) + flush(right)) if flushes else left + right
        return canonical(total).view(np.uint8)

    return combine
