"""Marlin as SGLang calls it, beside Hopper's GEMMs: NVFP4 or FP8 weights, bf16 activations and results.

nvcc compiles its kernels when they are first needed, which takes minutes: :meth:`Marlin.start`, before anything is
timed. Marlin takes one global scale a matrix, rounded to bf16; where a GEMM merges matrices, each with its own, its
user scales the results. It has no block-diagonal GEMM: groups are as many launches.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import foreign
from benchmarks.peers.attempts import Attempts, require_near
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

QUANTIZATION = "sglang.srt.layers.quantization"
FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
OPS = "sglang.kernels.ops"
TOOLKIT = Path("/usr/local/cuda")
GLOBAL_SCALE = 2.0**-7
"""Global scale of dense NVFP4 matrices: a value of bf16, so that Marlin's rounding of it loses nothing."""
FP8_BLOCK = 128
LIMIT = 0.01
"""Errors beyond it, relative and in the norm, mean that it computes something else: it is not timed."""

_PREPARE = foreign(f"{QUANTIZATION}.marlin_utils_fp4", "prepare_nvfp4_layer_for_marlin")
_APPLY = foreign(f"{QUANTIZATION}.marlin_utils_fp4", "apply_fp4_marlin_linear")
_PREPARE_FP8 = foreign(f"{QUANTIZATION}.marlin_utils_fp8", "prepare_fp8_layer_for_marlin")
_APPLY_FP8 = foreign(f"{QUANTIZATION}.marlin_utils_fp8", "apply_fp8_marlin_linear")
_PREPARE_EXPERTS = foreign(f"{QUANTIZATION}.marlin_utils_fp4", "prepare_moe_nvfp4_layer_for_marlin")
_GLOBAL_SCALE = foreign(f"{QUANTIZATION}.marlin_utils_fp4", "nvfp4_marlin_process_global_scale")
_EXPERTS = foreign(FUSED_MOE, "fused_marlin_moe")


class Marlin(Attempts):
    """Whether Marlin can be asked; what it lacks or fails at is printed once and leaves its column empty."""

    def __init__(self, wanted: bool) -> None:
        super().__init__("Marlin", wanted)
        self._compiling: list[Future[object]] = []
        self._started = time.monotonic()

    def start(self, dense: bool, experts: bool) -> None:
        """Import SGLang's Marlin and begin to compile its kernels, each module by an nvcc of its own."""
        if not self.usable:
            return
        if self.attempt(partial(self._import, experts)) is None:
            self.usable = False
            return
        threads = ThreadPoolExecutor()
        self._compiling = [threads.submit(build) for build in self.attempt(partial(_builders, dense, experts)) or []]
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Until its kernels are compiled. Those of SGLang that are not among them are compiled at their first call."""
        for future in self._compiling:
            self.attempt(future.result)
        if self._compiling:
            print(f"Marlin's kernels were ready after {time.monotonic() - self._started:.0f} s", flush=True)

    def _import(self, experts: bool) -> bool:
        self._started = time.monotonic()
        if "CUDA_HOME" not in os.environ and "CUDA_PATH" not in os.environ and (TOOLKIT / "bin/nvcc").exists():
            # Else SGLang looks beside the nvcc of the path, which may be a script that calls it from elsewhere.
            os.environ["CUDA_HOME"] = str(TOOLKIT)
        for module in ("marlin_utils_fp4", "marlin_utils_fp8"):
            importlib.import_module(f"{QUANTIZATION}.{module}")
        if experts:
            importlib.import_module(FUSED_MOE)
        return True


def _builders(dense: bool, experts: bool) -> list[Callable[[], object]]:
    """Functions that compile the kernels of bf16 activations, as SGLang's wrappers ask for it."""
    modules: list[tuple[str, str, tuple[Any, ...]]] = [
        ("quantization.gptq_marlin_repack", "_jit_gptq_marlin_repack_module", ()),
    ]
    if dense:
        modules.append(("gemm.gptq_marlin", "_jit_gptq_marlin_module", (torch.bfloat16,)))
    if experts:
        name = "_jit_moe_wna16_marlin_module"
        # No expert parallelism, no bias, sorted experts, (down alone) zeros where nothing is routed, their count.
        modules += [
            ("moe.moe_wna16_marlin", name, (torch.bfloat16, False, False, True, down, True)) for down in (False, True)
        ]
    return [
        partial(getattr(importlib.import_module(f"{OPS}.{module}"), function), *arguments)
        for module, function, arguments in modules
    ]


@dataclass(frozen=True)
class Linear:
    """A matrix [F, K] in Marlin's order; called with bf16 [T, K], gives bf16 [T, F]."""

    weight: Tensor
    scale: Tensor
    global_scale: Tensor | None
    workspace: Tensor
    features: int
    k: int

    def __call__(self, x: Tensor) -> Tensor:
        sizes = {"workspace": self.workspace, "size_n": self.features, "size_k": self.k, "bias": None}
        if self.global_scale is None:
            found: Tensor = _APPLY_FP8(input=x, weight=self.weight, weight_scale=self.scale, **sizes)
        else:
            found = _APPLY(
                input=x,
                weight=self.weight,
                weight_scale=self.scale,
                weight_global_scale=self.global_scale,
                **sizes,
            )
        return found

    def copy(self) -> Linear:
        """The same at another address."""
        return replace(self, weight=self.weight.clone(), scale=self.scale.clone())


def prepare(codes: Tensor, block_scale: Tensor) -> Linear:
    """A matrix in NVFP4 with the global scale ``GLOBAL_SCALE``: codes [F, K/2], E4M3 block scales [F, K/16]."""
    features, k = codes.shape[0], codes.shape[1] * 2
    layer = SimpleNamespace(
        output_size_per_partition=features,
        input_size_per_partition=k,
        params_dtype=torch.bfloat16,
        weight=codes.contiguous(),
        weight_scale=block_scale.contiguous(),
        weight_global_scale=torch.tensor(GLOBAL_SCALE, device=codes.device),
    )
    _PREPARE(layer)
    weight, scale, global_scale = (getattr(layer, f"weight{part}").detach() for part in ("", "_scale", "_global_scale"))
    return Linear(weight, scale, global_scale, layer.workspace, features, k)


def prepare_fp8(codes: Tensor, scale: float) -> Linear:
    """A matrix of E4M3 [F, K] whose blocks of 128 × 128 all have one scale, a value of bf16."""
    features, k = codes.shape
    if not hasattr(logging.Logger, "warning_once"):  # transformers adds it, when it is imported
        importlib.import_module("transformers.utils.logging")
    blocks = (-(-features // FP8_BLOCK), -(-k // FP8_BLOCK))
    layer = SimpleNamespace(
        output_size_per_partition=features,
        input_size_per_partition=k,
        orig_dtype=torch.bfloat16,
        weight_block_size=[FP8_BLOCK, FP8_BLOCK],
        weight=codes.contiguous(),
        weight_scale_inv=torch.full(blocks, scale, dtype=torch.bfloat16, device=codes.device),
    )
    _PREPARE_FP8(layer, size_k_first=False)
    return Linear(layer.weight.detach(), layer.weight_scale.detach(), None, layer.workspace, features, k)


class Dense:
    """Marlin's launches of a GEMM, one a group, over as many copies of the weights as ours."""

    def __init__(self, plain: NvFp4Tensor | MxFp8Tensor, copies: int):
        if isinstance(plain, MxFp8Tensor):
            scales = plain.scale.unique().tolist()
            if len(scales) != 1:
                raise ValueError(f"FP8 scales: expected one for all blocks, found {len(scales)}")
            first = [prepare_fp8(codes, 2.0 ** (scales[0] - 127)) for codes in plain.codes]
            self._expected = plain.dequantize
        else:
            first = [prepare(*matrix) for matrix in zip(plain.packed, plain.block_scale, strict=True)]
            self._expected = lambda: plain.unscaled() * GLOBAL_SCALE
        self.copies = [first] + [[matrix.copy() for matrix in first] for _ in range(copies - 1)]

    def run(self, copy: int, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The GEMM of each group's tokens, bf16 [T, K] each."""
        return [matrix(x) for matrix, x in zip(self.copies[copy], tokens, strict=True)]

    def check(self, tokens: Sequence[Tensor]) -> None:
        """Compare the first copy's results with the dequantised weights.

        Raises:
            ValueError: they differ by more than rounding.
        """
        expected = torch.stack([x.float() @ w.T for x, w in zip(tokens, self._expected(), strict=True)])
        require_near(torch.stack(self.run(0, tokens)), expected, LIMIT)


@dataclass(frozen=True)
class Experts:
    """A layer's experts in Marlin's order."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor
    w2_scale: Tensor
    w13_alpha: Tensor
    w2_alpha: Tensor
    workspace: Tensor

    @classmethod
    def of(cls, gate_up: NvFp4Tensor, down: NvFp4Tensor, picks: Tensor, alphas: Tensor) -> Experts:
        """As many experts as there are ``picks``, each with the codes and block scales of the one that it picks.

        Args:
            gate_up: [D, 2 I, K], gates first. down: [D, K, I]. Their global scales are not taken.
            picks: int64 [E], of D.
            alphas: fp32 [E], values of bf16: the global scale of each of an expert's matrices.
        """
        ones = torch.ones(len(gate_up.packed), device=alphas.device)
        layer = SimpleNamespace(
            moe_runner_config=SimpleNamespace(is_gated=True),
            intermediate_size_per_partition=down.shape[-1],
            params_dtype=torch.bfloat16,
            w13_weight=gate_up.packed.contiguous(),
            w13_weight_scale=gate_up.block_scale.contiguous(),
            w13_weight_scale_2=ones,
            w2_weight=down.packed.contiguous(),
            w2_weight_scale=down.block_scale.contiguous(),
            w2_weight_scale_2=ones,
        )
        _PREPARE_EXPERTS(layer, group_size=16)
        names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        w13, w2, w13_scale, w2_scale = (take(getattr(layer, name).detach(), picks) for name in names)
        alpha = _GLOBAL_SCALE(alphas.bfloat16())
        return cls(w13, w2, w13_scale, w2_scale, alpha, alpha, layer.workspace)

    def copy(self) -> Experts:
        """The same at another address."""
        parts = {name: getattr(self, name).clone() for name in ("w13", "w2", "w13_scale", "w2_scale")}
        return replace(self, **parts)

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, limit: float) -> Tensor:
        """The whole mixture: alignment, gate and up, SwiGLU, down, sum.

        Args:
            x: bf16 [T, K]. ids: int32 [T, k], the experts of each token. weights: fp32 [T, k]. limit: SwiGLU's clamp.

        Returns:
            bf16 [T, K].
        """
        found: Tensor = _EXPERTS(
            hidden_states=x,
            w1=self.w13,
            w2=self.w2,
            w1_scale=self.w13_scale,
            w2_scale=self.w2_scale,
            gating_output=weights,  # asked only for its number of tokens
            topk_weights=weights,
            topk_ids=ids,
            w1_global_scale=self.w13_alpha,
            w2_global_scale=self.w2_alpha,
            workspace=self.workspace,
            num_bits=4,
            clamp_limit=limit,
        )
        return found


def take(stack: Tensor, picks: Tensor) -> Tensor:
    """Matrices of a stack by number; as bytes, since torch does not index every dtype of eight bits."""
    if stack.element_size() > 1:
        return stack[picks]
    return stack.view(torch.uint8)[picks].view(stack.dtype)
