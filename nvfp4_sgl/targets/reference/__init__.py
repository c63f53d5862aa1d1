"""The CPU: every boundary composed of the references in :mod:`nvfp4_sgl.ops`, in the model dtype, fp32 by default."""

from torch import Tensor

from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.model.contract import Boundaries
from nvfp4_sgl.targets.reference.attention import (
    ReferenceAttentionCore,
    ReferenceAttentionInputs,
    ReferenceSelection,
)
from nvfp4_sgl.targets.reference.drafts import DSPARK, ReferenceMtpInput
from nvfp4_sgl.targets.reference.experts import Choices, ReferenceExperts, ReferenceRouter
from nvfp4_sgl.targets.reference.planner import ReferencePlanner
from nvfp4_sgl.targets.reference.projections import (
    ReferenceGroupedProjection,
    ReferenceInputProjection,
    ReferenceProjection,
)
from nvfp4_sgl.targets.reference.sites import Mix, ReferenceEmbedding, ReferenceSite


def boundaries() -> Boundaries[BatchPlan, Mix, Tensor, Choices, ReferenceExperts]:
    """The CPU's."""
    return Boundaries(
        plan=ReferencePlanner,
        embed=ReferenceEmbedding,
        site=ReferenceSite,
        project_input=ReferenceInputProjection,
        project=ReferenceProjection,
        project_groups=ReferenceGroupedProjection,
        prepare_attention=ReferenceAttentionInputs,
        select=ReferenceSelection,
        attend=ReferenceAttentionCore,
        route=ReferenceRouter,
        experts=ReferenceExperts,
        mtp_input=ReferenceMtpInput,
        dspark=DSPARK,
    )
