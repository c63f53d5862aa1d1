"""The GPU targets: each boundary of the decoder is one fused kernel, or a few.

Everything that is not a GEMM is a kernel of :mod:`nvfp4_sgl.triton_kernels`. The targets differ in their GEMMs alone:
``gemm_w4a16`` and ``gemm_rounded`` (Hopper, by its mode) and ``backends``. Activations are bf16.
Accumulators, and everything that the specification keeps in fp32, are fp32. Cache rows are SGLang's packed entries. A
pass waits for nothing on the host, and the shapes of a decode pass follow from the batch size alone, so that a CUDA
graph can hold it.
"""

from dataclasses import replace

from nvfp4_sgl.model.contract import Boundaries
from nvfp4_sgl.targets.fused import backends as sm100
from nvfp4_sgl.targets.fused import gemm_rounded as w4a4_hopper
from nvfp4_sgl.targets.fused import gemm_w4a16 as w4a16
from nvfp4_sgl.targets.fused.attention import FusedAttentionCore, FusedAttentionInputs, FusedSelection
from nvfp4_sgl.targets.fused.router import FusedRouter
from nvfp4_sgl.targets.fused.sites import FusedEmbedding, FusedSite


def w4a16_boundaries() -> Boundaries:
    """The boundaries on Hopper: NVFP4 or FP8 weights, bf16 activations."""
    return Boundaries(
        plan=w4a16.W4A16Planner,
        embed=FusedEmbedding,
        site=FusedSite,
        project_input=w4a16.project_input,
        project=w4a16.project,
        project_groups=w4a16.project_groups,
        prepare_attention=FusedAttentionInputs,
        select=FusedSelection,
        attend=FusedAttentionCore,
        route=FusedRouter,
        experts=w4a16.experts,
    )


def w4a4_on_hopper_boundaries() -> Boundaries:
    """The boundaries on Hopper with SM100's activations: rounded in launches before the GEMMs, in bf16."""
    return replace(
        w4a16_boundaries(),
        plan=w4a4_hopper.W4A4Planner,
        project_input=w4a4_hopper.project_input,
        project=w4a4_hopper.project,
        project_groups=w4a4_hopper.project_groups,
        experts=w4a4_hopper.experts,
    )


def sm100_boundaries() -> Boundaries:
    """The boundaries on SM100: those of Hopper with quantised activations in the GEMMs."""
    return replace(
        w4a16_boundaries(),
        plan=sm100.Sm100Planner,
        project_input=sm100.project_input,
        project=sm100.project,
        project_groups=sm100.project_groups,
        experts=sm100.experts,
    )
