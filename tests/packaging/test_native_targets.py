"""Which targets the tests of the GPU decoder take on which GPU, and that nothing stands in for SM100's GEMMs there."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.targets.choose import choose
from tests.support import native
from tests.support.reference_gemms import ReferenceLauncher


def put_in(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A GPU of that capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")


@pytest.mark.parametrize(("capability", "target"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_100a")])
def test_on_a_gpu_its_own_target_with_the_launcher_on_cuda(
    capability: tuple[int, int], target: str, monkeypatch: pytest.MonkeyPatch
):
    put_in(monkeypatch, capability)
    assert native.targets(on_gpu=True) == (target,)
    with native.gemms(target, on_gpu=True):
        assert type(launcher.current()) is launcher.CudaLauncher


def test_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch):
    put_in(monkeypatch, (12, 0))
    with pytest.raises(UnsupportedError, match=r"capability 12\.0; expected 9\.0"):
        native.targets(on_gpu=True)


def test_without_a_gpu_both_with_gemms_in_torch():
    assert native.targets(on_gpu=False) == ("sm_90a", "sm_100a")
    for target in native.GPU_TARGETS:
        with native.gemms(target, on_gpu=False):
            runner = launcher.current()
            assert type(runner) is ReferenceLauncher and runner.name == target


@pytest.mark.parametrize("target", native.GPU_TARGETS)
def test_the_reference_runs_in_the_mode_of_the_target(target: str):
    assert choose(target).mode is native.MODES[target]


def test_every_mode_of_a_target_is_run():
    names = [str(run) for run in native.runs(on_gpu=False)]
    assert names == ["sm_90a-w4a16", "sm_90a-w4a4", "sm_100a-w4a4"]
