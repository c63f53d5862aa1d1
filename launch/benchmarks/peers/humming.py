"""humming beside Hopper's dense GEMMs, if it is installed: NVFP4 weights, bf16 activations and results.

It compiles its kernels when they are first needed, some thirty of a matrix's size, for all numbers of tokens. Here it
gets its own choice of them for the numbers that are timed, and :meth:`Humming.start` compiles these before anything is
timed. It takes one global scale a matrix, in fp32; where a GEMM merges matrices, each with its own, its user scales the
results. Groups are as many launches. Written for humming-kernels 0.1.12, which SGLang pins.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import foreign, installed
from benchmarks.peers.attempts import Attempts, require_near
from benchmarks.peers.marlin import GLOBAL_SCALE, LIMIT
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor

PACKAGE = "humming"
LOCKS = 2048
"""Words in which CTAs that split a sum wait for each other: as many as humming's own layer has."""
NVFP4 = {
    "b_dtype": "float4e2m1",
    "bs_dtype": "float8e4m3",
    "weight_scale_group_size": 16,
    "weight_scale_type": "group",
    "weight_scale_2_type": "tensor",
}
"""How humming names the format of the weights."""

_SCHEMA = foreign(f"{PACKAGE}.schema", "HummingWeightSchema")
_CONFIGURE = foreign(f"{PACKAGE}.transform", "prepare_layer_config")
_CHOOSE = foreign(f"{PACKAGE}.tune", "get_heuristics_config")
_COMPILE = foreign(f"{PACKAGE}.kernel.humming", "HummingKernel.prepare_kernels")
_TRANSFORM = foreign(f"{PACKAGE}.transform", "transform_humming_tensors")
_FORWARD = foreign(f"{PACKAGE}.forward", "humming_forward")


class Humming(Attempts):
    """Whether humming can be asked; what it lacks or fails at is printed once and leaves its column empty."""

    def __init__(self, wanted: bool) -> None:
        super().__init__("humming", wanted)
        self._compiling: list[Future[None]] = []
        self._started = self._ended = time.monotonic()

    def start(self, sizes: Sequence[tuple[int, int]], counts: Sequence[int]) -> None:
        """Import the package and begin to compile its kernels.

        Args:
            sizes: of the matrices, [F, K]. counts: the numbers of tokens.
        """
        if not self.usable:
            return
        if not installed(PACKAGE):
            self.leave_out("the package humming-kernels is not installed")
            self.usable = False
            return
        self._started = time.monotonic()
        if self.attempt(partial(importlib.import_module, f"{PACKAGE}.forward")) is None:
            self.usable = False
            return
        # One thread: the kernels of a size are compiled in parallel already.
        threads = ThreadPoolExecutor(max_workers=1, initializer=_use_gpu, initargs=(_gpu(),))
        self._compiling = [threads.submit(compile_size, *size, counts) for size in dict.fromkeys(sizes)]
        for future in self._compiling:
            future.add_done_callback(self._end)
        threads.shutdown(wait=False)

    def wait(self) -> None:
        """Until its kernels are compiled."""
        for future in self._compiling:
            self.attempt(future.result)
        if self._compiling:
            print(f"humming's kernels were ready after {self._ended - self._started:.0f} s", flush=True)

    def _end(self, future: Future[None]) -> None:
        """Note that a size is compiled; callers may wait later."""
        self._ended = time.monotonic()


def _gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _use_gpu(number: int | None) -> None:
    """Make the GPU's context that of this thread, in which humming loads what it has compiled."""
    if number is not None:
        torch.cuda.set_device(number)


def compile_size(features: int, k: int, counts: Sequence[int]) -> None:
    """Compile humming's kernels of matrices [F, K] for these numbers of tokens."""
    config = configured(features, k)
    _COMPILE(config.to_str(), tuning_config=choice(config, counts))


def configured(features: int, k: int) -> Any:
    """A layer in humming's words: a matrix [F, K] in NVFP4, bf16 activations and results."""
    return _CONFIGURE(features, k, _SCHEMA(**NVFP4), torch_dtype=torch.bfloat16)


def choice(config: Any, counts: Sequence[int]) -> str:
    """The kernels that humming itself chooses for these numbers of tokens, as it takes them: JSON.

    The kernel of one token is always among them: at each launch humming looks at that first.
    """
    wanted = {1, *counts}
    entries = [[low, high, kernel] for low, high, kernel in _CHOOSE(config)]
    return json.dumps([entry for entry in entries if any(entry[0] < count <= entry[1] for count in wanted)])


@dataclass(frozen=True)
class Linear:
    """A matrix [F, K] in humming's order; called with bf16 [T, K], gives bf16 [T, F]."""

    config: Any
    kernels: str
    weight: Tensor
    scale: Tensor
    global_scale: Tensor
    locks: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = _FORWARD(
            self.config,
            inputs=x,
            weight=self.weight,
            weight_scale=self.scale,
            weight_scale_2=self.global_scale,
            locks=self.locks,
            tuning_config=self.kernels,
        )
        return found

    def copy(self) -> Linear:
        """The same at another address, with words of its own to wait on, as every layer has."""
        parts = {name: getattr(self, name).clone() for name in ("weight", "scale", "locks")}
        return replace(self, **parts)


def tensors_of(codes: Tensor, block_scale: Tensor) -> dict[str, Tensor]:
    """A matrix as humming names its parts, before it transforms them."""
    return {
        "weight": codes.contiguous().view(torch.int32),
        "weight_scale": block_scale.contiguous(),
        "weight_scale_2": torch.full((1,), GLOBAL_SCALE, device=codes.device),
    }


def prepare(codes: Tensor, block_scale: Tensor, counts: Sequence[int]) -> Linear:
    """A matrix in NVFP4 with the global scale ``GLOBAL_SCALE``: codes [F, K/2], E4M3 block scales [F, K/16].

    Args:
        counts: the numbers of tokens that it will be called with.
    """
    features, k = codes.shape[0], codes.shape[1] * 2
    config = configured(features, k)
    parts = _TRANSFORM(config, tensors_of(codes, block_scale))
    locks = torch.zeros(LOCKS, dtype=torch.int32, device=codes.device)
    weight, scale, global_scale = (parts[f"weight{part}"] for part in ("", "_scale", "_scale_2"))
    return Linear(config, choice(config, counts), weight, scale, global_scale, locks)


class Dense:
    """humming's launches of a GEMM, one a group, over as many copies of the weights as ours, for ``counts`` tokens."""

    def __init__(self, plain: NvFp4Tensor | MxFp8Tensor, copies: int, counts: Sequence[int]):
        if isinstance(plain, MxFp8Tensor):
            raise ValueError("weights: expected NVFP4, found FP8, which is not compared with humming")
        first = [prepare(*matrix, counts) for matrix in zip(plain.packed, plain.block_scale, strict=True)]
        self._plain = plain
        self.copies = [first] + [[matrix.copy() for matrix in first] for _ in range(copies - 1)]

    def run(self, copy: int, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The GEMM of each group's tokens, bf16 [T, K] each."""
        return [matrix(x) for matrix, x in zip(self.copies[copy], tokens, strict=True)]

    def check(self, tokens: Sequence[Tensor]) -> None:
        """Compare the first copy's results with the dequantised weights.

        Raises:
            ValueError: they differ by more than rounding.
        """
        weights = self._plain.unscaled() * GLOBAL_SCALE
        expected = torch.stack([x.float() @ w.T for x, w in zip(tokens, weights, strict=True)])
        require_near(torch.stack(self.run(0, tokens)), expected, LIMIT)
