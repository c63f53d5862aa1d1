"""Grouped kernels launched as programmatic dependents wait for the kernels that route tokens and that make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.emulator.host import Emulator
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.mutants import without_each
from tests.sm100.support.products import ExpertCase, poisoned
from tests.sm100.support.snippets import make_launch

OVERLAP = Options(overlap=True)
GATE_UP, DOWN = KernelShape(8, gated=True, grouped=True, output="nvfp4"), KernelShape(8, grouped=True)
COUNTS, FEATURES, K = (3, 0, 9), 64, 64
TOO_EARLY = r"without griddepcontrol\.wait"


def compiled(shape: KernelShape, epilogue: Epilogue) -> Compiled:
    return compile_entry(shape, epilogue, programmatic_launch=True)


def unwaiting(kernel: Compiled) -> Compiled:
    """Without the wait that comes first, which all warps execute before they read what the kernel before wrote."""
    return next(mutant for _, mutant in without_each(kernel, r"griddepcontrol\.wait"))


@contextmanager
def emulator_for(options: Options, calls: list[Call], written: list[Tensor]) -> Iterator[Emulator]:
    """Tensors that no kernel writes may only be read."""
    outputs = [tensor for call in calls for tensor in call.tensors()[1]] + written
    owned = {tensor.data_ptr() for tensor in outputs}
    inputs = [tensor for call in calls for tensor in call.tensors()[0] if tensor.data_ptr() not in owned]
    with emulated(options, reads=inputs, writes=outputs) as emulator:
        yield emulator


ROUTE = """mov.u32 %r0, %tid.x; ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    griddepcontrol.launch_dependents;
    setp.ge.u32 %p0, %r0, {experts};
    @%p0 ret;
    mad.wide.u32 %q2, %r0, 4, %q0; mad.wide.u32 %q3, %r0, 4, %q1;
    ld.global.b32 %r1, [%q2]; st.global.b32 [%q3], %r1; ret;"""
"""Copies counts to where the next kernel reads them, as the last thing it does."""


def route_and_multiply(options: Options, kernel: Compiled | None = None) -> None:
    case = ExpertCase(DOWN, COUNTS, FEATURES, K)
    call, weights, tokens, _ = case.build()
    assert call.counts is not None
    known = call.counts.clone()
    call.counts.zero_()
    with emulator_for(options, [call], [call.counts]) as emulator:
        body = ROUTE.format(experts=len(COUNTS))
        buffers = [known.numpy(), call.counts.numpy()]
        route = make_launch(body, buffers, options=options, stream=emulator.stream)
        emulator.stream.submit(route, programmatic=False)
        emulator(kernel or compiled(DOWN, case.epilogue("bf16")), call.arguments(1), 0)
    case.compare(call, weights, tokens)


@pytest.mark.parametrize("options", [OVERLAP, Options("random", 1, overlap=True)], ids=["immediate", "random"])
def test_counts_are_those_that_the_kernel_before_wrote(options: Options) -> None:
    route_and_multiply(options)


def test_counts_that_are_not_waited_for_are_noticed() -> None:
    kernel = compiled(DOWN, ExpertCase(DOWN, COUNTS, FEATURES, K).epilogue("bf16"))
    with pytest.raises(HazardError, match=TOO_EARLY):
        route_and_multiply(OVERLAP, unwaiting(kernel))


def gate_up_then_down(options: Options, down: Compiled | None = None) -> Tensor:
    """Experts' outputs: the second kernel takes the codes and scales that the first one makes."""
    first_case, second_case = ExpertCase(GATE_UP, COUNTS, FEATURES, K), ExpertCase(DOWN, COUNTS, FEATURES, FEATURES)
    (first, *_), (made, *_) = first_case.build(), second_case.build()
    assert first.out_scales is not None and first.offsets is not None
    used = torch.cat([torch.arange(int(o), int(o) + n) for o, n in zip(first.offsets, COUNTS, strict=True)])
    second = Call(
        shape=DOWN,
        weights=made.weights,
        weight_scales=made.weight_scales,
        tokens=first.out,
        token_scales=first.out_scales,
        out=made.out,
        row_scale=made.row_scale,
        alpha=made.alpha,
        row_weight=made.row_weight,
        offsets=first.offsets,
        counts=first.counts,
    )
    second.out.copy_(poisoned(*second.out.shape, output="bf16"))
    with emulator_for(options, [first, second], []) as emulator:
        emulator(compiled(GATE_UP, first_case.epilogue("nvfp4")), first.arguments(1), 0)
        emulator(down or compiled(DOWN, second_case.epilogue("bf16")), second.arguments(1), 0)
    return second.out[used]


@pytest.mark.parametrize("options", [OVERLAP, Options("random", 2, overlap=True)], ids=["immediate", "random"])
def test_down_takes_what_gate_and_up_give(options: Options) -> None:
    expected = gate_up_then_down(Options())
    assert torch.isfinite(expected).all() and expected.any()
    assert torch.equal(gate_up_then_down(options), expected)


def test_hidden_rows_that_are_not_waited_for_are_noticed() -> None:
    kernel = compiled(DOWN, ExpertCase(DOWN, COUNTS, FEATURES, FEATURES).epilogue("bf16"))
    with pytest.raises(HazardError, match=TOO_EARLY):
        gate_up_then_down(OVERLAP, unwaiting(kernel))
