"""GEMM backends of each GPU target. Routed experts are NVFP4, but for Hopper's, which may be bf16."""

from __future__ import annotations

from nvfp4_sgl.cutedsl_kernels.w4a4.operations import expert_token_tile_for, token_tile_for
from nvfp4_sgl.cutedsl_kernels.w4a16.operations import w4a16_expert_token_tile_for
from nvfp4_sgl.targets import target
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.gemm_bf16 import Bf16
from nvfp4_sgl.targets.fused.gemm_mxfp8 import MxFp8
from nvfp4_sgl.targets.fused.gemm_rounded import Rounded, RoundedNvFp4Experts, rounded_mxfp8, rounded_nvfp4
from nvfp4_sgl.targets.fused.gemm_w4a4 import W4A4
from nvfp4_sgl.targets.fused.gemm_w4a16 import W4A16
from nvfp4_sgl.targets.fused.gemm_w8a16 import W8A16

HOPPER = Backends(
    target.HOPPER,
    dense={"nvfp4": W4A16(), "fp8": W8A16(), "bf16": Bf16()},
    shared={"fp8": W8A16(), "bf16": Bf16()},
    experts={"nvfp4": W4A16(), "bf16": Bf16()},
    expert_token_tile=w4a16_expert_token_tile_for,
)
HOPPER_W4A4 = Backends(
    target.HOPPER_W4A4,
    dense={"nvfp4": Rounded(W4A16(), rounded_nvfp4), "mxfp8": Rounded(Bf16(), rounded_mxfp8), "bf16": Bf16()},
    shared={"mxfp8": Rounded(Bf16(), rounded_mxfp8), "bf16": Bf16()},
    experts={"nvfp4": RoundedNvFp4Experts()},
    expert_token_tile=w4a16_expert_token_tile_for,
)
SM100 = Backends(
    target.SM100,
    dense={"nvfp4": W4A4(), "mxfp8": MxFp8(), "bf16": Bf16()},
    shared={"mxfp8": MxFp8(), "bf16": Bf16()},
    experts={"nvfp4": W4A4()},
    expert_token_tile=expert_token_tile_for,
    token_tile=token_tile_for,
)
