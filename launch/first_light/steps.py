"""The steps of first light, in order, each with its command and its time limit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

PYTEST = ("-m", "pytest", "-v", "-x", "-p", "first_light.pytest_plugin")
"""Stops at the first failure; the plugin names it."""
BENCH = "benchmarks.sm100.bench"
"""What ``launch/bench_sm100`` runs."""
WAITING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""A kernel that fails is then found at its own launch."""


@dataclass(frozen=True)
class Step:
    """A process.

    Attributes:
        command: arguments of the Python interpreter.
        seconds: how long it may take; compiling included, caches empty.
        environment: added to this process's.
    """

    name: str
    about: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, more: tuple[str, ...] = ()) -> list[str]:
        """The command line; ``more`` goes to pytest."""
        is_pytest = self.command[:2] == PYTEST[:2]
        return [sys.executable, *self.command, *(more if is_pytest else ())]


FIRST_LIGHT = (
    Step(
        "instructions",
        "what SM100 adds to Hopper, an instruction at a time, against NumPy; the rest against an H200's record",
        ("-m", "first_light.instructions"),
        900,
        WAITING,
    ),
    Step(
        "gemms",
        "every GEMM that Flash and Pro ask for, in NVFP4 and as released, on one GPU and on one of eight, against fp64",
        ("-m", "first_light.gemms"),
        3600,
        WAITING,
    ),
    Step("triton", "tests/triton natively", (*PYTEST, "tests/triton"), 3600, WAITING),
    Step(
        "layer",
        "each sublayer of each kind of layer on equal inputs and cached bytes, against the CPU reference",
        (*PYTEST, "tests/gpu/test_sublayers.py"),
        1200,
        WAITING,
    ),
    Step(
        "model",
        "a tiny model: prefill, chunks, decode, CUDA graphs, nothing compiled after the warm-up",
        (*PYTEST, *(f"tests/gpu/test_{name}.py" for name in ("decoder", "cuda_graph", "warm_up", "tensor_parallel"))),
        2400,
    ),
    Step(
        "server",
        "SGLang serves the tiny model; new weights and NaN under graphs; released formats",
        (*PYTEST, *(f"tests/gpu/test_{name}.py" for name in ("server", "server_changes", "server_formats"))),
        2400,
    ),
    Step(
        "timings",
        "every GEMM of checkpoints all in NVFP4, beside cuBLAS and FlashInfer",
        ("-m", BENCH, "--no-facts"),
        5400,
    ),
    Step(
        "timings_released",
        "every GEMM of released checkpoints: MXFP8, and NVFP4 of the routed experts",
        ("-m", BENCH, "--no-facts", "--checkpoint", "released"),
        5400,
    ),
)
EMULATED = (
    Step("instructions", FIRST_LIGHT[0].about, ("-m", "first_light.instructions", "--emulated"), 600),
    Step(
        "gemms",
        "the GEMMs of a tiny model in NVFP4, and two in MXFP8, at one number of tokens, against fp64",
        ("-m", "first_light.gemms", "--emulated"),
        600,
    ),
)
"""What of it a CPU can run: the numeric part, reduced."""
