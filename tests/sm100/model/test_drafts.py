"""Drafts as SM100 runs them, with no SM100: Triton interpreted, every GEMM's PTX executed in the emulator.

``tests/gpu/test_drafts.py`` judges the same passes, with GEMMs computed in torch, against the CPU reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.ops.modes import ActivationMode
from tests.gpu.test_drafts import dspark, mtp, tiny
from tests.sm100.support.launcher import emulated_operations
from tests.support.full import full
from tests.support.lockstep import relative_errors
from tests.support.reference_gemms import reference_gemms

SUMS = 1e-3
"""What another order of fp32 sums may change of a row, relatively."""


@pytest.mark.parametrize(
    ("kind", "drafted"), [("mtp", mtp), *full(("dspark", partial(dspark, rounds=1)))], ids=["mtp", "dspark"]
)
def test_emulated_gemms_give_what_torch_gives(kind: str, drafted: Callable[..., list[Tensor]], tmp_path: Path) -> None:
    """The draft's projections in FP8, its experts in MXFP4 as released: a prompt, and several tokens a request."""
    verified = tiny(tmp_path, "nvfp4-experts", kind)
    with reference_gemms():
        computed = drafted(verified, "sm_100a", ActivationMode.W4A4, torch.bfloat16)
    with emulated_operations() as runner:
        emulated = drafted(verified, "sm_100a", ActivationMode.W4A4, torch.bfloat16)
    assert {key.shape.operands for key in runner.keys} == {"nvfp4", "mxfp8"}
    for found, expected in zip(emulated, computed, strict=True):
        assert bool(torch.isfinite(found).all())
        assert float(relative_errors(found, expected).max()) <= SUMS
