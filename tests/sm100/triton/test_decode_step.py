"""A decode step in which nothing but emulated SM100 PTX computes between token ids and logits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.library_gemm import emulated_library
from tests.sm100.support.only_kernels import OnlyKernels
from tests.sm100.support.triton_launch import emulated_triton
from tests.sm100.triton.decode_step import SHAPES, behind_prompt, decode_step, load
from tests.sm100.triton.interpreted import ROOT
from tests.support.calm import write_calm

ROUNDING = 0.05
"""Bound of a log-probability's error: sums in another order may round an FP4 code to the other side."""


def test_nothing_but_emulated_ptx_computes(tmp_path: Path) -> None:
    """The prompt before it is interpreted, for both."""
    checkpoint = write_calm(tmp_path / "calm", seed=11, **SHAPES)
    file = tmp_path / "interpreted.pt"
    command = [sys.executable, "-m", "tests.sm100.triton.decode_step", str(checkpoint), str(file)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    left, expected = torch.load(file)
    with emulated_triton() as triton, emulated_operations() as operations:
        counted = {}

        @contextmanager
        def alone() -> Iterator[None]:
            counted["before"] = len(triton.launches)
            with emulated_library(), emulated_operations() as step, OnlyKernels():
                yield
            counted["gemms"] = len(step.keys)

        model = load(checkpoint)
        behind_prompt(model, left)
        found = decode_step(model, alone)
    assert not operations.keys
    launches = [launch.name for launch in triton.launches[counted["before"] :]]
    print(f"{len(launches)} launches of Triton's, {counted['gemms']} NVFP4 GEMMs")
    assert counted["gemms"] == 6 * SHAPES["num_hidden_layers"]
    assert launches.count("attend") == SHAPES["num_hidden_layers"]
    assert bool(torch.isfinite(found).all())
    distance = float((found - expected).abs().max())
    print(f"largest distance of a log-probability: {distance:.2e}")
    assert distance <= ROUNDING


def test_torch_must_not_compute() -> None:
    x = torch.zeros(2, 3)
    with OnlyKernels():
        x.view(3, 2)[1:].unsqueeze(0)
        x.new_empty(4)
    for computes in (lambda: x + 1, lambda: x.clone(), lambda: x.zero_(), lambda: x @ x.T, lambda: x.bfloat16()):
        with OnlyKernels(), pytest.raises(AssertionError, match="torch computes"):
            computes()
