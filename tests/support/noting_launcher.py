"""A launcher that computes nothing, and notes what would have run."""

from __future__ import annotations

from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.targets.fused.gemm_planner import DryLauncher


class NotingLauncher(DryLauncher):
    """Notes the GEMMs that are launched."""

    def __init__(self, architecture: str, clusters: Clusters) -> None:
        super().__init__(architecture, clusters)
        self.gemms: set[KernelKey] = set()

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        self.gemms.add(key)
