"""Experts' kernels that read offsets and counts, and load weights, before the launch in front of them has ended.

A layer is four launches: routing writes offsets and counts; quantisation, which waits before it triggers, writes the
tokens; gates and ups; down.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.emulator.host import Emulator
from tests.sm100.support.products import LIMIT, ExpertCase, compile_call, unswizzle_rows
from tests.sm100.support.snippets import make_launch

COUNTS, TILE = (3, 0, 9), 8
MODES = {"immediate": Options(overlap=True), "random": Options("random", 1, overlap=True)}
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
TOO_EARLY = r"without griddepcontrol\.wait"
THREADS = 256
COPY = """{begin} mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, {threads}, %r0;
    setp.ge.u32 %p0, %r0, {words};
    @%p0 ret;
    ld.param.b64 %q0, [p0]; ld.param.b64 %q1, [p1];
    mad.wide.u32 %q2, %r0, 4, %q0; mad.wide.u32 %q3, %r0, 4, %q1;
    ld.global.b32 %r2, [%q2]; st.global.b32 [%q3], %r2; ret;"""
"""Writes what later kernels read, as the last thing it does."""
QUANTISE = f"{WAIT} {TRIGGER}"
"""As Triton's kernels begin."""


@functools.cache
def cases(split_k: int, ahead: bool) -> tuple[ExpertCase, ExpertCase]:
    """Gates and ups, and down."""
    both = KernelShape(TILE, split_k=split_k, grouped=True, counts_ahead=ahead)
    gate_up = ExpertCase(replace(both, gated=True, output="nvfp4"), COUNTS, features=192 * split_k, k=320 * split_k)
    return gate_up, ExpertCase(both, COUNTS, features=136, k=gate_up.features)


def compiled(split_k: int, ahead: bool) -> tuple[Compiled, Compiled]:
    gate_up, down = cases(split_k, ahead)
    return (
        compile_call(gate_up.build()[0], gate_up.epilogue("nvfp4")),
        compile_call(down.build()[0], down.epilogue("bf16")),
    )


def words(*tensors: Tensor) -> list[Tensor]:
    """Copies of the tensors, one behind the other in a buffer of whole int32 words, which comes first."""
    parts = [tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors]
    buffer = torch.cat(parts)
    pieces = buffer.split([len(part) for part in parts])
    return [buffer] + [
        piece.view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)
    ]


def copy(emulator: Emulator, options: Options, begin: str, source: Tensor, target: Tensor) -> None:
    body = COPY.format(begin=begin, threads=THREADS, words=len(source))
    buffers, grid = [source.numpy(), target.numpy()], math.ceil(len(source) / THREADS)
    stream = emulator.stream
    launch = make_launch(body, buffers, options=options, block=THREADS, grid=grid, stream=stream)
    stream.submit(launch, programmatic=begin != TRIGGER)


def run_layer(
    options: Options, kernels: tuple[Compiled, Compiled], split_k: int = 1, quantise: str | None = QUANTISE
) -> tuple[Tensor, ...]:
    """Codes and block scales that the first kernel gives, and outputs of the second, of rows that hold a token.

    Args:
        quantise: how the launch between begins; None: tokens are there already, and routing is in front of the experts.
    """
    upper, lower = cases(split_k, ahead=False)
    (first, *_, used), (second, *_) = upper.build(), lower.build()
    hidden_scales = first.out_scales
    assert first.offsets is not None and first.counts is not None and hidden_scales is not None
    routes, offsets, counts = words(first.offsets, first.counts)
    known_routes = routes.clone()
    made, tokens, token_scales, row_scale = words(first.tokens, first.token_scales, first.row_scale)
    known_rows = made.clone()
    for written in (routes, *([] if quantise is None else [made])):
        written.zero_()
    first = replace(
        first, tokens=tokens, token_scales=token_scales, row_scale=row_scale, offsets=offsets, counts=counts
    )
    second = replace(
        second,
        tokens=first.out,
        token_scales=hidden_scales,
        row_scale=torch.tensor([swiglu_row_scale(LIMIT)]),
        offsets=offsets,
        counts=counts,
    )
    writes = [routes, made, first.out, hidden_scales, second.out]
    with emulated(options, reads=constants(first, second), writes=writes) as emulator:
        copy(emulator, options, TRIGGER, known_routes, routes)
        if quantise is not None:
            copy(emulator, options, quantise, known_rows, made)
        for kernel, call in zip(kernels, (first, second), strict=True):
            emulator(kernel, call.arguments(2), 0)
    scales = unswizzle_rows(hidden_scales, first.rows, first.outputs // 16, TILE)
    return first.out[used], scales[used], second.out[used]


def constants(first: Call, second: Call) -> list[Tensor]:
    """What no kernel writes."""
    of_both = [t for call in (first, second) for t in (call.weights, call.weight_scales, call.alpha)]
    assert second.row_weight is not None
    return [*of_both, second.row_scale, second.row_weight]


@functools.cache
def expected(split_k: int) -> tuple[Tensor, ...]:
    """Of kernels that wait for counts, one launch after the other."""
    found = run_layer(Options(), compiled(split_k, ahead=False), split_k)
    assert found[2].isfinite().all() and found[2].count_nonzero() > 0.7 * found[2].numel()
    return found


@pytest.mark.parametrize(("split_k", "mode"), [(1, "immediate"), (1, "random"), (2, "random")])
def test_results_are_those_of_kernels_that_wait_for_counts(split_k: int, mode: str) -> None:
    """Bit for bit."""
    found = run_layer(MODES[mode], compiled(split_k, ahead=True), split_k)
    for one, other in zip(found, expected(split_k), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("left_out", [0, 1])
def test_gates_and_ups_need_both_waits(left_out: int) -> None:
    """The one in front of tokens and their block scales, and the one in front of what the epilogue reads."""
    gate_up, down = compiled(1, ahead=True)
    pieces = gate_up.ptx.split(WAIT)
    assert len(pieces) == 3
    ptx = WAIT.join(pieces[: left_out + 1]) + WAIT.join(pieces[left_out + 1 :])
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], (Compiled(gate_up.function, ptx), down))


def test_down_needs_the_wait_in_front_of_its_rows() -> None:
    gate_up, down = compiled(1, ahead=True)
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], (gate_up, down.patched(WAIT, "", count=2)))


@pytest.mark.parametrize("kernel", ["gate_up", "down"])
def test_the_kernel_in_front_must_wait_before_it_lets_the_next_one_in(kernel: str) -> None:
    """Else counts may not be there yet. Kernels that wait for counts do not mind."""
    (gate_up, down), (waiting_gate_up, waiting_down) = compiled(1, ahead=True), compiled(1, ahead=False)
    if kernel == "gate_up":
        quantise, right, wrong = f"{TRIGGER} {WAIT}", (waiting_gate_up, down), (gate_up, down)
    else:
        early = gate_up.patched(WAIT, f"{TRIGGER} {WAIT}", count=2)
        quantise, right, wrong = QUANTISE, (early, waiting_down), (early, down)
    run_layer(MODES["immediate"], right, quantise=quantise)
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], wrong, quantise=quantise)


def test_counts_must_not_be_the_work_of_the_kernel_in_front() -> None:
    (gate_up, down), (waiting, _) = compiled(1, ahead=True), compiled(1, ahead=False)
    run_layer(MODES["immediate"], (waiting, down), quantise=None)
    with pytest.raises(HazardError, match=TOO_EARLY):
        run_layer(MODES["immediate"], (gate_up, down), quantise=None)


@pytest.mark.parametrize("kernel", [0, 1], ids=["gate_up", "down"])
def test_weights_are_sent_for_before_the_wait(kernel: int) -> None:
    """As the load warp's code lies: two copies, codes and block scales, then its wait, then copies of tokens, too."""
    pieces = [compiled(1, ahead)[kernel].ptx.split(WAIT) for ahead in (False, True)]
    loads = [[piece.count("cp.async.bulk.tensor") for piece in one] for one in pieces]
    stores = 1 - (kernel == 0)
    assert [sum(one) - stores for one in loads] == [4, 6] and loads[0][0] == 0
    assert 2 in loads[1]
