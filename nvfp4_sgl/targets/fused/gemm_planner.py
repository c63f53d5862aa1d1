"""Plans passes where GEMMs are kernels of ``cutedsl_kernels``: all of them are ready before the first request."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache
from nvfp4_sgl.cutedsl_kernels.library import Library
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.cutedsl_kernels.warm_up import warm_up as warm_up_gemms
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.products import layer_products
from nvfp4_sgl.targets.fused.planner import FusedPlanner

LIBRARY_VARIABLE = "NVFP4_SGL_KERNELS"
"""Environment variable: the folder of a library of GEMMs built ahead of time."""


class GemmPlanner(FusedPlanner):
    """Plans passes, and compiles every GEMM, or loads it from a library built ahead of time, before the first request.

    ``NVFP4_SGL_KERNELS`` names the library (``python -m nvfp4_sgl.cutedsl_kernels.build``). GEMMs that it lacks are
    compiled, about a second a kernel. Nothing is compiled after the warm-up: a GEMM that was overlooked is an error.
    """

    @torch.no_grad()
    def warm_up(self, decoder: Decoder, table: Tensor, tokens: int) -> None:
        """Run every GEMM, then every pass; then refuse to compile."""
        context, runner = self.context, launcher.current()
        if (folder := os.environ.get(LIBRARY_VARIABLE)) and isinstance(runner, launcher.CudaLauncher):
            runner.kernels = KernelCache(Library(Path(folder)))
        keys = keys_for(
            layer_products(context.config, context.parallel.size),
            max(tokens, self.slots.requests),
            context.config.swiglu_limit,
            runner.architecture(context.device),
            runner.clusters(context.device),
            programmatic_launch=runner.programmatic_launch,
        )
        warm_up_gemms(keys, context.device)
        super().warm_up(decoder, table, tokens)
        runner.freeze()
