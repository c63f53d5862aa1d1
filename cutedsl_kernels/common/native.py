"""Calling a compiled kernel through its C interface, ``void entry(void **arguments, int32_t count)``.

CuTeDSL's exported headers document it: a slot per argument, then one for the CUDA error. Filling a block of slots that
is made once takes a microsecond or two; converting Python arguments one by one takes tens.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

from ..errors import LaunchError
from .arguments import Arguments

SLOTS = struct.Struct(f"<{len(Arguments._fields) + 2}q")
"""Arguments, stream, error: 8 bytes each; a 32-bit argument is the low half of its slot."""
COUNT = len(Arguments._fields) + 2


class _Block(threading.local):
    """A thread's slots and the list of their addresses; a launch copies all it needs before it returns."""

    def __init__(self) -> None:
        self.slots = ctypes.create_string_buffer(SLOTS.size)
        begin = ctypes.addressof(self.slots)
        self.error = ctypes.c_int32.from_buffer(self.slots, SLOTS.size - 8)
        self.addresses = (ctypes.c_void_p * COUNT)(*range(begin, begin + SLOTS.size, 8))


_BLOCK = _Block()


class NativeKernel:
    """A launchable kernel.

    Args:
        name: for error messages.
        entry: address of the C function.
        owner: kept alive as long as the kernel, for it owns the code.
    """

    def __init__(self, name: str, entry: int, owner: Any) -> None:
        self.name, self.owner = name, owner
        self._entry: Callable[[Any, int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(entry)

    @classmethod
    def of(cls, name: str, compiled: Any) -> NativeKernel:
        """Wrap what ``cute.compile`` returned; loads its code into all devices."""
        executor = compiled.to()
        entry = ctypes.cast(executor.jit_module.capi_func, ctypes.c_void_p).value
        assert entry is not None
        return cls(name, entry, executor)

    def __call__(self, arguments: Arguments, stream: int) -> None:
        """Launch.

        Raises:
            LaunchError: CUDA's error.
        """
        block = _BLOCK
        SLOTS.pack_into(block.slots, 0, *arguments, stream, 0)
        self._entry(block.addresses, COUNT)
        error = block.error.value
        if error:
            raise LaunchError(f"{self.name}: CUDA error {error} ({describe_error(error)}) at launch")


def describe_error(error: int) -> str:
    """CUDA's description of an error."""
    from cuda.bindings import runtime  # type: ignore[import-untyped]

    try:
        return runtime.cudaGetErrorString(runtime.cudaError_t(error))[1].decode()
    except ValueError:
        return "unknown to this CUDA version"
