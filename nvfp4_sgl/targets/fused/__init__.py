"""The GPU targets: each boundary of the decoder is one fused kernel, or a few.

Everything that is not a GEMM is a kernel of :mod:`nvfp4_sgl.triton_kernels`. The targets differ in their GEMMs alone
(:mod:`.backends`). Activations are bf16. Accumulators, and everything that the specification keeps in fp32, are fp32.
Cache rows are SGLang's packed entries. A pass waits for nothing on the host, and the shapes of a decode pass follow
from the batch size alone, so that a CUDA graph can hold it.
"""

from functools import partial

from torch import Tensor

from nvfp4_sgl.model.contract import Boundaries
from nvfp4_sgl.targets.fused.attention import FusedAttentionCore, FusedAttentionInputs, FusedSelection
from nvfp4_sgl.targets.fused.backends import HOPPER, HOPPER_W4A4, SM100
from nvfp4_sgl.targets.fused.drafts import FusedMtpInput, dspark
from nvfp4_sgl.targets.fused.experts import Experts
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.gemm_planner import GemmPlanner
from nvfp4_sgl.targets.fused.projections import GroupedProjection, InputProjection, Projection
from nvfp4_sgl.targets.fused.router import FusedRouter
from nvfp4_sgl.targets.fused.sites import FusedEmbedding, FusedSite, Mix
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.experts.permutation import Routes

FusedBoundaries = Boundaries[Step, Mix, tuple[Tensor, Tensor], Routes, Experts]


def boundaries(backends: Backends) -> FusedBoundaries:
    """The boundaries of a target that multiplies with ``backends``."""
    return Boundaries(
        plan=partial(GemmPlanner, backends),
        embed=FusedEmbedding,
        site=FusedSite,
        project_input=partial(InputProjection, backends),
        project=partial(Projection, backends),
        project_groups=partial(GroupedProjection, backends),
        prepare_attention=FusedAttentionInputs,
        select=FusedSelection,
        attend=FusedAttentionCore,
        route=FusedRouter,
        experts=partial(Experts, backends),
        mtp_input=partial(FusedMtpInput, backends),
        dspark=dspark(backends),
    )


def w4a16_boundaries() -> FusedBoundaries:
    """Hopper's: NVFP4 or FP8 weights, bf16 activations."""
    return boundaries(HOPPER)


def w4a4_on_hopper_boundaries() -> FusedBoundaries:
    """Hopper's with SM100's activations: rounded in launches before the GEMMs, in bf16."""
    return boundaries(HOPPER_W4A4)


def sm100_boundaries() -> FusedBoundaries:
    """SM100's: quantised activations in the GEMMs."""
    return boundaries(SM100)
