"""Put on PYTHONPATH to start a server for SM100 on a Hopper GPU, or on none; nothing of ours is launched.

The package is told that the GPU is a B200, and so is SGLang while it resolves its arguments on a GPU. Everything else
that asks (torch, cuBLAS, SGLang's own kernels) is told the truth, since it does run. What is recorded in place of
launches: ``tests/support/dry_server.py``.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

specification = importlib.util.spec_from_file_location("on_import", Path(__file__).parents[1] / "on_import.py")
assert specification is not None and specification.loader is not None
on_import = importlib.util.module_from_spec(specification)
specification.loader.exec_module(on_import)
on_import.offer_tests()

CAPABILITY = (10, 0)
PACKAGE = "nvfp4_sgl."
FACTS: dict[str, Any] = {
    "is_sm90": False,
    "is_hopper_with_cuda_12_3": False,
    "is_sm100": True,
    "is_sm100_or_sm110": True,
    "is_blackwell": True,
    "device_sm": 100,
    "device_capability": CAPABILITY,
}
"""What SGLang is told of the machine as it resolves its arguments on a GPU."""


def _answer_the_package(cuda):
    """Tell the package alone that the GPU is an SM100, and the choice of the target alone that there is one."""
    capability, available = cuda.get_device_capability, cuda.is_available

    def get_device_capability(device=None):
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return CAPABILITY if asks.startswith(PACKAGE) else capability(device)

    def is_available():
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return asks == "nvfp4_sgl.targets.choose" or available()

    cuda.get_device_capability, cuda.is_available = get_device_capability, is_available


def _compile_for_sm100(chip):
    """Some tilings go by the architecture that Triton compiles for."""
    chip.is_before_blackwell = lambda: False


def _resolve_for_sm100(pipeline):
    """SGLang's own scoped override of the machine's facts, and torch's answer beside it."""
    import torch
    from sglang.srt.runtime_context import override_platform

    resolve = pipeline.run_resolution_pipeline

    def run_resolution_pipeline(server_args):
        with contextlib.ExitStack() as stack:
            if torch.cuda.is_available():
                stack.enter_context(override_platform(**FACTS))
                truth = torch.cuda.get_device_capability
                stack.callback(setattr, torch.cuda, "get_device_capability", truth)
                torch.cuda.get_device_capability = lambda device=None: CAPABILITY
            return resolve(server_args)

    pipeline.run_resolution_pipeline = run_resolution_pipeline


def _take_any_logits(finite_logits):
    """Nothing computes them, so they may be NaN, which would fail the request."""
    choose = finite_logits.choose
    finite_logits.choose = lambda logits: choose(logits.zero_())


def _launch_nothing(model):
    from tests.support import dry_server

    dry_server.install(model)


on_import.patch_on_import(
    {
        "nvfp4_sgl.serving.finite_logits": _take_any_logits,
        "torch.cuda": _answer_the_package,
        "nvfp4_sgl.triton_kernels.common.chip": _compile_for_sm100,
        "sglang.srt.arg_groups.pipeline": _resolve_for_sm100,
        "nvfp4_sgl.serving.model": _launch_nothing,
    }
)
