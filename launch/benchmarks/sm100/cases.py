"""The GEMMs of DeepSeek-V4 that launch/bench_sm100 reports, and the kernel that the operations run for each."""

from __future__ import annotations

from dataclasses import dataclass

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import (
    expert_token_tile_for,
    plan_experts,
    plan_gated,
    plan_gemm,
    rows_of,
    token_tile_for,
)
from nvfp4_sgl.cutedsl_kernels.sm100.cost import Problem
from nvfp4_sgl.cutedsl_kernels.sm100.shape import BlockScaledKind, KernelShape
from nvfp4_sgl.weights.gemms import GemmSpec, OperandKind, all_nvfp4, step_gemms
from tests.support.released import FLASH, PRO, config_json

MODELS = {"flash": FLASH, "pro": PRO}
ARCHITECTURE = "sm_100a"
FULL, RELEASED = "full", "released"
CHECKPOINTS = (FULL, RELEASED)
"""All matrices in NVFP4; or as DeepSeek and NVIDIA release them: routed experts in MXFP4 or NVFP4, which both run as
NVFP4, compressors in bf16, which a library multiplies, and all else in FP8, which runs as MXFP8."""


@dataclass(frozen=True)
class Case:
    """One GEMM of a model on one rank, for a number of tokens; ``layers`` of the model have it."""

    model: str
    ranks: int
    product: GemmSpec
    tokens: int
    limit: float
    layers: int = 1

    @property
    def routed(self) -> bool:
        """Whether tokens are spread over experts."""
        return self.product.groups > 1 and self.product.experts_per_token > 0

    @property
    def kind(self) -> BlockScaledKind:
        """The kind of operands; GEMMs in bf16 are no cases."""
        kind = self.product.kind
        assert kind == "nvfp4" or kind == "mxfp8", self.product
        return kind

    @property
    def pairs(self) -> int:
        """Rows of the kernel: tokens, or token-expert pairs."""
        return self.tokens * (self.product.experts_per_token if self.routed else 1)

    @property
    def token_tile(self) -> int:
        """The tile of tokens that activations are quantised for."""
        return expert_token_tile_for(self.pairs, self.product.groups) if self.routed else token_tile_for(self.tokens)

    @property
    def shape(self) -> KernelShape:
        one, tile = self.product, self.token_tile
        if self.routed:
            rows = rows_of(self.pairs, one.groups, tile)
            sizes = one.features, one.k, rows, one.groups, one.gated, tile
            return plan_experts(*sizes, one.output, B200_CLUSTERS, counts_ahead=True)
        if one.gated:
            return plan_gated(one.features, one.k, self.tokens, tile, one.output, B200_CLUSTERS, self.kind)
        return plan_gemm(one.features, one.k, self.tokens, one.groups, tile, one.output, B200_CLUSTERS, self.kind)

    @property
    def key(self) -> KernelKey:
        return KernelKey(ARCHITECTURE, self.shape, self.limit if self.product.gated else None)

    @property
    def problem(self) -> Problem:
        one, shared = self.product, self.tokens if self.product.shared else 0
        return Problem(
            one.features, one.k, self.pairs, one.groups, one.gated, self.routed, one.output, shared, self.kind
        )


def cases(models: list[str], ranks: list[int], tokens: list[int], checkpoint: str = FULL) -> list[Case]:
    """Every distinct GEMM of the models that is ours, of one of :data:`CHECKPOINTS`."""
    found = []
    for model in models:
        config = ModelConfig.from_dict(config_json(MODELS[model]))
        for size in ranks:
            of_step = step_gemms(config, size, all_nvfp4 if checkpoint == FULL else released)
            for product, layers in of_step.items():
                if product.kind == "bf16":
                    continue
                found += [Case(model, size, product, count, config.swiglu_limit, layers) for count in tokens]
    return found


def released(stem: str) -> OperandKind:
    """The kind of operands of a released matrix's GEMM, by its name without suffix."""
    if ".ffn.experts." in stem:
        return "nvfp4"
    return "bf16" if ".compressor." in stem else "mxfp8"
