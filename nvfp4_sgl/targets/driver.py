"""Asks the CUDA driver for devices, in milliseconds and without torch."""

from __future__ import annotations

import ctypes


def sees_gpu() -> bool:
    """Whether the CUDA driver has a device for this process; CUDA_VISIBLE_DEVICES counts."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
