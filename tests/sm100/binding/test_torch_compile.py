"""``torch.compile`` traces every operation whole, on fake tensors, and runs the same kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.w4a4 import operations as ops
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.rows import ExpertRows, Rows
from tests.sm100.binding.test_errors import TILE, VALID, Recorder
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.operands import RandomRows, random_weights, scales


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_a_layer_of_operations_gives_the_same_compiled() -> None:
    """Product, shared expert and a sum: whole objects go in, buffers are made inside."""
    rows = RandomRows.make(6, 64, TILE).rows
    dense = Weights.dense(*random_weights(64, 64)[:2], scales(64))
    gate_up = Weights.gated_experts(*random_weights(1, 2, 64, 64)[:2], scales(1, 2))
    down = Weights.experts(*random_weights(1, 64, 64)[:2], scales(1))

    def layer(rows: Rows) -> Tensor:
        hidden = ops.expert_gate_up_quantized(rows, gate_up, 10.0)
        return ops.product(rows, dense) + ops.expert_down(hidden, down)

    with emulated_operations() as runner:
        expected = layer(rows)
        found = compiled(layer)(rows)
    assert torch.equal(found, expected) and expected.count_nonzero() > 0
    assert len(runner.keys) == 6


@pytest.mark.parametrize("op", VALID)
def test_operators_keep_pytorchs_rules(op: str) -> None:
    """Fake implementations; what else ``torch.library.opcheck`` knows compares E4M3 tensors, which torch cannot."""
    from nvfp4_sgl.cutedsl_kernels import launcher

    with launcher.use(Recorder()):
        torch.library.opcheck(
            getattr(torch.ops.nvfp4_sgl, op).default,
            (),
            VALID[op](),
            test_utils=("test_faketensor",),
        )


def test_a_mistake_is_seen_while_tracing() -> None:
    arguments = VALID["product"]() | {"alpha": torch.ones(3)}

    def wrong(out: Tensor) -> Tensor:
        torch.ops.nvfp4_sgl.product(**(arguments | {"out": out}))
        return out

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        raise AssertionError("traced to the end")

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"product: alpha: expected shape \(64,\) = \[features\], found \(3,\)"):
        torch.compile(wrong, fullgraph=True, backend=backend)(arguments["out"])


def test_other_numbers_of_rows_need_no_other_graph() -> None:
    """Marked dynamic, T stays symbolic through the checks."""
    weights = Weights.dense(*random_weights(64, 64)[:2], scales(64))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def function(codes: Tensor, block_scales: Tensor, scale: Tensor) -> Tensor:
        return ops.product(Rows(codes, block_scales, scale, 128), weights)

    torch._dynamo.reset()
    dynamic = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    with emulated_operations():
        for count in (130, 200):
            rows = RandomRows.make(count, 64, 128).rows
            dynamic(rows.codes, rows.block_scales, rows.scale)
    assert len(graphs) == 1


def test_expert_rows_pass_through() -> None:
    source = RandomRows.make(24, 64, TILE).for_experts((3, 0, 9))
    weights = Weights.experts(*random_weights(3, 64, 64)[:2], scales(3))

    def function(rows: ExpertRows, row_weight: Tensor) -> Tensor:
        return ops.expert_down(rows, weights, row_weight, out=torch.zeros(24, 64, dtype=torch.bfloat16))

    with emulated_operations():
        expected = function(source, torch.ones(24))
        assert torch.equal(compiled(function)(source, torch.ones(24)), expected)
