"""Asks the CUDA driver how many clusters of CTAs a GPU runs at a time.

``multiprocessors // size`` is too many, because GPCs have uneven numbers of multiprocessors. The driver answers for a
kernel and a launch. Here the kernel is an empty one that is given all shared memory, so that a CTA has a multiprocessor
to itself, as those of ``sm100/gemm.py`` do. So the answer holds for all of them, and is known before any is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .common.clusters import SIZES, Clusters
from .errors import LaunchError

EMPTY_KERNEL = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nvfp4_sgl_empty() { ret; }\n\0"
THREADS = 256
"""Threads of a CTA; any number for which shared memory remains the limit."""


@functools.cache
def active_clusters(index: int) -> Clusters:
    """The number of clusters that CUDA device ``index`` runs at a time; asked once, when a plan first needs it.

    Raises:
        LaunchError: the driver refused a query.
    """
    from cuda.bindings import driver  # type: ignore[import-untyped]

    with torch.cuda.device(index):
        torch.cuda.current_stream()  # makes the device's context current
        module = _checked(driver, driver.cuModuleLoadData(EMPTY_KERNEL))
        try:
            kernel = _checked(driver, driver.cuModuleGetFunction(module, b"nvfp4_sgl_empty"))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            max_shared = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
            shared = _checked(
                driver, driver.cuDeviceGetAttribute(max_shared, _checked(driver, driver.cuDeviceGet(index)))
            )
            _checked(driver, driver.cuFuncSetAttribute(kernel, attribute, shared))
            found = [
                _checked(driver, driver.cuOccupancyMaxActiveClusters(kernel, _launch(driver, size, shared)))
                for size in SIZES
            ]
        finally:
            driver.cuModuleUnload(module)
    if min(found) < 1:
        raise LaunchError(f"device {index}: expected room for a cluster of each size {SIZES}, found {found}")
    return Clusters(*found)


def _launch(driver: Any, size: int, shared: int) -> Any:
    """The configuration of a launch of one cluster of ``size`` CTAs with ``shared`` bytes of shared memory each."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    value = driver.CUlaunchAttributeValue()
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
    attribute.value = value
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _checked(driver: Any, answer: tuple[Any, ...]) -> Any:
    """The result of a driver call."""
    error, *result = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{error}: the CUDA driver refused to say how many clusters it runs at a time")
    return result[0] if result else None
