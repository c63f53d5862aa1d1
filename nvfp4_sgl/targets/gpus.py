"""GPUs that kernels are compiled for on machines without one."""

from __future__ import annotations

from dataclasses import dataclass

from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU by which kernels are chosen. Most kernels serve all GPUs of an architecture."""

    capability: int
    processors: int
    clusters: Clusters


H200 = Gpu(90, H200_CLUSTERS.multiprocessors, H200_CLUSTERS)
B200 = Gpu(100, B200_CLUSTERS.multiprocessors, B200_CLUSTERS)
