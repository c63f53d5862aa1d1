"""The operators in ``torch.ops.nvfp4_sgl``: compiled graphs and other programs call them by these schemas."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.mxfp8 import operations as mxfp8  # noqa: F401
from nvfp4_sgl.cutedsl_kernels.w4a4 import operations  # noqa: F401  registers operators, as do the next three
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations as w4a16  # noqa: F401
from nvfp4_sgl.cutedsl_kernels.w8a16 import operations as w8a16  # noqa: F401

NAMESPACE = "nvfp4_sgl"
SCHEMAS = {
    "expert_down": "(Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile, Tensor? row_weight,"
    " Tensor? offsets, Tensor? counts, Tensor weights, Tensor weight_scales, Tensor alpha, bool counts_ahead,"
    " Tensor(a!) out) -> ()",
    "expert_gate_up": "(Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile, Tensor? offsets,"
    " Tensor? counts, Tensor weights, Tensor weight_scales, Tensor alpha, float limit, bool counts_ahead,"
    " Tensor(a!) out, Tensor(b!)? out_scales) -> ()",
    "grouped_product": "(Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile, Tensor weights,"
    " Tensor weight_scales, Tensor alpha, Tensor(a!) out) -> ()",
    "mxfp8_gate_up": "(Tensor tokens, Tensor token_scales, int token_tile, Tensor weights, Tensor weight_scales,"
    " Tensor ones, float limit, Tensor(a!) out) -> ()",
    "mxfp8_product": "(Tensor tokens, Tensor token_scales, int token_tile, Tensor weights, Tensor weight_scales,"
    " Tensor ones, Tensor(a!) out) -> ()",
    "product": "(Tensor tokens, Tensor token_scales, Tensor row_scale, int token_tile, Tensor weights,"
    " Tensor weight_scales, Tensor alpha, Tensor(a!) out) -> ()",
    "w4a16_experts": "(Tensor tokens, int token_tile, Tensor offsets, Tensor counts, Tensor weights, Tensor alpha,"
    " float? limit, Tensor? sources, bool counts_ahead, Tensor(a!) out) -> ()",
    "w4a16_product": "(Tensor tokens, Tensor weights, Tensor alpha, Tensor(a!) out, Tensor(b!)[] copies) -> ()",
    "w8a16_product": "(Tensor tokens, Tensor weights, Tensor ones, Tensor(a!) out) -> ()",
}


def registered() -> list[str]:
    """Names in the namespace, as torch's dispatcher lists them."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for namespace, _, name in names if namespace == NAMESPACE)


def test_no_operator_is_new_or_gone() -> None:
    assert registered() == sorted(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_its_schema_is_kept(name: str) -> None:
    assert str(getattr(torch.ops.nvfp4_sgl, name).default._schema) == f"{NAMESPACE}::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_runs_on_every_device_and_can_be_traced(name: str) -> None:
    qualified = f"{NAMESPACE}::{name}"
    for key in ("CompositeExplicitAutograd", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key), key
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.nvfp4_sgl, name).default.tags
