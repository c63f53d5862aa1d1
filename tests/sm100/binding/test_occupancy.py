"""The clusters that a GPU runs at a time: what the driver is asked, what becomes of its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cuda.bindings import driver  # type: ignore[import-untyped]

from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.errors import LaunchError
from nvfp4_sgl.cutedsl_kernels.launcher import CudaLauncher
from nvfp4_sgl.cutedsl_kernels.occupancy import active_clusters
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape

SHARED = 227 * 1024
ACTIVE = {1: 132, 2: 66, 3: 39, 4: 30, 8: 15}
"""An H200's."""


class Driver:
    """Stands for the CUDA driver: notes what it is asked and answers for an H200."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.asked: list[tuple[int, int]] = []
        self.attributes: list[tuple[Any, int]] = []
        self.failing: str | None = None

    def answer(self, name: str, *result: object) -> tuple[object, ...]:
        error = driver.CUresult.CUDA_ERROR_INVALID_VALUE if name == self.failing else driver.CUresult.CUDA_SUCCESS
        return (error, *result)

    def load(self, image: bytes) -> tuple[object, ...]:
        assert b".entry nvfp4_sgl_empty" in image and image.endswith(b"\0")
        if self.failing != "load":
            self.loaded.append("module")
        return self.answer("load", "module")

    def unload(self, module: str) -> tuple[object, ...]:
        self.loaded.remove(module)
        return self.answer("unload")

    def function(self, module: str, name: bytes) -> tuple[object, ...]:
        assert (module, name) == ("module", b"nvfp4_sgl_empty")
        return self.answer("function", "kernel")

    def attribute(self, kernel: str, attribute: Any, value: int) -> tuple[object, ...]:
        self.attributes.append((attribute, value))
        return self.answer("attribute")

    def clusters(self, kernel: str, config: Any) -> tuple[object, ...]:
        (attribute,) = config.attrs
        assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim.x
        assert config.numAttrs == 1 and config.gridDimX % size == 0 and config.blockDimX > 0
        self.asked.append((size, config.sharedMemBytes))
        return self.answer("clusters", ACTIVE[size])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    replacements: dict[str, Callable[..., object]] = {
        "cuModuleLoadData": fake.load,
        "cuModuleUnload": fake.unload,
        "cuModuleGetFunction": fake.function,
        "cuFuncSetAttribute": fake.attribute,
        "cuOccupancyMaxActiveClusters": fake.clusters,
        "cuDeviceGet": lambda index: fake.answer("device", index),
        "cuDeviceGetAttribute": lambda attribute, device: fake.answer("shared", SHARED),
    }
    for name, function in replacements.items():
        assert hasattr(driver, name)
        monkeypatch.setattr(driver, name, function)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    active_clusters.cache_clear()
    yield fake
    active_clusters.cache_clear()


def test_the_driver_is_asked_once_a_device_with_all_shared_memory(fake: Driver) -> None:
    runner = CudaLauncher()
    for _ in range(3):
        assert runner.clusters(torch.device("cuda", 0)) == Clusters(132, 66, 39, 30, 15)
    assert fake.asked == [(size, SHARED) for size in (1, 2, 3, 4, 8)]
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert fake.attributes == [(limit, SHARED)]
    assert fake.loaded == []
    runner.clusters(torch.device("cuda", 1))
    assert len(fake.asked) == 10


@pytest.mark.parametrize("call", ["load", "function", "attribute", "clusters", "device", "shared"])
def test_a_refusal_is_an_error_and_is_not_remembered(fake: Driver, call: str) -> None:
    fake.failing = call
    with pytest.raises(LaunchError, match="INVALID_VALUE.*how many clusters"):
        active_clusters(0)
    assert fake.loaded == []
    fake.failing = None
    assert active_clusters(0).of_four == 30


def test_a_gpu_without_room_for_a_cluster_is_refused(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVE, 8, 0)
    with pytest.raises(LaunchError, match=r"room for a cluster of each size .*found \[132, 66, 39, 30, 0\]"):
        active_clusters(0)


def test_a_call_launches_no_more_clusters_than_run_at_a_time() -> None:
    def call(shape: KernelShape, features: int, rows: int) -> Call:
        weights = torch.empty(1, features, 2048, dtype=torch.uint8, device="meta")
        tokens = torch.empty(rows, 2048, dtype=torch.uint8, device="meta")
        empty = torch.empty(0, device="meta")
        return Call(
            shape=shape,
            weights=weights,
            weight_scales=empty,
            tokens=tokens,
            token_scales=empty,
            out=empty,
            row_scale=empty,
            alpha=empty,
        )

    pairs = KernelShape(256, pair=True, shared_tokens=2)
    assert call(pairs, 8192, 8192).clusters(B200_CLUSTERS) == 34
    assert call(KernelShape(8), 128 * 200, 8).clusters(B200_CLUSTERS) == 148
    assert call(KernelShape(8), 128 * 20, 8).clusters(B200_CLUSTERS) == 20
    assert call(KernelShape(8, split_k=8), 128 * 20, 8).clusters(Clusters(132, 66, 39, 30, 15)) == 15


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a GPU with clusters"
)
def test_a_gpu_answers() -> None:
    found = active_clusters(0)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert found.multiprocessors == multiprocessors
    for size in (2, 4, 8):
        assert multiprocessors // size // 2 < found.of(size) <= multiprocessors // size
