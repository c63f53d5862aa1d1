"""Gluon, Triton's language with explicit layouts and shared memory, for kernels that address shared memory themselves.

A kernel is decorated with :func:`jit`. It takes layouts, shared memory and what needs a layout from :data:`gl`, all else
from ``triton.language``. Triton's interpreter does not run Gluon. In it ``gl`` stands for functions of the same results,
to which layouts mean nothing, so that the same kernel runs there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.runtime.interpreter import TensorHandle

from .rounding import INTERPRETED


class InterpretedShared:
    """Shared memory in the interpreter: a NumPy array."""

    def __init__(self, dtype: tl.dtype, data: np.ndarray[Any, Any]) -> None:
        self._dtype, self._data = dtype, data

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its elements."""
        return self._data.shape

    def index(self, index: Any) -> InterpretedShared:
        """The part at ``index`` of the first dimension."""
        return InterpretedShared(self._dtype, self._data[int(index.handle.data.item() if _is_tensor(index) else index)])

    def slice(self, start: int, length: int) -> InterpretedShared:
        """So many elements from ``start`` on, of the only dimension."""
        return InterpretedShared(self._dtype, self._data[int(start) : int(start) + int(length)])

    def store(self, value: tl.tensor) -> None:
        """Overwrite all of it."""
        self._data[...] = value.handle.data

    def load(self, layout: object) -> tl.tensor:
        """All of it."""
        return _tensor(self._data.copy(), self._dtype)

    def atomic_scatter_add(self, values: tl.tensor, indices: tl.tensor, axis: int, mask: tl.tensor) -> None:
        """Add values at indices of the only dimension, where the mask says so."""
        assert axis == 0 and self._data.ndim == 1
        chosen = mask.handle.data
        np.add.at(self._data, indices.handle.data[chosen], values.handle.data[chosen])

    def scatter(self, values: tl.tensor, indices: tl.tensor, axis: int) -> None:
        """Store values at indices of the only dimension."""
        assert axis == 0 and self._data.ndim == 1
        self._data[indices.handle.data] = values.handle.data


def _is_tensor(value: object) -> bool:
    return isinstance(value, tl.core.tensor)


def _tensor(data: np.ndarray[Any, Any], dtype: tl.dtype) -> tl.tensor:
    return tl.core.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _numpy_dtype(dtype: tl.dtype) -> Any:
    return np.dtype(f"int{dtype.primitive_bitwidth}")


def _sizes(shape: list[Any]) -> list[int]:
    return [int(size) for size in shape]


def _no_layout(*shape: object) -> None:
    return None


class InterpretedGluon:
    """What kernels use of ``triton.experimental.gluon.language``, in the interpreter."""

    BlockedLayout = SliceLayout = SwizzledSharedLayout = staticmethod(_no_layout)

    @staticmethod
    def arange(start: int, end: int, layout: object) -> tl.tensor:
        return tl.arange(int(start), int(end))

    @staticmethod
    def full(shape: list[int], value: int, dtype: tl.dtype, layout: object) -> tl.tensor:
        return tl.full(_sizes(shape), value, dtype)

    @staticmethod
    def convert_layout(value: tl.tensor, layout: object) -> tl.tensor:
        return value

    @staticmethod
    def allocate_shared_memory(dtype: tl.dtype, shape: list[int], layout: object) -> InterpretedShared:
        return InterpretedShared(dtype, np.full(_sizes(shape), 0x5A5A5A5A, dtype=_numpy_dtype(dtype)))

    @staticmethod
    def barrier() -> None:
        return None


gl: Any = InterpretedGluon if INTERPRETED else gluon.language
"""Gluon's language, or its stand-in."""
jit: Any = triton.jit if INTERPRETED else gluon.jit
"""Decorates a Gluon kernel or a function of one."""
